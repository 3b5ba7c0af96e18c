//! verl's bypass mode, to which the step's own way is compared: the rollout itself is the anchor, and the
//! correction follows the current log-probs.

use super::fixture::starts;
use anyhow::Result;
use rloss::policy::correction::{CorrectionRules, correct};
use rloss::policy::loss::{LossFunction, LossInput, PolicyLoss, PpoClip, Reinforce};
use rloss::policy::{Aggregation, BatchSize, MetricMap, Normalizer, Sequences};

/// The loss under the correction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BypassLoss {
    /// The ratio to the rollout is PPO's own, so importance weights would count it twice: they are only
    /// measured.
    PpoClip(PpoClip),
    /// The importance weights are the only ratio.
    Reinforce,
}

/// The loss of a whole batch with O = R = `rollout_log_prob`, and the correction's `rollout_corr/…` metrics.
///
/// Rejected tokens leave the loss and its denominators, so the batch cannot be given in parts. When
/// everything is rejected a mean does not exist: see [`Normalizer::reduce`].
pub fn bypass(
    sequences: &Sequences,
    log_prob: &[f32],
    rollout_log_prob: &[f32],
    advantages: &[f32],
    correction: &CorrectionRules,
    loss: &BypassLoss,
    aggregation: Aggregation,
) -> Result<(PolicyLoss, MetricMap)> {
    let corrected = correct(sequences, log_prob, rollout_log_prob, correction)?;
    let starts = starts(sequences);
    let kept = Sequences::new(&starts, &corrected.mask)?;
    let normalizer = Normalizer::new(aggregation, BatchSize::from_sequences(&kept, 0))?;
    let input = |weights| LossInput {
        sequences: kept,
        log_prob,
        old_log_prob: rollout_log_prob,
        advantages,
        weights,
        selected: None,
    };
    let result = match loss {
        BypassLoss::PpoClip(clip) => clip.loss(&input(None), &normalizer, kept.len())?,
        BypassLoss::Reinforce => {
            Reinforce.loss(&input(corrected.weights.as_deref()), &normalizer, kept.len())?
        }
    };
    Ok((result, corrected.metrics))
}
