//! Selects the tokens of a batch that the policy loss treats in another way.

use super::batch::Batch;
use crate::bad_input;
use crate::metrics::Metrics;
use crate::policy::PolicySettings;
use crate::policy::loss::SelectionInput;
use crate::policy::ratio::OldLogProbSource;
use crate::random::{Purpose, stream};
use anyhow::{Context, Result};

/// Lets the recipe's loss select tokens of `batch`, the whole batch of step `step`. The selection depends
/// only on the batch, `seed` and `step`. So it is equal for every split into minibatches and micro-batches.
/// Returns the metric `actor/selected_fraction`, the fraction of valid tokens that are selected. Does nothing
/// for a loss that selects no tokens.
///
/// # Errors
/// [`crate::error::BadInput`] if the old log-probs are those of the update's own forward pass.
pub fn select_tokens(
    batch: &mut Batch,
    policy: &PolicySettings,
    source: OldLogProbSource,
    (seed, step): (u64, u64),
) -> Result<Metrics> {
    let mut metrics = Metrics::new();
    if !policy.loss.selects_tokens {
        return Ok(metrics);
    }
    let old_log_prob = match source {
        OldLogProbSource::Rollout => &batch.rollout_log_probs,
        OldLogProbSource::Recompute => batch.training_log_probs.as_ref().context("no second forward pass")?,
        OldLogProbSource::Detach => {
            return Err(bad_input!(
                "policy.loss = \"{}\" selects tokens before the first update, and policy.old_logprob = \"detach\" gives \
                 their log-probs during it; use \"rollout\" or \"recompute\"",
                policy.loss
            ));
        }
    };
    let sequences = batch.masked_sequences()?;
    let input = SelectionInput { sequences, old_log_prob, advantages: &batch.advantages };
    let random = &mut stream(seed, Purpose::TokenSelection, &[step]);
    let selected = (policy.loss.build)(policy)?.select_tokens(&input, random)?;
    let count = selected.iter().filter(|&&selected| selected).count();
    metrics.set("actor/selected_fraction", count as f64 / sequences.valid_tokens().max(1) as f64);
    batch.selected = Some(selected);
    Ok(metrics)
}
