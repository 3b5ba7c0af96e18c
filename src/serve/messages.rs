//! Reads the conversation of a request.

use super::api_error::ApiError;
use super::fields::Fields;
use crate::chat::{self, Chat, ConversationSource, RequestMessages, SystemPromptSettings};
use crate::harmony::ReasoningEffort;
use crate::settings::Choice;
use serde_json::Value;

/// Returns the conversation of a request.
pub(crate) fn read_conversation(
    fields: &Fields,
    chat: &Chat,
    settings: &SystemPromptSettings,
) -> Result<RequestMessages, ApiError> {
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
        if !matches!(chat, Chat::Harmony(_)) || settings.system_message == Some(false) {
            let why = "\"reasoning_effort\" has no place in this model's prompts: leave it out".to_owned();
            return Err(ApiError::invalid(Some("reasoning_effort"), why));
        }
        settings.reasoning_effort = Some(effort);
    }
    let messages = RequestMessages::read(list, &tools, chat, settings, ConversationSource::Request);
    messages.map_err(|why| ApiError::invalid(Some("messages"), why))
}

/// Returns the tools that the model may call.
fn read_tools(fields: &Fields, chat: &Chat) -> Result<Vec<Value>, ApiError> {
    let tools = chat::read_tools(fields.value("tools").unwrap_or(&Value::Null));
    let tools = tools.and_then(|tools| chat.check_request_tools(&tools).map(|()| tools));
    let tools = tools.map_err(|why| ApiError::invalid(Some("tools"), why))?;
    match fields.value("tool_choice") {
        None => Ok(tools),
        Some(choice) if choice == "auto" => Ok(tools),
        Some(choice) if choice == "none" => Ok(vec![]),
        Some(_) => Err(ApiError::invalid(
            Some("tool_choice"),
            "\"tool_choice\" must be \"auto\" or \"none\": a call cannot be forced".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatFormat;
    use crate::harmony::Message;
    use serde_json::json;

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

    /// FreeToken 2, vllm-mlx 85: `reasoning_effort` was accepted for models whose prompts cannot say it.
    #[test]
    fn a_reasoning_effort_is_in_the_prompt_or_refused() {
        let body = json!({"messages": [{"role": "user", "content": "?"}], "reasoning_effort": "low"});
        let read = |format: ChatFormat, system_message: Option<bool>| {
            let chat = format.from_embedded().unwrap();
            let settings = SystemPromptSettings { system_message, ..SystemPromptSettings::default() };
            let read = read_conversation(&Fields::new(&body).unwrap(), &chat, &settings);
            read.map(|messages| messages.system.iter().any(|m| m.content.contains("Reasoning: low")))
        };
        assert_eq!(read(ChatFormat::Harmony, None), Ok(true));
        for (format, system_message) in [
            (ChatFormat::Harmony, Some(false)),
            (ChatFormat::ChatMl, None),
            (ChatFormat::ThinkingChatMl, None),
        ] {
            let error = read(format, system_message).unwrap_err();
            assert!(error.message.contains("\"reasoning_effort\""), "{}", error.message);
        }
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
