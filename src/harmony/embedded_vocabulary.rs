//! The embedded vocabulary: 272 tokens, without merges.
//!
//! | ids | tokens |
//! | --- | --- |
//! | 0–6 | `<\|pad\|> <\|start\|> <\|message\|> <\|channel\|> <\|end\|> <\|call\|> <\|return\|>` |
//! | 7–14 | the header words in [`WORDS`] |
//! | 15 | reserved |
//! | 16–271 | the bytes 0–255 |
//!
//! No merge produces the header words. Only the rendering of headers looks them up, as whole header parts. In
//! content, every byte is one token, so a text's length in tokens is its length in bytes.

use crate::vocabulary::embedded_json;

/// Special tokens, with ids from 0.
const SPECIAL: [&str; 7] =
    ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"];
/// Header words, with ids from 7.
const WORDS: [&str; 8] =
    ["user", "assistant", "python", "analysis", "commentary", "final", " to=python", " to=assistant"];

/// Returns the vocabulary as a Hugging Face `tokenizer.json`.
pub(super) fn tokenizer_json() -> Vec<u8> {
    embedded_json(&SPECIAL, &[], &WORDS)
}
