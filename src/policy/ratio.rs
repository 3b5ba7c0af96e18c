//! Importance ratios between two policies, and the source of the old log-probs.

use anyhow::Result;

use crate::bad_input;
use crate::settings::choice;

/// Log ratios are clamped to ±20 before the exponential. e^20 ≈ 4.9e8 is far outside any clip range.
pub const LOG_RATIO_MAX: f64 = 20.0;

/// Returns exp(clamp(log_ratio, ±20)).
pub(super) fn clamped_ratio(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
}

choice! {
    /// Source of the old log-probabilities, the denominator of the importance ratio.
    pub enum OldLogProbSource {
        /// The log-probabilities of the training forward pass, detached, so the ratio is 1. For one update
        /// per step, on fresh samples.
        Detach = "detach",
        /// The log-probabilities stored at sampling.
        Rollout = "rollout",
        /// The log-probabilities of a second forward pass before the update.
        Recompute = "recompute",
    }
}

/// Rollout and training compute the same forward pass, so the three sources are bit-equal on fresh data.
impl OldLogProbSource {
    /// Selects the old log-probs.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) for `Detach` when `updates_per_batch` exceeds 1: the old
    /// log-probs must be fixed before the first update. Also for `Recompute` without `recomputed`.
    pub fn select<'a>(
        self,
        current: &'a [f32],
        rollout: &'a [f32],
        recomputed: Option<&'a [f32]>,
        updates_per_batch: usize,
    ) -> Result<&'a [f32]> {
        match self {
            OldLogProbSource::Detach if updates_per_batch > 1 => Err(bad_input!(
                "policy.old_logprob = \"detach\" with {updates_per_batch} updates per batch would change the old \
                 log-probs with every update; use \"rollout\" or \"recompute\""
            )),
            OldLogProbSource::Detach => Ok(current),
            OldLogProbSource::Rollout => Ok(rollout),
            OldLogProbSource::Recompute => recomputed.ok_or_else(|| {
                bad_input!(
                    "policy.old_logprob = \"recompute\" needs the log-probs of a forward pass that runs before the first update"
                )
            }),
        }
    }
}
