//! The recipe's rollout correction, applied to a batch.

use super::batch::Batch;
use crate::metrics::Metrics;
use crate::policy::CorrectionSettings;
use crate::policy::correction::correct;
use anyhow::{Context, Result};

/// Fills in the weights of `batch` and takes rejected tokens out of its mask, by its training and rollout
/// log-probabilities. Returns the figures; an inactive correction does nothing.
///
/// # Errors
/// When there are no training log-probabilities, or one of them is no number.
pub fn correct_rollout(batch: &mut Batch, settings: &CorrectionSettings) -> Result<Metrics> {
    if !settings.active() {
        return Ok(Metrics::new());
    }
    let training = batch.training_log_probs.as_ref().context("a correction without a training forward")?;
    let corrected = correct(&batch.tokens()?, training, &batch.rollout_log_probs, &settings.rules()?)?;
    (batch.weights, batch.mask) = (corrected.weights, corrected.mask);
    Ok(corrected.metrics.into_iter().collect())
}
