//! A tolerant parser of one sampled assistant turn. It never fails.
//!
//! A message with a broken header that `<|end|>` closes is kept as text, and the turn goes on. Other
//! malformed input ends the turn with a [`TurnError`], which has a reply for the model; its message is kept
//! as text.
//!
//! As in openai-harmony, the recipient makes a message a call, whatever closes it. A call ends the turn.

use super::header::{self, Header};
use super::message::{Message, Role};
use super::tokenizer::HarmonyTokenizer;

/// An error in a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnError {
    /// The header has words that are neither recipient nor content type, or a field is repeated, empty or
    /// invalid.
    MalformedHeader { leftover: String },
    /// The message closed before `<|message|>`.
    UnfinishedHeader,
    /// A message begins with an author other than the assistant.
    WrongAuthor { author: String },
    /// Tokens follow a closed message, and the first of them is not `<|start|>`.
    TextAfterEnd,
    /// `<|call|>` closed a message without a recipient.
    CallWithoutRecipient,
    /// The call's content is blank.
    EmptyCall { recipient: String },
    /// The content has special tokens. They are kept as text.
    SpecialTokenInContent,
    /// The content is not UTF-8. Invalid bytes are replaced by U+FFFD.
    InvalidUtf8,
    /// The tokens ended before the turn did.
    Truncated,
}

impl TurnError {
    /// Returns the reply to the model. It is short, because it uses up the model's context.
    pub fn reply(&self) -> String {
        match self {
            TurnError::MalformedHeader { leftover } => {
                format!("Error: malformed message header near {:?}.", excerpt(leftover))
            }
            TurnError::UnfinishedHeader => "Error: the message had a header but no content.".into(),
            TurnError::WrongAuthor { author } => {
                format!("Error: you cannot write messages as {:?}.", excerpt(author))
            }
            TurnError::TextAfterEnd => "Error: text outside of a message.".into(),
            TurnError::CallWithoutRecipient => "Error: the call names no recipient.".into(),
            TurnError::EmptyCall { .. } => "Error: the call is empty.".into(),
            TurnError::SpecialTokenInContent => "Error: the call contains special tokens.".into(),
            TurnError::InvalidUtf8 => "Error: the call is not valid UTF-8.".into(),
            TurnError::Truncated => "Error: the message was cut off.".into(),
        }
    }
}

fn excerpt(text: &str) -> String {
    text.chars().take(32).collect()
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnEnd {
    /// The assistant is done.
    Returned,
    /// The last message is a call with content, which needs a reply. The reply's author is the recipient,
    /// even if no such tool exists.
    Called,
    /// The turn is malformed. [`TurnError::reply`] gives the reply.
    Malformed,
    /// The tokens ended before the turn did.
    Truncated,
}

/// The effect of a token on the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnStep {
    /// The token is part of a message.
    Continues,
    /// `<|end|>` closed a message. The assistant may begin another one.
    MessageEnded,
    /// The turn ended.
    Ended(TurnEnd),
}

/// A parsed turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedCompletion {
    /// The messages in order. All have the role assistant. The last one may be malformed or unfinished.
    pub messages: Vec<Message>,
    pub end: TurnEnd,
    /// The error that ended the turn. If no error ended the turn: the first error in a message before its
    /// end, if there is one.
    pub error: Option<TurnError>,
}

#[derive(Clone)]
enum State {
    /// A header. `has_start_token`: the model sampled `<|start|>`, so the header begins with the author's
    /// name. In the first header of a turn, `<|start|>` and the author are usually part of the prompt.
    Header {
        has_start_token: bool,
        bytes: Vec<u8>,
        has_invalid_token: bool,
    },
    Content {
        header: Header,
        bytes: Vec<u8>,
        error: Option<TurnError>,
    },
    /// The content of a message with a malformed header.
    Unreadable {
        bytes: Vec<u8>,
        error: TurnError,
    },
    Between,
    Ended(TurnEnd),
}

/// Parses the tokens that are sampled after `<|start|>assistant`.
///
/// A second `<|start|>assistant` at the beginning of the turn is ignored, because the message after it is
/// unambiguous. The published parser and [`StreamParser`](super::StreamParser) read it as the recipient or
/// reject it.
#[derive(Clone)]
pub struct TurnParser {
    tokenizer: HarmonyTokenizer,
    state: State,
    messages: Vec<Message>,
    error: Option<TurnError>,
    /// Number of messages with broken headers after which the turn went on.
    pub broken_messages: usize,
}

