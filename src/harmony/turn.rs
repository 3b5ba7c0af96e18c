//! A tolerant parser of one sampled turn of the assistant. It never fails.
//!
//! Malformed input ends the turn as a [`TurnError`] with a reply for the model. Its message stays as text,
//! with the assistant as author.

use super::header::{self, Header};
use super::message::{Message, Role};
use super::tokenizer::HarmonyTokenizer;

/// An error in a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnError {
    /// The header has words that are neither recipient nor content type, or a field that is repeated, empty
    /// or invalid.
    MalformedHeader { leftover: String },
    /// The message closed before `<|message|>`.
    UnfinishedHeader,
    /// A message with another author.
    WrongAuthor { author: String },
    /// Tokens outside of a message, after one was closed.
    TextAfterEnd,
    /// `<|call|>` closed a message without recipient.
    CallWithoutRecipient,
    /// A message with a recipient was closed by `<|end|>` or `<|return|>`.
    CallNotClosed { recipient: String },
    /// The call's content is blank.
    EmptyCall { recipient: String },
    /// Special tokens inside the content; they become text.
    SpecialTokenInContent,
    /// The content is not UTF-8; invalid bytes became U+FFFD.
    InvalidUtf8,
    /// The tokens ran out before the turn ended.
    Truncated,
}

impl TurnError {
    /// Returns the reply to the model; short, as it counts against the context.
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
            TurnError::CallNotClosed { .. } => "Error: the message to a tool was not ended as a call.".into(),
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
    /// `<|return|>`: the assistant is done.
    Returned,
    /// `<|call|>`: the last message is a call with content, which needs a reply. Its recipient may be
    /// unknown; it is the author of the reply.
    Called,
    /// The turn is malformed; the problem has the reply.
    Malformed,
    /// The tokens ran out.
    Truncated,
}

/// The effect of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnStep {
    /// The token is part of a message.
    Within,
    /// `<|end|>` closed a message; the assistant may begin another.
    MessageEnded,
    /// The turn is over.
    Over(TurnEnd),
}

/// A whole turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedCompletion {
    /// The messages in order, including a malformed or unfinished last one, all of role assistant.
    pub messages: Vec<Message>,
    pub end: TurnEnd,
    /// The problem that ended the turn; otherwise the first error in a text that is no call, if any.
    pub problem: Option<TurnError>,
}

#[derive(Clone)]
enum State {
    /// `opened`: `<|start|>` was sampled again after the prompt's own, so the author's name comes first.
    Header {
        opened: bool,
        bytes: Vec<u8>,
        has_invalid_token: bool,
    },
    Content {
        header: Header,
        bytes: Vec<u8>,
        problem: Option<TurnError>,
    },
    /// Content under a malformed header.
    Unreadable {
        bytes: Vec<u8>,
        problem: TurnError,
    },
    Between,
    Over(TurnEnd),
}

/// Parses the tokens sampled after `<|start|>assistant`.
///
/// A second `<|start|>assistant` at the beginning of the turn is ignored, as the message after it is clear.
/// The published parser reads it as the recipient or refuses it; so does
/// [`StreamParser`](super::StreamParser).
#[derive(Clone)]
pub struct TurnParser {
    tokenizer: HarmonyTokenizer,
    state: State,
    messages: Vec<Message>,
    problem: Option<TurnError>,
}

impl TurnParser {
    pub fn new(tokenizer: &HarmonyTokenizer) -> Self {
        let state = State::Header { opened: false, bytes: Vec::new(), has_invalid_token: false };
        Self { tokenizer: tokenizer.clone(), state, messages: Vec::new(), problem: None }
    }

    /// Returns the problem so far, as in [`ParsedCompletion::problem`].
    pub fn error(&self) -> Option<&TurnError> {
        self.problem.as_ref()
    }

    /// Returns the call to answer, after a step that was [`TurnEnd::Called`].
    pub fn call(&self) -> Option<&Message> {
        match self.state {
            State::Over(TurnEnd::Called) => self.messages.last(),
            _ => None,
        }
    }

    /// Reads the next token. Every token after the end of the turn is [`TurnError::TextAfterEnd`].
    pub fn push(&mut self, token: u32) -> TurnStep {
        let control = self.tokenizer.control_tokens();
        match std::mem::replace(&mut self.state, State::Between) {
            State::Over(TurnEnd::Malformed) => self.over(TurnEnd::Malformed),
            State::Over(_) => self.malformed(TurnError::TextAfterEnd),
            State::Between if token == control.start => {
                self.within(State::Header { opened: true, bytes: Vec::new(), has_invalid_token: false })
            }
            State::Between => {
                self.keep_text(self.tokenizer.decode(&[token]).as_bytes());
                self.malformed(TurnError::TextAfterEnd)
            }
            State::Header { opened: false, bytes, has_invalid_token: false }
                if token == control.start && bytes.is_empty() =>
            {
                self.within(State::Header { opened: true, bytes, has_invalid_token: false })
            }
            State::Header { opened, bytes, has_invalid_token } if token == control.message => {
                self.within(match read_header(opened, &bytes, has_invalid_token) {
                    Ok(header) => State::Content { header, bytes: Vec::new(), problem: None },
                    Err(problem) => State::Unreadable { bytes, problem },
                })
            }
            State::Header { bytes, .. } if control.is_message_end(token) => {
                self.keep_text(&bytes);
                self.malformed(TurnError::UnfinishedHeader)
            }
            State::Unreadable { bytes, problem } if control.is_message_end(token) => {
                self.keep_text(&bytes);
                self.malformed(problem)
            }
            State::Content { header, bytes, problem } if control.is_message_end(token) => {
                self.close(token, header, &bytes, problem)
            }
            mut state => {
                self.append(token, &mut state);
                self.within(state)
            }
        }
    }

