//! A vocabulary with the Harmony control tokens.

use super::embedded_vocabulary;
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use std::ops::Deref;

/// Ids of the control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlTokens {
    pub start: u32,
    pub message: u32,
    pub channel: u32,
    pub end: u32,
    pub call: u32,
    /// `<|return|>`
    pub return_: u32,
    /// `<|constrain|>`; small vocabularies have none.
    pub constrain: Option<u32>,
    /// `<|endoftext|>`, which ends a turn too; small vocabularies have none.
    pub end_of_text: Option<u32>,
}

impl ControlTokens {
    /// Whether `id` closes a message: `<|end|>`, `<|call|>` or `<|return|>`.
    pub fn is_message_end(&self, id: u32) -> bool {
        id == self.end || id == self.call || id == self.return_
    }

    /// Whether `id` ends a turn: `<|return|>`, `<|call|>` or `<|endoftext|>`.
    pub fn is_turn_end(&self, id: u32) -> bool {
        id == self.return_ || id == self.call || Some(id) == self.end_of_text
    }

    /// Whether `id` closes a message or ends a turn.
    pub(super) fn is_end(&self, id: u32) -> bool {
        self.is_message_end(id) || self.is_turn_end(id)
    }
}

/// A byte-level BPE tokenizer with Harmony's control tokens. Clones share the tables.
#[derive(Debug, Clone)]
pub struct HarmonyTokenizer {
    vocabulary: Vocabulary,
    control: ControlTokens,
}

impl HarmonyTokenizer {
    /// Reads a `tokenizer.json` from its bytes. Error messages call the source `source_name`.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::from_bytes`] and of [`Self::new`].
    pub fn from_bytes(json: Vec<u8>, source_name: &str) -> Result<Self> {
        Self::new(Vocabulary::from_bytes(json, source_name)?, source_name)
    }

    /// Returns the embedded tokenizer of 272 tokens: control tokens, header words, bytes.
    ///
    /// # Errors
    /// None in practice: a test reads the embedded file.
    pub fn from_embedded() -> Result<Self> {
        Self::from_bytes(embedded_vocabulary::tokenizer_json(), "the embedded tokenizer")
    }

    /// Returns the tokenizer with this vocabulary. Error messages call its source `source_name`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) if control tokens are missing.
    pub fn new(vocabulary: Vocabulary, source_name: &str) -> Result<Self> {
        let names = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"];
        let remedy = "Harmony conversations need them; use the tokenizer.json of a GPT-OSS model";
        let [start, message, channel, end, call, return_] =
            vocabulary.added_ids(names, source_name, remedy)?;
        let constrain = vocabulary.added_id("<|constrain|>");
        let end_of_text = vocabulary.added_id("<|endoftext|>");
        let control = ControlTokens { start, message, channel, end, call, return_, constrain, end_of_text };
        Ok(Self { vocabulary, control })
    }

    /// Returns the ids of the control tokens.
    pub fn control_tokens(&self) -> ControlTokens {
        self.control
    }

    /// Encodes one part of a header, such as a role or ` to=python`.
    ///
    /// A part that is one vocabulary entry becomes that token. In a vocabulary with merges, BPE gives the
    /// same token. The embedded vocabulary has no merges, so its header words need this lookup.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::encode_text`].
    pub(super) fn encode_header(&self, part: &str) -> Result<Vec<u32>> {
        if let Some(id) = self.entry_id(part) { Ok(vec![id]) } else { self.encode_text(part) }
    }
}

impl Deref for HarmonyTokenizer {
    type Target = Vocabulary;

    fn deref(&self) -> &Vocabulary {
        &self.vocabulary
    }
}
