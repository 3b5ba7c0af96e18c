//! Conversations in files, in the format of chat templates: `role`, `content`, `tool_calls`.

use super::turn::thought_and_text;
use super::{json, system_text};
use crate::bad_input;
use crate::chat::PYTHON;
use crate::chat::openai::answer_messages;
use crate::harmony::{Message, Role, has_no_loss};
use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;

/// A message in a file. The keys `name`, `id` and `tool_call_id` are accepted, but the template ignores them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileMessage {
    role: Role,
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Vec<FileCall>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default, rename = "tool_call_id")]
    _tool_call_id: Option<String>,
    #[serde(default)]
    weight: Option<f64>,
}

/// A tool call: `{"type": "function", "function": {...}}`, or the inner function object alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum FileCall {
    Wrapped { function: Function },
    Bare(Function),
}

#[derive(Deserialize)]
struct Function {
    name: String,
    /// An object, or a string that holds an object as JSON.
    arguments: Value,
}

/// Reads the messages of `row`: `{"messages": [...], "tools": [...]}`.
///
/// The tools become part of the system message. If there is no system message, one is made from `identity`
/// and the tools. If the template has thoughts (`has_thoughts`), a thought is `reasoning_content`, or a
/// `<think>` block in the content.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) with `source_name`, the message's number (from 1) and the reason.
pub fn messages_from_json(
    row: &Value,
    identity: Option<&str>,
    has_thoughts: bool,
    source_name: &str,
) -> Result<Vec<Message>> {
    let list = row["messages"]
        .as_array()
        .ok_or_else(|| bad_input!("{source_name}: \"messages\" must be a list of messages"))?;
    let tools = match &row["tools"] {
        Value::Null => &[],
        Value::Array(tools) => tools.as_slice(),
        other => return Err(bad_input!("{source_name}: \"tools\" must be a list of functions, not {other}")),
    };
    let mut messages = vec![];
    for (i, value) in list.iter().enumerate() {
        let read = read_message(value, has_thoughts)
            .map_err(|e| bad_input!("{source_name}: message {}: {e}", i + 1))?;
        messages.extend(read);
    }
    let text = match messages.first() {
        Some(first) if first.role == Role::System => Some(messages.remove(0).content),
        _ => identity.map(str::to_owned),
    };
    let system = system_text(text.as_deref(), tools).map(|text| Message::new(Role::System, text));
    Ok(system.into_iter().chain(messages).collect())
}

fn read_message(value: &Value, has_thoughts: bool) -> Result<Vec<Message>, String> {
    let message = FileMessage::deserialize(value).map_err(|e| e.to_string())?;
    let no_loss = has_no_loss(message.weight, message.role)?;
    let mut content = message.content.unwrap_or_default();
    let mut thought = message.reasoning_content.unwrap_or_default();
    if !has_thoughts && !thought.is_empty() {
        return Err(
            "\"reasoning_content\", but this family's template has no thoughts; remove the key".into()
        );
    }
    if has_thoughts {
        (thought, content) = thought_and_text(thought, content);
    }
    if message.role != Role::Assistant && !message.tool_calls.is_empty() {
        return Err(format!("\"tool_calls\" in a message of role {}", message.role.name()));
    }
    let mut read = match message.role {
        Role::Tool => {
            vec![Message::tool(message.name.as_deref().unwrap_or("tool"), Some("commentary"), content)]
        }
        Role::Assistant => {
            let calls = message.tool_calls.into_iter().map(read_call).collect::<Result<Vec<_>, _>>()?;
            answer_messages(thought, content, calls)
        }
        role => vec![Message::new(role, content)],
    };
    read.iter_mut().for_each(|message| message.no_loss = no_loss);
    Ok(read)
}

fn read_call(call: FileCall) -> Result<Message, String> {
    let (FileCall::Wrapped { function } | FileCall::Bare(function)) = call;
    let Function { name, arguments } = function;
    let arguments = match arguments {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|e| format!("the arguments of the call to {name:?} are not JSON: {e}"))?,
        arguments => arguments,
    };
    let code = arguments.as_object().filter(|a| a.len() == 1).and_then(|a| a.get("code")?.as_str());
    let content = match code.filter(|_| name == PYTHON) {
        Some(code) => code.to_owned(),
        None if name == PYTHON => {
            return Err("a call to \"python\" takes one argument, the string \"code\"".into());
        }
        None => json::to_text(&arguments),
    };
    Ok(Message::call(&name, "commentary", content))
}
