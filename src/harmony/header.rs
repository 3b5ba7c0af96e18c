//! The text between `<|start|>` and `<|message|>`: author, recipient, channel, content type.

use super::message::{Message, Role};
use anyhow::{Result, anyhow, bail, ensure};

const CHANNEL: &str = "<|channel|>";
/// The marker that starts the content type of constrained output.
pub(super) const CONSTRAIN: &str = "<|constrain|>";

/// Returns whether `text` is a valid header field: it has no white space and no spelling of a control token.
pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(char::is_whitespace) && !text.contains("<|")
}

/// Returns whether `text` is a content type: a word, the marker of constrained output, or a word after the
/// marker.
pub(super) fn is_content_type(text: &str) -> bool {
    let kind = text.strip_prefix(CONSTRAIN).unwrap_or(text);
    !text.is_empty() && (kind.is_empty() || is_word(kind))
}

/// Returns whether `text` is a valid tool name: a word whose part before the first `:` is not the name of
/// another role.
pub(super) fn is_tool_name(text: &str) -> bool {
    let author = text.split(':').next().unwrap_or(text);
    is_word(text) && Role::from_name(author).is_none_or(|role| role == Role::Tool)
}

/// A header's fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub role: Role,
    /// The tool's name.
    pub name: Option<String>,
    pub recipient: Option<String>,
    pub channel: Option<String>,
    pub content_type: Option<String>,
}

impl Header {
    pub(super) fn new(role: Role) -> Self {
        Self { role, name: None, recipient: None, channel: None, content_type: None }
    }

    pub(super) fn message(self, content: String) -> Message {
        let Header { role, name, recipient, channel, content_type } = self;
        Message { name, recipient, channel, content_type, ..Message::new(role, content) }
    }
}

/// A header's channel and its other words. `<|constrain|>` always begins a new word.
pub(super) struct HeaderWords {
    pub channel: Option<String>,
    pub rest: Vec<String>,
}

/// Splits a header into its channel and its other words.
///
/// # Errors
/// When a channel marker has no name after it.
pub(super) fn split(text: &str) -> Result<HeaderWords> {
    let (channel, rest) = match text.split_once(CHANNEL) {
        None => (None, text.to_string()),
        Some((before, after)) => {
            let end = after.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(after.len());
            let (name, after) = after.split_at(end);
            ensure!(!name.is_empty(), "the message header has a channel marker without a channel");
            (Some(name.to_string()), format!("{before}{after}"))
        }
    };
    let rest = rest.trim().replace(CONSTRAIN, &format!(" {CONSTRAIN}"));
    Ok(HeaderWords { channel, rest: rest.split_ascii_whitespace().map(String::from).collect() })
}

/// Splits a header that may name its channel several times.
///
/// # Errors
/// The errors of [`split`], and when the names differ.
pub(super) fn split_repeated(text: &str) -> Result<HeaderWords> {
    let mut words = split(text)?;
    while words.rest.iter().any(|word| word.contains(CHANNEL)) {
        let again = split(&words.rest.join(" "))?;
        ensure!(again.channel == words.channel, "the message header has several channels");
        words = again;
    }
    Ok(words)
}

/// Reads a header by the rules of openai-harmony. `role` is the author, if known.
///
/// The rule for a last word without `to=`: it is the content type if another word precedes it, otherwise it
/// is the recipient.
pub(super) fn read(text: &str, role: Option<Role>) -> Result<Header> {
    let (mut header, mut words) = read_author(text, role)?;
    let recipient_of = |word: &str| word.strip_prefix("to=").unwrap_or(word).to_string();
    if let Some(last) = words.pop() {
        if last.starts_with("to=") || words.is_empty() {
            header.recipient = Some(recipient_of(&last));
        } else {
            header.content_type = Some(last);
            header.recipient = words.pop().map(|word| recipient_of(&word));
        }
    }
    ensure!(words.is_empty(), "unexpected words remain in the message header: {:?}", words.join(" "));
    Ok(header)
}

/// Reads author and channel of a message that ends before `<|message|>`. The other words become its content.
pub(super) fn read_partial(text: &str, role: Role) -> Result<Message> {
    let (header, words) = read_author(text, Some(role))?;
    Ok(header.message(words.join(" ")))
}

fn read_author(text: &str, role: Option<Role>) -> Result<(Header, Vec<String>)> {
    let HeaderWords { channel, rest: mut words } = split(text)?;
    let mut name = None;
    let role = match role {
        Some(role) => role,
        None => {
            let first = words.first().ok_or_else(|| anyhow!("the message header has no role"))?;
            if let Some(role) = Role::from_name(first) {
                if role == Role::Tool {
                    name = Some(first.clone());
                }
                role
            } else if words.len() > 1 || first.starts_with("to=") {
                // An unknown author that names a recipient is a tool.
                name = Some(words.remove(0));
                Role::Tool
            } else {
                bail!("unknown role {first:?} in the message header")
            }
        }
    };
    if words.first().is_some_and(|word| word == role.name()) {
        words.remove(0);
    }
    Ok((Header { name, channel, ..Header::new(role) }, words))
}
