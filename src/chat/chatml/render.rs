//! Messages to tokens.

use super::{CALL_END, ChatMl, PYTHON_CALL, TOOL_CALL, TOOL_RESPONSE, json};
use crate::chat::PYTHON;
use crate::harmony::{MaskedTokens, Message, Role};

impl ChatMl {
    /// A conversation and the opening of the assistant's turn.
    pub fn prompt(&self, messages: &[Message]) -> Vec<u32> {
        let mut out = Writer::new(self);
        turns(messages).for_each(|turn| out.turn(turn));
        out.opening(Role::Assistant);
        out.finish().tokens
    }

    /// What follows a sampled turn: the line break that ends it, `messages`, and the next opening.
    pub fn continuation(&self, messages: &[Message]) -> Vec<u32> {
        let mut out = Writer::new(self);
        out.text("\n");
        turns(messages).for_each(|turn| out.turn(turn));
        out.opening(Role::Assistant);
        out.finish().tokens
    }

    /// A conversation to learn from: what the assistant wrote and the `<|im_end|>` that closes it count as sampled.
    pub fn training(&self, messages: &[Message]) -> MaskedTokens {
        let mut out = Writer::new(self);
        turns(messages).for_each(|turn| out.turn(turn));
        // The line break behind the last turn predicts nothing.
        out.pending.clear();
        out.finish()
    }
}

/// The messages of each turn: replies that follow one another are one, and so are an assistant's calls with the text
/// before them.
fn turns(messages: &[Message]) -> impl Iterator<Item = &[Message]> {
    messages.chunk_by(|a, b| match (a.role, b.role) {
        (Role::Tool, Role::Tool) => true,
        (Role::Assistant, Role::Assistant) if a.recipient.is_some() => b.recipient.is_some(),
        (Role::Assistant, Role::Assistant) => a.channel.as_deref().is_some_and(|channel| channel != "final"),
        _ => false,
    })
}

struct Writer<'a> {
    chat: &'a ChatMl,
    tokens: Vec<u32>,
    mask: Vec<bool>,
    sampled: bool,
    /// Text that is not yet tokenised: neighbours are tokenised as one.
    pending: String,
}

impl<'a> Writer<'a> {
    fn new(chat: &'a ChatMl) -> Self {
        Self { chat, tokens: vec![], mask: vec![], sampled: false, pending: String::new() }
    }

    fn finish(mut self) -> MaskedTokens {
        self.flush();
        MaskedTokens { tokens: self.tokens, mask: self.mask }
    }

    fn flush(&mut self) {
        let text = std::mem::take(&mut self.pending);
        self.tokens.extend(self.chat.vocabulary.encode_text(&text));
        self.mask.resize(self.tokens.len(), self.sampled);
    }

    fn text(&mut self, text: &str) {
        self.pending.push_str(text);
    }

    fn token(&mut self, id: u32) {
        self.flush();
        self.tokens.push(id);
        self.mask.push(self.sampled);
    }

    /// A piece of the frame: the token of that spelling, where there is one that merges do not make anyway.
    fn frame(&mut self, piece: &str) {
        let vocabulary = &self.chat.vocabulary;
        let whole = vocabulary.added_id(piece).or_else(|| {
            let id = vocabulary.entry(piece)?;
            (vocabulary.encode_text(piece) != [id]).then_some(id)
        });
        match whole {
            Some(id) => self.token(id),
            None => self.text(piece),
        }
    }

    fn opening(&mut self, role: Role) {
        self.token(self.chat.im_start);
        self.frame(role.name());
        self.text("\n");
    }

    /// One turn, to the line break behind it.
    fn turn(&mut self, turn: &[Message]) {
        let Some(first) = turn.first() else { return };
        match first.role {
            Role::Assistant => {
                self.opening(Role::Assistant);
                self.flush();
                self.sampled = true;
                for (i, message) in turn.iter().enumerate() {
                    self.text(if i == 0 { "" } else { "\n" });
                    match &message.recipient {
                        Some(name) => self.call(name, &message.content),
                        None => self.text(&message.content),
                    }
                }
            }
            Role::Tool => {
                self.token(self.chat.im_start);
                self.frame(Role::User.name());
                for reply in turn {
                    self.text("\n");
                    self.frame(TOOL_RESPONSE[0]);
                    self.text(&format!("\n{}\n", reply.content));
                    self.frame(TOOL_RESPONSE[1]);
                }
            }
            role => {
                // There is no developer here: what one says is the system's.
                self.opening(if role == Role::Developer { Role::System } else { role });
                self.text(&first.content);
            }
        }
        self.token(self.chat.im_end);
        self.sampled = false;
        self.text("\n");
    }

    /// A call: the code of one to the Python tool, else a function's arguments as JSON.
    fn call(&mut self, name: &str, content: &str) {
        self.frame(TOOL_CALL[0]);
        self.text("\n");
        if name == PYTHON {
            self.frame(PYTHON_CALL);
            self.text(&json::escaped(content));
            self.frame(CALL_END);
        } else {
            self.text(&format!("{{\"name\": \"{name}\", \"arguments\": {content}}}"));
        }
        self.text("\n");
        self.frame(TOOL_CALL[1]);
    }
}
