//! REINFORCE: no ratio, no clip.

use anyhow::Result;

use super::{LossEntry, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::policy::aggregation::Normalizer;

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "reinforce",
    meaning: "Gradient of the log-probability.",
    make: |_| Ok(Box::new(Reinforce)),
    has_ratio: false,
    ..LossEntry::DEFAULT
};

/// [`reinforce`] as a registered loss; it has no settings.
#[derive(Debug)]
struct Reinforce;

impl LossFunction for Reinforce {
    fn loss(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        reinforce(input, normalizer)
    }
}

/// Computes the loss of the plain policy gradient (Williams 1992), weighted by w when the data is off-policy.
///
/// ```text
/// l = −A·T,   l' = −A
/// ```
///
/// Only `actor/ppo_kl`, the token mean of O − T, reads O: pass the rollout's log-probs.
pub fn reinforce(input: &LossInput, normalizer: &Normalizer) -> Result<PolicyLoss> {
    input.check()?;
    let mut loss = token_loss(input, normalizer, |_, token| {
        let slope = -input.advantage(token);
        Term {
            loss: slope * f64::from(input.log_prob[token]),
            slope,
            kl: -input.log_ratio(token),
            ..Term::default()
        }
    });
    loss.metrics.retain(|metric| metric.name == "actor/ppo_kl");
    Ok(loss)
}
