//! Messages to tokens.

use super::header::{CONSTRAIN, is_content_type, is_tool_name, is_word};
use super::message::{Message, Role};
use super::tokenizer::HarmonyTokenizer;
use crate::bad_input;
use anyhow::Result;

/// How a conversation is rendered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RenderOptions {
    /// Leave out analysis before the first final message once the last assistant message is final, as a
    /// chat does between turns. Off for trajectories: what was sampled stays.
    pub auto_drop_analysis: bool,
}

/// A rendered conversation and which of its tokens the assistant writes; both of one length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedTokens {
    pub tokens: Vec<u32>,
    /// True for what the assistant samples: everything after the `<|start|>assistant` that opens its turn,
    /// up to and including the closing token of the turn's last message.
    pub mask: Vec<bool>,
}

impl HarmonyTokenizer {
    /// One message from `<|start|>` to its closing token: `<|call|>` for an assistant's message with a
    /// recipient, otherwise `<|end|>`. Used as it is to insert a tool's reply into a trajectory.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when a header field could be read as another header: a tool without
    /// a name or named as a role, or a field with white space or a control token's spelling.
    pub fn render_message(&self, message: &Message) -> Result<Vec<u32>> {
        check_header(message)?;
        let control = self.control();
        let mut tokens = vec![control.start];
        match (message.role, &message.name) {
            (Role::Tool, Some(name)) => tokens.extend(self.encode_header(name)),
            (role, name) => {
                tokens.extend(self.encode_header(role.name()));
                tokens.extend(name.iter().flat_map(|name| self.encode_header(&format!(":{name}"))));
            }
        }
        if let Some(recipient) = message.recipient.as_deref().filter(|name| *name != "all") {
            tokens.extend(self.encode_header(&format!(" to={recipient}")));
        }
        if let Some(channel) = &message.channel {
            tokens.push(control.channel);
            tokens.extend(self.encode_header(channel));
        }
        if let Some(content_type) = &message.content_type {
            self.push_content_type(content_type, &mut tokens);
        }
        tokens.push(control.message);
        tokens.extend(self.encode_text(&message.content));
        let call = message.role == Role::Assistant && message.recipient.is_some();
        tokens.push(if call { control.call } else { control.end });
        Ok(tokens)
    }

    /// A vocabulary without `<|constrain|>` writes the type alone: the marker carries no meaning of its own.
    fn push_content_type(&self, content_type: &str, tokens: &mut Vec<u32>) {
        match (content_type.strip_prefix(CONSTRAIN), self.control().constrain) {
            (Some(rest), Some(constrain)) => {
                tokens.extend(self.encode_header(" "));
                tokens.push(constrain);
                if !rest.is_empty() {
                    tokens.extend(self.encode_header(rest));
                }
            }
            (rest, _) => tokens.extend(self.encode_header(&format!(" {}", rest.unwrap_or(content_type)))),
        }
    }

    /// A conversation, message by message. Errors as [`Self::render_message`].
    pub fn render_conversation(&self, messages: &[Message], options: RenderOptions) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for message in kept(messages, options) {
            tokens.extend(self.render_message(message)?);
        }
        Ok(tokens)
    }

    /// A conversation and the opening of `next`'s message. Errors as [`Self::render_message`].
    pub fn render_conversation_for_completion(
        &self,
        messages: &[Message],
        next: Role,
        options: RenderOptions,
    ) -> Result<Vec<u32>> {
        let mut tokens = self.render_conversation(messages, options)?;
        tokens.extend(self.opening(next));
        Ok(tokens)
    }

    /// `<|start|>` and the role: what stands before a sampled turn.
    pub fn opening(&self, role: Role) -> Vec<u32> {
        let mut tokens = vec![self.control().start];
        tokens.extend(self.encode_header(role.name()));
        tokens
    }

    /// A conversation to learn from: a last assistant message on `final` ends in `<|return|>`.
    ///
    /// Between two assistant messages the second `<|start|>assistant` counts as sampled, unless a call came
    /// before it: a call ends the turn, and what follows is inserted. Errors as [`Self::render_message`].
    pub fn render_conversation_for_training(
        &self,
        messages: &[Message],
        options: RenderOptions,
    ) -> Result<MaskedTokens> {
        let opening = self.opening(Role::Assistant).len();
        let (mut tokens, mut mask) = (Vec::new(), Vec::new());
        let mut turn_open = false;
        for message in kept(messages, options) {
            let rendered = self.render_message(message)?;
            let sampled = message.role == Role::Assistant;
            mask.extend((0..rendered.len()).map(|i| sampled && (turn_open || i >= opening)));
            tokens.extend(rendered);
            turn_open = sampled && message.recipient.is_none();
        }
        if let (Some(message), Some(token)) = (messages.last(), tokens.last_mut())
            && is_final_answer(message)
        {
            *token = self.control().ret;
        }
        Ok(MaskedTokens { tokens, mask })
    }
}

fn is_final(message: &Message) -> bool {
    message.channel.as_deref() == Some("final")
}

fn is_final_answer(message: &Message) -> bool {
    message.role == Role::Assistant && is_final(message)
}

fn kept(messages: &[Message], options: RenderOptions) -> impl Iterator<Item = &Message> {
    let answered = messages.iter().rfind(|m| m.role == Role::Assistant).is_some_and(is_final);
    let first_final = messages.iter().position(is_final).unwrap_or(0);
    let dropped_until = if options.auto_drop_analysis && answered { first_final } else { 0 };
    let drop = move |i: usize, m: &Message| i < dropped_until && m.channel.as_deref() == Some("analysis");
    messages.iter().enumerate().filter(move |(i, m)| !drop(*i, m)).map(|(_, m)| m)
}

/// Header fields come from tasks, tools and models; none may add words to a header or speak as another role.
fn check_header(message: &Message) -> Result<()> {
    let fields = [
        ("name", &message.name, is_word as fn(&str) -> bool),
        ("recipient", &message.recipient, is_word),
        ("channel", &message.channel, is_word),
        ("content_type", &message.content_type, is_content_type),
    ];
    for (field, value, valid) in fields {
        let Some(value) = value.as_deref().filter(|value| !valid(value)) else { continue };
        return Err(bad_input!("message header: {field} {value:?} must be one word without control tokens"));
    }
    match message.name.as_deref() {
        None if message.role == Role::Tool => {
            Err(bad_input!("message header: a tool message needs the tool's name"))
        }
        Some(name) if message.role == Role::Tool && !is_tool_name(name) => Err(bad_input!(
            "message header: a tool cannot be named {name:?}, which is a role; give it another name"
        )),
        _ => Ok(()),
    }
}
