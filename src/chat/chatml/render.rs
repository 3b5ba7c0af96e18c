//! Rendering of messages as tokens.

use super::{ANALYSIS, CALL_END, ChatMl, PYTHON_CALL, THINK, TOOL_CALL, TOOL_RESPONSE, json};
use crate::chat::{NextTokens, PYTHON};
use crate::harmony::{MaskedTokens, Message, Role};
use anyhow::Result;

impl ChatMl {
    /// Renders a conversation and the start of the assistant's turn.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::encode_text`](crate::vocabulary::Vocabulary::encode_text).
    pub fn render_prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        if let Some(template) = &self.template {
            return self.encode(&template.text(messages, true)?);
        }
        self.render_after("", messages)
    }

    /// Renders the text after a sampled turn: the line break after the turn, `messages`, and the start of the
    /// assistant's next turn.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::encode_text`](crate::vocabulary::Vocabulary::encode_text).
    pub fn render_continuation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.render_after("\n", messages)
    }

    fn render_after(&self, text: &str, messages: &[Message]) -> Result<Vec<u32>> {
        let mut out = Writer::new(self);
        out.text(text);
        out.conversation(messages);
        out.start_answer();
        Ok(out.finish()?.tokens)
    }

    /// Renders what follows a sampled turn, the last of `before`: `messages`, and the start of the next turn
    /// of the assistant.
    ///
    /// # Errors
    /// Those of [`Self::render_prompt`].
    pub fn render_next(&self, before: &[Message], messages: &[Message]) -> Result<NextTokens> {
        match &self.template {
            Some(template) => self.template_continuation(template, before, messages),
            None => self.render_continuation(messages).map(NextTokens::Appended),
        }
    }

    /// Renders a conversation for training. The mask is true for the assistant's text and the `<|im_end|>`
    /// after it, except in turns with [`Message::no_loss`]. With thinking off, each turn after the last user
    /// message begins with an empty thought, as sampled turns do. Qwen3's template writes an empty thought
    /// only in the last turn.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::encode_text`](crate::vocabulary::Vocabulary::encode_text).
    pub fn render_training(&self, messages: &[Message]) -> Result<MaskedTokens> {
        if let Some(template) = &self.template {
            return self.template_training(template, messages);
        }
        let mut out = Writer::new(self);
        out.empty_thought_in_every_turn = self.thinking == Some(false);
        out.conversation(messages);
        // No line break follows the last turn.
        out.pending.clear();
        out.finish()
    }
}

/// Splits messages into turns. Consecutive tool replies form one turn. The assistant's text and the calls
/// after it also form one turn.
pub(super) fn turns(messages: &[Message]) -> impl Iterator<Item = &[Message]> {
    messages.chunk_by(|a, b| match (a.role, b.role) {
        (Role::Tool, Role::Tool) => true,
        (Role::Assistant, Role::Assistant) if b.begins_turn => false,
        (Role::Assistant, Role::Assistant) if a.recipient.is_some() => b.recipient.is_some(),
        (Role::Assistant, Role::Assistant) => a.channel.as_deref().is_some_and(|channel| channel != "final"),
        _ => false,
    })
}

/// Returns whether `message` is a query: a message that the user wrote. A user message that consists of a
/// `<tool_response>` block is a tool's reply instead.
fn is_query(message: &Message) -> bool {
    let [open, close] = TOOL_RESPONSE;
    message.role == Role::User && !(message.content.starts_with(open) && message.content.ends_with(close))
}

/// The position of a turn in its conversation.
#[derive(Clone, Copy)]
enum TurnPosition {
    BeforeQuery,
    AfterQuery,
    /// After the last query, at the end of the conversation.
    Last,
}

struct Writer<'a> {
    chat: &'a ChatMl,
    tokens: Vec<u32>,
    mask: Vec<bool>,
    sampled: bool,
    /// Whether every turn after the last query begins with a thought, even if the thought is empty.
    empty_thought_in_every_turn: bool,
    /// Text that is not tokenised yet: adjacent texts are joined and tokenised as one.
    pending: String,
    /// The first text that could not be tokenised.
    failure: Option<anyhow::Error>,
}

impl<'a> Writer<'a> {
    fn new(chat: &'a ChatMl) -> Self {
        Self {
            chat,
            tokens: vec![],
            mask: vec![],
            sampled: false,
            empty_thought_in_every_turn: false,
            pending: String::new(),
            failure: None,
        }
    }

    fn finish(mut self) -> Result<MaskedTokens> {
        self.flush();
        self.failure.map_or(Ok(MaskedTokens { tokens: self.tokens, mask: self.mask }), Err)
    }

    fn flush(&mut self) {
        match self.chat.vocabulary.encode_text(&std::mem::take(&mut self.pending)) {
            Ok(tokens) => self.tokens.extend(tokens),
            Err(error) => drop(self.failure.get_or_insert(error)),
        }
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

    /// Writes a template word. It becomes one token if it is an added token, or an entry of the vocabulary
    /// that merges do not produce.
    fn template_word(&mut self, word: &str) {
        let vocabulary = &self.chat.vocabulary;
        let whole = vocabulary.added_id(word).or_else(|| {
            let id = vocabulary.entry_id(word)?;
            (vocabulary.encode_text(word).ok()? != [id]).then_some(id)
        });
        if let Some(id) = whole { self.token(id) } else { self.text(word) }
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
            let position = match (start > query, start + turn.len() == messages.len()) {
                (false, _) => TurnPosition::BeforeQuery,
                (true, false) => TurnPosition::AfterQuery,
                (true, true) => TurnPosition::Last,
            };
            self.turn(turn, position);
            start += turn.len();
        }
    }

    /// Writes the start of a turn that the model will sample.
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

    /// Writes an assistant's turn after its start. Thoughts are written only after the last query. The last
    /// turn of the conversation gets an empty thought if it has none. With thinking off, the mask excludes an
    /// empty thought, because it is inserted.
    fn answer(&mut self, turn: &[Message], position: TurnPosition) {
        let thinks = self.chat.has_thoughts();
        // A message on the channel `analysis` may also be a tool call.
        let is_thought = |message: &&Message| {
            thinks && message.recipient.is_none() && message.channel.as_deref() == Some(ANALYSIS)
        };
        let thoughts: Vec<&str> =
            turn.iter().filter(is_thought).map(|message| message.content.as_str()).collect();
        let thought = thoughts.join("\n");
        let is_shown = match position {
            TurnPosition::BeforeQuery => false,
            TurnPosition::AfterQuery => self.empty_thought_in_every_turn || !thought.is_empty(),
            TurnPosition::Last => thinks,
        };
        let has_loss = turn.iter().all(|message| !message.no_loss);
        self.flush();
        self.sampled = has_loss && (self.chat.thinking != Some(false) || !thought.is_empty() || !is_shown);
        if is_shown {
            self.thought(&thought);
            self.flush();
        }
        self.sampled = has_loss;
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
    fn turn(&mut self, turn: &[Message], position: TurnPosition) {
        let Some(first) = turn.first() else { return };
        match first.role {
            Role::Assistant => {
                self.start_turn(Role::Assistant);
                self.answer(turn, position);
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
                self.text(&first.content);
            }
        }
        self.token(self.chat.im_end);
        self.sampled = false;
        self.text("\n");
    }

    /// Writes a tool call. `content` is the code for the Python tool, and JSON arguments for any other
    /// function.
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
