//! Messages and calls in the form of OpenAI's API.

use super::functions::check_functions;
use super::rows::{check_message_keys, remove_foreign_arguments};
use super::{Chat, PYTHON, SystemPromptSettings, chatml, system_prompt};
use crate::harmony::{Message, Role, has_no_loss};
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};

/// Prefix of the recipient of a function call in Harmony.
const FUNCTIONS: &str = "functions.";

/// Returns the name of the function that calls to `recipient` reach.
pub fn function_name(recipient: &str) -> &str {
    recipient.strip_prefix(FUNCTIONS).unwrap_or(recipient)
}

/// Where a conversation in OpenAI's form comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConversationSource {
    /// A request of a client. Keys without a meaning here are ignored, as OpenAI's servers do.
    Request,
    /// A row to train on. A key without a meaning here is refused.
    Row { uses_python: bool },
}

/// A conversation in OpenAI's form, in the messages of the model's chat format.
pub struct RequestMessages {
    /// The system prompt with the tools.
    pub system: Vec<Message>,
    /// The messages of each entry of `messages`. A system message at the start has become a part of
    /// `system`, so its entry is empty.
    pub entries: Vec<Vec<Message>>,
}

impl RequestMessages {
    /// Reads the entries `list` of a conversation that declares `tools`. A system message at the start
    /// replaces the text of `settings`.
    ///
    /// # Errors
    /// The number of the first invalid message (from 1) and the reason.
    pub fn read(
        list: &[Value],
        tools: &[Value],
        chat: &Chat,
        mut settings: SystemPromptSettings,
        source: ConversationSource,
    ) -> Result<Self, String> {
        let (names, open_calls) = (HashMap::new(), VecDeque::new());
        let mut reader = MessageReader { chat, tools, source, names, open_calls, is_after_answer: false };
        let mut entries = Vec::with_capacity(list.len());
        for (index, value) in list.iter().enumerate() {
            entries.push(reader.read(value).map_err(|why| format!("message {}: {why}", index + 1))?);
        }
        if matches!(chat, Chat::Harmony(_)) {
            // The thought of an answer that is trained stays.
            let trained = usize::from(source != ConversationSource::Request);
            let before = entries.len().saturating_sub(trained);
            drop_old_thoughts(&mut entries[..before]);
        }
        let uses_python = match source {
            ConversationSource::Row { uses_python } => uses_python && matches!(chat, Chat::Harmony(_)),
            ConversationSource::Request => false,
        };
        if let Some([first, ..]) = entries.first().map(Vec::as_slice)
            && matches!(first.role, Role::System | Role::Developer)
        {
            let text = Some(entries[0].remove(0).content);
            let text = text.filter(|text| !text.is_empty() || chat.has_own_template());
            settings = settings.with_text(chat, text);
        }
        Ok(Self { system: system_prompt(chat, &settings, uses_python, tools), entries })
    }

    /// Returns the messages of the whole conversation.
    pub fn into_messages(self) -> Vec<Message> {
        self.system.into_iter().chain(self.entries.into_iter().flatten()).collect()
    }

    /// Returns the bytes of all texts.
    pub fn bytes(&self) -> usize {
        let messages = self.system.iter().chain(self.entries.iter().flatten());
        messages.map(|message| message.content.len()).sum()
    }
}

impl Chat {
    /// Checks the functions that a request declares.
    ///
    /// # Errors
    /// The first invalid function, or one that the format cannot call, with the reason.
    pub fn check_request_tools(&self, tools: &[Value]) -> Result<(), String> {
        check_functions(tools)?;
        if matches!(self, Chat::ChatMl(_))
            && let Some(tool) = tools.iter().find(|tool| tool["function"]["name"] == PYTHON)
            && let Some(properties) = tool["function"]["parameters"]["properties"].as_object()
            && !properties.keys().eq(["code"])
        {
            return Err(
                "the function \"python\" takes one text, \"code\", in this model's chat format; rename yours"
                    .into(),
            );
        }
        Ok(())
    }
}

/// Returns the messages of an assistant's turn: its thought, its text, its calls. Only text without calls is
/// an answer to the user.
pub(super) fn answer_messages(thought: String, text: String, calls: Vec<Message>) -> Vec<Message> {
    let thought = (!thought.is_empty()).then(|| Message::assistant("analysis", thought));
    let text = match calls.is_empty() {
        true => Some(Message::assistant("final", text)),
        false => (!text.is_empty()).then(|| Message::assistant("commentary", text)),
    };
    thought.into_iter().chain(text).chain(calls).collect()
}

/// Removes the thoughts before the last answer to the user, as GPT-OSS's template does. The thoughts before
/// an open tool call stay.
fn drop_old_thoughts(entries: &mut [Vec<Message>]) {
    let is_answer =
        |messages: &Vec<Message>| messages.iter().any(|message| message.channel.as_deref() == Some("final"));
    let answered = entries.iter().rposition(is_answer).map_or(0, |index| index + 1);
    for messages in &mut entries[..answered] {
        messages.retain(|message| !message.is_thought());
    }
}

