//! Embedded vocabularies, which need no download. They have the tokens of a template and one token per byte,
//! and no merges.

use super::byte_level::{alphabet, to_byte_level};
use serde_json::{Map, Value, json};

/// The id of byte 0. Lower ids belong to the template.
const FIRST_BYTE: usize = 16;

/// Returns a `tokenizer.json` of 272 tokens:
/// - `special` from id 0;
/// - `added`: tokens that the encoder recognises in text and decoders do not skip;
/// - `words`: words of templates. Only `entry_id` finds them, because no merge produces them;
/// - reserved ids up to 15, which no text produces;
/// - the bytes from id 16.
pub fn embedded_json(special: &[&str], added: &[&str], words: &[&str]) -> Vec<u8> {
    let mut entries: Vec<String> = special.iter().chain(added).map(|token| token.to_string()).collect();
    let added_end = entries.len();
    entries.extend(words.iter().map(|word| to_byte_level(word)));
    entries.extend((entries.len()..FIRST_BYTE).map(|id| format!("<|reserved_{id}|>")));
    let words_end = added_end + words.len();
    let tokens: Vec<Value> = entries
        .iter()
        .enumerate()
        .filter(|(id, _)| !(added_end..words_end).contains(id))
        .map(|(id, content)| {
            let special = !(special.len()..added_end).contains(&id);
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        })
        .collect();
    entries.extend(alphabet().map(String::from));
    let vocab: Map<String, Value> =
        entries.into_iter().enumerate().map(|(id, entry)| (entry, json!(id))).collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": tokens, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    });
    tokenizer.to_string().into_bytes()
}
