//! REINFORCE: no ratio, no clip.

use anyhow::Result;

use super::{LossEntry, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::policy::aggregation::Normalizer;

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "reinforce",
    meaning: "Gradient of the log-probability.",
    build: |_| Ok(Box::new(Reinforce)),
    has_ratio: false,
    ..LossEntry::DEFAULT
};

/// The plain policy gradient, which has no settings.
#[derive(Debug)]
pub struct Reinforce;

/// Computes the loss of the plain policy gradient (Williams 1992). If the data is off-policy, the loss is
/// weighted by w.
///
/// ```text
/// l = −A·T,   l' = −A
/// ```
///
/// Only the metric `actor/ppo_kl`, the token mean of O − T, uses O. Pass the rollout's log-probs as O.
impl LossFunction for Reinforce {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        let mut loss = token_loss(input, normalizer, |_, token| {
            let derivative = -input.advantage(token);
            Term {
                loss: derivative * f64::from(input.log_prob[token]),
                derivative,
                kl: -input.log_ratio(token),
                ..Term::default()
            }
        });
        loss.metrics.retain(|metric| metric.name == "actor/ppo_kl");
        Ok(loss)
    }
}
