//! The embedded vocabulary: 272 tokens, no merges, no download.
//!
//! | ids | what |
//! | --- | --- |
//! | 0–6 | `<\|pad\|> <\|start\|> <\|message\|> <\|channel\|> <\|end\|> <\|call\|> <\|return\|>` |
//! | 7–14 | the header words in [`WORDS`] |
//! | 15 | reserved |
//! | 16–271 | the bytes 0–255 |
//!
//! Header words are vocabulary entries that no merge reaches: only header rendering looks them up, as whole
//! header parts. In content every byte is one token, so the length of a text does not depend on its words.

use super::byte_level::{alphabet, spell};
use serde_json::{Map, Value, json};

/// Special tokens, ids from 0.
const SPECIAL: [&str; 7] =
    ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"];
/// Header words, ids from 7.
pub(super) const WORDS: [&str; 8] =
    ["user", "assistant", "python", "analysis", "commentary", "final", " to=python", " to=assistant"];
/// Keeps ids without a gap; never produced.
const RESERVED: &str = "<|reserved_15|>";

/// The vocabulary as a Hugging Face `tokenizer.json`.
pub(super) fn tokenizer_json() -> Vec<u8> {
    let mut entries: Vec<String> = SPECIAL.map(String::from).to_vec();
    entries.extend(WORDS.map(spell));
    entries.push(RESERVED.into());
    let added: Vec<Value> = entries
        .iter()
        .enumerate()
        .filter(|(_, entry)| entry.starts_with("<|"))
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    entries.extend(alphabet().map(String::from));
    let vocab: Map<String, Value> =
        entries.into_iter().enumerate().map(|(id, entry)| (entry, json!(id))).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    });
    tokenizer.to_string().into_bytes()
}
