//! Renders the conversations of demonstrations and of a file's rows into tokens for training.

use super::{Chat, SystemPromptSettings, rows};
use crate::bad_input;
use crate::harmony::{MaskedTokens, Message, Role};
use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeSet;

/// Renders conversations into tokens.
#[derive(Clone, Copy)]
pub struct ConversationRenderer<'a> {
    pub chat: &'a Chat,
    /// System and developer messages before a demonstration, and before a row that has none.
    pub system_prompt: &'a [Message],
    /// The settings of the system prompt of a row that has tools or a system message.
    pub settings: &'a SystemPromptSettings,
    /// Whether the recipe declares the Python tool.
    pub uses_python: bool,
    /// Maximum number of tokens of a sequence.
    pub context_tokens_max: usize,
    /// Size of the model's vocabulary.
    pub vocabulary: usize,
}

impl ConversationRenderer<'_> {
    /// Returns the tokens of a demonstration with the messages `messages`. The loss covers the assistant's
    /// tokens.
    ///
    /// # Errors
    /// When a message cannot be rendered, or the conversation is longer than the context.
    pub fn render_demonstration(&self, messages: &[Message]) -> Result<MaskedTokens> {
        let messages = [self.system_prompt, messages].concat();
        let source = match self.system_prompt.is_empty() {
            true => "a demonstration",
            false => {
                "a demonstration with the system messages of [chat], which system_message = false removes"
            }
        };
        self.render_conversation(&messages, source)
    }

    /// Returns the messages of a row with the recipe's system prompt, as a problem has it, unless the row has
    /// a system message. A row's developer message takes the place of the recipe's.
    fn with_system_prompt(&self, messages: Vec<Message>) -> Vec<Message> {
        let has = |role| messages.iter().any(|message| message.role == role);
        let (has_system, has_developer) = (has(Role::System), has(Role::Developer));
        let missing = |message: &&Message| !has_system && (message.role == Role::System || !has_developer);
        self.system_prompt.iter().filter(missing).cloned().chain(messages).collect()
    }

    /// Renders a conversation into tokens. `source` names the conversation in messages.
    fn render_conversation(&self, messages: &[Message], source: &str) -> Result<MaskedTokens> {
        self.check_length(self.chat.render_training(messages)?, source)
    }

    /// Checks that a sequence fits in the context and has a token to train on.
    fn check_length(&self, rendered: MaskedTokens, source: &str) -> Result<MaskedTokens> {
        if rendered.tokens.len() > self.context_tokens_max {
            return Err(bad_input!(
                "{source}: {} tokens, more than the model's context of {}; shorten the example or remove it",
                rendered.tokens.len(),
                self.context_tokens_max
            ));
        }
        if !rendered.mask.iter().skip(1).any(|&m| m) {
            return Err(bad_input!(
                "{source}: no token to train on; add an assistant message, or a mask that is true for some token"
            ));
        }
        Ok(rendered)
    }

    /// Returns the keys of a row that have no meaning here.
    ///
    /// # Errors
    /// A key that has a meaning in other programs, with the remedy.
    pub fn unused_keys(&self, row: &Value) -> Result<BTreeSet<String>, String> {
        if row["messages"].is_null() { Ok(BTreeSet::new()) } else { rows::check_row_keys(row) }
    }

    /// Returns the tokens of a row: `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a message cannot be read or rendered, or the sequence does not fit.
    pub fn render_row(&self, row: &Value) -> Result<MaskedTokens> {
        if row.get("messages").is_some_and(|messages| !messages.is_null()) {
            let messages = self.chat.read_messages(row, self.settings, self.uses_python);
            let messages = messages.map_err(|why| bad_input!("{why}"))?;
            return self.render_conversation(&self.with_system_prompt(messages), "row");
        }
        let format_error = || {
            bad_input!(
                "needs \"messages\", or \"tokens\" (ids below {}) and \"mask\" (true or 1 where trained) of the same length",
                self.vocabulary
            )
        };
        let list = |key: &str| row.get(key).and_then(Value::as_array).ok_or_else(format_error);
        let id = |value: &Value| value.as_u64().filter(|&id| id < self.vocabulary as u64).map(|id| id as u32);
        let flag = |value: &Value| value.as_bool().or_else(|| value.as_u64().map(|m| m != 0));
        let tokens: Option<Vec<u32>> = list("tokens")?.iter().map(id).collect();
        let mask: Option<Vec<bool>> = list("mask")?.iter().map(flag).collect();
        match (tokens, mask) {
            (Some(tokens), Some(mask)) if tokens.len() == mask.len() && !tokens.is_empty() => {
                self.check_length(MaskedTokens { tokens, mask }, "row")
            }
            _ => Err(format_error()),
        }
    }
}
