//! rloss's own rows: `{"tokens", "logprobs", "temperature"?, "mask"?}`. Its trajectories have this format.

use super::{RawRow, parse};
use serde::Deserialize;
use serde_json::Value;

/// A row; other keys of some exports are ignored.
#[derive(Deserialize)]
struct Row {
    tokens: Vec<u64>,
    logprobs: Vec<Option<f64>>,
    temperature: Option<f64>,
    /// False where the token was not sampled, so its log-prob is ignored.
    mask: Option<Vec<bool>>,
}

pub(super) fn row(value: Value) -> Result<RawRow, String> {
    let row: Row = parse(value, "a row")?;
    let mut log_probs = row.logprobs;
    if let Some(mask) = row.mask {
        if mask.len() != row.tokens.len() {
            return Err(format!(
                "{} tokens but a mask of {}; give one value a token",
                row.tokens.len(),
                mask.len()
            ));
        }
        log_probs.iter_mut().zip(mask).filter(|(_, sampled)| !sampled).for_each(|(l, _)| *l = None);
    }
    Ok(RawRow { tokens: row.tokens, log_probs, temperature: row.temperature, ..RawRow::default() })
}
