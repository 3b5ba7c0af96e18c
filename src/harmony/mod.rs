//! The Harmony chat format: messages, special tokens, rendering, streaming parser.
//!
//! All functions work with any vocabulary that has the control tokens, such as the small
//! [`embedded`](HarmonyTokenizer::from_embedded) one. Rendering and [`StreamParser`] agree with
//! openai-harmony 0.0.8 ("the reference"). [`TurnParser`] is for rollouts. Text from a user, a tool or a
//! model is always tokenised as ordinary text, so it can never become a control token.

mod content;
mod embedded_vocabulary;
mod header;
mod message;
mod parser;
mod render;
mod tokenizer;
mod turn;
mod typescript;

pub(crate) use content::has_no_loss;
pub use content::{
    ChannelConfig, DeveloperContent, PYTHON_DESCRIPTION, ReasoningEffort, SystemContent, SystemSettings,
    ToolDescription, ToolNamespace, messages_from_json,
};
pub use message::{Message, Role};
pub use parser::{ParseMode, StreamParser};
pub use render::{MaskedTokens, RenderOptions};
pub use tokenizer::{ControlTokens, HarmonyTokenizer};
pub use turn::{ParsedCompletion, TurnEnd, TurnError, TurnParser, TurnStep};
