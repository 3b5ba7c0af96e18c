//! verl's rows with token ids, and slime's samples. Files that hold only text are an error.

use super::{RawRoutedExperts, RawRow, TokenTexts, parse, prompt_and_response};
use serde::Deserialize;
use serde_json::Value;

pub(super) const TEXT_ONLY: &str = "verl's dump of input and output holds only text: no token ids, no log-probs; write \
    prompt_ids, response_ids, response_mask and response_logprobs of the agent loop's output instead \
    (rollout.calculate_log_probs=True)";
pub(super) const TRL_TEXT_ONLY: &str = "TRL's table of completions holds only text: no token ids, no log-probs; write \
    prompt_ids, completion ids and sampling_per_token_logps of the trainer's batch as rows of tokens and logprobs instead";

#[derive(Deserialize)]
struct Verl {
    #[serde(alias = "prompts")]
    prompt_ids: Vec<u64>,
    #[serde(alias = "responses")]
    response_ids: Vec<u64>,
    response_mask: Option<Vec<u8>>,
    #[serde(alias = "rollout_log_probs")]
    response_logprobs: Vec<Option<f64>>,
}

pub(super) fn rows(value: Value, _: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let verl: Verl = parse(value, "a row of verl with prompt_ids, response_ids and response_logprobs")?;
    let count = verl.response_ids.len();
    let mask = verl.response_mask.unwrap_or_else(|| vec![1; count]);
    if mask.len() != count || verl.response_logprobs.len() != count {
        return Err(format!(
            "{count} response_ids, a response_mask of {}, {} response_logprobs; they must agree",
            mask.len(),
            verl.response_logprobs.len()
        ));
    }
    let log_probs = verl.response_logprobs.into_iter().zip(mask).map(|(l, m)| l.filter(|_| m != 0));
    Ok(vec![prompt_and_response(verl.prompt_ids, verl.response_ids, log_probs.collect())])
}

#[derive(Deserialize)]
struct Slime {
    tokens: Vec<u64>,
    response_length: usize,
    loss_mask: Option<Vec<u8>>,
    rollout_log_probs: Vec<Option<f64>>,
    /// Routed experts, `[tokens − 1, layers, slots]`.
    rollout_routed_experts: Option<Vec<Vec<Vec<u32>>>>,
}

/// Reads slime's sample as JSON. It has log-probs of the response only.
pub(super) fn slime_rows(value: Value, _: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let slime: Slime = parse(value, "a sample of slime")?;
    let (count, response) = (slime.tokens.len(), slime.response_length);
    let mask = slime.loss_mask.unwrap_or_else(|| vec![1; response]);
    if response > count || mask.len() != response || slime.rollout_log_probs.len() != response {
        return Err(format!(
            "{count} tokens, response_length {response}, a loss_mask of {}, {} rollout_log_probs; they must agree",
            mask.len(),
            slime.rollout_log_probs.len()
        ));
    }
    let mut tokens = slime.tokens;
    let response_tokens = tokens.split_off(count - response);
    let log_probs = slime.rollout_log_probs.into_iter().zip(mask).map(|(l, m)| l.filter(|_| m != 0));
    let routed_experts = slime.rollout_routed_experts.map(|tokens| {
        let first_token = tokens.first();
        let layers = first_token.map_or(0, Vec::len);
        let slots = first_token.and_then(|layers| layers.first()).map_or(0, Vec::len);
        RawRoutedExperts {
            shape: Some([tokens.len(), layers, slots]),
            experts: tokens.into_iter().flatten().flatten().collect(),
        }
    });
    let row = prompt_and_response(tokens, response_tokens, log_probs.collect());
    Ok(vec![RawRow { routed_experts, ..row }])
}
