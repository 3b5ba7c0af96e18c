//! VESPO: the policy gradient, weighted by a smooth function of the sequence's ratio.

use anyhow::Result;

use super::{LossEntry, LossFunction, LossInput, PolicyLoss, Term, TokenWeights, token_loss};
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::LOG_RATIO_MAX;
use crate::settings::{from, table};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "vespo",
    meaning: "Gradient of the log-probability, weighted by a smooth function of the sequence's ratio.",
    build: |settings| Ok(Box::new(settings.vespo.clone())),
    token_weights: TokenWeights::None(
        "vespo has one ratio per sequence, so per-token weights do not apply; write is = \"sequence\", or use \
         another loss",
    ),
    ..LossEntry::DEFAULT
};

table! {
    /// Weight w^k·exp(λ·(1 − w)) of `loss = "vespo"`, where w is the ratio of a sequence.
    pub struct VespoSettings {
        /// k for advantages of 0 and more.
        pub power_positive: f64 = 2.0 => from(0.0).to(1e3),
        /// λ for advantages of 0 and more.
        pub decay_positive: f64 = 3.0 => from(1e-4).to(1e3),
        /// k for negative advantages.
        pub power_negative: f64 = 3.0 => from(0.0).to(1e3),
        /// λ for negative advantages.
        pub decay_negative: f64 = 2.0 => from(1e-4).to(1e3),
    }
}

/// Computes the loss of VESPO, variational sequence-level soft policy optimisation, as in TRL at f2cd577.
///
/// w is the ratio of the whole sequence, not normalised by its length:
///
/// ```text
/// log w = clamp(Σ_t clamp(T − O, ±20), ln 1e-8, 20),   φ = w^k·exp(λ·(1 − w)),   l = −sg(φ)·A·T
/// ```
///
/// Only the last factor depends on T, so l' = −φ·A. φ is 1 on fresh data.
///
/// Metrics: `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` are always 0, because nothing is clipped.
/// `actor/ppo_kl` is the mean of the clamped O − T.
///
/// # Errors
/// When a slice of `input` does not fit its sequences.
impl LossFunction for VespoSettings {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        let log_ratio = |token| input.log_ratio(token).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
        let sequences = &input.sequences;
        let log_ratios: Vec<f64> = sequences
            .token_ranges()
            .map(|range| sequences.valid_indices(range).map(log_ratio).sum::<f64>())
            .map(|sum| sum.clamp(SEQUENCE_RATIO_MIN.ln(), LOG_RATIO_MAX))
            .collect();
        Ok(token_loss(input, normalizer, |sequence, token| {
            let advantage = input.advantage(token);
            let (power, decay) = match advantage >= 0.0 {
                true => (self.power_positive, self.decay_positive),
                false => (self.power_negative, self.decay_negative),
            };
            let log_weight = power * log_ratios[sequence] + decay * (1.0 - log_ratios[sequence].exp());
            let derivative = -log_weight.exp() * advantage;
            Term {
                loss: derivative * f64::from(input.log_prob[token]),
                derivative,
                kl: -log_ratio(token),
                ..Term::default()
            }
        }))
    }
}

/// Minimum ratio of a sequence. The maximum is e^20.
const SEQUENCE_RATIO_MIN: f64 = 1e-8;
