//! A tolerant parser of one sampled assistant turn. It never fails.
//!
//! The parser searches the text for calls, so a `<tool_call>` that is spelled in ordinary tokens counts too.
//! A call that is JSON ends with its JSON (RFC 8259), so tags in its strings are text. Another call extends
//! to its end tag, the next call or the end of the turn. A call that a thought quotes is text, but a call
//! ends a thought that has no end tag, as in vLLM's parser for Qwen3.

use super::{ANALYSIS, ChatMl, THINK, TOOL_CALL, json};
use crate::chat::{Call, PYTHON, Texts};
use crate::harmony::{Message, TurnEnd, TurnStep};
use serde::de::IgnoredAny;
use serde_json::Value;
use std::ops::Range;

/// The channel of tool calls, and of text before tool calls.
const COMMENTARY: &str = "commentary";

/// Parses the tokens that are sampled after `<|im_start|>assistant` and its line break.
#[derive(Clone)]
pub struct ChatMlTurnParser {
    chat: ChatMl,
    bytes: Vec<u8>,
    /// Indices of special tokens in `bytes`. They make a call malformed.
    special_tokens: Vec<usize>,
    /// Whether calls are read as such. Otherwise they are text.
    takes_calls: bool,
    messages: Vec<Message>,
    pub calls: Vec<Call>,
    end_of_turn: Option<TurnEnd>,
}

impl ChatMlTurnParser {
    pub(super) fn new(chat: &ChatMl) -> Self {
        let begins_in_thought = chat.template.as_ref().is_some_and(|template| template.begins_in_thought());
        let bytes = if begins_in_thought { format!("{}\n", THINK[0]).into_bytes() } else { vec![] };
        let (special_tokens, messages, calls) = (vec![], vec![], vec![]);
        let (takes_calls, end_of_turn) = (true, None);
        Self { chat: chat.clone(), bytes, special_tokens, takes_calls, messages, calls, end_of_turn }
    }

    /// Returns the parser, which reads calls as text.
    pub fn without_calls(self) -> Self {
        Self { takes_calls: false, ..self }
    }

    /// Returns the text so far after the thought; `None` within the thought.
    pub fn answer(&self) -> Option<&[u8]> {
        if !self.chat.has_thoughts() {
            return Some(&self.bytes);
        }
        // Searched in bytes: the last character may be unfinished.
        let [open, close] = THINK.map(str::as_bytes);
        match self.bytes.windows(close.len()).position(|bytes| bytes == close) {
            Some(at) => {
                let answer = &self.bytes[at + close.len()..];
                answer.get(answer.iter().take_while(|&&byte| byte == b'\n').count()..)
            }
            None if self.bytes.trim_ascii_start().starts_with(open) => None,
            None => Some(&self.bytes),
        }
    }

