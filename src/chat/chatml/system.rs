//! What a system message says: who the model is, and its functions.

use super::json;
use crate::chat::PYTHON;
use serde_json::{Value, json};

/// What Qwen2.5's own template says where a conversation has no system message.
pub const QWEN_IDENTITY: &str = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

/// What the Python tool is said to do.
const PYTHON_DESCRIPTION: &str = "Runs Python code and answers with its output. Use it to compute and to check \
    your reasoning. The user sees neither code nor output.";

/// The Python tool: a function of one text.
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

/// The text of a system message that lists `functions`; `None` where it would say nothing.
pub fn system_text(text: Option<&str>, functions: &[Value]) -> Option<String> {
    if functions.is_empty() {
        return text.map(str::to_owned);
    }
    let listed: String = functions.iter().map(|function| format!("{}\n", json::to_text(function))).collect();
    let tools = format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
         signatures within <tools></tools> XML tags:\n<tools>\n{listed}</tools>\n\nFor each function call, return a json \
         object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": \
         <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
    );
    Some(match text {
        Some(text) => format!("{text}\n\n{tools}"),
        None => tools,
    })
}
