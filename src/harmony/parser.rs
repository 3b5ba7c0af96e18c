//! A streaming parser from tokens to messages, with the rules and errors of the `openai-harmony` package.
//!
//! Rollouts parse the model's own turn with [`TurnParser`](super::TurnParser), which never fails.

use super::header::{self, Header};
use super::message::{Message, Role};
use super::tokenizer::HarmonyTokenizer;
use anyhow::{Context, Result, bail};

/// How a message that closes before `<|message|>` is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParseMode {
    /// The closing token becomes part of the header.
    Strict,
    /// If the author is known, all words of the header except the channel become the message's content.
    Lenient,
}

enum State {
    ExpectStart,
    Header { bytes: Vec<u8> },
    Content { header: Header, bytes: Vec<u8> },
}

/// Parses a completion or a whole conversation.
pub struct StreamParser {
    tokenizer: HarmonyTokenizer,
    mode: ParseMode,
    /// Author of the first message, if the caller gave it. The headers of later messages name their authors.
    role: Option<Role>,
    state: State,
    messages: Vec<Message>,
}

impl StreamParser {
    /// Makes a parser. With a `role`, the first token is the one after `<|start|>` and that role. Without a
    /// role, the first token is `<|start|>`.
    pub fn new(tokenizer: &HarmonyTokenizer, role: Option<Role>, mode: ParseMode) -> Self {
        let state = if role.is_some() { State::Header { bytes: Vec::new() } } else { State::ExpectStart };
        Self { tokenizer: tokenizer.clone(), mode, role, state, messages: Vec::new() }
    }

    /// Reads the next token.
    ///
    /// # Errors
    /// When no message can begin with the token, and when the token ends an invalid header. The parser then
    /// waits for the next `<|start|>`.
    pub fn push(&mut self, token: u32) -> Result<()> {
        let control = self.tokenizer.control_tokens();
        match &mut self.state {
            State::ExpectStart if token == control.start => self.state = State::Header { bytes: Vec::new() },
            State::ExpectStart => {
                bail!("unexpected token {token}; expected the start token {}", control.start)
            }
            State::Header { bytes } if token == control.message => {
                let bytes = std::mem::take(bytes);
                self.state = State::ExpectStart;
                let text = String::from_utf8(bytes).context("the message header is not UTF-8")?;
                let header = header::read(&text, self.role.take())?;
                self.state = State::Content { header, bytes: Vec::new() };
            }
            State::Header { bytes } if self.mode == ParseMode::Lenient && control.is_message_end(token) => {
                let bytes = std::mem::take(bytes);
                self.state = State::ExpectStart;
                if let Some(role) = self.role.take().filter(|_| !bytes.is_empty()) {
                    let text = String::from_utf8(bytes).context("the message header is not UTF-8")?;
                    self.messages.push(header::read_partial(&text, role)?);
                }
            }
            State::Content { .. } if control.is_message_end(token) => self.end_message(),
            State::Header { bytes } | State::Content { bytes, .. } => {
                bytes.extend_from_slice(self.tokenizer.token_bytes(token).unwrap_or("\u{fffd}".as_bytes()));
            }
        }
        Ok(())
    }

    /// Returns all messages, including a last one whose content has begun.
    ///
    /// # Errors
    /// When the tokens end within a header.
    pub fn finish(mut self) -> Result<Vec<Message>> {
        if let State::Header { .. } = self.state {
            bail!("the tokens end within a message header");
        }
        self.end_message();
        Ok(self.messages)
    }

    fn end_message(&mut self) {
        if let State::Content { header, bytes } = std::mem::replace(&mut self.state, State::ExpectStart) {
            self.messages.push(header.message(String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
}
