//! llama.cpp's `/completion` with `n_probs`: sampled tokens with their ids, and the prompt as text.

use super::{RawRow, TokenTexts, parse, prompt_and_response};
use crate::vocabulary::Vocabulary;
use serde::Deserialize;
use serde_json::Value;

pub(super) const NO_LOG_PROBS: &str =
    "a response without completion_probabilities; request them from llama.cpp with \"n_probs\": 1";

#[derive(Deserialize)]
struct Response {
    completion_probabilities: Vec<Entry>,
    /// Sampled ids; empty unless the request asked for them.
    #[serde(default)]
    tokens: Vec<u64>,
    /// The prompt as text, or as ids if the request sent ids.
    prompt: Option<Value>,
    tokens_evaluated: Option<usize>,
    generation_settings: Option<Settings>,
}

#[derive(Deserialize)]
struct Entry {
    id: Option<u64>,
    token: Option<String>,
    bytes: Option<Vec<u8>>,
    logprob: Option<f64>,
    /// The probability after temperature and filters. Present with `post_sampling_probs`.
    prob: Option<f64>,
}

#[derive(Deserialize)]
struct Settings {
    temperature: Option<f64>,
}

const LEFT_OUT: &str = "completion_probabilities has no entry for some tokens, because llama.cpp writes no entry for a token that ends within a character; \
    send \"return_tokens\": true to get all ids";

/// Returns the index of an entry's token in `ids`. The search begins at `start`. `id` and `bytes` are those
/// of the entry. A token that ends within a character has no entry; the bytes of the next entry include its
/// bytes.
fn find_token(
    ids: &[u64],
    start: usize,
    id: u64,
    bytes: Option<&[u8]>,
    tokenizer: &Vocabulary,
) -> Option<usize> {
    (start..ids.len()).filter(|&index| ids[index] == id).find(|&index| {
        bytes.is_none_or(|bytes| {
            let mut tokens = ids[start..=index].iter();
            let rest = tokens.try_fold(bytes, |rest, &id| strip_token(rest, id, tokenizer));
            rest.is_some_and(<[u8]>::is_empty)
        })
    })
}

/// Removes the bytes of token `id` from the start of `bytes`. A special token may have no text.
fn strip_token<'a>(bytes: &'a [u8], id: u64, tokenizer: &Vocabulary) -> Option<&'a [u8]> {
    let id = u32::try_from(id).ok()?;
    let token_bytes = tokenizer.token_bytes(id).unwrap_or_default();
    bytes.strip_prefix(token_bytes).or_else(|| tokenizer.is_special(id).then_some(bytes))
}

/// The key of the server's own response, within one in OpenAI's form.
pub(super) const VERBOSE: &str = "__verbose";

pub(super) fn rows(value: Value, texts: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let tokenizer = &texts.tokenizer;
    let response: Response = parse(value, "a response of llama.cpp")?;
    let (prompt, from_texts) = match response.prompt {
        Some(Value::String(text)) => (encode_prompt(&text, response.tokens_evaluated, tokenizer)?, true),
        Some(ids @ Value::Array(_)) => (parse(ids, "a list of ids")?, false),
        _ => {
            return Err(
                "the prompt is missing, but log-probs depend on it; keep the response's \"prompt\"".into()
            );
        }
    };
    let after_sampling = response.completion_probabilities.iter().any(|entry| entry.prob.is_some());
    let asked_for_ids = !response.tokens.is_empty();
    let (mut ids, mut log_probs, mut texts) = (response.tokens, vec![], vec![]);
    for entry in response.completion_probabilities {
        let id = entry.id.ok_or("an entry has no id; this llama.cpp is too old; update it")?;
        let before = log_probs.len();
        if !asked_for_ids {
            ids.push(id);
        }
        let index = find_token(&ids, before, id, entry.bytes.as_deref(), tokenizer).ok_or(LEFT_OUT)?;
        log_probs.resize(index, None);
        log_probs.push(entry.logprob.or(entry.prob.map(f64::ln)));
        if index == before {
            texts.extend(entry.token.map(|text| (prompt.len() + index, text)));
        }
    }
    log_probs.resize(ids.len(), None);
    let stated = response.generation_settings.and_then(|settings| settings.temperature);
    Ok(vec![RawRow {
        temperature: if after_sampling { stated } else { Some(1.0) },
        texts,
        from_texts,
        ..prompt_and_response(prompt, ids, log_probs)
    }])
}

/// Encodes the prompt. The ids are certain if they decode to `text`, and their number is the server's
/// `count`.
///
/// # Errors
/// When the ids are not certain.
fn encode_prompt(text: &str, count: Option<usize>, tokenizer: &Vocabulary) -> Result<Vec<u64>, String> {
    let ids = tokenizer.encode_with_special(text).map_err(|e| format!("{e:#}"))?;
    let has_server_count = count.is_none_or(|count| count == ids.len());
    if tokenizer.decode(&ids) != text || !has_server_count {
        return Err(format!(
            "the prompt's text has {} tokens here, but the server counted {}, so its ids are not known; send \"prompt\" as a list of ids",
            ids.len(),
            count.map_or("different ones".into(), |count| count.to_string())
        ));
    }
    Ok(ids.into_iter().map(u64::from).collect())
}
