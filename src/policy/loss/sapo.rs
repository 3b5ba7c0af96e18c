//! SAPO: a smooth gate instead of the clip.

use anyhow::Result;

use super::{LossEntry, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};
use crate::settings::{above, table};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "sapo",
    meaning: "A smooth gate of the ratio instead of the clip.",
    build: |settings| Ok(Box::new(settings.sapo.clone())),
    ..LossEntry::DEFAULT
};

table! {
    /// Gate of `loss = "sapo"`. With a higher temperature, the gate closes at a smaller distance of the
    /// ratio from 1.
    pub struct SapoSettings {
        /// Temperature for tokens with a positive advantage.
        pub temperature_positive: f64 = 1.0 => above(0.0).to(1e6),
        /// Temperature for the other tokens.
        pub temperature_negative: f64 = 1.05 => above(0.0).to(1e6),
    }
}

/// Computes the loss of SAPO, soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347), as in
/// verl at b178a3c and TRL at f2cd577.
///
/// Let x = clamp(T − O, ±20) and r = eˣ. τ is the temperature for the sign of the advantage.
///
/// ```text
/// l = −A·(4/τ)·σ(τ·(r − 1))
/// ```
///
/// σ' = σ·(1 − σ). dr/dT is r if |T − O| ≤ 20, else 0. So l' = −A·4·σ·(1 − σ)·r, which is −A at r = 1.
///
/// Metrics: `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` are always 0, because nothing is clipped.
/// `actor/ppo_kl` is the mean of −x.
///
/// # Errors
/// When a slice of `input` does not fit its sequences.
impl LossFunction for SapoSettings {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        Ok(token_loss(input, normalizer, |_, token| {
            let log_ratio = input.log_ratio(token);
            let advantage = input.advantage(token);
            let ratio = clamped_ratio(log_ratio);
            let temperature =
                if advantage > 0.0 { self.temperature_positive } else { self.temperature_negative };
            let gate = 1.0 / (1.0 + (-temperature * (ratio - 1.0)).exp());
            let is_clamped = log_ratio.abs() > LOG_RATIO_MAX;
            Term {
                loss: -advantage * gate * 4.0 / temperature,
                derivative: if is_clamped { 0.0 } else { -advantage * 4.0 * gate * (1.0 - gate) * ratio },
                kl: -log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX),
                ..Term::default()
            }
        }))
    }
}