    /// Reads the next token. Tokens after the end of the turn are ignored.
    pub fn push(&mut self, token: u32) -> TurnStep {
        if let Some(end) = self.end_of_turn {
            return TurnStep::Ended(end);
        }
        let vocabulary = self.chat.vocabulary();
        if self.chat.is_stop_token(token) {
            self.read();
            return TurnStep::Ended(self.end());
        }
        if vocabulary.is_special(token) {
            self.special_tokens.push(self.bytes.len());
        }
        self.bytes.extend_from_slice(vocabulary.token_bytes(token).unwrap_or("\u{fffd}".as_bytes()));
        TurnStep::Continues
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

    /// Returns the thought and the content of the turn so far. Before the end, the content is the text before
    /// the first call. After it, calls that could be read are left out, and any other call is shown as it was
    /// written. Calls are text if `takes_calls` is false.
    pub fn texts(&self, at_end: bool, takes_calls: bool) -> Texts {
        let text = String::from_utf8_lossy(&self.bytes);
        let (thought, start) = self.split_thought(&text, at_end);
        let reasoning = thought.unwrap_or_default().to_owned();
        let answer = text.get(start..).unwrap_or_default();
        let mut parts = split(answer);
        let content = match parts.len() {
            1 => answer.to_owned(),
            _ if !takes_calls => answer.to_owned(),
            _ if !at_end => answer[parts.swap_remove(0).range].to_owned(),
            _ if self.end_of_turn != Some(TurnEnd::Called) => answer.to_owned(),
            _ => {
                let mut calls = self.calls.iter();
                parts.retain(|part| part.is_text || matches!(calls.next(), Some(Call::Malformed { .. })));
                let texts = parts.iter().map(|part| part.text(answer)).filter(|text| !text.is_empty());
                texts.collect::<Vec<_>>().join("\n")
            }
        };
        Texts { content, reasoning }
    }

    /// Parses the text into messages and calls.
    fn read(&mut self) {
        let text = String::from_utf8_lossy(&self.bytes);
        let (thought, start) = self.split_thought(&text, true);
        let (thought, has_thought) = (thought.unwrap_or_default(), thought.is_some());
        let answer = text.get(start..).unwrap_or_default();
        if !thought.is_empty() {
            self.messages.push(Message::assistant(ANALYSIS, thought));
        }
        let parts = if self.takes_calls { split(answer) } else { vec![] };
        if parts.len() < 2 {
            if !(has_thought && start == text.len()) {
                self.messages.push(Message::assistant("final", answer));
            }
            return;
        }
        let is_utf8 = std::str::from_utf8(&self.bytes).is_ok();
        for part in parts {
            let content = part.text(answer);
            if part.is_text {
                if !content.trim().is_empty() {
                    self.messages.push(Message::assistant(COMMENTARY, content));
                }
                continue;
            }
            let range = start + part.range.start..start + part.range.end;
            let error = if !is_utf8 {
                Some("Error: the call is not valid UTF-8.")
            } else if self.special_tokens.iter().any(|at| range.contains(at)) {
                Some("Error: the call contains special tokens.")
            } else {
                None
            };
            let call = match (read_call(content), error) {
                (Call::Ready(message), Some(error)) => {
                    Call::Malformed { recipient: message.recipient, reply: error.into() }
                }
                (call, _) => call,
            };
            self.messages.push(match &call {
                Call::Ready(message) => message.clone(),
                Call::Malformed { .. } => Message::assistant(COMMENTARY, content),
            });
            self.calls.push(call);
        }
    }

    /// Returns the thought, if there is one, and where the text after it starts. A thought without an end tag
    /// extends to the first call that can be read, or to the end. Before the end of the turn (`at_end` is
    /// false), it extends to the first text that may become a call.
    fn split_thought<'a>(&self, text: &'a str, at_end: bool) -> (Option<&'a str>, usize) {
        if !self.chat.has_thoughts() {
            return (None, 0);
        }
        match split_thought(text, at_end) {
            None => (None, 0),
            Some((thought, Some(answer))) => (Some(thought), text.len() - answer.len()),
            Some((thought, None)) => {
                let is_call = |&at: &usize| {
                    let after = &text[at + TOOL_CALL[0].len()..];
                    match at_end {
                        true => matches!(read_call(split_call(after).0.trim()), Call::Ready(_)),
                        false => matches!(after.trim_start().chars().next(), None | Some('{')),
                    }
                };
                let mut tags = text.match_indices(TOOL_CALL[0]).map(|(at, _)| at);
                match (tags.find(is_call), at_end) {
                    (None, _) => (Some(thought), text.len()),
                    (Some(at), true) => (Some(strip_think_tag(&text[..at]).trim_matches('\n')), at),
                    (Some(at), false) => {
                        (Some(strip_think_tag(&text[..at]).trim_start_matches('\n')), text.len())
                    }
                }
            }
        }
    }
}

/// Returns the thought and the text of an assistant's message in a file or request. Without a thought of its
/// own, the message may have one at the start of its text, which Qwen3's template splits off too.
pub fn thought_and_text(thought: String, text: String) -> (String, String) {
    match split_thought(&text, true) {
        Some((found, Some(answer))) if thought.is_empty() => (found.to_owned(), answer.to_owned()),
        _ => (thought, text),
    }
}

/// Returns the thought at the beginning of a turn, and the text after it. The text after it is `None` if the
/// thought has no end tag. The result is `None` if there is no thought. An end tag in the JSON of a call is
/// none; before the end of the turn (`at_end` false), the JSON may be unfinished.
fn split_thought(text: &str, at_end: bool) -> Option<(&str, Option<&str>)> {
    let [open, close] = THINK;
    let begins = text.trim_start().starts_with(open);
    let mut ends = text.match_indices(close).map(|(at, _)| at);
    match ends.find(|&at| !is_within_call(text, at, begins && at_end)) {
        Some(at) => {
            let (thought, answer) = (&text[..at], &text[at + close.len()..]);
            Some((strip_think_tag(thought).trim_matches('\n'), Some(answer.trim_start_matches('\n'))))
        }
        None => begins.then(|| (strip_think_tag(text).trim_matches('\n'), None)),
    }
}

