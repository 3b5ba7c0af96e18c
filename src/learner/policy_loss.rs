//! The loss of one policy update: policy loss, KL to the reference, entropy bonus, and distillation.

use super::batch::Batch;
use crate::actor::{BatchPart, Forward, PolicyColumns};
use crate::metrics::Metrics;
use crate::policy::distill::distill_loss;
use crate::policy::divergence::kl_loss;
use crate::policy::loss::{LossFunction, LossInput, PolicyLoss, TokenMean};
use crate::policy::ratio::OldLogProbSource;
use crate::policy::{BatchSize, KlPlacement, Normalizer, PolicySettings, Sequences};
use anyhow::Result;
use std::collections::BTreeMap;

/// The loss of an update over a batch or a minibatch. Every part uses the normaliser of the whole update. So
/// the split into parts changes the result within rounding alone.
pub struct UpdateLoss<'a> {
    batch: &'a Batch,
    policy: &'a PolicySettings,
    loss: Box<dyn LossFunction>,
    old_log_prob_source: OldLogProbSource,
    /// Number of updates in the step.
    updates: usize,
    normalizer: Normalizer,
}

/// The loss of one part. The losses of all parts add up to the loss of the update.
pub struct LossShare {
    /// The policy loss, without its gradient.
    policy: PolicyLoss,
    /// KL to the reference, before its coefficient.
    kl: f64,
    /// Divergence from the teacher, before its coefficient.
    distill: f64,
}

impl<'a> UpdateLoss<'a> {
    /// Creates the loss over `batch`. `old_log_prob_source` selects the old log-probs of the importance
    /// ratio. `response_tokens_max` is the constant of [`crate::policy::Aggregation::Constant`].
    ///
    /// # Errors
    /// When the settings of the recipe's loss are invalid, or the batch has no token.
    pub fn new(
        batch: &'a Batch,
        policy: &'a PolicySettings,
        old_log_prob_source: OldLogProbSource,
        updates: usize,
        response_tokens_max: usize,
    ) -> Result<Self> {
        let loss = (policy.loss.build)(policy)?;
        let size = BatchSize::from_sequences(&batch.masked_sequences()?, response_tokens_max);
        let normalizer = Normalizer::new(policy.aggregation, size)?;
        Ok(Self { batch, policy, loss, old_log_prob_source, updates, normalizer })
    }

    /// Returns the gradient of the loss of `part` with respect to its columns, and the loss.
    ///
    /// # Errors
    /// When a log-probability or a divergence is not finite.
    pub fn part(&self, part: &BatchPart, columns: &PolicyColumns) -> Result<(PolicyColumns, LossShare)> {
        let PolicyColumns { log_probs, entropies, divergences } = columns;
        let Self { batch, policy, normalizer, .. } = self;
        let span = part.targets.clone();
        let of_part = |column: &'a Option<Vec<f32>>| column.as_ref().map(|column| &column[span.clone()]);
        let (rollout, training) =
            (&batch.rollout_log_probs[span.clone()], of_part(&batch.training_log_probs));
        let input = LossInput {
            sequences: Sequences::new(&part.cu_targets, &batch.mask[span.clone()])?,
            log_prob: log_probs,
            old_log_prob: self.old_log_prob_source.select(log_probs, rollout, training, self.updates)?,
            advantages: &batch.advantages[span.clone()],
            weights: of_part(&batch.weights),
            selected: batch.selected.as_ref().map(|flags| &flags[span.clone()]),
        };
        let coefficient = policy.loss_coefficient();
        let mut loss = match coefficient == 0.0 {
            true => PolicyLoss { loss: 0.0, grad_log_prob: vec![0.0; log_probs.len()], metrics: vec![] },
            false => self.loss.loss(&input, normalizer, batch.sequences.len())?,
        };
        if coefficient != 1.0 {
            let scaled = |gradient: &mut f32| *gradient = (coefficient * f64::from(*gradient)) as f32;
            loss.grad_log_prob.iter_mut().for_each(scaled);
        }
        let mut kl = 0.0;
        if let (KlPlacement::Loss, Some(reference)) = (policy.kl.place, of_part(&batch.reference_log_probs)) {
            let gradients;
            (kl, gradients) =
                kl_loss(&input.sequences, log_probs, reference, policy.kl.estimator, normalizer)?;
            for (sum, gradient) in loss.grad_log_prob.iter_mut().zip(gradients) {
                *sum += (policy.kl.coefficient * f64::from(gradient)) as f32;
            }
        }
        // A higher entropy must lower the loss, so the gradient of the bonus is negative.
        let bonus = policy.entropy_coefficient;
        let entropies = match bonus == 0.0 {
            true => vec![0.0; entropies.len()],
            false => normalizer.reduce(&input.sequences, |_, t| (f64::from(entropies[t]), -bonus)).1,
        };
        let (mut distill, mut grad_divergences) = (0.0, None);
        if let (Some(settings), Some(divergences)) = (&policy.distill, divergences) {
            let gradients;
            (distill, gradients) = distill_loss(&input.sequences, divergences, normalizer)?;
            let scaled = |gradient: f32| (settings.coefficient * f64::from(gradient)) as f32;
            grad_divergences = Some(gradients.into_iter().map(scaled).collect());
        }
        let log_probs = std::mem::take(&mut loss.grad_log_prob);
        let gradient = PolicyColumns { log_probs, entropies, divergences: grad_divergences };
        Ok((gradient, LossShare { policy: loss, kl, distill }))
    }

    /// Returns the update's metrics, which are means over its tokens. `shares` has one entry per part.
    /// `has_load_balance` says whether there is a load-balancing loss.
    pub fn metrics(&self, shares: &[LossShare], forward: &Forward, has_load_balance: bool) -> Metrics {
        let mut metrics = Metrics::new();
        let mut means: BTreeMap<&str, TokenMean> = BTreeMap::new();
        for mean in shares.iter().flat_map(|s| &s.policy.metrics) {
            let total = means.entry(mean.name).or_insert(TokenMean { sum: 0.0, tokens: 0.0, ..*mean });
            total.sum += mean.sum;
            total.tokens += mean.tokens;
        }
        means.into_iter().for_each(|(name, mean)| metrics.set(name, mean.value()));
        if self.policy.loss_coefficient() != 0.0 {
            metrics.set("actor/pg_loss", shares.iter().map(|s| s.policy.loss).sum::<f64>());
        }
        if self.policy.distill.is_some() {
            metrics.set("actor/distill_kl", shares.iter().map(|s| s.distill).sum::<f64>());
        }
        if self.policy.kl.place == KlPlacement::Loss {
            metrics.set("actor/kl_loss", shares.iter().map(|s| s.kl).sum::<f64>());
        }
        let entropies = forward.columns.entropies.iter().map(|&e| f64::from(e));
        metrics.set("actor/entropy", entropies.sum::<f64>() / self.batch.rollout_log_probs.len() as f64);
        if has_load_balance {
            metrics.set("actor/load_balance", forward.load_balance);
        }
        metrics
    }
}
