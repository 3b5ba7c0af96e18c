//! SGLang's `/generate` with `return_logprob`: `[log-prob, id, text]` for each token in `meta_info`.

use super::npy::base64_bytes;
use super::{RawRoutedExperts, RawRow, TokenTexts, parse};
use serde::Deserialize;
use serde_json::Value;

type Entry = (Option<f64>, u64, Option<String>);

#[derive(Deserialize)]
struct MetaInfo {
    input_token_logprobs: Option<Vec<Value>>,
    output_token_logprobs: Option<Vec<Value>>,
    prompt_tokens: Option<usize>,
    /// Routed experts, int32 in base64, `[tokens, layers, slots]`.
    routed_experts: Option<Value>,
}

pub(super) fn rows(mut value: Value, _: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let meta: MetaInfo = parse(value["meta_info"].take(), "a response of SGLang")?;
    let Some(output) = meta.output_token_logprobs else {
        return Err(
            "meta_info has no output_token_logprobs; request them with \"return_logprob\": true".into()
        );
    };
    let input = meta.input_token_logprobs.unwrap_or_default();
    if input.is_empty() || meta.prompt_tokens.is_some_and(|count| count != input.len()) {
        return Err(format!(
            "{} of {} prompt tokens are in the file, but log-probs depend on all of them; request them with \"logprob_start_len\": 0",
            input.len(),
            meta.prompt_tokens.map_or("the".into(), |count| count.to_string())
        ));
    }
    let mut row = RawRow { raw_tokens: input.len(), ..RawRow::default() };
    for (index, entry) in input.into_iter().chain(output).enumerate() {
        let (log_prob, id, text) = parse_entry(entry)?;
        row.tokens.push(id);
        row.log_probs.push(log_prob);
        row.texts.extend(text.map(|text| (index, text)));
    }
    row.routed_experts = match meta.routed_experts {
        Some(Value::String(text)) => {
            Some(RawRoutedExperts { experts: decode_u32_le(&base64_bytes(&text)?), shape: None })
        }
        _ => None,
    };
    Ok(vec![row])
}

/// Reads one entry, whose text is optional.
fn parse_entry(entry: Value) -> Result<Entry, String> {
    match entry.as_array().map(Vec::len) {
        Some(2) => parse::<(Option<f64>, u64)>(entry, "an entry [log-prob, id]").map(|(l, id)| (l, id, None)),
        _ => parse(entry, "an entry [log-prob, id, text]"),
    }
}

fn decode_u32_le(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
