//! Rendering of messages as tokens.

use super::header::{CONSTRAIN, is_content_type, is_tool_name, is_word};
use super::message::{Message, Role};
use super::tokenizer::HarmonyTokenizer;
use crate::bad_input;
use anyhow::Result;

/// Options for rendering a conversation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RenderOptions {
    /// Whether to drop the analysis messages before the first final message. They are dropped only if the
    /// last assistant message is final. A chat drops them between turns. A trajectory keeps all sampled
    /// tokens, so this is false for a trajectory.
    pub auto_drop_analysis: bool,
}

/// A rendered conversation and the mask of the assistant's tokens. Both have the same length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedTokens {
    pub tokens: Vec<u32>,
    /// True for the tokens that the assistant samples. They begin after the `<|start|>assistant` of its turn
    /// and end with the closing token of the turn's last message.
    pub mask: Vec<bool>,
}

impl HarmonyTokenizer {
    /// Renders one message from `<|start|>` to its closing token. The closing token is `<|call|>` for an
    /// assistant's message with a recipient, otherwise `<|end|>`. Rollouts insert a tool's reply in this
    /// format.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) for a header field that could be read as another header: a tool
    /// without a name or with a role's name, or a field with white space or a control token's spelling. Also
    /// the errors of [`Vocabulary::encode_text`](crate::vocabulary::Vocabulary::encode_text).
    pub fn render_message(&self, message: &Message) -> Result<Vec<u32>> {
        check_header(message)?;
        let control = self.control_tokens();
        let mut tokens = vec![control.start];
        match (message.role, &message.name) {
            (Role::Tool, Some(name)) => tokens.extend(self.encode_header(name)?),
            (role, name) => {
                tokens.extend(self.encode_header(role.name())?);
                if let Some(name) = name {
                    tokens.extend(self.encode_header(&format!(":{name}"))?);
                }
            }
        }
        if let Some(recipient) = message.recipient.as_deref().filter(|name| *name != "all") {
            tokens.extend(self.encode_header(&format!(" to={recipient}"))?);
        }
        if let Some(channel) = &message.channel {
            tokens.push(control.channel);
            tokens.extend(self.encode_header(channel)?);
        }
        if let Some(content_type) = &message.content_type {
            self.push_content_type(content_type, &mut tokens)?;
        }
        tokens.push(control.message);
        tokens.extend(self.encode_text(&message.content)?);
        let call = message.role == Role::Assistant && message.recipient.is_some();
        tokens.push(if call { control.call } else { control.end });
        Ok(tokens)
    }

    /// Adds the content type. If the vocabulary has no `<|constrain|>`, only the type is written; the meaning
    /// is the same.
    fn push_content_type(&self, content_type: &str, tokens: &mut Vec<u32>) -> Result<()> {
        match (content_type.strip_prefix(CONSTRAIN), self.control_tokens().constrain) {
            (Some(rest), Some(constrain)) => {
                tokens.extend(self.encode_header(" ")?);
                tokens.push(constrain);
                if !rest.is_empty() {
                    tokens.extend(self.encode_header(rest)?);
                }
            }
            (rest, _) => tokens.extend(self.encode_header(&format!(" {}", rest.unwrap_or(content_type)))?),
        }
        Ok(())
    }

    /// Renders a conversation, message by message.
    ///
    /// # Errors
    /// The errors of [`Self::render_message`].
    pub fn render_conversation(&self, messages: &[Message], options: RenderOptions) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for message in select_messages(messages, options) {
            tokens.extend(self.render_message(message)?);
        }
        Ok(tokens)
    }

    /// Renders a conversation and the start of a message of role `next`.
    ///
    /// # Errors
    /// The errors of [`Self::render_message`].
    pub fn render_conversation_for_completion(
        &self,
        messages: &[Message],
        next: Role,
        options: RenderOptions,
    ) -> Result<Vec<u32>> {
        let mut tokens = self.render_conversation(messages, options)?;
        tokens.extend(self.turn_start(next)?);
        Ok(tokens)
    }

    /// Returns the tokens before a sampled turn: `<|start|>` and the role.
    ///
    /// # Errors
    /// The errors of [`Vocabulary::encode_text`](crate::vocabulary::Vocabulary::encode_text).
    pub fn turn_start(&self, role: Role) -> Result<Vec<u32>> {
        let mut tokens = vec![self.control_tokens().start];
        tokens.extend(self.encode_header(role.name())?);
        Ok(tokens)
    }

    /// Renders a conversation for training. If the last message is the assistant's and on `final`, it ends in
    /// `<|return|>`.
    ///
    /// Within one turn the model itself writes the next `<|start|>assistant`, so the mask is true there. A
    /// call ends the turn, so the `<|start|>assistant` after a call is inserted, and the mask is false. The
    /// mask is also false in messages with [`Message::no_loss`].
    ///
    /// # Errors
    /// The errors of [`Self::render_message`].
    pub fn render_conversation_for_training(
        &self,
        messages: &[Message],
        options: RenderOptions,
    ) -> Result<MaskedTokens> {
        let start = self.turn_start(Role::Assistant)?.len();
        let (mut tokens, mut mask) = (Vec::new(), Vec::new());
        let mut turn_open = false;
        for message in select_messages(messages, options) {
            let rendered = self.render_message(message)?;
            let sampled = message.role == Role::Assistant;
            let has_loss = sampled && !message.no_loss;
            mask.extend((0..rendered.len()).map(|i| has_loss && (turn_open || i >= start)));
            tokens.extend(rendered);
            turn_open = sampled && message.recipient.is_none();
        }
        if let (Some(message), Some(token)) = (messages.last(), tokens.last_mut())
            && message.role == Role::Assistant
            && is_final(message)
        {
            *token = self.control_tokens().return_;
        }
        Ok(MaskedTokens { tokens, mask })
    }
}

fn is_final(message: &Message) -> bool {
    message.channel.as_deref() == Some("final")
}

fn select_messages(messages: &[Message], options: RenderOptions) -> impl Iterator<Item = &Message> {
    let answered = messages.iter().rfind(|m| m.role == Role::Assistant).is_some_and(is_final);
    let first_final = messages.iter().position(is_final).unwrap_or(0);
    let dropped_until = if options.auto_drop_analysis && answered { first_final } else { 0 };
    let drop = move |i: usize, m: &Message| i < dropped_until && m.channel.as_deref() == Some("analysis");
    messages.iter().enumerate().filter(move |(i, m)| !drop(*i, m)).map(|(_, m)| m)
}

/// Checks the header fields, which come from tasks, tools and models. No field may add words to a header or
/// imitate another role.
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
