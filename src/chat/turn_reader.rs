//! The text of an answer that is being sampled, and the part of the text that is final and may be shown.

use super::{Call, Chat, ChatTurnParser};
use crate::harmony::{Message, TurnEnd, TurnParser, TurnStep};
use crate::vocabulary::Vocabulary;

/// Tags of ChatML's calls and thoughts. If a text ends with the start of a tag, further tokens may complete
/// the tag, so this end is not shown yet.
const TAGS: [&str; 4] = ["<tool_call>", "</tool_call>", "<think>", "</think>"];

/// The texts of an answer so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Texts {
    pub content: String,
    /// Thoughts: Harmony's channel `analysis`, Qwen3's thought.
    pub reasoning: String,
}

/// Reads the tokens of one sample.
pub struct TurnReader<'a> {
    /// The parser of a chat's turn; `None` for plain text.
    parser: Option<ChatTurnParser>,
    chat: &'a Chat,
    stop: Vec<String>,
    /// Tokens that end the answer and are no part of its text, beside those of the chat format.
    stop_tokens: Vec<u32>,
    /// Whether calls are read as such. Otherwise they are text.
    takes_calls: bool,
    /// Bytes of plain text.
    bytes: Vec<u8>,
    end: Option<TurnEnd>,
    /// The final texts, once a stop text has cut them.
    cut: Option<Texts>,
}

impl<'a> TurnReader<'a> {
    /// Returns a reader of a chat's turn. The answer ends before the first occurrence of a text of `stop`.
    pub fn chat(chat: &'a Chat, stop: Vec<String>) -> Self {
        Self { parser: Some(chat.turn_parser()), ..Self::text(chat, stop) }
    }

    /// Returns a reader of plain text.
    pub fn text(chat: &'a Chat, stop: Vec<String>) -> Self {
        Self {
            parser: None,
            chat,
            stop,
            stop_tokens: vec![],
            takes_calls: true,
            bytes: vec![],
            end: None,
            cut: None,
        }
    }

    /// Returns the reader with further tokens that end the answer.
    pub fn with_stop_tokens(self, stop_tokens: Vec<u32>) -> Self {
        Self { stop_tokens, ..self }
    }

    /// Returns the reader, which reads calls as text if `takes_calls` is false.
    pub fn with_calls(self, takes_calls: bool) -> Self {
        Self { takes_calls, ..self }
    }

    /// Reads the next token. Returns true when the answer ends with it.
    pub fn push(&mut self, token: u32) -> bool {
        if self.stop_tokens.contains(&token) && !self.chat.stop_tokens().contains(&token) {
            return false;
        }
        let vocabulary: &Vocabulary = self.chat.vocabulary();
        // Control tokens are no part of a plain text, but a stop text may be one.
        let is_stop = |bytes: &[u8]| self.stop.iter().any(|stop| stop.as_bytes() == bytes);
        if self.parser.is_none()
            && vocabulary.is_special(token)
            && vocabulary.token_bytes(token).is_some_and(is_stop)
        {
            self.cut = Some(self.texts(true));
            return true;
        }
        if self.parser.is_none() && !vocabulary.is_special(token) {
            self.bytes.extend_from_slice(vocabulary.token_bytes(token).unwrap_or("\u{fffd}".as_bytes()));
        }
        if let Some(parser) = &mut self.parser
            && let TurnStep::Ended(end) = parser.push(token)
        {
            self.end = Some(end);
        }
        if !self.stop.is_empty() {
            let mut texts = self.texts(self.end.is_some());
            let found = self.stop.iter().filter_map(|stop| texts.content.find(stop.as_str())).min();
            if let Some(at) = found {
                texts.content.truncate(at);
                self.cut = Some(texts);
            }
        }
        self.end.is_some() || self.cut.is_some()
    }

