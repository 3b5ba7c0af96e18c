//! The text of conversations, with one interface for the chat formats of the model families: rendering,
//! parsing of sampled turns, stop tokens, tool calls, system prompts, messages in OpenAI's form.
//!
//! GPT-OSS uses [Harmony](crate::harmony), Qwen uses [ChatML](chatml). Other modules use only [`Chat`] and
//! [`Message`]. ChatML has no channels. A ChatML text gets the channel `final` if it ends a turn, and the
//! channel `commentary` if tool calls follow it.

pub mod chatml;
pub mod functions;
mod openai;
mod programs;
mod renderer;
mod rows;
mod system;
pub mod template;
mod turn_reader;

pub use openai::{ConversationSource, GivenAnswer, RequestMessages, call_json, function_name, read_content};
pub use programs::{ProgramScanner, ToolForm};
pub use renderer::ConversationRenderer;
pub use rows::read_tools;
pub use system::{SystemPromptSettings, replaced_system_prompt, system_prompt};
pub use turn_reader::{Texts, TurnReader};

use crate::harmony::{
    self, HarmonyTokenizer, MaskedTokens, Message, ParseMode, ParsedCompletion, RenderOptions, Role,
    StreamParser, TurnError, TurnStep,
};
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use chatml::ChatMl;
use serde_json::Value;
use std::path::Path;

/// The name of the Python tool. A call to the tool has this name as recipient.
pub const PYTHON: &str = "python";

/// A chat format and a tokenizer with the format's control tokens.
#[derive(Debug, Clone)]
pub enum Chat {
    Harmony(HarmonyTokenizer),
    ChatMl(ChatMl),
}

/// A chat format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatFormat {
    Harmony,
    ChatMl,
    /// Qwen3's ChatML, with thoughts.
    ThinkingChatMl,
}

impl ChatFormat {
    /// Reads a tokenizer from a `tokenizer.json`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file cannot be read or lacks the format's control tokens.
    pub fn read(self, file: &Path) -> Result<Chat> {
        Ok(match self {
            ChatFormat::Harmony => Chat::Harmony(HarmonyTokenizer::from_file(file)?),
            ChatFormat::ChatMl => Chat::ChatMl(ChatMl::from_file(file)?),
            ChatFormat::ThinkingChatMl => Chat::ChatMl(ChatMl::from_file(file)?.with_thinking(true)),
        })
    }

    /// Returns the tokenizer with this vocabulary. Error messages call its source `source_name`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] if control tokens are missing.
    pub fn from_vocabulary(self, vocabulary: Vocabulary, source_name: &str) -> Result<Chat> {
        Ok(match self {
            ChatFormat::Harmony => Chat::Harmony(HarmonyTokenizer::new(vocabulary, source_name)?),
            ChatFormat::ChatMl => Chat::ChatMl(ChatMl::new(vocabulary, source_name)?),
            ChatFormat::ThinkingChatMl => {
                Chat::ChatMl(ChatMl::new(vocabulary, source_name)?.with_thinking(true))
            }
        })
    }

    /// Returns the tokenizer that is embedded in the binary.
    ///
    /// # Errors
    /// None in practice: tests read the embedded files.
    pub fn from_embedded(self) -> Result<Chat> {
        Ok(match self {
            ChatFormat::Harmony => Chat::Harmony(HarmonyTokenizer::from_embedded()?),
            ChatFormat::ChatMl => Chat::ChatMl(ChatMl::from_embedded()?),
            ChatFormat::ThinkingChatMl => Chat::ChatMl(ChatMl::from_embedded_with_thoughts()?),
        })
    }
}

/// A tool call at the end of a turn. It needs a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A call that could be read: a message with a recipient, which need not be an existing tool. The author
    /// of the tool's reply is this recipient.
    Ready(Message),
    /// A call that could not be read: its recipient, if known, and the error that the model gets as reply.
    Malformed { recipient: Option<String>, reply: String },
}

impl Chat {
    /// Returns the chat with Qwen3's thinking on or off. Other formats are returned unchanged.
    pub fn with_thinking(self, enabled: bool) -> Self {
        match self {
            Chat::ChatMl(chatml) if chatml.has_thoughts() => Chat::ChatMl(chatml.with_thinking(enabled)),
            other => other,
        }
    }

    /// Returns the vocabulary of text and control tokens.
    pub fn vocabulary(&self) -> &Vocabulary {
        match self {
            Chat::Harmony(tokenizer) => tokenizer,
            Chat::ChatMl(chatml) => chatml.vocabulary(),
        }
    }

