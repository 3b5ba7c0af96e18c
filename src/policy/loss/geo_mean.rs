//! GMPO: the geometric mean of a sequence's token ratios.

use anyhow::{Result, ensure};

use super::{ClipCounts, ClipRange, LossEntry, LossFunction, LossInput, PolicyLoss, Term, TokenWeights};
use crate::policy::aggregation::Normalizer;
use crate::policy::sequences::mean;

/// Added to an importance weight before its logarithm, so that the logarithm of a weight of 0 is finite.
const WEIGHT_EPSILON: f64 = 1e-10;

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "geo_mean",
    meaning: "Geometric mean of a sequence's ratios, each log-ratio clipped to -`clip_low`, `clip_high`. The loss is a mean over all sequences, rejected ones too; `aggregation` is only that of KL and entropy.",
    build: |settings| Ok(Box::new(GeoMean(ClipRange::from_settings(settings)?))),
    token_weights: TokenWeights::Truncated(
        "geo_mean takes the geometric mean of a sequence's weights, which is 0 if one weight is 0; give one number as \
              policy.correction.threshold, which truncates weights instead",
    ),
    ..LossEntry::DEFAULT
};

/// The loss GMPO with its clip range.
#[derive(Debug)]
pub struct GeoMean(pub ClipRange);

/// Computes the loss of GMPO, geometric-mean policy optimisation (Zhao et al. 2025).
///
/// For a sequence of n valid tokens, with x_t = T_t − O_t and the clip range applied to the log ratio:
///
/// ```text
/// y_t  = min(x_t, high) for A_t > 0,  max(x_t, −low) for A_t < 0,  0 for A_t = 0
/// loss = −1/B Σ_s Ā·W·g,   g = exp(mean_t y_t),  Ā = mean_t A_t,  W = exp(mean_t log(w_t + 1e-10))
/// ```
///
/// `batch_sequences` is B, the number of sequences of the whole batch. It counts sequences without valid
/// tokens, which add nothing to the sum. The aggregation mode is not used. Only g depends on T, and dg/dT_t =
/// g/n where y_t is not clipped. So the gradient is −Ā·W·g/(n·B) there, and 0 elsewhere.
///
/// Metrics: `actor/pg_clipfrac` is the fraction of tokens with x outside [−low, high] and A > 0.
/// `actor/pg_clipfrac_lower` is the fraction with x outside this range and A < 0. `actor/ppo_kl` is the token
/// mean of O − T.
///
/// # Errors
/// When a slice does not fit its sequences, or `batch_sequences` is smaller than the number of sequences of
/// the micro-batch.
impl LossFunction for GeoMean {
    fn compute(&self, input: &LossInput, _: &Normalizer, batch_sequences: usize) -> Result<PolicyLoss> {
        ensure!(
            batch_sequences >= input.sequences.len(),
            "a micro-batch of {} sequences is larger than its batch of {batch_sequences}",
            input.sequences.len()
        );
        let mut counts = ClipCounts::default();
        let mut total = 0.0;
        let mut gradient = vec![0.0; input.sequences.tokens()];
        for range in input.sequences.token_ranges() {
            let valid = input.sequences.valid_indices(range);
            let tokens = valid.clone().count();
            if tokens == 0 {
                continue;
            }
            let ratio = mean(valid.clone().map(|t| clip_log_ratio(input, &self.0, t).0)).exp();
            let weight = mean(valid.clone().map(|t| (input.weight(t) + WEIGHT_EPSILON).ln()));
            let weight = if input.weights.is_some() { weight.exp() } else { 1.0 };
            let loss = -mean(valid.clone().map(|t| input.advantage(t))) * ratio * weight;
            total += loss;
            for token in valid {
                let (_, depends_on_log_prob) = clip_log_ratio(input, &self.0, token);
                let (log_ratio, advantage) = (input.log_ratio(token), input.advantage(token));
                let outside = log_ratio != log_ratio.clamp(-self.0.low, self.0.high);
                counts.add(&Term {
                    kl: -log_ratio,
                    clipped: outside && advantage > 0.0,
                    clipped_lower: outside && advantage < 0.0,
                    ..Term::default()
                });
                if depends_on_log_prob {
                    gradient[token] = (loss / (tokens * batch_sequences) as f64) as f32;
                }
            }
        }
        Ok(PolicyLoss {
            loss: total / batch_sequences as f64,
            grad_log_prob: gradient,
            metrics: counts.metrics(),
        })
    }
}

/// Returns y of a token, and whether y depends on T.
fn clip_log_ratio(input: &LossInput, clip: &ClipRange, token: usize) -> (f64, bool) {
    let log_ratio = input.log_ratio(token);
    let advantage = input.advantage(token);
    if advantage > 0.0 {
        (log_ratio.min(clip.high), log_ratio <= clip.high)
    } else if advantage < 0.0 {
        (log_ratio.max(-clip.low), log_ratio >= -clip.low)
    } else {
        (0.0, false)
    }
}