/// Reads the messages of a conversation in order.
struct MessageReader<'a> {
    chat: &'a Chat,
    tools: &'a [Value],
    source: ConversationSource,
    /// The function name of each call so far, by the call's id.
    names: HashMap<String, String>,
    /// The function names of the last calls that have no reply yet.
    open_calls: VecDeque<String>,
    /// Whether the last message was the assistant's.
    is_after_answer: bool,
}

impl MessageReader<'_> {
    fn read(&mut self, value: &Value) -> Result<Vec<Message>, String> {
        if self.is_row() {
            check_message_keys(value)?;
        }
        let role = value["role"].as_str().ok_or("\"role\" is missing")?;
        let role = match role {
            "function" => Role::Tool,
            role => Role::from_name(role).ok_or_else(|| format!("there is no role {role:?}"))?,
        };
        let content = read_content(&value["content"])?;
        let calls = list_of(&value["tool_calls"]).ok_or("\"tool_calls\" must be a list of calls")?;
        if role != Role::Assistant && !calls.is_empty() {
            return Err(format!("\"tool_calls\" in a message of role {}", role.name()));
        }
        let weight = &value["weight"];
        let no_loss = match self.is_row() {
            true if !weight.is_null() && !weight.is_number() => {
                return Err(format!("\"weight\" is {weight}; it must be 0 (no loss) or 1"));
            }
            true => has_no_loss(weight.as_f64(), role)?,
            false => false,
        };
        let mut messages = match role {
            Role::Assistant => self.read_answer(value, content, &calls)?,
            Role::Tool => vec![self.read_reply(value, content)?],
            role => vec![Message::new(role, content)],
        };
        messages.iter_mut().for_each(|message| message.no_loss = no_loss);
        if let Some(first) = messages.first_mut() {
            first.begins_turn = role == Role::Assistant && self.is_after_answer;
        }
        self.is_after_answer = role == Role::Assistant;
        Ok(messages)
    }

    fn is_row(&self) -> bool {
        self.source != ConversationSource::Request
    }

    /// Reads a tool's reply. It belongs to the call of its id, else to the function of its name, else to the
    /// first call that has no reply.
    fn read_reply(&mut self, value: &Value, content: String) -> Result<Message, String> {
        let by_id = value["tool_call_id"].as_str().and_then(|id| self.names.get(id));
        let name =
            by_id.map(String::as_str).or(value["name"].as_str()).or(self.open_calls.front().map(|s| &**s));
        let name = name.ok_or("\"tool_call_id\" names no earlier call")?.to_owned();
        if let Some(index) = self.open_calls.iter().position(|open| *open == name) {
            self.open_calls.remove(index);
        }
        let channel = if self.is_own_python(&name) { "analysis" } else { "commentary" };
        Ok(Message::tool(&self.recipient(&name), Some(channel), content))
    }

    /// Reads an assistant's message: its thought, its text, its calls.
    fn read_answer(
        &mut self,
        value: &Value,
        mut content: String,
        calls: &[Value],
    ) -> Result<Vec<Message>, String> {
        let given = ["reasoning_content", "reasoning"].iter().find_map(|key| value[*key].as_str());
        let mut thought = given.unwrap_or_default().to_owned();
        if self.is_row() && value["content"].is_null() && calls.is_empty() {
            return Err("\"content\" is null and there are no \"tool_calls\"; write a text".into());
        }
        match self.chat {
            Chat::Harmony(_) => {}
            Chat::ChatMl(chat) if !chat.has_thoughts() => {
                if self.is_row() && !thought.is_empty() {
                    return Err(
                        "\"reasoning_content\", but this family's template has no thoughts; remove the key"
                            .into(),
                    );
                }
                thought.clear();
            }
            Chat::ChatMl(_) => (thought, content) = chatml::thought_and_text(thought, content),
        }
        if !self.is_after_answer {
            self.open_calls.clear();
        }
        let mut read = vec![];
        for call in calls {
            // The inner function alone is a call too.
            let function = if call["function"].is_null() { call } else { &call["function"] };
            let name = function["name"].as_str().ok_or("a call names no function")?;
            if let Some(id) = call["id"].as_str() {
                self.names.insert(id.to_owned(), name.to_owned());
            }
            self.open_calls.push_back(name.to_owned());
            read.push(self.call_message(name, &function["arguments"])?);
        }
        Ok(answer_messages(thought, content, read))
    }

    fn call_message(&self, name: &str, arguments: &Value) -> Result<Message, String> {
        let is_harmony = matches!(self.chat, Chat::Harmony(_));
        let is_own_python = self.is_own_python(name);
        let mut parsed = match arguments {
            Value::Null => Ok(json!({})),
            Value::String(text) if text.trim().is_empty() => Ok(json!({})),
            Value::String(text) => serde_json::from_str(text).map_err(|error| (text, error)),
            arguments => Ok(arguments.clone()),
        };
        if let (Ok(Value::Object(found)), true) = (&mut parsed, arguments.is_object()) {
            remove_foreign_arguments(found, name, self.tools);
        }
        let content = match parsed {
            Ok(arguments) if self.is_row() && !arguments.is_object() => {
                return Err(format!("the arguments of the call to {name:?} are no JSON object"));
            }
            Ok(arguments) if is_own_python || (!is_harmony && name == PYTHON) => {
                let code = arguments["code"].as_str();
                let alone = arguments.as_object().is_some_and(|arguments| arguments.len() == 1);
                let code = code.filter(|_| alone).map(str::to_owned);
                // GPT-OSS's own tool takes any text.
                let code = code.or_else(|| is_own_python.then(|| chatml::json_text(&arguments)));
                code.ok_or("a call to \"python\" takes one argument, the string \"code\"")?
            }
            Ok(arguments) => chatml::json_text(&arguments),
            // A model's own call may be no JSON. Harmony has its text as it is.
            Err((text, _)) if is_harmony && !self.is_row() => text.clone(),
            Err((_, error)) => {
                return Err(format!("the arguments of the call to {name:?} are not JSON: {error}"));
            }
        };
        let channel = if is_own_python { "analysis" } else { "commentary" };
        let content_type = (is_harmony && !is_own_python).then(|| "json".to_owned());
        Ok(Message { content_type, ..Message::call(&self.recipient(name), channel, content) })
    }

    /// Returns whether `name` is GPT-OSS's own Python tool, whose calls are code on the channel `analysis`.
    fn is_own_python(&self, name: &str) -> bool {
        let is_declared = || self.tools.iter().any(|tool| tool["function"]["name"] == PYTHON);
        matches!(self.chat, Chat::Harmony(_)) && name == PYTHON && !is_declared()
    }

    /// Returns the recipient of calls to function `name`.
    fn recipient(&self, name: &str) -> String {
        match self.chat {
            Chat::Harmony(_) if !self.is_own_python(name) => format!("{FUNCTIONS}{name}"),
            Chat::Harmony(_) | Chat::ChatMl(_) => name.to_owned(),
        }
    }
}

