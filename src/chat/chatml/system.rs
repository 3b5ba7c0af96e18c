//! The system message: the model's identity and its functions.

use super::json;
use crate::chat::PYTHON;
use serde_json::{Value, json};

/// Qwen2.5's default identity. If a conversation has no system message, Qwen2.5's template adds one with this
/// identity.
pub const QWEN_IDENTITY: &str = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

/// Description of the Python tool.
const PYTHON_DESCRIPTION: &str = "Runs Python code and answers with its output. Use it to compute and to check \
    your reasoning. The user sees neither code nor output.";

/// Returns the Python tool as a function with one string argument.
pub fn python_function() -> Value {
    json!({
        "type": "function",
        "function": {
            "name": PYTHON,
            "description": PYTHON_DESCRIPTION,
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to run."}},
                "required": ["code"],
            },
        },
    })
}

/// Returns the text of a system message that lists `functions`. `None` if the message would be empty.
pub fn system_text(text: Option<&str>, functions: &[Value]) -> Option<String> {
    if functions.is_empty() {
        return text.map(str::to_owned);
    }
    let listed: String = functions.iter().map(|function| format!("{}\n", json::to_text(function))).collect();
    let tools = format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
         signatures within <tools></tools> XML tags:\n<tools>\n{listed}</tools>\n\nFor each function call, return a json object \
         with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": \
         <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
    );
    Some(if let Some(text) = text { format!("{text}\n\n{tools}") } else { tools })
}
