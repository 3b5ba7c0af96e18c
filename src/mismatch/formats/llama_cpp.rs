//! llama.cpp's `/completion` with `n_probs`: sampled tokens with their ids; the prompt as text.

use super::{RawRow, parsed, prompt_and_response};
use crate::vocabulary::Vocabulary;
use serde::Deserialize;
use serde_json::Value;

pub(super) const NO_LOG_PROBS: &str =
    "a response without completion_probabilities; ask llama.cpp with \"n_probs\": 1";

#[derive(Deserialize)]
struct Response {
    completion_probabilities: Vec<Entry>,
    /// Text, or ids where ids were sent.
    prompt: Option<Value>,
    tokens_evaluated: Option<usize>,
    generation_settings: Option<Settings>,
}

#[derive(Deserialize)]
struct Entry {
    id: Option<u64>,
    token: Option<String>,
    logprob: Option<f64>,
    /// With `post_sampling_probs`: the probability after temperature and filters.
    prob: Option<f64>,
}

#[derive(Deserialize)]
struct Settings {
    temperature: Option<f64>,
}

pub(super) fn row(value: Value, tokenizer: &Vocabulary) -> Result<RawRow, String> {
    let response: Response = parsed(value, "a response of llama.cpp")?;
    let (prompt, from_texts) = match response.prompt {
        Some(Value::String(text)) => (ids_of(&text, response.tokens_evaluated, tokenizer)?, true),
        Some(ids @ Value::Array(_)) => (parsed(ids, "a list of ids")?, false),
        _ => {
            return Err(
                "the prompt is missing, and a log-prob depends on it; keep the response's \"prompt\"".into(),
            );
        }
    };
    let after_sampling = response.completion_probabilities.iter().any(|entry| entry.prob.is_some());
    let mut ids = vec![];
    let (mut log_probs, mut texts) = (vec![], vec![]);
    for (at, entry) in response.completion_probabilities.into_iter().enumerate() {
        ids.push(entry.id.ok_or("an entry has no id; this llama.cpp is too old to be read")?);
        log_probs.push(entry.logprob.or(entry.prob.map(f64::ln)));
        texts.extend(entry.token.map(|text| (prompt.len() + at, text)));
    }
    let stated = response.generation_settings.and_then(|settings| settings.temperature);
    Ok(RawRow {
        temperature: stated.filter(|_| after_sampling),
        texts,
        from_texts,
        ..prompt_and_response(prompt, ids, log_probs)
    })
}

/// The prompt's ids, if they are beyond doubt: they spell the text, and are as many as the server counted.
fn ids_of(text: &str, count: Option<usize>, tokenizer: &Vocabulary) -> Result<Vec<u64>, String> {
    let ids = tokenizer.encode_with_special(text).map_err(|e| format!("{e:#}"))?;
    let counted = count.is_none_or(|count| count == ids.len());
    if tokenizer.decode(&ids) != text || !counted {
        return Err(format!(
            "the prompt's text is {} tokens here, the server counted {}: its ids cannot be known; send \"prompt\" as a list of ids",
            ids.len(),
            count.map_or("others".into(), |count| count.to_string())
        ));
    }
    Ok(ids.into_iter().map(u64::from).collect())
}
