//! One step of reinforcement learning after sampling, from top to bottom: log-probs and values, advantages,
//! correction. Then, for each minibatch: loss, backward pass, clip, update.

use super::gradient_norms::{GradientNormLimits, skipped_norm};
use super::observer::Stages;
use crate::actor::routed_experts::experts_from_sampling;
use crate::actor::teacher::Teacher;
use crate::actor::{Actor, Forward, GradientNorm, PassInput, PassSettings, PolicyColumns};
use crate::learner::TrainSettings;
use crate::learner::advantages::AdvantageEstimator;
use crate::learner::batch::Batch;
use crate::learner::critic::{Critic, add_value_gradients};
use crate::learner::policy_loss::UpdateLoss;
use crate::learner::rollout_correction::correct_rollout;
use crate::learner::token_selection::select_tokens;
use crate::metrics::{Accumulator, Metrics};
use crate::model::forward::ForwardOptions;
use crate::policy::ratio::OldLogProbSource;
use crate::policy::{KlPlacement, PolicySettings, RouterReplay, Truncated};
use crate::trajectory::{Group, TokenStats};
use anyhow::{Context, Result};
use std::collections::BTreeMap;

/// The update of a step from its trajectories.
#[derive(Clone, Copy)]
pub struct PolicyStep<'a> {
    /// The number of the step, from 1.
    pub step: u64,
    pub policy: &'a PolicySettings,
    pub train: &'a TrainSettings,
    /// The settings of the policy's passes.
    pub pass: PassSettings,
    /// An ablation: the old log-probs come from a separate forward pass, regardless of `policy.old_logprob`.
    pub old_log_prob_forward: Option<ForwardOptions>,
    /// Maximum number of response tokens. [`crate::policy::Aggregation::Constant`] divides by it, and the
    /// penalty of overlong shaping begins before it.
    pub response_tokens_max: usize,
    /// The task's least reward.
    pub reward_min: f32,
    /// The weights of the task's named rewards; empty if it has none.
    pub reward_weights: &'a BTreeMap<String, f32>,
    /// KL coefficient in the reward at this step: `policy.kl.coefficient`, or the adapted value.
    pub kl_coefficient: f64,
    pub norm_limits: GradientNormLimits,
    /// The frozen reference, which `policy.kl` requires.
    pub reference: Option<&'a Actor>,
    /// The frozen teacher, which `policy.distill` requires.
    pub teacher: Option<Teacher<'a>>,
    pub stages: Stages<'a>,
}

/// One update before the optimizer step. The policy holds its gradients.
pub struct PolicyUpdate {
    /// Means over the tokens of the update.
    pub metrics: Metrics,
    pub forward: Forward,
}

/// The updates of one model in a step.
struct UpdateSummary {
    /// Means over the updates. For updates that were skipped because of their gradient: their number, and
    /// their largest finite gradient norm.
    metrics: Accumulator,
    /// Number of updates that changed the weights.
    updates: usize,
    /// Number of minibatches without an update, because the rollout correction rejected all of their tokens.
    rejected_minibatches: usize,
}