    /// Adds a token's bytes to a header or a content, and notes tokens that are invalid there.
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
            State::Content { bytes, problem, .. } => {
                if special {
                    *problem = Some(TurnError::SpecialTokenInContent);
                } else if text.is_none() {
                    problem.get_or_insert(TurnError::InvalidUtf8);
                }
                bytes
            }
            State::Unreadable { bytes, .. } => bytes,
            State::Between | State::Over(_) => return,
        };
        bytes.extend_from_slice(text.unwrap_or("\u{fffd}".as_bytes()));
    }

    /// Returns the turn so far.
    pub fn finish(mut self) -> ParsedCompletion {
        let end = match std::mem::replace(&mut self.state, State::Between) {
            State::Over(end) => end,
            state => {
                let unfinished = match state {
                    State::Content { header, bytes, .. } => Some((header, bytes)),
                    State::Header { bytes, .. } | State::Unreadable { bytes, .. } => {
                        Some((Header::new(Role::Assistant), bytes)).filter(|(_, bytes)| !bytes.is_empty())
                    }
                    State::Between | State::Over(_) => None,
                };
                let message = |(header, bytes): (Header, Vec<u8>)| header.message(lossy(&bytes));
                self.messages.extend(unfinished.map(message));
                self.problem = Some(TurnError::Truncated);
                TurnEnd::Truncated
            }
        };
        ParsedCompletion { messages: self.messages, end, problem: self.problem }
    }

    /// Closes a message with a valid header.
    fn close(&mut self, token: u32, header: Header, bytes: &[u8], problem: Option<TurnError>) -> TurnStep {
        let control = self.tokenizer.control_tokens();
        let invalid = std::str::from_utf8(bytes).is_err().then_some(TurnError::InvalidUtf8);
        let error = problem.or(invalid);
        let content = lossy(bytes);
        let blank = content.trim().is_empty();
        let recipient = header.recipient.clone();
        self.messages.push(header.message(content));
        match recipient {
            Some(recipient) if token != control.call => {
                self.malformed(TurnError::CallNotClosed { recipient })
            }
            Some(recipient) if blank => self.malformed(TurnError::EmptyCall { recipient }),
            Some(_) => match error {
                Some(problem) => self.malformed(problem),
                None => self.over(TurnEnd::Called),
            },
            None if token == control.call => self.malformed(TurnError::CallWithoutRecipient),
            None => {
                self.problem = self.problem.take().or(error);
                if token == control.ret { self.over(TurnEnd::Returned) } else { TurnStep::MessageEnded }
            }
        }
    }

    fn keep_text(&mut self, bytes: &[u8]) {
        self.messages.push(Message::new(Role::Assistant, lossy(bytes)));
    }

    fn within(&mut self, state: State) -> TurnStep {
        self.state = state;
        TurnStep::Within
    }

    fn malformed(&mut self, problem: TurnError) -> TurnStep {
        self.problem = Some(problem);
        self.over(TurnEnd::Malformed)
    }

    fn over(&mut self, end: TurnEnd) -> TurnStep {
        self.state = State::Over(end);
        TurnStep::Over(end)
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reads a header: one optional `to=NAME` and one optional content type, in any order around the channel.
fn read_header(opened: bool, bytes: &[u8], has_invalid_token: bool) -> Result<Header, TurnError> {
    let text = lossy(bytes);
    let malformed = |leftover: &str| TurnError::MalformedHeader { leftover: leftover.trim().to_string() };
    if has_invalid_token || std::str::from_utf8(bytes).is_err() {
        return Err(malformed(&text));
    }
    let words = header::split(&text).map_err(|_| malformed(&text))?;
    let mut header = Header { channel: words.channel, ..Header::new(Role::Assistant) };
    let mut rest = words.rest.into_iter();
    if opened {
        let author = rest.next().unwrap_or_default();
        if author != Role::Assistant.name() {
            return Err(TurnError::WrongAuthor { author });
        }
    }
    for word in rest {
        let known = match word.strip_prefix("to=") {
            Some(name) => header::is_tool_name(name) && header.recipient.replace(name.to_string()).is_none(),
            None => header::is_content_type(&word) && header.content_type.replace(word.clone()).is_none(),
        };
        if !known {
            return Err(malformed(&word));
        }
    }
    // A content type alone is invalid: it must qualify a channel or a call.
    match &header {
        Header { recipient: None, channel: None, content_type: Some(word), .. } => Err(malformed(word)),
        _ => Ok(header),
    }
}