    /// Returns the tokens that end a turn. The most common one comes first.
    pub fn stop_tokens(&self) -> Vec<u32> {
        match self {
            Chat::Harmony(tokenizer) => {
                let control = tokenizer.control_tokens();
                [control.return_, control.call].into_iter().chain(control.end_of_text).collect()
            }
            Chat::ChatMl(chatml) => chatml.stop_tokens(),
        }
    }

    /// Returns a Jinja template (dialect of transformers) that renders as [`Self::render_prompt`] does.
    pub fn jinja(&self) -> &'static str {
        match self {
            Chat::Harmony(_) => include_str!("harmony.jinja"),
            Chat::ChatMl(chatml) if chatml.has_thoughts() => include_str!("chatml/thinking.jinja"),
            Chat::ChatMl(_) => include_str!("chatml/chatml.jinja"),
        }
    }

    /// Returns whether `template` is the family's published template, or [`Self::jinja`]. The texts are
    /// compared; no template is executed.
    pub fn is_known_template(&self, template: &str) -> bool {
        let published = match self {
            Chat::Harmony(_) => "ac91ce5e1082099a9a7589c349ab3dda7035be834d487478218c44658d10b956",
            Chat::ChatMl(chatml) if chatml.has_thoughts() => {
                "45fdf00a05e3daa5751bcd1de40a0a8280bde6328765dfe3828f9dac093b584b"
            }
            Chat::ChatMl(_) => "fec583fa8a02141eae850c0ffcb69ca6607f075d9eaf3a92e3203572e6393a54",
        };
        let digest = |text: &str| blake3::hash(text.trim().as_bytes());
        digest(template).to_hex().as_str() == published || digest(template) == digest(self.jinja())
    }

    /// Renders a conversation and the start of the assistant's turn.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when a message cannot be rendered.
    pub fn render_prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match self {
            Chat::Harmony(tokenizer) => tokenizer.render_conversation_for_completion(
                messages,
                Role::Assistant,
                RenderOptions::default(),
            ),
            Chat::ChatMl(chatml) => chatml.render_prompt(messages),
        }
    }

    /// Renders the text after a turn that was sampled up to its stop token: `messages`, and the start of the
    /// assistant's next turn.
    ///
    /// # Errors
    /// The errors of [`Self::render_prompt`].
    pub fn render_continuation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match self {
            Chat::Harmony(_) => self.render_prompt(messages),
            Chat::ChatMl(chatml) => chatml.render_continuation(messages),
        }
    }

    /// Renders a conversation for training. The mask is true for the tokens that the assistant would sample.
    ///
    /// # Errors
    /// The errors of [`Self::render_prompt`].
    pub fn render_training(&self, messages: &[Message]) -> Result<MaskedTokens> {
        match self {
            Chat::Harmony(tokenizer) => {
                tokenizer.render_conversation_for_training(messages, RenderOptions::default())
            }
            Chat::ChatMl(chatml) => chatml.render_training(messages),
        }
    }

    /// Reads the conversation of a row `{"messages": [...], "tools": [...]}` in OpenAI's form, as the server
    /// reads a request. With Harmony, messages may also be in Harmony's own form, without tools; a message of
    /// the assistant without a channel gets the channel `final`, or `commentary` if it is a call.
    ///
    /// A conversation with tools or with a system message has its system prompt, which `settings` describes.
    /// `uses_python`: whether the recipe declares the Python tool.
    ///
    /// # Errors
    /// The number of the first invalid message (from 1), or the key, with the reason.
    pub fn read_messages(
        &self,
        row: &Value,
        settings: &SystemPromptSettings,
        uses_python: bool,
    ) -> Result<Vec<Message>, String> {
        let list = row["messages"].as_array().ok_or("\"messages\" must be a list of messages")?;
        let tools = read_tools(&row["tools"])?;
        if matches!(self, Chat::Harmony(_)) && list.iter().any(rows::is_harmony_message) {
            if !tools.is_empty() {
                return Err(
                    "\"tools\" beside messages in Harmony's form; declare functions in a developer message, or write \
                     \"tool_calls\" instead of \"recipient\""
                        .into(),
                );
            }
            let mut messages =
                harmony::messages_from_json(&row["messages"], "row").map_err(|e| format!("{e:#}"))?;
            for message in messages.iter_mut().filter(|message| message.role == Role::Assistant) {
                let usual = if message.recipient.is_some() { "commentary" } else { "final" };
                message.channel.get_or_insert_with(|| usual.to_owned());
            }
            return Ok(messages);
        }
        self.check_request_tools(&tools)?;
        self.check_declarations(&tools)?;
        let source = ConversationSource::Row { uses_python };
        let mut conversation = RequestMessages::read(list, &tools, self, settings.clone(), source)?;
        let has_text =
            list.first().is_some_and(|first| first["role"] == "system" || first["role"] == "developer");
        if tools.is_empty() && !has_text {
            conversation.system.clear();
        }
        Ok(conversation.into_messages())
    }

    /// Returns a parser for the tokens that are sampled after a prompt.
    pub fn turn_parser(&self) -> ChatTurnParser {
        match self {
            Chat::Harmony(tokenizer) => ChatTurnParser::Harmony(harmony::TurnParser::new(tokenizer)),
            Chat::ChatMl(chatml) => ChatTurnParser::ChatMl(chatml.turn_parser()),
        }
    }

    /// Checks that `tokens` are a conversation in this format, from its first token. The last turn may be
    /// unfinished.
    ///
    /// # Errors
    /// If a turn or a header is malformed.
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

    /// Checks that a prompt can declare `functions`, which are valid.
    ///
    /// # Errors
    /// The first function whose parameters the format cannot show, with the reason and the remedy.
    pub fn check_declarations(&self, functions: &[Value]) -> Result<(), String> {
        match self {
            Chat::Harmony(_) => functions::check_namespace(functions),
            Chat::ChatMl(_) => Ok(()),
        }
    }

    /// Returns the parameters of `functions` whose types a prompt does not show completely, as
    /// `function.parameter`.
    pub fn simplified_parameters(&self, functions: &[Value]) -> Vec<String> {
        match self {
            Chat::Harmony(_) => functions::simplified_parameters(functions),
            Chat::ChatMl(_) => vec![],
        }
    }

    /// Returns the format's name, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Chat::Harmony(_) => "Harmony",
            Chat::ChatMl(_) => "ChatML",
        }
    }
}

