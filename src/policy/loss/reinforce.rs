//! REINFORCE: no ratio, no clip.

use anyhow::Result;

use super::{LossInput, PolicyLoss, Term, token_loss};
use crate::policy::aggregation::Normalizer;

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
