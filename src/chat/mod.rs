//! Conversations of a model family, behind one face: rendering, reading of sampled turns, stop tokens, the form of a call.
//!
//! GPT-OSS speaks [Harmony](crate::harmony), Qwen2.5 [ChatML](chatml). Everything above knows a [`Chat`] and its
//! [`Message`]s. A text without a channel of its own, as in ChatML, is on `final` where it ends a turn and on `commentary`
//! where calls follow it.

pub mod chatml;

use crate::harmony::{
    self, HarmonyTokenizer, MaskedTokens, Message, ParseMode, ParsedCompletion, RenderOptions, Role,
    StreamParser, TurnProblem, TurnStep,
};
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use chatml::ChatMl;
use serde_json::Value;
use std::path::Path;

/// The name of the Python tool, as a recipient of calls.
pub const PYTHON: &str = "python";

/// A template over a vocabulary that has its control tokens.
#[derive(Debug, Clone)]
pub enum Chat {
    Harmony(HarmonyTokenizer),
    ChatMl(ChatMl),
}

/// A format of conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Harmony,
    ChatMl,
}

impl Format {
    /// Conversations over the vocabulary in a `tokenizer.json`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file cannot be read or lacks the template's control tokens.
    pub fn read(self, file: &Path) -> Result<Chat> {
        Ok(match self {
            Format::Harmony => Chat::Harmony(HarmonyTokenizer::from_file(file)?),
            Format::ChatMl => Chat::ChatMl(ChatMl::from_file(file)?),
        })
    }

    /// Conversations over the vocabulary inside the binary.
    ///
    /// # Errors
    /// None in practice: tests read both.
    pub fn embedded(self) -> Result<Chat> {
        Ok(match self {
            Format::Harmony => Chat::Harmony(HarmonyTokenizer::embedded()?),
            Format::ChatMl => Chat::ChatMl(ChatMl::embedded()?),
        })
    }
}

/// A call that a turn ended in, to be answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A message with a recipient, known or not, who can author the reply.
    Ready(Message),
    /// What could not be read as a call, whom it was for, if that is known, and what to tell the model.
    Malformed { recipient: Option<String>, reply: String },
}

impl Chat {
    /// The ids of text and of control tokens.
    pub fn vocabulary(&self) -> &Vocabulary {
        match self {
            Chat::Harmony(tokenizer) => tokenizer,
            Chat::ChatMl(chatml) => chatml.vocabulary(),
        }
    }

    /// The tokens that end a turn, the usual one first.
    pub fn stop_tokens(&self) -> Vec<u32> {
        match self {
            Chat::Harmony(tokenizer) => vec![tokenizer.control().ret, tokenizer.control().call],
            Chat::ChatMl(chatml) => chatml.stop_tokens(),
        }
    }

    /// The Jinja template of the rendering, in the form that transformers reads.
    pub fn jinja(&self) -> &'static str {
        match self {
            Chat::Harmony(_) => include_str!("harmony.jinja"),
            Chat::ChatMl(_) => include_str!("chatml/chatml.jinja"),
        }
    }

    /// A conversation and the opening of the assistant's turn.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when a message cannot be written.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match self {
            Chat::Harmony(tokenizer) => tokenizer.render_conversation_for_completion(
                messages,
                Role::Assistant,
                RenderOptions::default(),
            ),
            Chat::ChatMl(chatml) => Ok(chatml.prompt(messages)),
        }
    }

    /// What follows a turn that was sampled up to its stop token: `messages`, and the opening of the assistant's next turn.
    ///
    /// # Errors
    /// As [`Self::prompt`].
    pub fn continuation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match self {
            Chat::Harmony(_) => self.prompt(messages),
            Chat::ChatMl(chatml) => Ok(chatml.continuation(messages)),
        }
    }

    /// A conversation to learn from; the mask is true where the assistant would have sampled.
    ///
    /// # Errors
    /// As [`Self::prompt`].
    pub fn training(&self, messages: &[Message]) -> Result<MaskedTokens> {
        match self {
            Chat::Harmony(tokenizer) => {
                tokenizer.render_conversation_for_training(messages, RenderOptions::default())
            }
            Chat::ChatMl(chatml) => Ok(chatml.training(messages)),
        }
    }

    /// Reads the conversation of a row `{"messages": [...]}`, in ChatML also `"tools"`; `place` names it in errors.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput): `place`, the message's number (from 1) and what is wrong with it.
    pub fn read_messages(&self, row: &Value, place: &str) -> Result<Vec<Message>> {
        match self {
            Chat::Harmony(_) => harmony::messages_from_json(&row["messages"], place),
            Chat::ChatMl(_) => chatml::messages_from_json(row, None, place),
        }
    }

    /// A reader of the tokens sampled after an opening.
    pub fn turn_parser(&self) -> TurnReader {
        match self {
            Chat::Harmony(tokenizer) => TurnReader::Harmony(harmony::TurnParser::new(tokenizer)),
            Chat::ChatMl(chatml) => TurnReader::ChatMl(chatml.turn_parser()),
        }
    }

    /// Whether `tokens` are a conversation of this template from its start; the last turn may be unfinished.
    ///
    /// # Errors
    /// Where they are none.
    pub fn check(&self, tokens: &[u32]) -> Result<()> {
        match self {
            Chat::Harmony(tokenizer) => {
                let mut parser = StreamParser::new(tokenizer, None, ParseMode::Strict);
                tokens.iter().try_for_each(|&token| parser.push(token))?;
                parser.finish().map(drop)
            }
            Chat::ChatMl(chatml) => chatml.check(tokens),
        }
    }

    /// The template's name, for sentences.
    pub fn name(&self) -> &'static str {
        match self {
            Chat::Harmony(_) => "Harmony",
            Chat::ChatMl(_) => "ChatML",
        }
    }
}

/// Reads the tokens sampled after an opening, one by one. It never fails.
pub enum TurnReader {
    Harmony(harmony::TurnParser),
    ChatMl(chatml::ChatMlTurn),
}

impl TurnReader {
    /// Reads the next token.
    pub fn push(&mut self, token: u32) -> TurnStep {
        match self {
            TurnReader::Harmony(parser) => parser.push(token),
            TurnReader::ChatMl(parser) => parser.push(token),
        }
    }

    /// The calls to answer once a step was [`TurnEnd::Called`](harmony::TurnEnd::Called) or
    /// [`TurnEnd::Malformed`](harmony::TurnEnd::Malformed), in the order they were made. After
    /// the first at least one is [`Call::Ready`], after the second none.
    pub fn calls(&self) -> Vec<Call> {
        match self {
            TurnReader::Harmony(parser) => match (parser.call(), parser.problem()) {
                (Some(call), _) => vec![Call::Ready(call.clone())],
                (None, problem) => {
                    let problem = problem.cloned().unwrap_or(TurnProblem::Truncated);
                    let reply = problem.reply();
                    let recipient = match problem {
                        TurnProblem::CallNotClosed { recipient } | TurnProblem::EmptyCall { recipient } => {
                            Some(recipient)
                        }
                        _ => None,
                    };
                    vec![Call::Malformed { recipient, reply }]
                }
            },
            TurnReader::ChatMl(parser) => parser.calls().to_vec(),
        }
    }

    /// The turn's messages as far as it was read, all of role assistant.
    pub fn finish(self) -> Vec<Message> {
        match self {
            TurnReader::Harmony(parser) => {
                let ParsedCompletion { messages, .. } = parser.finish();
                messages
            }
            TurnReader::ChatMl(parser) => parser.finish(),
        }
    }
}
