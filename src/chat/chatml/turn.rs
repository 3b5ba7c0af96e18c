//! A tolerant parser of one sampled assistant turn. It never fails.
//!
//! The parser searches the text for calls, so a `<tool_call>` that is spelled in ordinary tokens counts too.
//! A call without an end tag extends to the next call or to the end of the turn.

use super::{ANALYSIS, ChatMl, THINK, TOOL_CALL, json};
use crate::chat::{Call, PYTHON};
use crate::harmony::{Message, TurnEnd, TurnStep};
use serde_json::Value;

/// The channel of tool calls, and of text before tool calls.
const COMMENTARY: &str = "commentary";

/// Parses the tokens that are sampled after `<|im_start|>assistant` and its line break.
#[derive(Clone)]
pub struct ChatMlTurnParser {
    chat: ChatMl,
    bytes: Vec<u8>,
    /// An error that makes all calls of the turn malformed.
    error: Option<&'static str>,
    messages: Vec<Message>,
    calls: Vec<Call>,
    end_of_turn: Option<TurnEnd>,
}

impl ChatMlTurnParser {
    pub(super) fn new(chat: &ChatMl) -> Self {
        let (bytes, messages, calls) = (vec![], vec![], vec![]);
        Self { chat: chat.clone(), bytes, error: None, messages, calls, end_of_turn: None }
    }

    /// Reads the next token. Tokens after the end of the turn are ignored.
    pub fn push(&mut self, token: u32) -> TurnStep {
        if let Some(end) = self.end_of_turn {
            return TurnStep::Ended(end);
        }
        let vocabulary = self.chat.vocabulary();
        if self.chat.is_stop_token(token) {
            if std::str::from_utf8(&self.bytes).is_err() {
                self.error = Some("Error: the call is not valid UTF-8.");
            }
            self.read();
            return TurnStep::Ended(self.end());
        }
        if vocabulary.is_special(token) {
            self.error = Some("Error: the call contains special tokens.");
        }
        self.bytes.extend_from_slice(vocabulary.token_bytes(token).unwrap_or("\u{fffd}".as_bytes()));
        TurnStep::Continues
    }

    /// Returns the calls of a finished turn, in order.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Returns the turn's messages so far: its text, then its valid calls.
    pub fn finish(mut self) -> Vec<Message> {
        if self.end_of_turn.is_none() && !self.bytes.is_empty() {
            self.read();
        }
        self.messages
    }

    fn end(&mut self) -> TurnEnd {
        let end = match self.calls.iter().any(|call| matches!(call, Call::Ready(_))) {
            true => TurnEnd::Called,
            false if self.calls.is_empty() => TurnEnd::Returned,
            false => TurnEnd::Malformed,
        };
        *self.end_of_turn.insert(end)
    }

    /// Parses the text into messages and calls.
    fn read(&mut self) {
        let mut text = String::from_utf8_lossy(&self.bytes).into_owned();
        if self.chat.has_thoughts()
            && let Some((thought, answer)) = split_thought(&text)
        {
            if !thought.is_empty() {
                self.messages.push(Message::assistant(ANALYSIS, thought));
            }
            match answer {
                Some(answer) => text = answer.to_owned(),
                None => return,
            }
        }
        let (outside, calls) = split(&text);
        if calls.is_empty() {
            self.messages.push(Message::assistant("final", text));
            return;
        }
        if !outside.trim().is_empty() {
            self.messages.push(Message::assistant(COMMENTARY, outside));
        }
        for text in calls {
            let call = read_call(text);
            let call = match (call, self.error) {
                (Call::Ready(message), Some(error)) => {
                    Call::Malformed { recipient: message.recipient, reply: error.into() }
                }
                (call, _) => call,
            };
            self.messages.push(match &call {
                Call::Ready(message) => message.clone(),
                Call::Malformed { .. } => Message::assistant(COMMENTARY, text),
            });
            self.calls.push(call);
        }
    }
}

/// Returns the thought and the text of an assistant's message in a file or request. Without a thought of its
/// own, the message may have one at the start of its text, which Qwen3's template splits off too.
pub fn thought_and_text(thought: String, text: String) -> (String, String) {
    match split_thought(&text) {
        Some((found, Some(answer))) if thought.is_empty() => (found.to_owned(), answer.to_owned()),
        _ => (thought, text),
    }
}

