//! A vocabulary with the Harmony control tokens.

use super::embedded_vocabulary;
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use std::ops::Deref;
use std::path::Path;

/// Ids of the control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlTokens {
    pub start: u32,
    pub message: u32,
    pub channel: u32,
    pub end: u32,
    pub call: u32,
    /// `<|return|>`
    pub ret: u32,
    /// `<|constrain|>`; small vocabularies have none.
    pub constrain: Option<u32>,
}

impl ControlTokens {
    /// Whether `id` closes a message: `<|end|>`, `<|call|>` or `<|return|>`.
    pub fn is_message_end(&self, id: u32) -> bool {
        id == self.end || id == self.call || id == self.ret
    }
}

/// A byte-level BPE vocabulary with Harmony's control tokens. A clone shares the tables.
#[derive(Debug, Clone)]
pub struct HarmonyTokenizer {
    vocabulary: Vocabulary,
    control: ControlTokens,
}

impl HarmonyTokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput), naming the file: those of [`Vocabulary::from_file`], and when
    /// it lacks control tokens.
    pub fn from_file(path: &Path) -> Result<Self> {
        Self::new(Vocabulary::from_file(path)?, &path.display().to_string())
    }

    /// Reads the bytes of a `tokenizer.json`; error messages name it `place`.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_bytes(json: Vec<u8>, place: &str) -> Result<Self> {
        Self::new(Vocabulary::from_bytes(json, place)?, place)
    }

    /// Makes the embedded vocabulary of 272 tokens: control tokens, header words, bytes.
    ///
    /// # Errors
    /// Never in practice; a test parses it.
    pub fn from_embedded() -> Result<Self> {
        Self::from_bytes(embedded_vocabulary::tokenizer_json(), "the embedded tokenizer")
    }

    fn new(vocabulary: Vocabulary, place: &str) -> Result<Self> {
        let names = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"];
        let remedy = "Harmony dialogues need them: take the tokenizer.json of a GPT-OSS checkpoint";
        let [start, message, channel, end, call, ret] = vocabulary.added_ids(names, place, remedy)?;
        let constrain = vocabulary.added_id("<|constrain|>");
        let control = ControlTokens { start, message, channel, end, call, ret, constrain };
        Ok(Self { vocabulary, control })
    }

    /// Ids of the control tokens.
    pub fn control_tokens(&self) -> ControlTokens {
        self.control
    }

    /// Encodes one part of a header, such as a role or ` to=python`.
    ///
    /// A part that is one vocabulary entry becomes that token. With merges BPE gives the same token anyway;
    /// the embedded vocabulary has its header words in this way.
    pub(super) fn encode_header(&self, part: &str) -> Vec<u32> {
        match self.entry_id(part) {
            Some(id) => vec![id],
            None => self.encode_text(part),
        }
    }
}

impl Deref for HarmonyTokenizer {
    type Target = Vocabulary;

    fn deref(&self) -> &Vocabulary {
        &self.vocabulary
    }
}
