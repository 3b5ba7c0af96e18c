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
use chatml::{ChatMl, TemplateSource};
use serde_json::{Map, Value};
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
        self.from_vocabulary(Vocabulary::from_file(file)?, &file.display().to_string())
    }

    /// Returns the tokenizer with this vocabulary. Error messages call its source `source_name`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] if control tokens are missing.
    pub fn from_vocabulary(self, vocabulary: Vocabulary, source_name: &str) -> Result<Chat> {
        if self == ChatFormat::Harmony {
            return Ok(Chat::Harmony(HarmonyTokenizer::new(vocabulary, source_name)?));
        }
        let chat = ChatMl::new(vocabulary, source_name)?;
        Ok(Chat::ChatMl(if self == ChatFormat::ChatMl { chat } else { chat.with_thinking(true) }))
    }

    /// Returns the tokenizer of a model with this template. GPT-OSS's conversations are in Harmony, whatever
    /// its template is, and a template that the family published has its own renderer.
    ///
    /// # Errors
    /// Those of [`Self::from_vocabulary`], and for a template with which no conversation can be trained.
    pub fn with_template(self, vocabulary: Vocabulary, name: &str, source: &TemplateSource) -> Result<Chat> {
        match self {
            ChatFormat::ChatMl | ChatFormat::ThinkingChatMl
                if !source.default.is_empty() && !self.is_known_template(&source.default) =>
            {
                Ok(Chat::ChatMl(ChatMl::with_template(vocabulary, name, source, Map::new())?))
            }
            _ => self.from_vocabulary(vocabulary, name),
        }
    }

    /// Returns a Jinja template (dialect of transformers) that renders as the format's own renderer does.
    fn jinja(self) -> &'static str {
        match self {
            ChatFormat::Harmony => include_str!("harmony.jinja"),
            ChatFormat::ThinkingChatMl => include_str!("chatml/thinking.jinja"),
            ChatFormat::ChatMl => include_str!("chatml/chatml.jinja"),
        }
    }

    /// Returns whether `template` is the family's published template, or [`Self::jinja`].
    fn is_known_template(self, template: &str) -> bool {
        let published = match self {
            ChatFormat::Harmony => "ac91ce5e1082099a9a7589c349ab3dda7035be834d487478218c44658d10b956",
            ChatFormat::ThinkingChatMl => "45fdf00a05e3daa5751bcd1de40a0a8280bde6328765dfe3828f9dac093b584b",
            ChatFormat::ChatMl => "fec583fa8a02141eae850c0ffcb69ca6607f075d9eaf3a92e3203572e6393a54",
        };
        let digest = |text: &str| blake3::hash(text.trim().as_bytes());
        digest(template).to_hex().as_str() == published || digest(template) == digest(self.jinja())
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

/// The tokens after a sampled turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextTokens {
    /// The tokens behind the turn. Those before are kept.
    Appended(Vec<u32>),
    /// The tokens of the whole prompt: the template writes what stands before in another way, `from` here.
    Rewritten { tokens: Vec<u32>, from: String },
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
    /// Returns the chat with the recipe's settings: Qwen3's thinking on or off, and what a model's own
    /// template reads of them. `place` names the model.
    ///
    /// # Errors
    /// When the model's own template refuses them.
    pub fn with_settings(self, settings: &SystemPromptSettings, place: &str) -> Result<Self> {
        let Chat::ChatMl(chatml) = &self else { return Ok(self) };
        let Some(source) = chatml.own_template() else {
            return Ok(match chatml.has_thoughts() {
                true => Chat::ChatMl(chatml.clone().with_thinking(settings.enable_thinking.unwrap_or(true))),
                false => self,
            });
        };
        let mut variables = Map::new();
        let mut set =
            |name: &str, value: Option<Value>| value.map(|value| variables.insert(name.into(), value));
        set("enable_thinking", settings.enable_thinking.map(Value::from));
        set(
            "reasoning_effort",
            settings.reasoning_effort.map(|effort| crate::settings::Choice::name(effort).into()),
        );
        set(template::DATE, settings.current_date.clone().map(Value::from));
        if variables.is_empty() {
            return Ok(self);
        }
        Ok(Chat::ChatMl(ChatMl::with_template(chatml.vocabulary().clone(), place, source, variables)?))
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
    pub fn jinja(&self) -> &str {
        match self {
            Chat::Harmony(_) => ChatFormat::Harmony.jinja(),
            Chat::ChatMl(chatml) => match chatml.own_template() {
                Some(source) => &source.default,
                None if chatml.has_thoughts() => ChatFormat::ThinkingChatMl.jinja(),
                None => ChatFormat::ChatMl.jinja(),
            },
        }
    }

    /// Returns the model's own template of conversations with tools, if it is another one.
    pub fn tool_use_jinja(&self) -> Option<&str> {
        if let Chat::ChatMl(chatml) = self { chatml.own_template()?.tool_use.as_deref() } else { None }
    }

    /// Returns whether the model has its own template.
    pub fn has_own_template(&self) -> bool {
        matches!(self, Chat::ChatMl(chatml) if chatml.has_own_template())
    }

    /// Returns whether the model's own template reads the variable or calls the function `name`.
    pub fn template_reads(&self, name: &str) -> bool {
        matches!(self, Chat::ChatMl(chatml) if chatml.own_template().is_some_and(|source| source.reads(name)))
    }

    /// Returns how GPT-OSS's own `template` renders a prompt in another way than openai-harmony does, which
    /// decides; `None` for a published one, and where the two agree.
    pub fn difference_from(&self, template: &str) -> Option<String> {
        if ChatFormat::Harmony.is_known_template(template) {
            return None;
        }
        let settings = SystemPromptSettings { current_date: Some(template::today()), ..Default::default() };
        let messages = [system_prompt(self, &settings, false, &[]), vec![Message::user("?")]].concat();
        let own = self.vocabulary().decode(&self.render_prompt(&messages).ok()?);
        let variables = Map::from_iter([(template::DATE.to_owned(), template::today().into())]);
        let user = [serde_json::json!({"role": "user", "content": "?"})];
        let of_template = template::ChatTemplate::new(template)
            .and_then(|template| template.render(&user, &[], true, &variables))
            .unwrap_or_else(|why| format!("an error: {why}"));
        let common = own.bytes().zip(of_template.bytes()).take_while(|(a, b)| a == b).count();
        let at = |text: &str| text[text.floor_char_boundary(common)..].chars().take(60).collect::<String>();
        (own != of_template).then(|| {
            format!(
                "the model's chat template differs from openai-harmony, which decides: it writes {:?} instead of {:?}",
                at(&of_template),
                at(&own)
            )
        })
    }

    /// Returns what was found of the model's own template; nothing without one.
    pub fn template_facts(&self) -> &[String] {
        if let Chat::ChatMl(chatml) = self { chatml.template_facts() } else { &[] }
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

    /// Renders what follows a turn that was sampled up to its stop token, the last of `before`: `messages`,
    /// and the start of the assistant's next turn.
    ///
    /// # Errors
    /// The errors of [`Self::render_prompt`].
    pub fn render_next(&self, before: &[Message], messages: &[Message]) -> Result<NextTokens> {
        match self {
            Chat::Harmony(_) => self.render_prompt(messages).map(NextTokens::Appended),
            Chat::ChatMl(chatml) => chatml.render_next(before, messages),
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
        if let Chat::Harmony(_) = self { functions::check_namespace(functions) } else { Ok(()) }
    }

    /// Returns the parameters of `functions` whose types a prompt does not show completely, as
    /// `function.parameter`.
    pub fn simplified_parameters(&self, functions: &[Value]) -> Vec<String> {
        if let Chat::Harmony(_) = self { functions::simplified_parameters(functions) } else { vec![] }
    }

    /// Returns the format's name, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Chat::Harmony(_) => "Harmony",
            Chat::ChatMl(chatml) if chatml.has_own_template() => "the model's own template",
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
            ChatTurnParser::ChatMl(parser) => parser.calls.to_vec(),
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
        if let ChatTurnParser::Harmony(parser) = self { parser.broken_messages } else { 0 }
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
