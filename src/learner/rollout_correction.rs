//! Applies the recipe's rollout correction to a batch.

use super::batch::Batch;
use crate::metrics::Metrics;
use crate::policy::CorrectionSettings;
use crate::policy::correction::correct;
use anyhow::{Context, Result};

/// Computes the importance weights of `batch` and masks rejected tokens, from its training and rollout
/// log-probabilities. Returns the metrics. An inactive correction changes nothing.
///
/// # Errors
/// When there are no training log-probabilities, or one of them is not a number.
pub fn correct_rollout(batch: &mut Batch, settings: &CorrectionSettings) -> Result<Metrics> {
    if !settings.is_active() {
        return Ok(Metrics::new());
    }
    let training = batch.training_log_probs.as_ref().context("a correction without a training forward")?;
    let corrected = correct(&batch.tokens()?, training, &batch.rollout_log_probs, &settings.rules()?)?;
    (batch.weights, batch.mask) = (corrected.weights, corrected.mask);
    Ok(corrected.metrics.into_iter().collect())
}
