//! Clip-Cov: no gradient for a few random tokens whose log-prob and advantage have a high covariance.

use anyhow::Result;
use rand::RngCore;
use rand::seq::IteratorRandom;

use super::covariance::selected_count;
use super::{ClipRange, LossEntry, LossFunction, LossInput, PolicyLoss, SelectionInput, Term, token_loss};
use crate::policy::aggregation::Normalizer;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};
use crate::settings::{above, from, table};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "clip_cov",
    meaning: "Clipped ratio; a few random tokens with a high covariance of log-probability and advantage have no gradient.",
    build: |settings| {
        let range = ClipRange::from_settings(settings)?;
        Ok(Box::new(ClipCov { range, settings: settings.clip_cov.clone() }))
    },
    selects_tokens: true,
    ..LossEntry::DEFAULT
};

table! {
    /// Selection of `loss = "clip_cov"`, not with `old_logprob = "detach"`. A token's covariance is
    /// (A − mean A)·(old log-probability − its mean), with means over the batch.
    pub struct ClipCovSettings {
        /// Fraction of the batch's tokens that have no gradient; at least one token if any has a covariance
        /// in the range.
        pub fraction: f64 = 2e-4 => above(0.0).to(1.0),
        /// Only tokens with a covariance above this are selected.
        pub covariance_min: f64 = 1.0 => from(-1e6).to(1e6),
        /// Only tokens with a covariance below this are selected. Must exceed `covariance_min`.
        pub covariance_max: f64 = 5.0 => from(-1e6).to(1e6),
    }
}

/// The loss Clip-Cov with its clip range and its selection.
#[derive(Debug)]
pub struct ClipCov {
    pub range: ClipRange,
    pub settings: ClipCovSettings,
}

/// Computes the loss of Clip-Cov (Cui et al. 2025, arXiv 2505.22617), as in verl at b178a3c.
///
/// Let x = clamp(T − O, ±20) and r = eˣ. The selection is made over the whole batch, before the first update
/// of a step, with O in place of T.
///
/// ```text
/// l = 0 for a selected token, else max(−A·r, −A·clip(r, 1 − low, 1 + high))
/// ```
///
/// l' = −A·r, and 0 for a token that is selected, clipped or clamped.
///
/// Metrics: `actor/pg_clipfrac` is the fraction of selected tokens, as in verl. `actor/pg_clipfrac_lower` is
/// always 0. `actor/ppo_kl` is the mean of −x.
///
/// # Errors
/// When a slice of `input` does not fit its sequences, or no selection was made.
impl LossFunction for ClipCov {
    fn compute(&self, input: &LossInput, normalizer: &Normalizer, _: usize) -> Result<PolicyLoss> {
        let selected = input.selection()?;
        Ok(token_loss(input, normalizer, |_, token| {
            let log_ratio = input.log_ratio(token);
            let kl = -log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
            if selected[token] {
                return Term { kl, clipped: true, ..Term::default() };
            }
            let advantage = input.advantage(token);
            let ratio = clamped_ratio(log_ratio);
            let (unclipped_loss, clipped_loss) = (-advantage * ratio, -advantage * self.range.clip(ratio));
            let has_zero_gradient = clipped_loss > unclipped_loss || log_ratio.abs() > LOG_RATIO_MAX;
            Term {
                loss: unclipped_loss.max(clipped_loss),
                derivative: if has_zero_gradient { 0.0 } else { unclipped_loss },
                kl,
                ..Term::default()
            }
        }))
    }

    /// Selects tokens at random among those whose covariance lies in the range.
    fn select_tokens(&self, batch: &SelectionInput, random: &mut dyn RngCore) -> Result<Vec<bool>> {
        let ClipCovSettings { fraction, covariance_min, covariance_max } = self.settings;
        let covariances = batch.covariances()?;
        let count = selected_count(covariances.len(), fraction);
        let candidates = covariances
            .iter()
            .filter(|(_, covariance)| covariance_min < *covariance && *covariance < covariance_max);
        let selected = candidates.map(|(token, _)| *token).choose_multiple(random, count);
        Ok(batch.flags(selected.into_iter()))
    }
}
