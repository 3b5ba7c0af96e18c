//! Messages and calls in the form of OpenAI's API.

use super::functions::check_functions;
use super::{Chat, PYTHON, SystemPromptSettings, chatml, system_prompt};
use crate::harmony::{Message, Role};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Prefix of the recipient of a function call in Harmony.
const FUNCTIONS: &str = "functions.";

/// Returns the name of the function that calls to `recipient` reach.
pub fn function_name(recipient: &str) -> &str {
    recipient.strip_prefix(FUNCTIONS).unwrap_or(recipient)
}

/// The conversation of a request in the messages of the model's chat format.
pub struct RequestMessages {
    /// The system prompt with the tools.
    pub system: Vec<Message>,
    /// The messages of each entry of `messages`. A system message at the start has become a part of
    /// `system`, so its entry is empty.
    pub entries: Vec<Vec<Message>>,
}

impl RequestMessages {
    /// Reads the entries `list` of a request that declares `tools`. A system message at the start replaces
    /// the text of `settings`.
    ///
    /// # Errors
    /// The number of the first invalid message (from 1) and the reason.
    pub fn read(
        list: &[Value],
        tools: &[Value],
        chat: &Chat,
        mut settings: SystemPromptSettings,
    ) -> Result<Self, String> {
        let declares_python = tools.iter().any(|tool| tool["function"]["name"] == PYTHON);
        let mut reader = MessageReader { chat, declares_python, names: HashMap::new() };
        let mut entries = Vec::with_capacity(list.len());
        for (index, value) in list.iter().enumerate() {
            entries.push(reader.read(value).map_err(|why| format!("message {}: {why}", index + 1))?);
        }
        if matches!(chat, Chat::Harmony(_)) {
            drop_old_thoughts(&mut entries);
        }
        if let Some([first, ..]) = entries.first().map(Vec::as_slice)
            && matches!(first.role, Role::System | Role::Developer)
        {
            let text = Some(entries[0].remove(0).content).filter(|text| !text.is_empty());
            settings = settings.with_text(chat, text);
        }
        Ok(Self { system: system_prompt(chat, &settings, false, tools), entries })
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

/// Reads the messages of a request in order.
struct MessageReader<'a> {
    chat: &'a Chat,
    /// Whether the request declares a function `python`. Otherwise that name is the model's own Python tool.
    declares_python: bool,
    /// The function name of each call so far, by the call's id.
    names: HashMap<String, String>,
}

impl MessageReader<'_> {
    fn read(&mut self, value: &Value) -> Result<Vec<Message>, String> {
        let role = value["role"].as_str().ok_or("\"role\" is missing")?;
        let role = match role {
            "function" => Role::Tool,
            role => Role::from_name(role).ok_or_else(|| format!("there is no role {role:?}"))?,
        };
        let content = read_content(&value["content"])?;
        match role {
            Role::Assistant => self.read_answer(value, content),
            Role::Tool => {
                let id = value["tool_call_id"].as_str();
                let by_id = id.and_then(|id| self.names.get(id).map(String::as_str));
                let name =
                    by_id.or(value["name"].as_str()).ok_or("\"tool_call_id\" names no earlier call")?;
                let channel = if self.is_own_python(name) { "analysis" } else { "commentary" };
                Ok(vec![Message::tool(&self.recipient(name), Some(channel), content)])
            }
            role => Ok(vec![Message::new(role, content)]),
        }
    }

    /// Reads an assistant's message: its thought, its text, its calls.
    fn read_answer(&mut self, value: &Value, mut content: String) -> Result<Vec<Message>, String> {
        let calls = value["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        let given = ["reasoning_content", "reasoning"].iter().find_map(|key| value[*key].as_str());
        let mut thought = given.unwrap_or_default().to_owned();
        match self.chat {
            Chat::Harmony(_) => {}
            Chat::ChatMl(chat) if !chat.has_thoughts() => thought.clear(),
            Chat::ChatMl(_) => (thought, content) = chatml::thought_and_text(thought, content),
        }
        let mut read = vec![];
        for call in calls {
            let function = &call["function"];
            let name = function["name"].as_str().ok_or("a call names no function")?;
            if let Some(id) = call["id"].as_str() {
                self.names.insert(id.to_owned(), name.to_owned());
            }
            read.push(self.call_message(name, &function["arguments"])?);
        }
        Ok(answer_messages(thought, content, read))
    }

    fn call_message(&self, name: &str, arguments: &Value) -> Result<Message, String> {
        let is_harmony = matches!(self.chat, Chat::Harmony(_));
        let is_own_python = self.is_own_python(name);
        let parsed = match arguments {
            Value::Null => Ok(json!({})),
            Value::String(text) if text.trim().is_empty() => Ok(json!({})),
            Value::String(text) => serde_json::from_str(text).map_err(|error| (text, error)),
            arguments => Ok(arguments.clone()),
        };
        let content = match parsed {
            Ok(arguments) => {
                let shows_code = if is_harmony { is_own_python } else { name == PYTHON };
                let code = arguments["code"].as_str().filter(|_| shows_code);
                code.map_or_else(|| chatml::json_text(&arguments), str::to_owned)
            }
            // A model's own call may be no JSON. Harmony has its text as it is.
            Err((text, _)) if is_harmony => text.clone(),
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
        matches!(self.chat, Chat::Harmony(_)) && name == PYTHON && !self.declares_python
    }

    /// Returns the recipient of calls to function `name`.
    fn recipient(&self, name: &str) -> String {
        match self.chat {
            Chat::Harmony(_) if !self.is_own_python(name) => format!("{FUNCTIONS}{name}"),
            Chat::Harmony(_) | Chat::ChatMl(_) => name.to_owned(),
        }
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
    let arguments = match recipient == PYTHON {
        true => json!({ "code": call.content }).to_string(),
        false => call.content.clone(),
    };
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
        self.text == other.text && self.calls == other.calls
    }
}
