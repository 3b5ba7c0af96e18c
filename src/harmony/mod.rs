//! The Harmony dialogue format: messages, special tokens, rendering, streaming parse.

mod message;

pub use message::{Message, Role};