/// Parses the tokens that are sampled after a prompt, one by one. It never fails.
#[derive(Clone)]
pub enum ChatTurnParser {
    Harmony(harmony::TurnParser),
    ChatMl(chatml::ChatMlTurnParser),
}

impl ChatTurnParser {
    /// Reads the next token.
    pub fn push(&mut self, token: u32) -> TurnStep {
        match self {
            ChatTurnParser::Harmony(parser) => parser.push(token),
            ChatTurnParser::ChatMl(parser) => parser.push(token),
        }
    }

    /// Returns the calls that need replies, in order. The turn must have ended with
    /// [`TurnEnd::Called`](harmony::TurnEnd::Called) or [`TurnEnd::Malformed`](harmony::TurnEnd::Malformed).
    /// In the first case at least one call is [`Call::Ready`], in the second case none.
    pub fn calls(&self) -> Vec<Call> {
        match self {
            ChatTurnParser::Harmony(parser) => match (parser.call(), parser.error()) {
                (Some(call), _) => vec![Call::Ready(call.clone())],
                (None, problem) => {
                    let problem = problem.cloned().unwrap_or(TurnError::Truncated);
                    let reply = problem.reply();
                    let recipient = match problem {
                        TurnError::EmptyCall { recipient } => Some(recipient),
                        _ => None,
                    };
                    vec![Call::Malformed { recipient, reply }]
                }
            },
            ChatTurnParser::ChatMl(parser) => parser.calls().to_vec(),
        }
    }

    /// Returns the parser, which reads ChatML's calls as text. Harmony's calls are messages of their own.
    pub fn without_calls(self) -> Self {
        match self {
            ChatTurnParser::ChatMl(parser) => ChatTurnParser::ChatMl(parser.without_calls()),
            harmony => harmony,
        }
    }

    /// Returns the bytes so far of the answer that is being sampled, without thoughts; `None` elsewhere.
    pub fn answer(&self) -> Option<&[u8]> {
        match self {
            ChatTurnParser::Harmony(parser) => parser.answer(),
            ChatTurnParser::ChatMl(parser) => parser.answer(),
        }
    }

    /// Returns the number of messages that could not be read and after which the turn went on.
    pub fn broken_messages(&self) -> usize {
        match self {
            ChatTurnParser::Harmony(parser) => parser.broken_messages(),
            ChatTurnParser::ChatMl(_) => 0,
        }
    }

    /// Returns the texts of the turn so far. Calls are text if `takes_calls` is false. At the end of the
    /// answer (`at_end`), a call that could not be read is text too.
    pub fn texts(&self, at_end: bool, takes_calls: bool) -> Texts {
        match self {
            ChatTurnParser::Harmony(parser) => turn_reader::harmony_texts(parser, at_end, takes_calls),
            ChatTurnParser::ChatMl(parser) => parser.texts(at_end, takes_calls),
        }
    }

    /// Returns the turn's messages so far. All have the role assistant.
    pub fn finish(self) -> Vec<Message> {
        match self {
            ChatTurnParser::Harmony(parser) => {
                let ParsedCompletion { messages, .. } = parser.finish();
                messages
            }
            ChatTurnParser::ChatMl(parser) => parser.finish(),
        }
    }
}
