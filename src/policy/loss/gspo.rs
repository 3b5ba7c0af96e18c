//! GSPO: one importance ratio per sequence.

use anyhow::Result;

use super::{ClipRange, LossEntry, LossFunction, LossInput, PolicyLoss, Term, TokenWeights, token_loss};
use crate::policy::aggregation::Normalizer;

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "gspo",
    meaning: "One clipped ratio per sequence.",
    build: |settings| Ok(Box::new(Gspo(ClipRange::from_settings(settings)?))),
    token_weights: TokenWeights::None(
        "gspo has one ratio per sequence; with per-token weights its gradient would not be the gradient of its loss; write \
         is = \"sequence\", or another loss",
    ),
    ..LossEntry::DEFAULT
};

/// The loss GSPO with its clip range.
#[derive(Debug)]
pub struct Gspo(pub ClipRange);

/// Computes the loss of GSPO, group sequence policy optimisation (Zheng et al. 2025), in its token form.
///
/// Every token of a sequence has the length-normalised ratio of its sequence, s = exp(min(mean_t(T − O),
/// 10)). The gradient flows through the token's own log-prob:
///
/// ```text
/// log s_t = sg(mean(T − O)) + T_t − sg(T_t),     l_t = max(−A·s_t, −A·clip(s_t, 1 − low, 1 + high))
/// ```
///
/// So l' = −A·s, and 0 where the ratio is clipped or the mean exceeds 10.
///
/// Metrics: `actor/pg_clipfrac` is the fraction of tokens in clipped sequences. `actor/pg_clipfrac_lower` is
/// always 0, because there is no dual clip. `actor/ppo_kl` is the token mean of O − T, not clamped.
impl LossFunction for Gspo {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        let means = input.sequences.sequence_means(|token| input.log_ratio(token));
        Ok(token_loss(input, normalizer, |sequence, token| {
            let advantage = input.advantage(token);
            let ratio = means[sequence].min(LOG_SEQUENCE_RATIO_MAX).exp();
            let (unclipped_loss, clipped_loss) = (-advantage * ratio, -advantage * self.0.clip(ratio));
            let clipped = clipped_loss > unclipped_loss;
            let has_zero_gradient = clipped || means[sequence] > LOG_SEQUENCE_RATIO_MAX;
            Term {
                loss: unclipped_loss.max(clipped_loss),
                derivative: if has_zero_gradient { 0.0 } else { unclipped_loss },
                kl: -input.log_ratio(token),
                clipped,
                clipped_lower: false,
            }
        }))
    }
}

/// Upper limit of the logarithm of the sequence ratio. There is no lower limit.
const LOG_SEQUENCE_RATIO_MAX: f64 = 10.0;
