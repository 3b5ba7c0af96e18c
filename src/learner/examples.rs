//! Supervised examples: the task's demonstrations, or conversations and tokens from JSON lines.

use crate::actor::micro_batch::Sequence;
use crate::bad_input;
use crate::chat::Chat;
use crate::harmony::{Message, Role};
use crate::random::Purpose;
use crate::tasks::rows::{self, EpochOrder};
use crate::tasks::{Demonstration, Task};
use anyhow::Result;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// The source of supervised examples.
pub enum Examples {
    /// Rows of a file, shuffled again in each epoch.
    Rows { sequences: Arc<[Sequence]>, order: EpochOrder },
    /// The task's own demonstrations.
    Demonstrations,
}

/// Renders conversations into tokens.
#[derive(Clone, Copy)]
pub struct ConversationRenderer<'a> {
    pub chat: &'a Chat,
    /// System and developer messages before a demonstration, and before a row that has none.
    pub system_prompt: &'a [Message],
    /// The text of ChatML's system message before the functions of a row that has no system message.
    pub identity: Option<&'a str>,
    /// Maximum number of tokens of a sequence.
    pub context_tokens_max: usize,
    /// Size of the model's vocabulary.
    pub vocabulary: usize,
}

impl ConversationRenderer<'_> {
    /// Returns the tokens of a demonstration. The loss covers the assistant's tokens.
    ///
    /// # Errors
    /// When a message cannot be rendered, or the conversation is longer than the context.
    pub fn render_demonstration(&self, demonstration: &Demonstration) -> Result<Sequence> {
        let messages: Vec<Message> =
            self.system_prompt.iter().chain(&demonstration.messages).cloned().collect();
        let source = match self.system_prompt.is_empty() {
            true => "a demonstration",
            false => {
                "a demonstration with the system messages of [harmony], which system_message = false removes"
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
    fn render_conversation(&self, messages: &[Message], source: &str) -> Result<Sequence> {
        let rendered = self.chat.render_training(messages)?;
        self.check_sequence(rendered.tokens, rendered.mask, source)
    }

    /// Checks that the sequence fits in the context and has a token to train on.
    fn check_sequence(&self, tokens: Vec<u32>, mask: Vec<bool>, source: &str) -> Result<Sequence> {
        if tokens.len() > self.context_tokens_max {
            return Err(bad_input!(
                "{source}: {} tokens, more than the model's context of {}; shorten the example or remove it",
                tokens.len(),
                self.context_tokens_max
            ));
        }
        if !mask.iter().skip(1).any(|&m| m) {
            return Err(bad_input!(
                "{source}: no token to train on; add an assistant message, or a mask that is true for some token"
            ));
        }
        Ok(Sequence { tokens, mask, kept_tokens: vec![] })
    }

    /// Reads up to `rows_max` JSON lines. Each line is `{"messages": [...]}` or `{"tokens": [...], "mask":
    /// [...]}`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the file and the row.
    pub fn read_rows(&self, path: &Path, rows_max: Option<usize>) -> Result<Vec<Sequence>> {
        let format = "{\"messages\": [...]} or {\"tokens\": [...], \"mask\": [...]}";
        rows::read(path, rows_max, format, |row| self.row(row).map_err(|e| format!("{e:#}")))
    }

    fn row(&self, row: &Value) -> Result<Sequence> {
        if row.get("messages").is_some() {
            let messages = self.chat.read_messages(row, self.identity, "row")?;
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
                self.check_sequence(tokens, mask, "row")
            }
            _ => Err(format_error()),
        }
    }
}

impl Examples {
    /// Returns the examples of `rows`; without rows, the task's demonstrations.
    pub fn new(rows: Option<Arc<[Sequence]>>) -> Self {
        match rows {
            Some(sequences) => {
                let order = EpochOrder::new(sequences.len(), Purpose::Shuffle);
                Examples::Rows { sequences, order }
            }
            None => Examples::Demonstrations,
        }
    }

    /// Returns the examples `start..start + count`. The sequence of examples is endless.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the task has no demonstrations.
    pub fn batch(
        &self,
        renderer: &ConversationRenderer,
        task: &dyn Task,
        seed: u64,
        start: u64,
        count: usize,
    ) -> Result<Vec<Sequence>> {
        (start..start + count as u64)
            .map(|index| match self {
                Examples::Rows { sequences, order } => Ok(sequences[order.row(seed, index)].clone()),
                Examples::Demonstrations => {
                    let demonstration =
                        task.demonstration(seed, index).ok_or_else(|| no_demonstrations(task))?;
                    renderer.render_demonstration(&demonstration)
                }
            })
            .collect()
    }
}

fn no_demonstrations(task: &dyn Task) -> anyhow::Error {
    bad_input!(
        "cold_start.train_file: the task {} has no demonstrations; name a JSONL file, or set cold_start.steps = 0",
        task.name()
    )
}