/// Returns the text after the last `<think>`, if there is one.
fn strip_think_tag(text: &str) -> &str {
    text.rsplit(THINK[0]).next().unwrap_or_default()
}

/// Returns whether index `at` is within the JSON of a call. `is_finished`: whether the JSON must have an end.
fn is_within_call(text: &str, at: usize, is_finished: bool) -> bool {
    text[..at].match_indices(TOOL_CALL[0]).any(|(start, tag)| {
        let rest = &text[start + tag.len()..];
        let within = |end: usize| start + tag.len() + end > at && !(is_finished && end > rest.len());
        json_end(rest).is_some_and(within)
    })
}

/// A part of a turn: a text, or a call without its tags.
#[derive(Debug, PartialEq)]
struct Part {
    is_text: bool,
    range: Range<usize>,
}

impl Part {
    fn text<'a>(&self, of: &'a str) -> &'a str {
        let text = &of[self.range.clone()];
        match self.is_text {
            true if self.range.start == 0 => text.trim_end_matches('\n'),
            true => text.trim_matches('\n'),
            false => text.trim(),
        }
    }
}

/// Splits a turn into texts and calls, in order. The first part and the last part are texts.
fn split(text: &str) -> Vec<Part> {
    let mut parts = vec![];
    let mut start = 0;
    while let Some(at) = text[start..].find(TOOL_CALL[0]) {
        parts.push(Part { is_text: true, range: start..start + at });
        let call = start + at + TOOL_CALL[0].len();
        let (content, after) = split_call(&text[call..]);
        parts.push(Part { is_text: false, range: call..call + content.len() });
        start = text.len() - after.len();
    }
    parts.push(Part { is_text: true, range: start..text.len() });
    parts
}

/// Splits the text after a call's tag into the call and the text after it.
fn split_call(text: &str) -> (&str, &str) {
    let [open, close] = TOOL_CALL;
    if let Some(end) = json_end(text).filter(|&end| end <= text.len()) {
        let (call, after) = text.split_at(end);
        let next = after.trim_start();
        if next.is_empty() || next.starts_with(open) {
            return (call, next);
        }
        if let Some(after) = next.strip_prefix(close) {
            return (call, after);
        }
    }
    let (call, _) = text.split_once(open).unwrap_or((text, ""));
    match call.split_once(close) {
        Some((call, _)) => (call, &text[call.len() + close.len()..]),
        None => (call, &text[call.len()..]),
    }
}

/// Returns the end of the JSON value at the start of `text`, if there is one. The end of a value that is not
/// finished is beyond the text.
fn json_end(text: &str) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    match values.next()? {
        Ok(IgnoredAny) => Some(values.byte_offset()),
        Err(error) => {
            // The parser calls the start of a number invalid, not unfinished.
            let last_line = text.rsplit('\n').next().unwrap_or_default();
            let at_end = error.line() > text.matches('\n').count() && error.column() >= last_line.len();
            (error.is_eof() || (at_end && text.ends_with(['-', '+', '.', 'e', 'E'])))
                .then_some(text.len() + 1)
        }
    }
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
        let parts =
            |text: &str| split(text).iter().map(|part| part.text(text).to_owned()).collect::<Vec<_>>();
        assert_eq!(parts("just text\n"), ["just text"]);
        assert_eq!(parts("a\n<tool_call>\n1\n</tool_call>\n<tool_call>2"), ["a", "1", "", "2", ""]);
        assert_eq!(parts("<tool_call>1<tool_call>2</tool_call>\nb"), ["", "1", "", "2", "b"]);
        assert_eq!(parts("<tool_call>no</tool_call>b</tool_call>"), ["", "no", "b</tool_call>"]);
        let call = r#"{"a": "</tool_call> <tool_call>"}"#;
        assert_eq!(parts(&format!("<tool_call>{call}</tool_call>b")), ["", call, "b"]);
        assert_eq!(parts(&format!("<tool_call>{call}")), ["", call, ""]);
        assert_eq!(parts(&format!("<tool_call>{call}}}</tool_call>")), ["", r#"{"a": ""#, " ", r#""}}"#, ""]);
    }

    #[test]
    fn a_thought_ends_at_its_tag() {
        assert_eq!(split_thought("<think>\na\nb\n</think>\n\n7", true), Some(("a\nb", Some("7"))));
        assert_eq!(split_thought("a</think>7</think>", true), Some(("a", Some("7</think>"))));
        assert_eq!(split_thought("<think>\na <tool_call>", true), Some(("a <tool_call>", None)));
        assert_eq!(split_thought("7 <think>", true), None);
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
