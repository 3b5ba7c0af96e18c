//! Applies the recipe's rollout correction to a batch.

use super::batch::Batch;
use crate::metrics::Metrics;
use crate::policy::CorrectionSettings;
use crate::policy::correction::correct;
use anyhow::{Context, Result};

/// Computes the importance weights of `batch` from its training and rollout log-probabilities, and masks
/// rejected tokens. Returns the metrics. A correction without rules changes nothing.
///
/// # Errors
/// When there are no training log-probabilities, or a log-probability is NaN.
pub fn correct_rollout(batch: &mut Batch, settings: &CorrectionSettings) -> Result<Metrics> {
    if !settings.is_active() {
        return Ok(Metrics::new());
    }
    let training = batch
        .training_log_probs
        .as_ref()
        .context("the correction needs the log-probs of a training forward pass")?;
    let correction =
        correct(&batch.masked_sequences()?, training, &batch.rollout_log_probs, &settings.rules()?)?;
    (batch.weights, batch.mask) = (correction.weights, correction.mask);
    Ok(correction.metrics.into_iter().collect())
}