    /// Returns the `finish_reason` of the answer, once [`Self::push`] has returned true.
    pub fn reason(&self) -> &'static str {
        match self.end {
            Some(TurnEnd::Called) if self.cut.is_none() && self.takes_calls => "tool_calls",
            _ => "stop",
        }
    }

    /// Returns the part of the texts that further tokens cannot change.
    pub fn certain(&self) -> Texts {
        if let Some(cut) = &self.cut {
            return cut.clone();
        }
        let mut texts = self.texts(false);
        let held = |text: &mut String| {
            // An unfinished character is read as U+FFFD.
            text.truncate(text.trim_end_matches('\u{fffd}').len());
            let tags = TAGS.iter().copied().filter(|_| self.parser.is_some());
            let words = tags.chain(self.stop.iter().map(String::as_str));
            let length = words.map(|word| overlap(text, word)).max().unwrap_or(0);
            text.truncate(text.len() - length);
            if self.parser.is_some() {
                // Line breaks before a tag are no part of the text.
                text.truncate(text.trim_end_matches('\n').len());
            }
        };
        held(&mut texts.content);
        held(&mut texts.reasoning);
        texts
    }

    /// Returns the texts of the answer after its last token.
    pub fn last(&self) -> Texts {
        self.cut.clone().unwrap_or_else(|| self.texts(true))
    }

    /// Returns the valid calls at the end of the answer.
    pub fn calls(&self) -> Vec<Message> {
        let Some(parser) = self.parser.as_ref().filter(|_| self.reason() == "tool_calls") else {
            return vec![];
        };
        let ready = |call| match call {
            Call::Ready(message) => Some(message),
            Call::Malformed { .. } => None,
        };
        parser.calls().into_iter().filter_map(ready).collect()
    }

    fn texts(&self, at_end: bool) -> Texts {
        let Some(parser) = &self.parser else {
            return Texts { content: String::from_utf8_lossy(&self.bytes).into_owned(), ..Texts::default() };
        };
        parser.texts(at_end, self.takes_calls)
    }
}

/// Returns the texts of a turn of Harmony.
pub(super) fn harmony_texts(parser: &TurnParser, at_end: bool, takes_calls: bool) -> Texts {
    let call = parser.call();
    let mut texts = Texts::default();
    let messages = parser.clone().finish().messages;
    for (index, message) in messages.iter().enumerate() {
        let is_last = index + 1 == messages.len();
        let (text, shown) = match (message.channel.as_deref(), &message.recipient) {
            (_, Some(_)) => {
                let is_call = takes_calls && (!at_end || call == Some(message));
                (&mut texts.content, !is_call)
            }
            (Some("analysis"), _) => (&mut texts.reasoning, true),
            // A header, a text outside of messages, or a message with a broken header.
            (channel, _) => (&mut texts.content, at_end || channel.is_some() || !is_last),
        };
        let content = match &message.recipient {
            // A call without content would leave no trace.
            Some(recipient) if message.content.trim().is_empty() => format!("to={recipient}"),
            _ => message.content.clone(),
        };
        if !shown || content.is_empty() {
            continue;
        }
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&content);
    }
    texts
}

