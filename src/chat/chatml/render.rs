//! Rendering of messages as tokens.

use super::system::CALLS_GUIDE;
use super::{ANALYSIS, CALL_END, ChatMl, PYTHON_CALL, THINK, TOOL_CALL, TOOL_RESPONSE, json};
use crate::chat::PYTHON;
use crate::harmony::{MaskedTokens, Message, Role};

impl ChatMl {
    /// Renders a conversation and the start of the assistant's turn.
    pub fn render_prompt(&self, messages: &[Message]) -> Vec<u32> {
        let mut out = Writer::new(self);
        out.conversation(messages);
        out.start_answer();
        out.finish().tokens
    }

    /// Renders the text after a sampled turn: the line break that ends the turn, `messages`, and the start of
    /// the assistant's next turn.
    pub fn render_continuation(&self, messages: &[Message]) -> Vec<u32> {
        let mut out = Writer::new(self);
        out.text("\n");
        out.conversation(messages);
        out.start_answer();
        out.finish().tokens
    }

    /// Renders a conversation for training. The mask is true for the assistant's text and the `<|im_end|>`
    /// after it. With thinking off, each turn after the last query begins with an empty thought, as sampled
    /// turns do; Qwen3's template writes it before the last turn alone.
    pub fn render_training(&self, messages: &[Message]) -> MaskedTokens {
        let mut out = Writer::new(self);
        out.opens_turns = self.thinking == Some(false);
        out.conversation(messages);
        // The line break after the last turn is not part of it.
        out.pending.clear();
        out.finish()
    }
}

/// Splits messages into turns. Consecutive replies form one turn, and so do an assistant's calls with the
/// text before them.
fn turns(messages: &[Message]) -> impl Iterator<Item = &[Message]> {
    messages.chunk_by(|a, b| match (a.role, b.role) {
        (Role::Tool, Role::Tool) => true,
        (Role::Assistant, Role::Assistant) if a.recipient.is_some() => b.recipient.is_some(),
        (Role::Assistant, Role::Assistant) => a.channel.as_deref().is_some_and(|channel| channel != "final"),
        _ => false,
    })
}

/// Whether a message is a user's, and not a reply of a tool that its text spells.
fn is_query(message: &Message) -> bool {
    let [open, close] = TOOL_RESPONSE;
    message.role == Role::User && !(message.content.starts_with(open) && message.content.ends_with(close))
}

/// The place of a turn in its conversation.
#[derive(Clone, Copy)]
enum Place {
    BeforeQuery,
    AfterQuery,
    /// After the last query, at the end.
    Last,
}

struct Writer<'a> {
    chat: &'a ChatMl,
    tokens: Vec<u32>,
    mask: Vec<bool>,
    sampled: bool,
    /// Whether every turn after the last query begins with a thought.
    opens_turns: bool,
    /// Text not tokenised yet: adjacent texts are tokenised as one.
    pending: String,
}