impl TurnParser {
    pub fn new(tokenizer: &HarmonyTokenizer) -> Self {
        let state = State::Header { has_start_token: false, bytes: Vec::new(), has_invalid_token: false };
        Self { tokenizer: tokenizer.clone(), state, messages: Vec::new(), error: None, broken_messages: 0 }
    }

    /// Returns the error so far, as in [`ParsedCompletion::error`].
    pub fn error(&self) -> Option<&TurnError> {
        self.error.as_ref()
    }

    /// Returns the text so far of the final message that is being sampled.
    pub fn answer(&self) -> Option<&[u8]> {
        match &self.state {
            State::Content { header, bytes, .. } if header.channel.as_deref() == Some("final") => Some(bytes),
            _ => None,
        }
    }

    /// Returns the call that needs a reply, if the turn ended with [`TurnEnd::Called`].
    pub fn call(&self) -> Option<&Message> {
        if let State::Ended(TurnEnd::Called) = self.state { self.messages.last() } else { None }
    }

    /// Reads the next token. A token after the end of a valid turn is the error [`TurnError::TextAfterEnd`].
    pub fn push(&mut self, token: u32) -> TurnStep {
        let control = self.tokenizer.control_tokens();
        match std::mem::replace(&mut self.state, State::Between) {
            State::Ended(TurnEnd::Malformed) => self.end_turn(TurnEnd::Malformed),
            State::Ended(_) => self.end_malformed(TurnError::TextAfterEnd),
            State::Between if token == control.start => self.continue_in(State::Header {
                has_start_token: true,
                bytes: Vec::new(),
                has_invalid_token: false,
            }),
            State::Between if control.is_turn_end(token) => self.end_malformed(TurnError::TextAfterEnd),
            State::Between => {
                self.keep_text(self.tokenizer.decode(&[token]).as_bytes());
                self.end_malformed(TurnError::TextAfterEnd)
            }
            State::Header { has_start_token: false, bytes, has_invalid_token: false }
                if token == control.start && bytes.is_empty() =>
            {
                self.continue_in(State::Header { has_start_token: true, bytes, has_invalid_token: false })
            }
            State::Header { has_start_token, bytes, has_invalid_token } if token == control.message => self
                .continue_in(match read_header(has_start_token, &bytes, has_invalid_token) {
                    Ok(header) => State::Content { header, bytes: Vec::new(), error: None },
                    Err(error) => {
                        let own = Role::Assistant.name().as_bytes();
                        let header = bytes.strip_prefix(own).filter(|_| has_start_token).unwrap_or(&bytes);
                        State::Unreadable { bytes: [header, b" "].concat(), error }
                    }
                }),
            State::Header { bytes, .. } if control.is_end(token) => {
                self.keep_header(&bytes);
                self.close_broken(token, TurnError::UnfinishedHeader)
            }
            State::Unreadable { bytes, error } if control.is_end(token) => {
                self.keep_text(&bytes);
                self.close_broken(token, error)
            }
            State::Content { header, bytes, error } if control.is_end(token) => {
                self.close(token, header, &bytes, error)
            }
            mut state => {
                self.append(token, &mut state);
                self.continue_in(state)
            }
        }
    }

    /// Adds a token's bytes to a header or a content. Records whether the token is invalid there.
    fn append(&self, token: u32, state: &mut State) {
        let control = self.tokenizer.control_tokens();
        let special = self.tokenizer.is_special(token);
        let text = self.tokenizer.token_bytes(token);
        let bytes = match state {
            State::Header { bytes, has_invalid_token, .. } => {
                let expected = token == control.channel || Some(token) == control.constrain;
                *has_invalid_token |= text.is_none() || (special && !expected);
                bytes
            }
            State::Content { bytes, error, .. } => {
                if special {
                    *error = Some(TurnError::SpecialTokenInContent);
                } else if text.is_none() {
                    error.get_or_insert(TurnError::InvalidUtf8);
                }
                bytes
            }
            State::Unreadable { bytes, .. } => bytes,
            State::Between | State::Ended(_) => return,
        };
        bytes.extend_from_slice(text.unwrap_or("\u{fffd}".as_bytes()));
    }

