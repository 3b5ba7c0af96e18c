//! ChatML in the format of Qwen2.5 and Qwen3: `<|im_start|>role`, the text, `<|im_end|>`. A tool call is JSON
//! between `<tool_call>` and `</tool_call>`. A tool's reply is in a user turn, between `<tool_response>` and
//! `</tool_response>`.
//!
//! The rendering agrees with the template of Qwen2.5-Instruct on conversations of one system message, user
//! messages, tool calls and replies. Qwen's template adds a missing system message. The rendering here adds
//! no message; the recipe gives the system message.
//!
//! Qwen3's ChatML also has thoughts. A thought is a message on the channel `analysis`; it is rendered between
//! `<think>` and `</think>` before the turn's text. Both Qwen3's template and the rendering here omit
//! thoughts before the last user message.

mod json;
mod own_template;
mod render;
mod system;
mod turn;

pub(super) use json::python_number;
pub use json::{is_same as is_same_json, to_text as json_text};
pub use own_template::{DECLARATION, TemplateSource};
pub use system::{QWEN_IDENTITY, python_function, system_text};
pub use turn::{ChatMlTurnParser, thought_and_text};

use crate::harmony::Role;
use crate::vocabulary::{Vocabulary, embedded_json};
use anyhow::{Result, ensure};
use own_template::OwnTemplate;
use std::sync::Arc;

/// The text before the code in a call to the Python tool. It is one token of the embedded vocabulary, and so
/// is [`CALL_END`], the text after the code.
const PYTHON_CALL: &str = "{\"name\": \"python\", \"arguments\": {\"code\": \"";
const CALL_END: &str = "\"}}";

/// The tags around a tool call. Each is one token in Qwen's vocabulary.
const TOOL_CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];
/// The tags around a thought. Each is one token in Qwen3's vocabulary.
const THINK: [&str; 2] = ["<think>", "</think>"];
/// The channel of thoughts.
const ANALYSIS: &str = "analysis";
/// The tags around a tool's reply.
const TOOL_RESPONSE: [&str; 2] = ["<tool_response>", "</tool_response>"];

/// Control tokens of the embedded vocabulary, with ids from 0. [`TOOL_CALL`] has ids 3 and 4.
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// Template words of the embedded vocabulary. Their ids begin at 5 or, with [`THINK`], at 7. In content,
/// every byte is one token.
const WORDS: [&str; 7] =
    ["system", "user", "assistant", PYTHON_CALL, CALL_END, TOOL_RESPONSE[0], TOOL_RESPONSE[1]];

/// A tokenizer with ChatML's control tokens. Clones share the tables.
#[derive(Debug, Clone)]
pub struct ChatMl {
    vocabulary: Vocabulary,
    im_start: u32,
    im_end: u32,
    /// `<|endoftext|>`, which ends a turn as `<|im_end|>` does.
    end_of_text: Option<u32>,
    /// Whether thinking is on. `None` if the template has no thoughts.
    thinking: Option<bool>,
    /// The model's own template. `None` if it is the family's.
    template: Option<Arc<OwnTemplate>>,
}

impl ChatMl {
    /// Reads a `tokenizer.json` from its bytes. Error messages call the source `source_name`.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::from_bytes`] and of [`Self::new`].
    pub fn from_bytes(json: Vec<u8>, source_name: &str) -> Result<Self> {
        Self::new(Vocabulary::from_bytes(json, source_name)?, source_name)
    }

    /// Returns the embedded tokenizer of 272 tokens: control tokens, template words, bytes.
    ///
    /// # Errors
    /// None in practice: a test reads the embedded file.
    pub fn from_embedded() -> Result<Self> {
        Self::from_bytes(embedded_json(&SPECIAL, &TOOL_CALL, &WORDS), "the embedded ChatML tokenizer")
    }

    /// Returns the embedded tokenizer of 272 tokens with [`THINK`] at ids 5 and 6.
    ///
    /// # Errors
    /// None in practice: a test reads the embedded file.
    pub fn from_embedded_with_thoughts() -> Result<Self> {
        let json = embedded_json(&SPECIAL, &[TOOL_CALL, THINK].concat(), &WORDS);
        Ok(Self::from_bytes(json, "the embedded ChatML tokenizer")?.with_thinking(true))
    }

    /// Returns the tokenizer with Qwen3's template. If `enabled`, the model may think. Otherwise each turn
    /// begins with an empty thought that is inserted, not sampled.
    pub fn with_thinking(self, enabled: bool) -> Self {
        Self { thinking: Some(enabled), ..self }
    }

    /// Returns whether the template has thoughts.
    pub fn has_thoughts(&self) -> bool {
        self.thinking.is_some()
    }

    /// Returns the tokenizer with this vocabulary. Error messages call its source `source_name`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) if control tokens are missing.
    pub fn new(vocabulary: Vocabulary, source_name: &str) -> Result<Self> {
        let remedy = "ChatML conversations need them; use the tokenizer.json of a Qwen2.5 or Qwen3 model";
        let [im_start, im_end] = vocabulary.added_ids(["<|im_start|>", "<|im_end|>"], source_name, remedy)?;
        let end_of_text = vocabulary.added_id("<|endoftext|>");
        Ok(Self { vocabulary, im_start, im_end, end_of_text, thinking: None, template: None })
    }

    /// Returns the vocabulary of text and control tokens.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Returns the ids of `<|im_end|>` and, if the vocabulary has it, `<|endoftext|>`.
    pub fn stop_tokens(&self) -> Vec<u32> {
        std::iter::once(self.im_end).chain(self.end_of_text).collect()
    }

    fn is_stop_token(&self, token: u32) -> bool {
        token == self.im_end || Some(token) == self.end_of_text
    }

    /// Returns a parser for the tokens that are sampled after `<|im_start|>assistant` and its line break.
    pub fn turn_parser(&self) -> ChatMlTurnParser {
        ChatMlTurnParser::new(self)
    }

    /// Returns whether the model has its own template.
    pub fn has_own_template(&self) -> bool {
        self.template.is_some()
    }

    /// Returns the model's own template with its variables, if it has one.
    pub fn own_template(&self) -> Option<&TemplateSource> {
        self.template.as_ref().map(|template| &template.source)
    }

    /// Checks that `tokens` are turns of known roles. The last turn may be unfinished. A model's own template
    /// knows no form of turns.
    ///
    /// # Errors
    /// If a turn is malformed, or has an unknown role.
    pub fn check(&self, tokens: &[u32]) -> Result<()> {
        if self.template.is_some() {
            return Ok(());
        }
        let mut rest = tokens;
        while let [first, after @ ..] = rest {
            ensure!(
                *first == self.im_start,
                "unexpected token {first}; expected the start token {}",
                self.im_start
            );
            let end = after.iter().position(|&token| self.is_stop_token(token));
            let turn = &after[..end.unwrap_or(after.len())];
            ensure!(!turn.contains(&self.im_start), "a turn begins within another");
            let text = self.vocabulary.decode(turn);
            let role = text.split('\n').next().unwrap_or_default();
            let known = Role::from_name(role).is_some_and(|role| role != Role::Developer);
            let begun = end.is_none() && !text.contains('\n');
            ensure!(known || begun, "a turn of the unknown role {role:?}");
            let Some(end) = end else { return Ok(()) };
            rest = &after[end + 1..];
            // The line break between two turns.
            let next = rest.iter().position(|&token| token == self.im_start).unwrap_or(rest.len());
            let between = self.vocabulary.decode(&rest[..next]);
            ensure!(between.trim().is_empty(), "text between two turns: {between:?}");
            rest = &rest[next..];
        }
        Ok(())
    }
}
