//! Applies the recipe's rollout correction to a batch.

use super::batch::Batch;
use crate::metrics::Metrics;
use crate::policy::CorrectionSettings;
use crate::policy::correction::{correct, off_policy_mask};
use anyhow::{Context, Result};

/// Computes the importance weights of `batch` from its training and rollout log-probabilities, and masks
/// rejected tokens. The weights of responses in the off-policy sequence mask become 0. Returns the metrics. A
/// correction without rules changes nothing.
///
/// # Errors
/// When there are no training log-probabilities, or a log-probability is NaN.
pub fn correct_rollout(batch: &mut Batch, settings: &CorrectionSettings) -> Result<Metrics> {
    if !settings.is_active() {
        return Ok(Metrics::new());
    }
    let training = batch.training_log_probs.as_ref();
    let training = training.context("the correction needs the log-probs of a training forward pass")?;
    let sequences = batch.masked_sequences()?;
    let mut correction = correct(&sequences, training, &batch.rollout_log_probs, &settings.rules()?)?;
    let mut metrics: Metrics = correction.metrics.into_iter().collect();
    if let Some(bound) = settings.off_policy_mask {
        let (rollout, advantages) = (&batch.rollout_log_probs, &batch.advantages);
        let (masked, of_mask) = off_policy_mask(&sequences, training, rollout, advantages, bound)?;
        let weights = correction.weights.get_or_insert_with(|| vec![1.0; sequences.tokens()]);
        for (range, _) in sequences.token_ranges().zip(masked).filter(|(_, masked)| *masked) {
            weights[range].fill(0.0);
        }
        of_mask.into_iter().for_each(|(name, value)| metrics.set(format!("rollout_corr/{name}"), value));
    }
    (batch.weights, batch.mask) = (correction.weights, correction.mask);
    Ok(metrics)
}
