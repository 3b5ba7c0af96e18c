//! KL-Cov: a KL penalty on the tokens whose log-prob and advantage have the highest covariance.

use anyhow::Result;
use rand::RngCore;

use super::covariance::selected_count;
use super::{LossEntry, LossFunction, LossInput, PolicyLoss, SelectionInput, Term, token_loss};
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};
use crate::settings::{above, table};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "kl_cov",
    meaning: "Ratio without a clip; the tokens with the highest covariance of log-probability and advantage have a KL penalty.",
    build: |settings| Ok(Box::new(settings.kl_cov.clone())),
    selects_tokens: true,
    ..LossEntry::DEFAULT
};

table! {
    /// Penalty of `loss = "kl_cov"`, not with `old_logprob = "detach"`. The covariance is that of `clip_cov`.
    /// The penalty has a gradient only where the policy has moved away from the old log-probabilities, so a
    /// step needs several updates or samples of older weights.
    pub struct KlCovSettings {
        /// Fraction of the batch's tokens that have the penalty, those with the highest covariance; at least
        /// one token.
        pub fraction: f64 = 2e-4 => above(0.0).to(1.0),
        /// Coefficient of the penalty.
        pub coefficient: f64 = 1.0 => above(0.0).to(1e6),
    }
}

/// Computes the loss of KL-Cov (Cui et al. 2025, arXiv 2505.22617), as in verl at b178a3c.
///
/// Let x = clamp(T − O, ±20) and r = eˣ. β is the coefficient. The selection is made over the whole batch,
/// before the first update of a step, with O in place of T.
///
/// ```text
/// l = −A·r,   and for a selected token   l = −A·r + β·|x|
/// ```
///
/// l' = −A·r, plus β·sign(x) for a selected token, with sign(0) = 0. l' is 0 if |T − O| > 20.
///
/// Metrics: `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` are always 0, because nothing is clipped.
/// `actor/ppo_kl` is the mean of −x; verl's is that of |x|.
///
/// # Errors
/// When a slice of `input` does not fit its sequences, or no selection was made.
impl LossFunction for KlCovSettings {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        let selected = input.selection()?;
        Ok(token_loss(input, normalizer, |_, token| {
            let log_ratio = input.log_ratio(token);
            let clamped = log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
            let unpenalised = -input.advantage(token) * clamped_ratio(log_ratio);
            let penalty = if selected[token] { self.coefficient } else { 0.0 };
            let sign = if clamped == 0.0 { 0.0 } else { clamped.signum() };
            let is_clamped = log_ratio.abs() > LOG_RATIO_MAX;
            Term {
                loss: unpenalised + penalty * clamped.abs(),
                derivative: if is_clamped { 0.0 } else { unpenalised + penalty * sign },
                kl: -clamped,
                ..Term::default()
            }
        }))
    }

    /// Selects the tokens with the highest covariance. Of tokens with equal covariances, the first ones are
    /// selected.
    fn select_tokens(&self, batch: &SelectionInput, _: &mut dyn RngCore) -> Result<Vec<bool>> {
        let mut covariances = batch.covariances()?;
        covariances.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let count = selected_count(covariances.len(), self.fraction);
        Ok(batch.flags(covariances.into_iter().take(count).map(|(token, _)| token)))
    }
}
