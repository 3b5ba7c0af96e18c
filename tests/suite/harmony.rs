//! Harmony: what its tests share.

use crate::data;
use rloss::harmony::*;
use std::io::Read;
use std::sync::OnceLock;

mod messages;
mod turns;
mod vectors;
mod vocabulary;

/// The o200k vocabulary, read once; `None` without outside data.
fn o200k() -> Option<&'static HarmonyTokenizer> {
    static TOKENIZER: OnceLock<Option<HarmonyTokenizer>> = OnceLock::new();
    TOKENIZER
        .get_or_init(|| {
            let file = data::folder("o200k")?.join("tokenizer.json.gz");
            let mut json = Vec::new();
            flate2::read::GzDecoder::new(std::fs::File::open(&file).unwrap()).read_to_end(&mut json).unwrap();
            Some(HarmonyTokenizer::from_bytes(json, "o200k").unwrap())
        })
        .as_ref()
}

fn embedded() -> HarmonyTokenizer {
    HarmonyTokenizer::embedded().unwrap()
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
