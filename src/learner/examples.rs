//! Supervised examples: the task's demonstrations, or conversations and tokens in JSON lines.

use super::micro_batch::Sequence;
use crate::bad_input;
use crate::chat::Chat;
use crate::harmony::Message;
use crate::random::Purpose;
use crate::tasks::rows::{self, Order};
use crate::tasks::{Demonstration, Task};
use anyhow::Result;
use serde_json::Value;
use std::path::Path;

/// The source of supervised examples.
pub enum Examples {
    /// Rows of a file, reshuffled each epoch.
    Rows { sequences: Vec<Sequence>, order: Order },
    /// The task's own demonstrations.
    Demonstrations,
}

/// Renders conversations into tokens.
#[derive(Clone, Copy)]
pub struct ConversationRenderer<'a> {
    pub chat: &'a Chat,
    /// System and developer messages before a demonstration.
    pub system_prompt: &'a [Message],
    /// Maximum tokens of a sequence.
    pub context_tokens_max: usize,
    /// Size of the model's vocabulary.
    pub vocabulary: usize,
}

impl ConversationRenderer<'_> {
    /// Returns a demonstration's tokens. The loss covers the assistant's tokens.
    ///
    /// # Errors
    /// When a message cannot be rendered, or the conversation is longer than the context.
    pub fn render_demonstration(&self, demonstration: &Demonstration) -> Result<Sequence> {
        let messages: Vec<Message> =
            self.system_prompt.iter().chain(&demonstration.messages).cloned().collect();
        let place = match self.system_prompt.is_empty() {
            true => "a demonstration",
            false => {
                "a demonstration after the messages of [harmony], which system_message = false takes away"
            }
        };
        self.conversation(&messages, place)
    }

    fn conversation(&self, messages: &[Message], place: &str) -> Result<Sequence> {
        let rendered = self.chat.render_training(messages)?;
        self.checked(rendered.tokens, rendered.mask, place)
    }

    fn checked(&self, tokens: Vec<u32>, mask: Vec<bool>, place: &str) -> Result<Sequence> {
        if tokens.len() > self.context_tokens_max {
            return Err(bad_input!(
                "{place}: {} tokens, more than the model's context of {}; shorten or drop it",
                tokens.len(),
                self.context_tokens_max
            ));
        }
        if !mask.iter().skip(1).any(|&m| m) {
            return Err(bad_input!(
                "{place}: no token to train on; it needs an assistant's message or a mask"
            ));
        }
        Ok(Sequence { tokens, mask })
    }

    /// Reads up to `rows_max` JSON lines, each `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] naming file and row.
    pub fn read_rows(&self, path: &Path, rows_max: Option<usize>) -> Result<Vec<Sequence>> {
        let form = "{\"messages\": [...]} or {\"tokens\": [...], \"mask\": [...]}";
        rows::read(path, rows_max, form, |row| self.row(row).map_err(|e| format!("{e:#}")))
    }

    fn row(&self, row: &Value) -> Result<Sequence> {
        if row.get("messages").is_some() {
            return self.conversation(&self.chat.read_messages(row, "row")?, "row");
        }
        let wrong = || {
            bad_input!(
                "needs \"messages\", or \"tokens\" (ids below {}) and \"mask\" (true or 1 where trained) of one length",
                self.vocabulary
            )
        };
        let list = |key: &str| row.get(key).and_then(Value::as_array).ok_or_else(wrong);
        let id = |value: &Value| value.as_u64().filter(|&id| id < self.vocabulary as u64).map(|id| id as u32);
        let flag = |value: &Value| value.as_bool().or_else(|| value.as_u64().map(|m| m != 0));
        let tokens: Option<Vec<u32>> = list("tokens")?.iter().map(id).collect();
        let mask: Option<Vec<bool>> = list("mask")?.iter().map(flag).collect();
        match (tokens, mask) {
            (Some(tokens), Some(mask)) if tokens.len() == mask.len() && !tokens.is_empty() => {
                self.checked(tokens, mask, "row")
            }
            _ => Err(wrong()),
        }
    }
}

impl Examples {
    /// Reads the rows of `file` if given; else uses the task's demonstrations.
    ///
    /// # Errors
    /// When [`ConversationRenderer::read_rows`] fails.
    pub fn open(file: Option<&Path>, rendering: &ConversationRenderer) -> Result<Self> {
        Ok(match file {
            Some(path) => {
                let sequences = rendering.read_rows(path, None)?;
                let order = Order::new(sequences.len(), Purpose::Shuffle);
                Examples::Rows { sequences, order }
            }
            None => Examples::Demonstrations,
        })
    }

    /// Returns examples `start..start + count` of the endless stream.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the task has no demonstrations.
    pub fn batch(
        &self,
        rendering: &ConversationRenderer,
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
                    rendering.render_demonstration(&demonstration)
                }
            })
            .collect()
    }
}

fn no_demonstrations(task: &dyn Task) -> anyhow::Error {
    bad_input!(
        "cold_start.train_file: the task {} makes no demonstrations of its own; name a JSONL file, or set cold_start.steps = 0",
        task.name()
    )
}