    /// Returns the turn so far.
    pub fn finish(mut self) -> ParsedCompletion {
        let end = match std::mem::replace(&mut self.state, State::Between) {
            State::Ended(end) => end,
            state => {
                let unfinished = match state {
                    State::Content { header, bytes, .. } => Some((header, bytes)),
                    State::Header { bytes, .. } | State::Unreadable { bytes, .. } => {
                        Some((Header::new(Role::Assistant), bytes)).filter(|(_, bytes)| !bytes.is_empty())
                    }
                    State::Between | State::Ended(_) => None,
                };
                let message = |(header, bytes): (Header, Vec<u8>)| header.message(lossy(&bytes));
                self.messages.extend(unfinished.map(message));
                self.error = Some(TurnError::Truncated);
                TurnEnd::Truncated
            }
        };
        ParsedCompletion { messages: self.messages, end, error: self.error }
    }

    /// Closes a message that has a valid header.
    fn close(&mut self, token: u32, header: Header, bytes: &[u8], error: Option<TurnError>) -> TurnStep {
        let control = self.tokenizer.control_tokens();
        let invalid = std::str::from_utf8(bytes).is_err().then_some(TurnError::InvalidUtf8);
        let error = error.or(invalid);
        let content = lossy(bytes);
        let blank = content.trim().is_empty();
        let recipient = header.recipient.clone();
        self.messages.push(header.message(content));
        match (recipient, error) {
            (Some(recipient), _) if blank => self.end_malformed(TurnError::EmptyCall { recipient }),
            (Some(_), Some(error)) => self.end_malformed(error),
            (Some(_), None) => self.end_turn(TurnEnd::Called),
            (None, _) if token == control.call => self.end_malformed(TurnError::CallWithoutRecipient),
            (None, error) => {
                self.error = self.error.take().or(error);
                if control.is_turn_end(token) {
                    self.end_turn(TurnEnd::Returned)
                } else {
                    TurnStep::MessageEnded
                }
            }
        }
    }

    /// Closes a message whose header is broken. The turn goes on after `<|end|>`, unless the model wrote in
    /// another author's name.
    fn close_broken(&mut self, token: u32, error: TurnError) -> TurnStep {
        let control = self.tokenizer.control_tokens();
        if control.is_turn_end(token) || matches!(error, TurnError::WrongAuthor { .. }) {
            return self.end_malformed(error);
        }
        self.error.get_or_insert(error);
        self.broken_messages += 1;
        TurnStep::MessageEnded
    }

    /// Keeps a message that was closed in its header, as openai-harmony's lenient parser does.
    fn keep_header(&mut self, bytes: &[u8]) {
        let header = std::str::from_utf8(bytes).ok();
        match header.and_then(|text| header::read_partial(text, Role::Assistant).ok()) {
            Some(message) if !message.content.is_empty() => self.messages.push(message),
            _ => self.keep_text(bytes),
        }
    }

    fn keep_text(&mut self, bytes: &[u8]) {
        self.messages.push(Message::new(Role::Assistant, lossy(bytes)));
    }

    fn continue_in(&mut self, state: State) -> TurnStep {
        self.state = state;
        TurnStep::Continues
    }

    fn end_malformed(&mut self, error: TurnError) -> TurnStep {
        self.error = Some(error);
        self.end_turn(TurnEnd::Malformed)
    }

    fn end_turn(&mut self, end: TurnEnd) -> TurnStep {
        self.state = State::Ended(end);
        TurnStep::Ended(end)
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reads a header: an optional `to=NAME` and an optional content type, in any order around the channel.
fn read_header(has_start_token: bool, bytes: &[u8], has_invalid_token: bool) -> Result<Header, TurnError> {
    let text = lossy(bytes);
    let malformed = |leftover: &str| TurnError::MalformedHeader { leftover: leftover.trim().to_string() };
    if has_invalid_token || std::str::from_utf8(bytes).is_err() {
        return Err(malformed(&text));
    }
    let words = header::split_repeated(&text).map_err(|_| malformed(&text))?;
    let mut header = Header { channel: words.channel, ..Header::new(Role::Assistant) };
    let mut rest = words.rest.into_iter();
    if has_start_token {
        let author = rest.next().unwrap_or_default();
        if author != Role::Assistant.name() {
            return Err(TurnError::WrongAuthor { author });
        }
    }
    for word in rest {
        let known = match word.strip_prefix("to=") {
            // A message to the assistant itself is text.
            Some(name) if name == Role::Assistant.name() => true,
            Some(name) => header::is_tool_name(name) && header.recipient.replace(name.to_string()).is_none(),
            None => header::is_content_type(&word) && header.content_type.replace(word.clone()).is_none(),
        };
        if !known {
            return Err(malformed(&word));
        }
    }
    // A content type alone is invalid. A channel or a recipient must be present too.
    match &header {
        Header { recipient: None, channel: None, content_type: Some(word), .. } => Err(malformed(word)),
        _ => Ok(header),
    }
}
