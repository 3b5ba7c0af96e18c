//! CISPO: the clipped ratio is a detached weight of the policy gradient.

use anyhow::{Result, ensure};

use super::{LossEntry, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::bad_input;
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "cispo",
    meaning: "Gradient of the log-probability, weighted by the clipped ratio.",
    build: |settings| Ok(Box::new(CispoClip::new(settings.clip_low, settings.clip_high)?)),
    clips_weight: true,
    ..LossEntry::DEFAULT
};

/// Computes the loss of CISPO, clipped importance-sampling policy optimisation (MiniMax-M1, 2025). The ratio
/// is clipped on both sides, as in verl.
///
/// ```text
/// l = −sg(clip(r, 1 − low, 1 + high))·A·T,   r = exp(clamp(T − O, ±20))
/// ```
///
/// sg means stop-gradient: only the last factor depends on T. So l' = −clip(r)·A, which is 0 only if A is 0.
///
/// Metrics: `actor/pg_clipfrac` is the fraction of tokens with r outside the bounds.
/// `actor/pg_clipfrac_lower` is always 0. `actor/ppo_kl` is the mean of the clamped O − T.
impl LossFunction for CispoClip {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        Ok(token_loss(input, normalizer, |_, token| {
            let log_ratio = input.log_ratio(token);
            let ratio = clamped_ratio(log_ratio);
            let weight = ratio.clamp(1.0 - self.low, 1.0 + self.high);
            let derivative = -weight * input.advantage(token);
            Term {
                loss: derivative * f64::from(input.log_prob[token]),
                derivative,
                kl: -log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX),
                clipped: weight != ratio,
                clipped_lower: false,
            }
        }))
    }
}

/// CISPO's bounds on the weight: [1 − low, 1 + high].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CispoClip {
    low: f64,
    high: f64,
}

impl CispoClip {
    /// Checks the bounds. They limit a weight, not a trust region, so they may be wider than those of
    /// [`super::ClipRange`]. low = 1 means no lower bound, and high may exceed 1.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) unless 0 < low ≤ 1 and high > 0.
    pub fn new(low: f64, high: f64) -> Result<Self> {
        if !(low > 0.0 && low <= 1.0) {
            return Err(bad_input!(
                "cispo clip low is {low}: it must lie in (0, 1], where 1 means no lower bound"
            ));
        }
        ensure!(high > 0.0 && high.is_finite(), bad_input!("cispo clip high is {high}: it must be positive"));
        Ok(Self { low, high })
    }
}
