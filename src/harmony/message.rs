//! A message of a Harmony conversation.

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, EnumString, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// Returns the role's name in headers and files.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the role that is called `name`, if there is one.
    pub fn from_name(name: &str) -> Option<Role> {
        name.parse().ok()
    }
}

/// One message: header fields and text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    /// The author's name. For [`Role::Tool`] it is the tool's name, such as `python` or `functions.lookup`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipient: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The text between `<|message|>` and the closing token. It never contains control tokens.
    pub content: String,
    /// Byte ranges of the content that were inserted into the model's answer: outputs of programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inserted: Vec<(usize, usize)>,
    /// Whether supervised training leaves this message of the assistant out of the loss.
    #[serde(skip)]
    pub no_loss: bool,
    /// Whether it begins a turn of its own even after another message of the assistant.
    #[serde(skip)]
    pub begins_turn: bool,
}

impl Message {
    /// Makes a message of `role` with only text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            name: None,
            recipient: None,
            channel: None,
            content_type: None,
            content: content.into(),
            inserted: vec![],
            no_loss: false,
            begins_turn: false,
        }
    }

    /// Makes a user's message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content)
    }

    /// Makes an assistant's message on `channel`.
    pub fn assistant(channel: &str, content: impl Into<String>) -> Self {
        Self { channel: Some(channel.into()), ..Self::new(Role::Assistant, content) }
    }

    /// Returns whether the message is a thought: text on the channel `analysis` that is no call or reply.
    pub fn is_thought(&self) -> bool {
        self.channel.as_deref() == Some("analysis") && self.recipient.is_none()
    }

    /// Makes an assistant's call to a tool, such as `python`, on `channel`.
    pub fn call(recipient: &str, channel: &str, content: impl Into<String>) -> Self {
        Self { recipient: Some(recipient.into()), ..Self::assistant(channel, content) }
    }

    /// Makes a tool's reply to the assistant.
    pub fn tool(name: &str, channel: Option<&str>, content: impl Into<String>) -> Self {
        Self {
            name: Some(name.into()),
            recipient: Some("assistant".into()),
            channel: channel.map(Into::into),
            ..Self::new(Role::Tool, content)
        }
    }
}
