//! PPO with asymmetric clip and dual clip.

use anyhow::Result;

use super::{ClipRange, LossEntry, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::bad_input;
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "ppo",
    meaning: "One clipped ratio per token, with dual clip.",
    build: |settings| {
        let dual = (settings.dual_clip > 0.0).then_some(settings.dual_clip);
        Ok(Box::new(PpoClip::new(ClipRange::from_settings(settings)?, dual)?))
    },
    ..LossEntry::DEFAULT
};

/// Computes the clipped surrogate of PPO (Schulman et al. 2017), with clip-higher (DAPO) and dual clip (Ye et
/// al. 2020).
///
/// With x = clamp(T − O, ±20) and r = eˣ:
///
/// ```text
/// l = max(−A·r, −A·clip(r, 1 − low, 1 + high)),   and for A < 0   l = min(l, −A·c)
/// ```
///
/// dr/dT is r if |T − O| ≤ 20, else 0. The first branch of the max gives l' = −A·r. The second branch is
/// chosen only where the ratio is clipped, and is constant there. −A·c is constant too. So l' = −A·r, or 0
/// for a token that is clipped, dual-clipped or clamped.
///
/// Metrics: `actor/pg_clipfrac` is the fraction of tokens with a clipped ratio, before the dual clip.
/// `actor/pg_clipfrac_lower` is the fraction of tokens with an active dual clip. `actor/ppo_kl` is the mean
/// of −x.
impl LossFunction for PpoClip {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        Ok(token_loss(input, normalizer, |_, token| {
            let log_ratio = input.log_ratio(token);
            let advantage = input.advantage(token);
            let ratio = clamped_ratio(log_ratio);
            let (unclipped_loss, clipped_loss) = (-advantage * ratio, -advantage * self.range.clip(ratio));
            let clipped = clipped_loss > unclipped_loss;
            let loss = if clipped { clipped_loss } else { unclipped_loss };
            let ceiling = self.dual.filter(|_| advantage < 0.0).map_or(f64::INFINITY, |c| -advantage * c);
            let clipped_lower = loss > ceiling;
            let has_zero_gradient = clipped || clipped_lower || log_ratio.abs() > LOG_RATIO_MAX;
            Term {
                loss: loss.min(ceiling),
                derivative: if has_zero_gradient { 0.0 } else { unclipped_loss },
                kl: -log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX),
                clipped,
                clipped_lower,
            }
        }))
    }
}

/// PPO's clip range and dual clip.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PpoClip {
    range: ClipRange,
    dual: Option<f64>,
}

impl PpoClip {
    /// Checks the bounds. `dual` is c. It bounds the loss of a token with A < 0 by −A·c. `None` means no
    /// bound.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) unless c exceeds 1: a smaller c would reduce the gradient on
    /// fresh data.
    pub fn new(range: ClipRange, dual: Option<f64>) -> Result<Self> {
        match dual {
            Some(c) if !(c > 1.0 && c.is_finite()) => Err(bad_input!(
                "dual clip is {c}: it bounds the ratio of a token with a negative advantage, so it must exceed 1"
            )),
            _ => Ok(Self { range, dual }),
        }
    }
}
