//! Importance ratios between two policies, and the anchor that a PPO ratio is taken against.

use anyhow::Result;

use crate::bad_input;
use crate::settings::choice;

/// Log ratios are clamped to ±20 before they are exponentiated: e^20 ≈ 4.9e8 is far beyond any clip.
pub const LOG_RATIO_MAX: f64 = 20.0;

/// exp(clamp(log_ratio, ±20)).
pub(super) fn clamped_ratio(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
}

choice! {
    /// Log-probabilities that the importance ratio is taken against.
    pub enum OldLogprob {
        /// The training forward's own, detached: for one update a batch, the ratio is 1 by construction.
        Detach = "detach",
        /// Those kept at sampling.
        Rollout = "rollout",
        /// A second forward before the update.
        Recompute = "recompute",
    }
}

/// With one forward for rollout and training the three agree bit for bit on fresh data.
impl OldLogprob {
    /// The anchor among the three candidates.
    ///
    /// Refused for `Detach` when `updates_per_batch` exceeds 1, where the anchor must be fixed before the first
    /// update, and for `Recompute` without `recomputed`.
    pub fn select<'a>(
        self,
        current: &'a [f32],
        rollout: &'a [f32],
        recomputed: Option<&'a [f32]>,
        updates_per_batch: usize,
    ) -> Result<&'a [f32]> {
        match self {
            OldLogprob::Detach if updates_per_batch > 1 => Err(bad_input!(
                "policy.old_logprob = \"detach\" with {updates_per_batch} updates a batch would move the anchor \
                 with every update: use \"rollout\" or \"recompute\""
            )),
            OldLogprob::Detach => Ok(current),
            OldLogprob::Rollout => Ok(rollout),
            OldLogprob::Recompute => recomputed.ok_or_else(|| {
                bad_input!(
                    "policy.old_logprob = \"recompute\" needs the log-probs of a forward before the first update"
                )
            }),
        }
    }
}
