//! Harmony: what its tests share.

use crate::data;
use rloss::harmony::*;
use rloss::vocabulary::Vocabulary;
use std::io::Read;
use std::sync::OnceLock;

mod messages;
mod turns;
mod vectors;
mod vocabulary;

/// The o200k vocabulary of the outside data, read once; `None` without it.
fn o200k() -> Option<&'static HarmonyTokenizer> {
    // Asked every time, so that every test without it is named.
    let file = data::folder("o200k")?.join("tokenizer.json.gz");
    static TOKENIZER: OnceLock<HarmonyTokenizer> = OnceLock::new();
    Some(TOKENIZER.get_or_init(|| {
        let mut json = Vec::new();
        flate2::read::GzDecoder::new(std::fs::File::open(&file).unwrap()).read_to_end(&mut json).unwrap();
        HarmonyTokenizer::from_bytes(json, "o200k").unwrap()
    }))
}

/// Our own small vocabulary in o200k's form, and o200k's where it is there.
fn vocabularies() -> Vec<(data::Folder, HarmonyTokenizer)> {
    let read = |folder: data::Folder| {
        let tokenizer = if folder.own {
            HarmonyTokenizer::new(Vocabulary::from_file(&folder.path.join("tokenizer.json")).unwrap(), "ours")
                .unwrap()
        } else {
            o200k().expect("it is there").clone()
        };
        (folder, tokenizer)
    };
    data::folders("o200k").into_iter().map(read).collect()
}

/// The ids of `text` with special tokens recognised, as only a text of the tests' own may be read.
pub fn encode_with_special(tokenizer: &Vocabulary, text: &str) -> Vec<u32> {
    let is_special = |id: &u32| tokenizer.is_special(*id);
    let special: std::collections::BTreeMap<&[u8], u32> = (0..tokenizer.vocab_size() as u32)
        .filter(is_special)
        .filter_map(|id| Some((tokenizer.token_bytes(id)?, id)))
        .collect();
    let (mut ids, mut ordinary, mut rest) = (vec![], 0, 0);
    while let Some(start) = text[rest..].find("<|").map(|at| rest + at) {
        rest = start + 2;
        let Some(end) = text[start..].find("|>").map(|at| start + at + 2) else { break };
        if let Some(&id) = special.get(&text.as_bytes()[start..end]) {
            ids.extend(tokenizer.encode_text(&text[ordinary..start]).unwrap());
            ids.push(id);
            (ordinary, rest) = (end, end);
        }
    }
    ids.extend(tokenizer.encode_text(&text[ordinary..]).unwrap());
    ids
}

/// Reads a whole turn: the tokens sampled after `<|start|>assistant`.
fn parse_completion(tokenizer: &HarmonyTokenizer, tokens: &[u32]) -> ParsedCompletion {
    let mut parser = TurnParser::new(tokenizer);
    for &token in tokens {
        parser.push(token);
    }
    parser.finish()
}

fn embedded() -> HarmonyTokenizer {
    HarmonyTokenizer::from_embedded().unwrap()
}

fn parse(
    tokenizer: &HarmonyTokenizer,
    role: Role,
    mode: ParseMode,
    tokens: &[u32],
) -> anyhow::Result<Vec<Message>> {
    let mut parser = StreamParser::new(tokenizer, Some(role), mode);
    for &token in tokens {
        parser.push(token)?;
    }
    parser.finish()
}
