//! Converts conversations in OpenAI's form to messages of the model's chat format.

use super::api_error::ApiError;
use super::fields::Fields;
use crate::chat::functions::check_functions;
use crate::chat::{Chat, PYTHON, chatml};
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
    let tools = read_tools(fields, chat)?;
    let mut settings = settings.clone();
    if let Some(effort) = fields.text("reasoning_effort")? {
        let effort = ReasoningEffort::from_name(effort).ok_or_else(|| {
            let what = "\"reasoning_effort\" must be \"low\", \"medium\" or \"high\"".to_owned();
            ApiError::invalid(Some("reasoning_effort"), what)
        })?;
        settings.reasoning_effort = Some(effort);
    }
    let declares_python = tools.iter().any(|tool| tool["function"]["name"] == PYTHON);
    let mut reader = MessageReader { chat, declares_python, names: HashMap::new() };
    let mut entries = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let messages = reader
            .read(value)
            .map_err(|why| ApiError::invalid(Some("messages"), format!("message {}: {why}", index + 1)))?;
        entries.push(messages);
    }
    if matches!(chat, Chat::Harmony(_)) {
        drop_old_thoughts(&mut entries);
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
fn read_tools<'v>(fields: &Fields<'v>, chat: &Chat) -> Result<&'v [Value], ApiError> {
    let tools = fields.list("tools")?.unwrap_or_default();
    check_functions(tools).map_err(|why| ApiError::invalid(Some("tools"), why))?;
    if matches!(chat, Chat::ChatMl(_))
        && let Some(tool) = tools.iter().find(|tool| tool["function"]["name"] == PYTHON)
        && let Some(properties) = tool["function"]["parameters"]["properties"].as_object()
        && !properties.keys().eq(["code"])
    {
        let why =
            "the function \"python\" takes one text, \"code\", in this model's chat format; rename yours";
        return Err(ApiError::invalid(Some("tools"), why.to_owned()));
    }
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
            // Qwen3's template splits a thought off the text too.
            Chat::ChatMl(_) => {
                if thought.is_empty()
                    && let Some((found, Some(answer))) = chatml::split_thought(&content)
                {
                    (thought, content) = (found.to_owned(), answer.to_owned());
                }
            }
        }
        let thought = (!thought.is_empty()).then(|| Message::assistant("analysis", thought));
        let mut messages: Vec<Message> = thought.into_iter().collect();
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
            if let Some(id) = call["id"].as_str() {
                self.names.insert(id.to_owned(), name.to_owned());
            }
            messages.push(self.call_message(name, &function["arguments"])?);
        }
        Ok(messages)
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

/// Returns a call of the model in OpenAI's form. `id` names it.
pub(super) fn call_json(call: &Message, id: String) -> Value {
    let recipient = call.recipient.as_deref().unwrap_or_default();
    let name = recipient.strip_prefix(FUNCTIONS).unwrap_or(recipient);
    let arguments = match recipient == PYTHON {
        true => json!({ "code": call.content }).to_string(),
        false => call.content.clone(),
    };
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatFormat;

    fn entries(format: ChatFormat, body: Value) -> Result<Vec<Vec<Message>>, ApiError> {
        let chat = format.from_embedded().unwrap();
        let settings = SystemPromptSettings::default();
        Ok(read_conversation(&Fields::new(&body)?, &chat, &settings)?.entries)
    }

    fn call(name: &str, arguments: &str) -> Value {
        let function = json!({"name": name, "arguments": arguments});
        json!({"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]})
    }

    /// One such call made every later request of the conversation fail.
    #[test]
    fn a_call_of_the_model_that_is_no_json_stays_as_it_is() {
        let with =
            |arguments: &str| json!({"messages": [{"role": "user", "content": "?"}, call("f", arguments)]});
        let read = entries(ChatFormat::Harmony, with("{\"a\": x}")).unwrap();
        assert_eq!(read[1][0].content, "{\"a\": x}");
        assert!(entries(ChatFormat::ChatMl, with("{\"a\": x}")).is_err());
        for format in [ChatFormat::Harmony, ChatFormat::ChatMl] {
            assert_eq!(entries(format, with(" ")).unwrap()[1][0].content, "{}");
        }
    }

    #[test]
    fn the_models_own_python_tool_is_rendered_as_it_was_trained() {
        let reply = json!({"role": "tool", "tool_call_id": "1", "content": "3"});
        let messages =
            json!([{"role": "user", "content": "?"}, call("python", "{\"code\": \"1+2\"}"), reply]);
        let own = entries(ChatFormat::Harmony, json!({"messages": messages})).unwrap();
        assert_eq!(own[1], [Message::call("python", "analysis", "1+2")]);
        assert_eq!(own[2], [Message::tool("python", Some("analysis"), "3")]);
        let tool =
            json!({"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}});
        let declared = entries(ChatFormat::Harmony, json!({"messages": messages, "tools": [tool]})).unwrap();
        assert_eq!(declared[1][0].recipient.as_deref(), Some("functions.python"));
        assert_eq!(declared[1][0].content, "{\"code\": \"1+2\"}");
        let chatml = entries(ChatFormat::ChatMl, json!({"messages": messages})).unwrap();
        assert_eq!(chatml[1], [Message::call("python", "commentary", "1+2")]);
        // ChatML has no other name for a client's own function, whose other arguments would be lost.
        let with = |properties: Value| {
            let parameters = json!({"type": "object", "properties": properties});
            let tool = json!({"type": "function", "function": {"name": "python", "parameters": parameters}});
            entries(ChatFormat::ChatMl, json!({"messages": messages, "tools": [tool]}))
        };
        assert!(with(json!({"code": {"type": "string"}})).is_ok());
        assert!(with(json!({"code": {}, "timeout": {}})).is_err() && with(json!({"script": {}})).is_err());
    }

    #[test]
    fn harmony_drops_thoughts_before_the_last_answer() {
        let thought = |text: &str, mut message: Value| {
            message["reasoning_content"] = text.into();
            message
        };
        let answer = json!({"role": "assistant", "content": "2"});
        let user = json!({"role": "user", "content": "?"});
        let messages = json!([user, thought("old", answer), user, thought("new", call("f", "{}"))]);
        let read = entries(ChatFormat::Harmony, json!({"messages": messages})).unwrap();
        assert_eq!(read[1], [Message::assistant("final", "2")]);
        assert_eq!(read[3][0], Message::assistant("analysis", "new"));
    }
}
