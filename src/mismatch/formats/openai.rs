//! Reads responses of `/v1/completions` and `/v1/chat/completions`. Those of vLLM have token ids, and those
//! of llama-cpp-python have the texts of tokens.

use super::{RawRow, TokenTexts, npy, parse};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;

/// For each prompt token, a map from token id (as text) to its entry. The map has the token itself and the
/// most likely tokens.
type PromptLogProbs = Vec<Option<HashMap<String, PromptEntry>>>;

#[derive(Deserialize)]
struct PromptEntry {
    logprob: Option<f64>,
}

#[derive(Deserialize)]
struct Response {
    choices: Vec<Choice>,
    /// Token ids of the prompt, shared by all choices of a chat.
    prompt_token_ids: Option<Vec<u64>>,
    prompt_logprobs: Option<PromptLogProbs>,
}

#[derive(Deserialize)]
struct Choice {
    logprobs: Option<LogProbs>,
    token_ids: Option<Vec<u64>>,
    prompt_token_ids: Option<Vec<u64>>,
    prompt_logprobs: Option<PromptLogProbs>,
    routed_experts: Option<String>,
}

#[derive(Default, Deserialize)]
struct LogProbs {
    tokens: Option<Vec<String>>,
    token_logprobs: Option<Vec<Option<f64>>>,
    content: Option<Vec<Content>>,
}

#[derive(Deserialize)]
struct Content {
    token: String,
    logprob: Option<f64>,
    bytes: Option<Vec<u8>>,
}

const NO_PROMPT: &str = "the prompt is missing, but log-probs depend on it; request it from vLLM with \"return_token_ids\": true, \
                         from llama.cpp with \"verbose\": true, from llama-cpp-python with echo=True, or add its ids \
                         as \"prompt_token_ids\"";

/// Returns whether the value is the response to a chat. Its first choice has log-probs in `content`, or it
/// has a message and the prompt's log-probs are given ([`has_prompt`]).
pub(super) fn is_chat(value: &Value) -> bool {
    let choice = &value["choices"][0];
    choice["logprobs"].get("content").is_some() || choice.get("message").is_some() && has_prompt(value)
}

/// Returns whether the value is the response to a completion. Its first choice has `token_logprobs`, or it
/// has no message and the prompt's log-probs are given ([`has_prompt`]).
pub(super) fn is_completion(value: &Value) -> bool {
    let choice = &value["choices"][0];
    choice["logprobs"].get("token_logprobs").is_some() || choice.get("message").is_none() && has_prompt(value)
}

/// Returns whether the first choice or the response has `prompt_logprobs`. A scoring request gives such a
/// response.
fn has_prompt(value: &Value) -> bool {
    [value, &value["choices"][0]].iter().any(|object| object["prompt_logprobs"].is_array())
}

/// Returns the remedy for choices without log-probs.
pub(super) fn log_probs_remedy(value: &Value) -> &'static str {
    match value["choices"][0].get("message") {
        Some(_) => {
            "choices have no logprobs; request them with \"logprobs\": true, or \"prompt_logprobs\": 0"
        }
        None => {
            "choices have no logprobs; request them with \"logprobs\": 0, or \"prompt_logprobs\": 0 (and \"return_token_ids\": true)"
        }
    }
}

/// Reads one row for each choice of a completion.
pub(super) fn completions(value: Value, texts: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let response: Response = parse(value, "a response of /v1/completions")?;
    let row = |choice: Choice| {
        let log_probs = match choice.logprobs {
            None if choice.prompt_logprobs.is_none() => return Err("a choice has no logprobs".to_owned()),
            log_probs => log_probs.unwrap_or_default(),
        };
        let (token_texts, values) =
            (log_probs.tokens.unwrap_or_default(), log_probs.token_logprobs.unwrap_or_default());
        join_sequence(
            (choice.prompt_token_ids, choice.prompt_logprobs),
            choice.token_ids,
            token_texts,
            values,
            choice.routed_experts,
            texts,
        )
    };
    response.choices.into_iter().map(row).collect()
}

