//! REINFORCE: no ratio, no clip.

use anyhow::Result;

use super::{LossEntry, LossFunction, LossInput, PolicyLoss, Term, token_loss};
use crate::policy::aggregation::Normalizer;

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "reinforce",
    meaning: "Gradient of the log-probability.",
    make: |_| Ok(Box::new(Reinforce)),
    has_ratio: false,
    ..LossEntry::USUAL
};

/// [`reinforce`], which has no settings.
#[derive(Debug)]
struct Reinforce;

impl LossFunction for Reinforce {
    fn loss(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        reinforce(input, normalizer)
    }
}

/// The plain policy gradient, weighted by w when the data is off-policy (Williams 1992).
///
/// ```text
/// l = −A·T,   l' = −A
/// ```
///
/// O is read for `actor/ppo_kl` alone, the token mean of O − T: pass the rollout's log-probs.
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