impl<'a> Writer<'a> {
    fn new(chat: &'a ChatMl) -> Self {
        Self {
            chat,
            tokens: vec![],
            mask: vec![],
            sampled: false,
            opens_turns: false,
            pending: String::new(),
        }
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

    /// Writes a template word: as one token if the vocabulary has it, unless merges make that token anyway.
    fn template_word(&mut self, word: &str) {
        let vocabulary = &self.chat.vocabulary;
        let whole = vocabulary.added_id(word).or_else(|| {
            let id = vocabulary.entry_id(word)?;
            (vocabulary.encode_text(word) != [id]).then_some(id)
        });
        match whole {
            Some(id) => self.token(id),
            None => self.text(word),
        }
    }

    fn start_turn(&mut self, role: Role) {
        self.token(self.chat.im_start);
        self.template_word(role.name());
        self.text("\n");
    }

    /// Writes a conversation, turn by turn.
    fn conversation(&mut self, messages: &[Message]) {
        let query = messages.iter().rposition(is_query).unwrap_or(messages.len());
        let mut start = 0;
        for turn in turns(messages) {
            let place = match (start > query, start + turn.len() == messages.len()) {
                (false, _) => Place::BeforeQuery,
                (true, false) => Place::AfterQuery,
                (true, true) => Place::Last,
            };
            self.turn(turn, place);
            start += turn.len();
        }
    }

    /// Writes the start of a turn to sample.
    fn start_answer(&mut self) {
        self.start_turn(Role::Assistant);
        if self.chat.thinking == Some(false) {
            self.thought("");
        }
    }

    fn thought(&mut self, thought: &str) {
        self.template_word(THINK[0]);
        self.text(&format!("\n{}\n", thought.trim_matches('\n')));
        self.template_word(THINK[1]);
        self.text("\n\n");
    }

    /// Writes an assistant's turn after its start. Qwen3's thoughts are written after the last query, and an
    /// empty one at the end of the conversation. The model samples no empty thought when thinking is off.
    fn answer(&mut self, turn: &[Message], place: Place) {
        let thinks = self.chat.has_thoughts();
        // A call may be on the channel `analysis` too.
        let is_thought = |message: &&Message| {
            thinks && message.recipient.is_none() && message.channel.as_deref() == Some(ANALYSIS)
        };
        let thoughts: Vec<&str> =
            turn.iter().filter(is_thought).map(|message| message.content.as_str()).collect();
        let thought = thoughts.join("\n");
        let is_shown = match place {
            Place::BeforeQuery => false,
            Place::AfterQuery => self.opens_turns || !thought.is_empty(),
            Place::Last => thinks,
        };
        self.flush();
        self.sampled = self.chat.thinking != Some(false) || !thought.is_empty() || !is_shown;
        if is_shown {
            self.thought(&thought);
            self.flush();
        }
        self.sampled = true;
        for (i, message) in turn.iter().filter(|message| !is_thought(message)).enumerate() {
            self.text(if i == 0 { "" } else { "\n" });
            match &message.recipient {
                Some(name) => self.call(name, &message.content),
                None if i == 0 && is_shown => self.text(message.content.trim_start_matches('\n')),
                None => self.text(&message.content),
            }
        }
    }

    /// Writes one turn and the line break after it.
    fn turn(&mut self, turn: &[Message], place: Place) {
        let Some(first) = turn.first() else { return };
        match first.role {
            Role::Assistant => {
                self.start_turn(Role::Assistant);
                self.answer(turn, place);
            }
            Role::Tool => {
                self.token(self.chat.im_start);
                self.template_word(Role::User.name());
                for reply in turn {
                    self.text("\n");
                    self.template_word(TOOL_RESPONSE[0]);
                    self.text(&format!("\n{}\n", reply.content));
                    self.template_word(TOOL_RESPONSE[1]);
                }
            }
            role => {
                // ChatML has no developer role: its messages become system messages.
                self.start_turn(if role == Role::Developer { Role::System } else { role });
                match first.content.strip_suffix(CALLS_GUIDE) {
                    Some(before) if role == Role::System => {
                        self.text(before);
                        self.calls_guide();
                    }
                    _ => self.text(&first.content),
                }
            }
        }
        self.token(self.chat.im_end);
        self.sampled = false;
        self.text("\n");
    }

    /// Writes [`CALLS_GUIDE`] with its tags as template words.
    fn calls_guide(&mut self) {
        let mut rest = CALLS_GUIDE;
        while let Some((at, tag)) = TOOL_CALL.iter().filter_map(|&tag| Some((rest.find(tag)?, tag))).min() {
            self.text(&rest[..at]);
            self.template_word(tag);
            rest = &rest[at + tag.len()..];
        }
        self.text(rest);
    }

    /// Writes a call: the code of a call to the Python tool, otherwise a function's arguments as JSON.
    fn call(&mut self, name: &str, content: &str) {
        self.template_word(TOOL_CALL[0]);
        self.text("\n");
        if name == PYTHON {
            self.template_word(PYTHON_CALL);
            self.text(&json::escape(content));
            self.template_word(CALL_END);
        } else {
            self.text(&format!("{{\"name\": \"{name}\", \"arguments\": {content}}}"));
        }
        self.text("\n");
        self.template_word(TOOL_CALL[1]);
    }
}
