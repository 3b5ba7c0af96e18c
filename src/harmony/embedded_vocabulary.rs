//! The embedded vocabulary: 272 tokens, no merges, no download.
//!
//! | ids | what |
//! | --- | --- |
//! | 0–6 | `<\|pad\|> <\|start\|> <\|message\|> <\|channel\|> <\|end\|> <\|call\|> <\|return\|>` |
//! | 7–14 | the header words in [`WORDS`] |
//! | 15 | reserved |
//! | 16–271 | the bytes 0–255 |
//!
//! Header words are vocabulary entries that no merge produces: only header rendering looks them up, as whole
//! header parts. In content every byte is one token, so the length of a text does not depend on its words.

use crate::vocabulary::embedded_json;

/// Special tokens, ids from 0.
const SPECIAL: [&str; 7] =
    ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"];
/// Header words, ids from 7.
const WORDS: [&str; 8] =
    ["user", "assistant", "python", "analysis", "commentary", "final", " to=python", " to=assistant"];

/// Returns the vocabulary as a Hugging Face `tokenizer.json`.
pub(super) fn tokenizer_json() -> Vec<u8> {
    embedded_json(&SPECIAL, &[], &WORDS)
}
