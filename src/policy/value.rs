//! The critic's loss, and the explained variance of its values.

use anyhow::{Result, ensure};

use super::aggregation::Normalizer;
use super::loss::TokenMean;
use super::sequences::Sequences;
use crate::bad_input;

/// The value loss of one micro-batch. The losses of all micro-batches add up to the loss of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueLoss {
    pub loss: f64,
    /// ∂loss/∂V, one value per token; 0 where the mask is false.
    pub grad_values: Vec<f32>,
    /// `critic/vf_clipfrac`: fraction of tokens where the clipped branch is larger.
    pub clipped: TokenMean,
}

/// Computes PPO's clipped value loss, where R are the returns and V_old the values before the update:
///
/// ```text
/// l = ½·max((V − R)², (clip(V, V_old ± clip) − R)²)
/// ```
///
/// dl/dV = V − R where the first branch is larger. The second branch is strictly larger only where V is
/// clipped. It is constant there, so dl/dV = 0.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) unless `clip` is positive.
pub fn value_loss(
    sequences: &Sequences,
    values: &[f32],
    old_values: &[f32],
    returns: &[f32],
    clip: f64,
    normalizer: &Normalizer,
) -> Result<ValueLoss> {
    ensure!(clip > 0.0, bad_input!("value clip is {clip}: it must be positive"));
    sequences.check("values", values)?;
    sequences.check("old values", old_values)?;
    sequences.check("returns", returns)?;
    let mut clipped = TokenMean { name: "critic/vf_clipfrac", sum: 0.0, tokens: 0.0 };
    let (loss, grad_values) = normalizer.reduce(sequences, |_, t| {
        let (value, old, target) = (f64::from(values[t]), f64::from(old_values[t]), f64::from(returns[t]));
        let unclipped_error = value - target;
        let clipped_error = value.max(old - clip).min(old + clip) - target;
        let is_clipped = clipped_error * clipped_error > unclipped_error * unclipped_error;
        clipped.tokens += 1.0;
        clipped.sum += f64::from(is_clipped);
        if is_clipped {
            (0.5 * clipped_error * clipped_error, 0.0)
        } else {
            (0.5 * unclipped_error * unclipped_error, unclipped_error)
        }
    });
    Ok(ValueLoss { loss, grad_values, clipped })
}

/// Returns 1 − Var(R − V) / Var(R) over valid tokens. The result is 1 for exact values, 0 for a critic that
/// is no better than a constant, and negative for a worse critic. `None` when all returns are equal, because
/// the ratio is then undefined.
pub fn explained_variance(sequences: &Sequences, values: &[f32], returns: &[f32]) -> Result<Option<f64>> {
    sequences.check("values", values)?;
    sequences.check("returns", returns)?;
    let variance = |of: &dyn Fn(usize) -> f64| {
        let mean = sequences.mean(of);
        sequences.mean(|t| (of(t) - mean).powi(2))
    };
    let mut valid = sequences.all_valid_indices();
    let first = valid.next().map(|t| returns[t]);
    if valid.all(|t| Some(returns[t]) == first) {
        return Ok(None);
    }
    let total = variance(&|t| f64::from(returns[t]));
    Ok(Some(1.0 - variance(&|t| f64::from(returns[t]) - f64::from(values[t])) / total))
}