/// Returns the thought at the beginning of a turn, and the text after it. The text after it is `None` if the
/// thought has no end tag. The result is `None` if there is no thought.
fn split_thought(text: &str) -> Option<(&str, Option<&str>)> {
    let [open, close] = THINK;
    let (thought, answer) = match text.split_once(close) {
        Some((thought, answer)) => (thought, Some(answer.trim_start_matches('\n'))),
        None => (text.trim_start().strip_prefix(open)?, None),
    };
    Some((thought.rsplit(open).next().unwrap_or_default().trim_matches('\n'), answer))
}

/// Returns the text outside calls, and the text of each call.
fn split(text: &str) -> (String, Vec<&str>) {
    let [open, close] = TOOL_CALL;
    let mut parts = text.split(open);
    let mut outside = vec![parts.next().unwrap_or_default().trim_end_matches('\n')];
    let mut calls = vec![];
    for part in parts {
        let (call, after) = part.split_once(close).unwrap_or((part, ""));
        calls.push(call.trim());
        outside.push(after.trim_matches('\n'));
    }
    outside.retain(|text| !text.is_empty());
    (outside.join("\n"), calls)
}

/// Reads a call `{"name": …, "arguments": {…}}`. The arguments may also be a JSON string that contains the
/// object.
fn read_call(text: &str) -> Call {
    let malformed = |recipient: Option<&str>, what: String| Call::Malformed {
        recipient: recipient.map(str::to_owned),
        reply: format!("Error: {what}."),
    };
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) => return malformed(None, format!("the call is not valid JSON: {error}")),
    };
    let Some(name) = value["name"].as_str().filter(|name| !name.is_empty()) else {
        return malformed(None, "the call names no function".into());
    };
    let arguments = match &value["arguments"] {
        Value::String(text) => serde_json::from_str(text).unwrap_or(Value::Null),
        arguments => arguments.clone(),
    };
    if !arguments.is_object() {
        return malformed(Some(name), "the call's \"arguments\" are no JSON object".into());
    }
    if name != PYTHON {
        return Call::Ready(Message::call(name, COMMENTARY, json::to_text(&arguments)));
    }
    match arguments["code"].as_str() {
        Some(code) if !code.trim().is_empty() => Call::Ready(Message::call(name, COMMENTARY, code)),
        Some(_) => malformed(Some(name), "the call is empty".into()),
        None => malformed(Some(name), "the function takes one text, \"code\"".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_split_into_text_and_calls() {
        assert_eq!(split("just text\n"), ("just text".into(), vec![]));
        assert_eq!(split("a\n<tool_call>\n1\n</tool_call>\n<tool_call>2"), ("a".into(), vec!["1", "2"]));
        assert_eq!(split("<tool_call>1<tool_call>2</tool_call>\nb"), ("b".into(), vec!["1", "2"]));
    }

    #[test]
    fn a_thought_ends_at_its_tag() {
        assert_eq!(split_thought("<think>\na\nb\n</think>\n\n7"), Some(("a\nb", Some("7"))));
        assert_eq!(split_thought("a</think>7</think>"), Some(("a", Some("7</think>"))));
        assert_eq!(split_thought("<think>\na <tool_call>"), Some(("a <tool_call>", None)));
        assert_eq!(split_thought("7 <think>"), None);
    }

    #[test]
    fn invalid_calls_get_an_error_as_reply() {
        let ready = |name: &str, content: &str| Call::Ready(Message::call(name, COMMENTARY, content));
        let code = r#"{"name": "python", "arguments": {"code": "print(\"1\")\n"}}"#;
        assert_eq!(read_call(code), ready("python", "print(\"1\")\n"));
        let spelled = r#"{"arguments": "{\"city\":\"Ulm\"}", "name": "weather"}"#;
        assert_eq!(read_call(spelled), ready("weather", r#"{"city": "Ulm"}"#));
        for (text, recipient, word) in [
            (r#"{"name": "python", "arguments": {"code": "1"}"#, None, "not valid JSON"),
            ("", None, "not valid JSON"),
            ("[1]", None, "names no function"),
            (r#"{"arguments": {}}"#, None, "names no function"),
            (r#"{"name": "python"}"#, Some("python"), "no JSON object"),
            (r#"{"name": "python", "arguments": "code"}"#, Some("python"), "no JSON object"),
            (r#"{"name": "python", "arguments": {"code": 1}}"#, Some("python"), "one text"),
            (r#"{"name": "python", "arguments": {"code": " "}}"#, Some("python"), "empty"),
        ] {
            let Call::Malformed { recipient: found, reply } = read_call(text) else { panic!("{text}") };
            assert_eq!(found.as_deref(), recipient, "{text}");
            assert!(reply.starts_with("Error: ") && reply.contains(word), "{text}: {reply}");
        }
    }
}
