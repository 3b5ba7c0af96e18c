//! Messages and tools as data libraries write them. Arrow, `datasets` and pandas give every row every key, so
//! a key that other rows use is null here, and a tool has the other tools' parameters as null.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Keys of a row with a meaning here.
const ROW_KEYS: [&str; 2] = ["messages", "tools"];
/// Keys that say what is trained or shown in other programs. Beside `messages` they have no effect here.
const REFUSED_ROW_KEYS: &str = "mask weight weights loss loss_mask labels train tokens input_ids functions \
    documents prompt completion chat_template_kwargs";
/// Keys of a message with a meaning here.
const MESSAGE_KEYS: [&str; 8] =
    ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "weight"];
/// Keywords of JSON Schema whose value may be null.
const NULLABLE_KEYWORDS: [&str; 2] = ["default", "const"];

/// Returns whether a library may write `value` for a key that a row does not use.
fn is_filler(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Checks the keys of a row beside `messages`. Returns those without a meaning here.
///
/// # Errors
/// A key that would say what is trained, with the remedy.
pub(super) fn check_row_keys(row: &Value) -> Result<BTreeSet<String>, String> {
    let keys = row.as_object().into_iter().flatten().filter(|(_, value)| !is_filler(value));
    let keys: BTreeSet<String> = keys.map(|(key, _)| key.clone()).collect();
    match REFUSED_ROW_KEYS.split(' ').find(|key| keys.contains(*key)) {
        Some(key) => Err(format!(
            "{key:?} beside \"messages\" has no effect; remove it, give a message \"weight\": 0, or give \"tokens\" and \
             \"mask\" without \"messages\""
        )),
        None => Ok(keys.into_iter().filter(|key| !ROW_KEYS.contains(&key.as_str())).collect()),
    }
}

/// Returns whether a message is in Harmony's own form.
pub(super) fn is_harmony_message(message: &Value) -> bool {
    let is_part = |part: &Value| part["type"] == "system_content" || part["type"] == "developer_content";
    ["recipient", "channel", "content_type"].iter().any(|key| !message[*key].is_null())
        || message["content"].as_array().is_some_and(|parts| parts.iter().any(is_part))
}

/// Checks the keys of a message.
///
/// # Errors
/// The first key without a meaning here, with the remedy.
pub(super) fn check_message_keys(message: &Value) -> Result<(), String> {
    let mut keys = message.as_object().into_iter().flatten().filter(|(_, value)| !is_filler(value));
    match keys.find(|(key, _)| !MESSAGE_KEYS.contains(&key.as_str())) {
        Some((key, _)) => Err(format!(
            "{key:?} has no meaning in a message; remove it, or write \"weight\": 0 for a message without loss"
        )),
        None => Ok(()),
    }
}

/// Returns the tools of a row or a request: a list, the JSON text of a list, or null. Nulls that JSON Schema
/// does not allow are removed; if there are any, so are null defaults.
///
/// # Errors
/// When `tools` is something else.
pub fn read_tools(tools: &Value) -> Result<Vec<Value>, String> {
    let wrong = || "\"tools\" must be a list of functions, or its JSON text".to_owned();
    let parsed = |text: &str| serde_json::from_str::<Value>(text).map_err(|_| wrong());
    let list = match tools {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => parsed(text)?,
        other => other.clone(),
    };
    let mut tools = match list {
        Value::Null => vec![],
        Value::Array(tools) => tools,
        _ => return Err(wrong()),
    };
    for tool in &mut tools {
        if let Value::String(text) = tool {
            *tool = parsed(text)?;
        }
    }
    let mut remove = |all| tools.iter_mut().fold(false, |found, tool| remove_nulls(tool, all) | found);
    if remove(false) {
        remove(true);
    }
    Ok(tools)
}

/// Removes the keys of objects whose value is null; those of [`NULLABLE_KEYWORDS`] only if `all`. Returns
/// whether there was one.
fn remove_nulls(value: &mut Value, all: bool) -> bool {
    match value {
        Value::Object(map) => {
            let before = map.len();
            map.retain(|key, value| !value.is_null() || (!all && NULLABLE_KEYWORDS.contains(&key.as_str())));
            let mut found = map.len() < before;
            let is_schema = |(key, _): &(&String, &mut Value)| !NULLABLE_KEYWORDS.contains(&key.as_str());
            for (_, value) in map.iter_mut().filter(is_schema) {
                found |= remove_nulls(value, all);
            }
            found
        }
        Value::Array(list) => list.iter_mut().fold(false, |found, value| remove_nulls(value, all) | found),
        _ => false,
    }
}

/// Removes the null arguments that a call's function does not have: they are other functions'. Arguments of
/// an undeclared function stay.
pub(super) fn remove_foreign_arguments(arguments: &mut Map<String, Value>, name: &str, tools: &[Value]) {
    let functions = tools.iter().map(|tool| &tool["function"]);
    if let Some(function) = functions.into_iter().find(|function| function["name"] == name) {
        let properties = &function["parameters"]["properties"];
        arguments.retain(|key, value| !value.is_null() || properties.get(key.as_str()).is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tools_are_read_as_libraries_write_them() {
        let tool = |properties: Value| json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": properties}}}]);
        let clean = tool(json!({"a": {"type": "number"}}));
        for given in [
            clean.clone(),
            clean.to_string().into(),
            json!([clean[0].to_string()]),
            tool(json!({"a": {"type": "number", "enum": null, "default": null}, "city": null})),
        ] {
            assert_eq!(Value::Array(read_tools(&given).unwrap()), clean, "{given}");
        }
        for none in [json!(null), json!("null"), json!(""), json!([]), json!("[]")] {
            assert_eq!(read_tools(&none).unwrap(), Vec::<Value>::new(), "{none}");
        }
        let nullable = tool(json!({"a": {"type": "number", "default": null}}));
        assert_eq!(Value::Array(read_tools(&nullable).unwrap()), nullable, "a default may be null");
        for wrong in [json!({}), json!(1), json!("add"), json!(["add"])] {
            assert!(read_tools(&wrong).unwrap_err().contains("\"tools\""), "{wrong}");
        }
    }
}
