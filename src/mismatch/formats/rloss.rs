//! rloss's own rows: `{"tokens", "logprobs", "temperature"?, "mask"?, "kept_tokens"?}`. Trajectories of rloss
//! have this format too.

use super::{RawRow, TokenTexts, parse};
use crate::ops::token_set::TokenSet;
use serde::Deserialize;
use serde_json::Value;

/// A row. Other keys, which some exports have, are ignored.
#[derive(Deserialize)]
struct Row {
    tokens: Vec<u64>,
    logprobs: Vec<Option<f64>>,
    temperature: Option<f64>,
    /// False where the token was not sampled. Its log-prob is then ignored.
    mask: Option<Vec<bool>>,
    /// The log-probs are those over these sets.
    #[serde(default)]
    kept_tokens: Vec<Option<TokenSet>>,
}

pub(super) fn rows(value: Value, _: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let row: Row = parse(value, "a row")?;
    let mut log_probs = row.logprobs;
    if let Some(mask) = row.mask {
        if mask.len() != row.tokens.len() {
            return Err(format!(
                "{} tokens but a mask of {}; give one value per token",
                row.tokens.len(),
                mask.len()
            ));
        }
        log_probs.iter_mut().zip(mask).filter(|(_, sampled)| !sampled).for_each(|(l, _)| *l = None);
    }
    let Row { tokens, temperature, kept_tokens, .. } = row;
    Ok(vec![RawRow { tokens, log_probs, temperature, kept_tokens, ..RawRow::default() }])
}
