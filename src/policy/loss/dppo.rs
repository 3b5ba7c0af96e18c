//! DPPO: a trust region on the probability of the sampled token, instead of a clip of its ratio.

use anyhow::Result;

use super::{ClipRange, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::bad_input;
use crate::policy::PolicySettings;
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};

/// The divergence between two Bernoulli distributions: either the sampled token or any other token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BinaryDivergence {
    /// Total variation.
    Tv,
    /// KL(old ‖ trained).
    Kl,
}

/// Added to 1 − p and 1 − q, so that the logarithm of their ratio is finite if a probability is 1.
const COMPLEMENT_EPSILON: f64 = 1e-8;

impl BinaryDivergence {
    /// Returns the divergence of a token with log-probs T and O. The unit is nats for `Kl`.
    fn between(self, log_prob: f64, old_log_prob: f64) -> f64 {
        let (p, old) = (log_prob.exp(), old_log_prob.exp());
        match self {
            BinaryDivergence::Tv => (p - old).abs(),
            BinaryDivergence::Kl => {
                let complement_ratio = (1.0 - old + COMPLEMENT_EPSILON) / (1.0 - p + COMPLEMENT_EPSILON);
                old * (old_log_prob - log_prob) + (1.0 - old) * complement_ratio.ln()
            }
        }
    }
}

/// DPPO's bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DppoBounds {
    pub divergence: BinaryDivergence,
    /// Bounds of the divergence: `low` where the probability decreased, `high` where it increased.
    range: ClipRange,
    /// c, the maximum weight of a token.
    ratio_max: f64,
}

impl DppoBounds {
    /// Checks the bounds. `None` for `ratio_max` means no bound.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) unless `ratio_max` exceeds 1: a smaller value would reduce the
    /// gradient on fresh data.
    pub fn new(divergence: BinaryDivergence, range: ClipRange, ratio_max: Option<f64>) -> Result<Self> {
        match ratio_max {
            Some(c) if !(c > 1.0 && c.is_finite()) => Err(bad_input!(
                "dppo's maximum ratio is {c}: it bounds a weight of the gradient, so it must exceed 1"
            )),
            _ => Ok(Self { divergence, range, ratio_max: ratio_max.unwrap_or(f64::INFINITY) }),
        }
    }

    /// Reads the bounds from the recipe.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub(super) fn build(
        divergence: BinaryDivergence,
        settings: &PolicySettings,
    ) -> Result<Box<dyn LossFunction>> {
        let ratio_max = (settings.dual_clip > 0.0).then_some(settings.dual_clip);
        Ok(Box::new(Self::new(divergence, ClipRange::from_settings(settings)?, ratio_max)?))
    }

    /// Returns whether the token has left the trust region, and its advantage pushes it further away.
    fn masks(&self, log_prob: f64, old_log_prob: f64, advantage: f64) -> bool {
        let divergence = self.divergence.between(log_prob, old_log_prob);
        match advantage > 0.0 {
            true => log_prob > old_log_prob && divergence > self.range.high,
            false => log_prob < old_log_prob && divergence > self.range.low,
        }
    }
}

/// Computes the loss of DPPO, divergence proximal policy optimisation (Qi et al. 2026, arXiv 2602.04879), as
/// in verl of 2026-02.
///
/// Let r = exp(clamp(T − O, ±20)), p = e^T and q = e^O. The binary divergence D is |p − q| for TV, and q·(O −
/// T) + (1 − q)·ln((1 − q)/(1 − p)) for KL.
///
/// ```text
/// l = −A·sg(min(r, c))·T,   and 0 where D exceeds its bound and A pushes p further away from q
/// ```
///
/// Only the last factor depends on T, so l' = −A·min(r, c), or 0.
///
/// Metrics: `actor/pg_clipfrac` is the fraction of tokens whose loss this rule sets to 0.
/// `actor/pg_clipfrac_lower` is the fraction of tokens that keep their loss and have r above c.
/// `actor/ppo_kl` is the mean of the clamped O − T.
///
/// # Errors
/// When a slice of `input` does not fit its sequences.
impl LossFunction for DppoBounds {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        Ok(token_loss(input, normalizer, |_, token| {
            let (log_prob, old) = (f64::from(input.log_prob[token]), f64::from(input.old_log_prob[token]));
            let log_ratio = input.log_ratio(token);
            let advantage = input.advantage(token);
            let ratio = clamped_ratio(log_ratio);
            let clipped = self.masks(log_prob, old, advantage);
            let derivative = if clipped { 0.0 } else { -advantage * ratio.min(self.ratio_max) };
            Term {
                loss: derivative * log_prob,
                derivative,
                kl: -log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX),
                clipped,
                clipped_lower: !clipped && ratio > self.ratio_max,
            }
        }))
    }
}