impl PolicyStep<'_> {
    /// Runs the step after sampling. Returns the metrics, and statistics of each token. A metric is a mean
    /// over the updates, or a value of the whole batch before the first update. During critic warm-up, only
    /// the critic is updated.
    ///
    /// # Errors
    /// When a pass fails, or a log-probability or value is NaN; or a gradient norm, unless such updates are
    /// skipped.
    pub fn run(
        &self,
        groups: &[&Group],
        actor: &mut Actor,
        critic: Option<&mut Critic>,
    ) -> Result<(Metrics, Vec<TokenStats>)> {
        let is_critic_warm_up = self.is_critic_warm_up(critic.as_deref());
        let (batch, mut forward, mut metrics) = self.prepare(groups, actor, critic.as_deref())?;
        if let Some(critic) = critic {
            metrics.extend(self.update_critic(&batch, critic)?);
        }
        if !is_critic_warm_up {
            let (update_metrics, first_forward) = self.update_policy(&batch, actor)?;
            metrics.extend(update_metrics);
            // With one minibatch, the forward pass of the first update covers the whole batch.
            forward = first_forward.filter(|_| self.train.minibatches == 1).or(forward);
        }
        if let Some(forward) = &forward {
            metrics.extend(batch.mismatch_metrics(forward, actor.model.config.num_experts_per_tok)?);
        }
        let forward_log_probs = || forward.as_ref().map(|forward| &forward.columns.log_probs);
        let training = batch.training_log_probs.as_ref().or_else(forward_log_probs);
        Ok((metrics, batch.token_stats(training.map(Vec::as_slice))))
    }

    /// Returns the batch for all updates, the policy's forward pass over it if it ran, and the metrics.
    ///
    /// # Errors
    /// The errors of [`Self::run`].
    pub fn prepare(
        &self,
        groups: &[&Group],
        actor: &Actor,
        critic: Option<&Critic>,
    ) -> Result<(Batch, Option<Forward>, Metrics)> {
        let mut batch = Batch::new(groups);
        if self.policy.kl.place != KlPlacement::None {
            let reference = self.reference.context("policy.kl needs a reference")?;
            let forward = self.forward(("ref", "reference"), reference, batch.policy_input(), self.pass)?;
            batch.reference_log_probs = Some(forward.columns.log_probs);
        }
        let config = &actor.model.config;
        let sampled = experts_from_sampling(groups, config.num_hidden_layers, config.num_experts_per_tok);
        match self.policy.router_replay == RouterReplay::Rollout {
            true => batch.replayed_experts = Some(sampled?),
            false => batch.rollout_experts = sampled.ok(),
        }
        let forward = match self.needs_forward(critic) {
            true => Some(self.forward_before_updates(&mut batch, actor)?),
            false => None,
        };
        if let Some(critic) = critic {
            batch.values = Some(self.stages.run(("values", "values"), || critic.values(&batch))?);
        }
        let estimator = AdvantageEstimator {
            policy: self.policy,
            old_log_prob_source: self.old_log_prob_source(),
            kl_coefficient: self.kl_coefficient,
            response_tokens_max: self.response_tokens_max,
            reward_min: self.reward_min,
            reward_weights: self.reward_weights,
            critic,
        };
        let mut metrics = self.stages.timings.time("adv", || estimator.estimate(&mut batch, groups))?;
        metrics.extend(correct_rollout(&mut batch, &self.policy.correction)?);
        if self.policy.truncated == Truncated::Mask {
            batch.mask_truncated(groups);
        }
        let (source, seed) = (self.old_log_prob_source(), self.train.seed);
        metrics.extend(select_tokens(&mut batch, self.policy, source, (seed, self.step))?);
        Ok((batch, forward, metrics))
    }

    /// Runs the policy's forward pass before the first update: the old log-probs, and the experts to replay.
    fn forward_before_updates(&self, batch: &mut Batch, actor: &Actor) -> Result<Forward> {
        let replays = self.policy.router_replay == RouterReplay::Recompute;
        let pass = PassSettings {
            forward: self.old_log_prob_forward.unwrap_or(self.pass.forward),
            keeps_routed_experts: batch.rollout_experts.is_some() || replays,
            ..self.pass
        };
        let forward = self.forward(("old_log_prob", "old log-probs"), actor, batch.policy_input(), pass)?;
        batch.training_log_probs = Some(forward.columns.log_probs.clone());
        if replays {
            batch.replayed_experts = Some(forward.routed_experts.clone());
        }
        Ok(forward)
    }

    /// Returns whether the policy runs a forward pass before its first update: for old log-probs, for the
    /// rollout correction, for a KL penalty in the reward, or because no single update will pass over the
    /// whole batch, with which the rollout is compared.
    fn needs_forward(&self, critic: Option<&Critic>) -> bool {
        let source = self.old_log_prob_source();
        let kl_needs_forward =
            self.policy.kl.place == KlPlacement::Reward && source == OldLogProbSource::Detach;
        let first_update_covers_batch = self.train.minibatches == 1 && !self.is_critic_warm_up(critic);
        source == OldLogProbSource::Recompute
            || self.policy.correction.is_active()
            || kl_needs_forward
            || !first_update_covers_batch
    }

    /// Returns the source of the old log-probs: those of sampling (`Rollout`), of a forward pass before the
    /// first update (`Recompute`), or of the update's own pass (`Detach`: the ratio is 1).
    fn old_log_prob_source(&self) -> OldLogProbSource {
        match self.old_log_prob_forward {
            Some(_) => OldLogProbSource::Recompute,
            None => self.policy.old_logprob,
        }
    }

    fn is_critic_warm_up(&self, critic: Option<&Critic>) -> bool {
        critic.is_some_and(|critic| self.step <= critic.settings.warmup_steps)
    }

    /// Runs the critic's updates. Their targets, the returns, are already computed.
    fn update_critic(&self, batch: &Batch, critic: &mut Critic) -> Result<Metrics> {
        let Critic { settings, actor } = critic;
        let aggregation = (self.policy.aggregation, self.response_tokens_max);
        let schedule = (settings.minibatches, settings.epochs);
        let limit = self.norm_limits.critic;
        let summary = self.update(("critic", limit), actor, batch, schedule, |actor, minibatch| {
            let stage = self.stages.console.start_inner_stage("critic's update", 0);
            add_value_gradients(actor, settings, aggregation, minibatch).inspect(|_| stage.finish())
        })?;
        summary.metrics.finish()
    }

    /// Runs the policy's updates. Returns their metrics and the forward pass of the first update.
    fn update_policy(&self, batch: &Batch, actor: &mut Actor) -> Result<(Metrics, Option<Forward>)> {
        let &TrainSettings { minibatches, epochs, .. } = self.train;
        let mut first_forward = None;
        let lr = actor.update_settings(self.step, self.train.steps, None)?.lr;
        let model = ("actor", self.norm_limits.actor);
        let summary = self.update(model, actor, batch, (minibatches, epochs), |actor, minibatch| {
            let Some(update) = self.gradients(minibatch, actor)? else { return Ok(None) };
            first_forward.get_or_insert(update.forward);
            Ok(Some(update.metrics))
        })?;
        let UpdateSummary { metrics, updates, rejected_minibatches } = summary;
        let mut metrics = metrics.finish()?;
        metrics.set("actor/lr", lr);
        if minibatches * epochs > 1 || rejected_minibatches > 0 {
            metrics.set("actor/updates", updates as f64);
            metrics.set("actor/updates_skipped", rejected_minibatches as f64);
        }
        Ok((metrics, first_forward))
    }

    /// Updates `actor`, whose metrics begin with `name`. For each minibatch of each epoch: loss and backward
    /// pass (`gradients`), clip, update. `gradients` returns `None` if all tokens of the minibatch are
    /// rejected.
    fn update(
        &self,
        (name, norm_limit): (&str, Option<f64>),
        actor: &mut Actor,
        batch: &Batch,
        (minibatches, epochs): (usize, usize),
        mut gradients: impl FnMut(&mut Actor, &Batch) -> Result<Option<Metrics>>,
    ) -> Result<UpdateSummary> {
        let settings = actor.update_settings(self.step, self.train.steps, norm_limit)?;
        let (mut metrics, mut updates, mut rejected_minibatches) = (Accumulator::new(), 0, 0);
        for epoch in 0..epochs as u64 {
            for indices in batch.minibatches(minibatches, self.train.seed, self.step, epoch) {
                let minibatch = batch.select(&indices);
                let timing = format!("update_{name}");
                let result = self.stages.timings.time(&timing, || gradients(actor, &minibatch))?;
                let Some(minibatch_metrics) = result else {
                    rejected_minibatches += 1;
                    continue;
                };
                match self.stages.run(("optimizer", "optimizer"), || actor.optim_step(&settings))? {
                    GradientNorm::Applied(norm) => {
                        metrics.mean(&format!("{name}/grad_norm"), norm, 1.0);
                        metrics.mean(&format!("{name}/lr"), settings.lr, 1.0);
                        minibatch_metrics.iter().for_each(|(name, value)| metrics.mean(name, value, 1.0));
                        updates += 1;
                    }
                    GradientNorm::Skipped(norm) => {
                        // Without a limit (`train.on_bad_step = "stop"`) this ends the run.
                        metrics.sum(&format!("{name}/updates_bad"), 1.0);
                        if let Some(norm) = skipped_norm(norm, norm_limit)? {
                            metrics.max(&format!("{name}/grad_norm_bad"), norm);
                        }
                    }
                }
            }
        }
        Ok(UpdateSummary { metrics, updates, rejected_minibatches })
    }

    /// Adds the gradients of the policy's loss over `batch`, which may be a minibatch, to those of `actor`.
    /// Returns `None` if every token was rejected.
    ///
    /// # Errors
    /// When a pass fails, or a log-probability is NaN.
    pub fn gradients(&self, batch: &Batch, actor: &mut Actor) -> Result<Option<PolicyUpdate>> {
        if batch.masked_sequences()?.valid_tokens() == 0 {
            return Ok(None);
        }
        let updates = self.train.minibatches * self.train.epochs;
        let source = self.old_log_prob_source();
        let loss = UpdateLoss::new(batch, self.policy, source, updates, self.response_tokens_max)?;
        let teacher = match &self.policy.distill {
            None => None,
            Some(_) => Some(self.teacher.context("policy.distill needs a teacher")?),
        };
        let input = PassInput { teacher, ..batch.policy_input() };
        let pass = PassSettings { keeps_routed_experts: batch.rollout_experts.is_some(), ..self.pass };
        let part_loss = |part: &_, columns: &PolicyColumns| loss.part(part, columns);
        let progress = |tokens| self.stages.console.start_pass("update", tokens);
        let (forward, shares) = actor.forward_backward(&input, pass, &part_loss, &progress)?;
        let metrics = loss.metrics(&shares, &forward, self.pass.load_balance_coefficient > 0.0);
        Ok(Some(PolicyUpdate { metrics, forward }))
    }

    /// Runs a forward pass of `actor` as a stage with the given names in the timings and on the console.
    fn forward(
        &self,
        (timing, label): (&str, &str),
        actor: &Actor,
        input: PassInput,
        pass: PassSettings,
    ) -> Result<Forward> {
        let progress = |tokens| self.stages.console.start_pass(label, tokens);
        self.stages.timings.time(timing, || actor.forward(&input, pass, &progress))
    }
}