/// Reads one row for each choice of a chat.
pub(super) fn chat(value: Value, texts: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let response: Response = parse(value, "a response of /v1/chat/completions")?;
    let mut prompts = vec![(response.prompt_token_ids, response.prompt_logprobs)];
    let mut rows = vec![];
    let count = response.choices.len();
    for (index, choice) in response.choices.into_iter().enumerate() {
        let shared = if index + 1 == count {
            prompts.pop()
        } else {
            prompts.last().map(|(ids, _)| (ids.clone(), None))
        };
        let (ids, log_probs) = shared.unwrap_or_default();
        let (ids, log_probs) = (choice.prompt_token_ids.or(ids), choice.prompt_logprobs.or(log_probs));
        let content = match choice.logprobs.and_then(|l| l.content) {
            None if log_probs.is_none() => return Err("a choice has no logprobs.content".to_owned()),
            content => content.unwrap_or_default(),
        };
        let values = content.iter().map(|c| c.logprob).collect();
        let token_texts = content.into_iter().map(|c| match c.bytes {
            Some(bytes) => String::from_utf8(bytes).unwrap_or(c.token),
            None => c.token,
        });
        rows.push(join_sequence(
            (ids, log_probs),
            choice.token_ids,
            token_texts.collect(),
            values,
            choice.routed_experts,
            texts,
        )?);
    }
    Ok(rows)
}

/// Joins prompt and response into a row. The prompt has ids and log-probs. `values` are the log-probs of the
/// response. With `echo` they include those of the prompt; for a scoring request there are none.
fn join_sequence(
    (prompt_ids, prompt_log_probs): (Option<Vec<u64>>, Option<PromptLogProbs>),
    ids: Option<Vec<u64>>,
    token_texts: Vec<String>,
    mut values: Vec<Option<f64>>,
    routed_experts: Option<String>,
    texts: &TokenTexts,
) -> Result<RawRow, String> {
    let from_texts = ids.is_none() && !token_texts.is_empty();
    let echoed = values.first().is_some_and(Option::is_none);
    let response = match ids {
        Some(ids) => ids,
        None => token_texts.iter().map(|text| texts.id(text)).collect::<Result<Vec<_>, _>>()?,
    };
    if values.is_empty() {
        values = vec![None; response.len()];
    }
    let routed_experts = routed_experts.map(|text| npy::read_routed_experts(&text)).transpose()?;
    let prompt_ids = match (prompt_ids, echoed) {
        // Without prompt ids, an echoed response also holds the prompt. With prompt ids, only the response's
        // values include the prompt.
        (_, true) if from_texts || values.len() == response.len() => vec![],
        (Some(ids), _) => ids,
        (None, _) => return Err(NO_PROMPT.into()),
    };
    let mut log_probs = match prompt_log_probs {
        Some(entries) if !prompt_ids.is_empty() => select_log_probs(&prompt_ids, entries)?,
        _ => vec![None; prompt_ids.len()],
    };
    if values.len() == prompt_ids.len() + response.len() {
        let response_values = values.split_off(prompt_ids.len());
        log_probs = std::mem::replace(&mut values, response_values);
    }
    if values.len() != response.len() {
        return Err(format!("{} token ids but {} log-probs of the response", response.len(), values.len()));
    }
    // With `echo` and without prompt ids, the end of the prompt is unknown, so `raw_tokens` is 0.
    let raw_tokens = prompt_ids.len();
    let first = if token_texts.len() == response.len() { prompt_ids.len() } else { 0 };
    let token_texts = token_texts.into_iter().filter(|_| !from_texts).enumerate();
    Ok(RawRow {
        texts: token_texts
            .filter(|(_, text)| !text.starts_with("token_id:"))
            .map(|(i, t)| (first + i, t))
            .collect(),
        tokens: [prompt_ids, response].concat(),
        log_probs: [log_probs, values].concat(),
        raw_tokens,
        routed_experts,
        from_texts,
        ..RawRow::default()
    })
}

/// Selects the log-prob of each prompt token from the entries at the token's position.
fn select_log_probs(ids: &[u64], entries: PromptLogProbs) -> Result<Vec<Option<f64>>, String> {
    if ids.len() != entries.len() {
        return Err(format!("{} prompt_token_ids but {} prompt_logprobs", ids.len(), entries.len()));
    }
    let value = |(id, entry): (&u64, Option<HashMap<String, PromptEntry>>)| match entry {
        None => Ok(None),
        Some(entry) => match entry.get(&id.to_string()) {
            Some(entry) => Ok(entry.logprob),
            None => Err(format!("prompt_logprobs has no entry for prompt token {id}")),
        },
    };
    ids.iter().zip(entries).map(value).collect()
}