/// Returns the length of the longest suffix of `text` that is a proper prefix of `word`, or 0.
fn overlap(text: &str, word: &str) -> usize {
    let lengths = (1..word.len().min(text.len() + 1)).rev();
    lengths
        .filter(|&length| word.is_char_boundary(length))
        .find(|&length| text.ends_with(&word[..length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ChatFormat;

    fn read(chat: &Chat, text: &str, stop: &[&str]) -> (Vec<Texts>, Texts, &'static str, Vec<Message>) {
        read_with(TurnReader::chat(chat, owned(stop)), chat, text)
    }

    fn owned(stop: &[&str]) -> Vec<String> {
        stop.iter().map(|&stop| stop.to_owned()).collect()
    }

    fn read_with(
        mut reader: TurnReader,
        chat: &Chat,
        text: &str,
    ) -> (Vec<Texts>, Texts, &'static str, Vec<Message>) {
        let mut seen = vec![];
        for token in chat.vocabulary().encode_with_special(text).unwrap() {
            let over = reader.push(token);
            seen.push(reader.certain());
            if over {
                break;
            }
        }
        (seen, reader.last(), reader.reason(), reader.calls())
    }

    /// Checks that each text begins with the previous one, so that a stream need not take anything back.
    fn check_growth(seen: &[Texts], last: &Texts) {
        for pair in seen.windows(2) {
            assert!(pair[1].content.starts_with(&pair[0].content), "{pair:?}");
            assert!(pair[1].reasoning.starts_with(&pair[0].reasoning), "{pair:?}");
        }
        let before = seen.last().unwrap();
        assert!(last.content.starts_with(before.content.trim_end()), "{before:?} {last:?}");
        assert!(last.reasoning.starts_with(&before.reasoning), "{before:?} {last:?}");
    }

    #[test]
    fn harmonys_channels_are_thought_text_and_call() {
        let chat = ChatFormat::Harmony.from_embedded().unwrap();
        let text = "<|channel|>analysis<|message|>hm é<|end|><|start|>assistant<|channel|>final<|message|>84<|return|>";
        let (seen, last, reason, calls) = read(&chat, text, &[]);
        check_growth(&seen, &last);
        assert_eq!((last.reasoning.as_str(), last.content.as_str(), reason), ("hm é", "84", "stop"));
        assert!(calls.is_empty());
        assert!(seen.iter().any(|texts| texts.reasoning == "hm " && texts.content.is_empty()));
        let text = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Ulm\"}<|call|>";
        let (_, last, reason, calls) = read(&chat, text.trim_start_matches("<|start|>assistant"), &[]);
        assert_eq!((last, reason), (Texts::default(), "tool_calls"));
        assert_eq!(calls[0].recipient.as_deref(), Some("functions.weather"));
        assert_eq!(calls[0].content, "{\"city\": \"Ulm\"}");
    }

    #[test]
    fn chatmls_calls_are_not_sent_as_text() {
        let chat = ChatFormat::ChatMl.from_embedded().unwrap();
        let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";
        let (seen, last, reason, calls) = read(&chat, &format!("Let me see.\n{call}<|im_end|>"), &[]);
        check_growth(&seen, &last);
        assert_eq!((last.content.as_str(), reason, calls.len()), ("Let me see.", "tool_calls", 1));
        assert!(seen.iter().all(|texts| !texts.content.contains('<')));
        let (_, last, reason, calls) = read(&chat, "<tool_call>\n{1}\n</tool_call><|im_end|>", &[]);
        assert_eq!((reason, calls.len()), ("stop", 0));
        assert_eq!(last.content, "<tool_call>\n{1}\n</tool_call>", "a call that cannot be read is text");
    }

    #[test]
    fn bug_without_calls_a_call_is_text() {
        let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";
        for (format, thought) in
            [(ChatFormat::ChatMl, ""), (ChatFormat::ThinkingChatMl, "<think>\nhm\n</think>\n\n")]
        {
            let chat = format.from_embedded().unwrap();
            let text = format!("{thought}Let me see.\n{call} and on<|im_end|>");
            let reader = TurnReader::chat(&chat, vec![]).with_calls(false);
            let (seen, last, reason, calls) = read_with(reader, &chat, &text);
            check_growth(&seen, &last);
            assert_eq!(
                (last.content, reason, calls.len()),
                (format!("Let me see.\n{call} and on"), "stop", 0)
            );
        }
        let chat = ChatFormat::Harmony.from_embedded().unwrap();
        let reader = TurnReader::chat(&chat, vec![]).with_calls(false);
        let text = " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>";
        let (_, last, reason, calls) = read_with(reader, &chat, text);
        assert_eq!((last.content.as_str(), reason, calls.len()), ("{}", "stop", 0));
    }

    #[test]
    fn bug_a_stop_text_that_is_a_control_token_ends_plain_text() {
        let chat = ChatFormat::ChatMl.from_embedded().unwrap();
        let reader = TurnReader::text(&chat, owned(&["<|im_start|>"]));
        let (_, last, reason, _) = read_with(reader, &chat, "a = 1<|im_start|>b = 2");
        assert_eq!((last.content.as_str(), reason), ("a = 1", "stop"));
    }

    #[test]
    fn a_stop_text_cuts_the_answer_and_is_never_sent() {
        let chat = ChatFormat::ChatMl.from_embedded().unwrap();
        let (seen, last, reason, _) = read(&chat, "one two three<|im_end|>", &["o thr", "zzz"]);
        check_growth(&seen, &last);
        assert_eq!((last.content.as_str(), reason), ("one tw", "stop"));
        assert!(seen.iter().all(|texts| "one tw".starts_with(&texts.content)), "{seen:?}");
        let thinking = ChatFormat::ThinkingChatMl.from_embedded().unwrap();
        let (seen, last, ..) = read(&thinking, "<think>\nhm\n</think>\n\n7<|im_end|>", &[]);
        check_growth(&seen, &last);
        assert_eq!((last.reasoning.as_str(), last.content.as_str()), ("hm", "7"));
    }

    #[test]
    fn bug_a_call_that_a_thought_mentions_neither_freezes_the_stream_nor_hides_a_stop_text() {
        let chat = ChatFormat::ThinkingChatMl.from_embedded().unwrap();
        let text = "<think>\nno <tool_call> needed\n</think>\n\n7 END more<|im_end|>";
        let (seen, last, reason, calls) = read(&chat, text, &["END"]);
        check_growth(&seen, &last);
        assert_eq!((last.reasoning.as_str(), last.content.as_str()), ("no <tool_call> needed", "7 "));
        assert_eq!((reason, calls.len()), ("stop", 0));
        assert!(seen.iter().any(|texts| texts.reasoning.ends_with("needed") && texts.content.is_empty()));
    }

    #[test]
    fn the_overlap_is_the_longest_start_of_the_word() {
        assert_eq!(overlap("a<tool", "<tool_call>"), 5);
        assert_eq!(overlap("abab", "abac"), 2);
        assert_eq!(overlap("x", "y"), 0);
        assert_eq!(overlap("ab", "ab"), 0);
        assert_eq!(overlap("é", "éa"), 2);
    }
}
