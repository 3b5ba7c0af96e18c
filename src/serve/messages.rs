//! Converts conversations in OpenAI's form to messages of the model's chat format.

use super::api_error::ApiError;
use super::fields::Fields;
use crate::chat::functions::check_functions;
use crate::chat::{Chat, chatml};
use crate::harmony::{Message, ReasoningEffort, Role};
use crate::rollout::{SystemPromptSettings, system_prompt};
use crate::settings::Choice;
use serde_json::{Value, json};
use std::collections::HashMap;

/// Prefix of the recipient of a function call in Harmony.
pub(super) const FUNCTIONS: &str = "functions.";

/// The conversation of a request in the messages of the model's chat format.
pub(crate) struct Conversation {
    /// The system prompt with the tools.
    pub system: Vec<Message>,
    /// The messages of each entry of `messages`. A system message at the start has become a part of
    /// `system`, so its entry is empty.
    pub entries: Vec<Vec<Message>>,
}

impl Conversation {
    pub fn into_messages(self) -> Vec<Message> {
        self.system.into_iter().chain(self.entries.into_iter().flatten()).collect()
    }

    /// Returns the bytes of all texts.
    pub fn bytes(&self) -> usize {
        let messages = self.system.iter().chain(self.entries.iter().flatten());
        messages.map(|message| message.content.len()).sum()
    }
}

/// Returns the conversation of a request.
pub(crate) fn read_conversation(
    fields: &Fields,
    chat: &Chat,
    settings: &SystemPromptSettings,
) -> Result<Conversation, ApiError> {
    let list = fields.list("messages")?.filter(|list| !list.is_empty());
    let list =
        list.ok_or_else(|| ApiError::invalid(Some("messages"), "\"messages\" is missing".to_owned()))?;
    let tools = read_tools(fields)?;
    let mut settings = settings.clone();
    if let Some(effort) = fields.text("reasoning_effort")? {
        let effort = ReasoningEffort::from_name(effort).ok_or_else(|| {
            let what = "\"reasoning_effort\" must be \"low\", \"medium\" or \"high\"".to_owned();
            ApiError::invalid(Some("reasoning_effort"), what)
        })?;
        settings.reasoning_effort = Some(effort);
    }
    let (mut entries, mut names) = (Vec::with_capacity(list.len()), HashMap::new());
    for (index, value) in list.iter().enumerate() {
        let messages = read_message(value, chat, &mut names)
            .map_err(|why| ApiError::invalid(Some("messages"), format!("message {}: {why}", index + 1)))?;
        entries.push(messages);
    }
    // A system message of the request replaces the recipe's own text.
    if let Some([first, ..]) = entries.first().map(Vec::as_slice)
        && matches!(first.role, Role::System | Role::Developer)
    {
        let text = Some(entries[0].remove(0).content).filter(|text| !text.is_empty());
        match chat {
            Chat::Harmony(_) => settings.developer_instructions = text,
            Chat::ChatMl(_) => {
                settings.system_message = Some(text.is_some());
                (settings.model_identity, settings.developer_instructions) = (text, None);
            }
        }
    }
    Ok(Conversation { system: system_prompt(chat, &settings, false, tools), entries })
}

/// Returns the tools that the model may call.
fn read_tools<'v>(fields: &Fields<'v>) -> Result<&'v [Value], ApiError> {
    let tools = fields.list("tools")?.unwrap_or_default();
    check_functions(tools).map_err(|why| ApiError::invalid(Some("tools"), why))?;
    match fields.value("tool_choice") {
        None => Ok(tools),
        Some(choice) if choice == "auto" => Ok(tools),
        Some(choice) if choice == "none" => Ok(&[]),
        Some(_) => Err(ApiError::invalid(
            Some("tool_choice"),
            "\"tool_choice\" must be \"auto\" or \"none\": a call cannot be forced".to_owned(),
        )),
    }
}

/// Reads one message. `names` has the function name of each call so far, by the call's id.
fn read_message(
    value: &Value,
    chat: &Chat,
    names: &mut HashMap<String, String>,
) -> Result<Vec<Message>, String> {
    let role = value["role"].as_str().ok_or("\"role\" is missing")?;
    let role = match role {
        "function" => Role::Tool,
        role => Role::from_name(role).ok_or_else(|| format!("there is no role {role:?}"))?,
    };
    let content = read_content(&value["content"])?;
    match role {
        Role::Assistant => read_answer(value, content, chat, names),
        Role::Tool => {
            let by_id = value["tool_call_id"].as_str().and_then(|id| names.get(id).map(String::as_str));
            let name = by_id.or(value["name"].as_str()).ok_or("\"tool_call_id\" names no earlier call")?;
            Ok(vec![Message::tool(&recipient(name, chat), Some("commentary"), content)])
        }
        role => Ok(vec![Message::new(role, content)]),
    }
}

/// Returns a text, or the concatenated texts of a list of parts.
pub(crate) fn read_content(content: &Value) -> Result<String, String> {
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

/// Reads an assistant's message: its thought, its text, its calls.
fn read_answer(
    value: &Value,
    content: String,
    chat: &Chat,
    names: &mut HashMap<String, String>,
) -> Result<Vec<Message>, String> {
    let calls = value["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    let has_thoughts = match chat {
        Chat::Harmony(_) => true,
        Chat::ChatMl(chat) => chat.has_thoughts(),
    };
    let thought = ["reasoning_content", "reasoning"].iter().find_map(|key| value[*key].as_str());
    let thought = thought.filter(|thought| has_thoughts && !thought.is_empty());
    let mut messages: Vec<Message> =
        thought.map(|thought| Message::assistant("analysis", thought)).into_iter().collect();
    if calls.is_empty() {
        messages.push(Message::assistant("final", content));
        return Ok(messages);
    }
    if !content.is_empty() {
        messages.push(Message::assistant("commentary", content));
    }
    for call in calls {
        let function = &call["function"];
        let name = function["name"].as_str().ok_or("a call names no function")?;
        let arguments = match &function["arguments"] {
            Value::String(text) => serde_json::from_str(text)
                .map_err(|error| format!("the arguments of the call to {name:?} are not JSON: {error}"))?,
            arguments => arguments.clone(),
        };
        if let Some(id) = call["id"].as_str() {
            names.insert(id.to_owned(), name.to_owned());
        }
        messages.push(call_message(name, &arguments, chat));
    }
    Ok(messages)
}

fn call_message(name: &str, arguments: &Value, chat: &Chat) -> Message {
    let python_code = arguments["code"].as_str().filter(|_| name == crate::chat::PYTHON);
    let content = python_code.map_or_else(|| chatml::json_text(arguments), str::to_owned);
    let call = Message::call(&recipient(name, chat), "commentary", content);
    match chat {
        Chat::Harmony(_) => Message { content_type: Some("json".to_owned()), ..call },
        Chat::ChatMl(_) => call,
    }
}

/// Returns the recipient of calls to function `name`.
fn recipient(name: &str, chat: &Chat) -> String {
    match chat {
        Chat::Harmony(_) => format!("{FUNCTIONS}{name}"),
        Chat::ChatMl(_) => name.to_owned(),
    }
}

/// Returns a call of the model in OpenAI's form. `id` names it.
pub(super) fn call_json(call: &Message, id: String) -> Value {
    let recipient = call.recipient.as_deref().unwrap_or_default();
    let name = recipient.strip_prefix(FUNCTIONS).unwrap_or(recipient);
    let arguments = match recipient == crate::chat::PYTHON {
        true => json!({ "code": call.content }).to_string(),
        false => call.content.clone(),
    };
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}