/// Returns the entries of a list, or of its JSON text; none for null.
fn list_of(value: &Value) -> Option<Vec<Value>> {
    match value {
        Value::Null => Some(vec![]),
        Value::Array(list) => Some(list.clone()),
        Value::String(text) if text.trim().is_empty() => Some(vec![]),
        Value::String(text) => list_of(&serde_json::from_str(text).ok()?),
        _ => None,
    }
}

/// Returns a text, or the concatenated texts of a list of parts.
///
/// # Errors
/// When `content` is neither, or a part is no text.
pub fn read_content(content: &Value) -> Result<String, String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let text = |part: &Value| {
                let is_text = ["text", "input_text", "output_text"].iter().any(|kind| part["type"] == *kind);
                let text = part["text"].as_str().filter(|_| is_text);
                text.map(str::to_owned).ok_or("\"content\" has a part whose type is not \"text\"".to_owned())
            };
            parts.iter().map(text).collect()
        }
        _ => Err("\"content\" must be a text or a list of parts".to_owned()),
    }
}

/// Returns a call of the model in OpenAI's form. `id` names it.
pub fn call_json(call: &Message, id: String) -> Value {
    let recipient = call.recipient.as_deref().unwrap_or_default();
    let name = function_name(recipient);
    let arguments =
        if recipient == PYTHON { json!({ "code": call.content }).to_string() } else { call.content.clone() };
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// The parts of an assistant message by which it is found again.
#[derive(Debug)]
pub struct GivenAnswer {
    pub text: String,
    /// Name and arguments of each call.
    pub calls: Vec<(String, Value)>,
    pub call_ids: Vec<String>,
}

impl GivenAnswer {
    /// Reads an assistant message. Invalid content counts as no text.
    pub fn read(message: &Value) -> Self {
        let text = read_content(&message["content"]).unwrap_or_default().trim().to_owned();
        let calls = message["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        let text_of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let arguments = |call: &Value| match &call["function"]["arguments"] {
            Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| text.clone().into()),
            arguments => arguments.clone(),
        };
        Self {
            text,
            call_ids: calls.iter().map(|call| text_of(&call["id"])).collect(),
            calls: calls.iter().map(|call| (text_of(&call["function"]["name"]), arguments(call))).collect(),
        }
    }

    /// Returns whether both have the same text and the same calls, whatever their ids.
    pub fn says_the_same(&self, other: &Self) -> bool {
        let same = |((name, arguments), (other_name, other)): (&(String, Value), &(String, Value))| {
            name == other_name && chatml::is_same_json(arguments, other)
        };
        self.text == other.text
            && self.calls.len() == other.calls.len()
            && self.calls.iter().zip(&other.calls).all(same)
    }
}
