//! One step of reinforcement learning, from top to bottom: sample, log-probs and values, advantages,
//! correction. Then, for each minibatch: loss, backward pass, clip, optimizer.

use super::Trainer;
use super::gradient_norms::GradientNormLimits;
use super::sample::SampleOutput;
use crate::learner::TrainSettings;
use crate::learner::advantages::AdvantageEstimator;
use crate::learner::batch::{Batch, ForwardResult};
use crate::actor::batch_runner::{BatchObjective, BatchRunner};
use crate::learner::critic::Critic;
use crate::actor::forward_backward::{PassOutput, PassSettings};
use crate::actor::micro_batch::MicroBatchValues;
use crate::actor::optimizer::{GradientNorm, Optimizer};
use crate::learner::policy_loss::{LossShare, UpdateLoss};
use crate::learner::rollout_correction::correct_rollout;
use crate::actor::teacher::{Teacher, TeacherPasses};
use crate::learner::token_selection::select_tokens;
use crate::metrics::{Accumulator, Console, Metrics, Phase, Timings};
use crate::model::forward::ForwardOptions;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use crate::policy::PolicySettings;
use crate::trajectory::{Group, TokenStats};
use anyhow::{Context, Result, ensure};

/// Number of steps in a row without a group to train on after which a run ends.
const STEPS_WITHOUT_GROUPS_MAX: u64 = 3;

impl Trainer {
    /// Trains on the groups of step `step`, which are sampled now or were sampled ahead. Returns the samples,
    /// the metrics, and statistics of each trained token.
    pub(super) fn step(
        &mut self,
        step: u64,
        optimizer: &mut Optimizer,
        critic: Option<&mut Critic>,
    ) -> Result<(SampleOutput, Metrics, Vec<TokenStats>)> {
        let samples = self.take_samples(step)?;
        if samples.training_groups().is_empty() {
            self.skip_step(step)?;
            return Ok((samples, Metrics::new(), vec![]));
        }
        self.steps_without_groups = 0;
        let groups = samples.training_groups();
        let (metrics, token_stats) = self.update(step, &groups, optimizer, critic)?;
        if let Some(kl) = metrics.get("actor/reward_kl_penalty") {
            self.kl.update(kl, groups.iter().map(|group| group.trajectories.len()).sum());
        }
        Ok((samples, metrics, token_stats))
    }

    /// Warns about a step whose episodes all failed. It changes no weight.
    ///
    /// # Errors
    /// After several such steps in a row.
    fn skip_step(&mut self, step: u64) -> Result<()> {
        self.steps_without_groups += 1;
        let steps = self.steps_without_groups;
        ensure!(
            steps < STEPS_WITHOUT_GROUPS_MAX,
            "for {steps} steps no group has had enough episodes with a reward; the first failures are printed above, and \
             agent/failed in metrics.jsonl counts all; correct the agent's program and resume the run"
        );
        let text =
            "no group has enough episodes with a reward (agent/failed), so this step changes no weight";
        self.warn(Phase::Rl, step, text.to_owned())
    }

    pub(super) fn policy_step(&self, step: u64) -> PolicyStep<'_> {
        let recipe = &self.environment.plan.recipe;
        let load_balance_coefficient = recipe.train.load_balance_coefficient;
        PolicyStep {
            step,
            runner: self.runner(),
            reference: self.reference.as_ref(),
            teacher: self.teacher(),
            policy: &recipe.policy,
            train: &recipe.train,
            kl_coefficient: self.kl.coefficient(),
            pass: PassSettings { load_balance_coefficient, ..self.pass_settings(recipe.rollout.temperature) },
            old_log_prob_forward: ForwardOptions::for_old_log_probs(&recipe.arms, recipe.train.seed),
            response_tokens_max: recipe.rollout.response_tokens_max,
            reward_min: recipe.task.name.reward_min,
            norm_limits: GradientNormLimits {
                actor: self.norm_limit(&self.monitor.actor_norms),
                critic: self.norm_limit(&self.monitor.critic_norms),
            },
            timings: &self.timings,
            console: &self.console,
        }
    }
}

/// Updates policy and critic from a step's trajectories.
#[derive(Clone, Copy)]
pub struct PolicyStep<'a> {
    /// The number of the step, from 1.
    pub step: u64,
    /// Runs batches with the policy's parameters.
    pub runner: BatchRunner<'a>,
    /// Weights of the frozen reference. `policy.kl` requires them.
    pub reference: Option<&'a Parameters>,
    /// The frozen teacher, which `policy.distill` requires.
    pub teacher: Option<Teacher<'a>>,
    pub policy: &'a PolicySettings,
    pub train: &'a TrainSettings,
    /// KL coefficient in the reward at this step: `policy.kl.coefficient`, or the adapted value.
    pub kl_coefficient: f64,
    pub pass: PassSettings,
    /// An ablation: the old log-probs come from a separate forward pass, regardless of `policy.old_logprob`.
    pub old_log_prob_forward: Option<ForwardOptions>,
    /// Maximum number of response tokens. [`crate::policy::Aggregation::Constant`] divides by it, and the
    /// penalty of overlong shaping begins before it.
    pub response_tokens_max: usize,
    /// The task's least reward.
    pub reward_min: f32,
    pub norm_limits: GradientNormLimits,
    pub timings: &'a Timings,
    /// Shows the current stage.
    pub console: &'a Console,
}

/// The model that is updated.
struct UpdateTarget<'a> {
    /// The prefix of the model's metrics: `actor` or `critic`.
    name: &'a str,
    runner: BatchRunner<'a>,
    norm_limit: Option<f64>,
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

/// One update before the optimizer step. The policy's parameters hold its gradients.
pub struct PolicyUpdate {
    /// Means over the tokens of the update.
    pub metrics: Metrics,
    pub forward: ForwardResult,
}

impl<'a> PolicyStep<'a> {
    /// Returns the step with passes and updates on `threads`.
    pub(super) fn on_threads(self, threads: &'a Threads) -> Self {
        Self { runner: BatchRunner { threads, ..self.runner }, ..self }
    }

    /// Runs the step after sampling. Returns the metrics, and statistics of each token. A metric is a mean
    /// over the updates, or a value of the whole batch before the first update. During critic warm-up, only
    /// the critic is updated.
    ///
    /// # Errors
    /// When a pass fails, or a log-probability, value or gradient norm is NaN.
    pub fn run(
        &self,
        groups: &[&Group],
        optimizer: &mut Optimizer,
        critic: Option<&mut Critic>,
    ) -> Result<(Metrics, Vec<TokenStats>)> {
        let is_critic_warm_up = self.is_critic_warm_up(critic.as_deref());
        let (batch, mut forward, mut metrics) = self.prepare(groups, critic.as_deref())?;
        if let Some(critic) = critic {
            metrics.extend(self.update_critic(&batch, critic)?);
        }
        if !is_critic_warm_up {
            let (update_metrics, first_forward) = self.update_policy(&batch, optimizer)?;
            metrics.extend(update_metrics);
            // With one minibatch, the forward pass of the first update covers the whole batch.
            forward = first_forward.filter(|_| self.train.minibatches == 1).or(forward);
        }
        if let Some(forward) = &forward {
            metrics.extend(batch.mismatch_metrics(forward)?);
        }
        let forward_log_probs = || forward.as_ref().map(|forward| &forward.log_probs);
        let training = batch.training_log_probs.as_ref().or_else(forward_log_probs);
        Ok((metrics, batch.token_stats(training.map(Vec::as_slice))))
    }

    /// Returns the batch for all updates, the result of the policy's forward pass if it ran, and the metrics.
    ///
    /// # Errors
    /// The errors of [`Self::run`].
    pub fn prepare(
        &self,
        groups: &[&Group],
        critic: Option<&Critic>,
    ) -> Result<(Batch, Option<ForwardResult>, Metrics)> {
        let mut batch = Batch::new(groups, self.runner.packing_parameters(self.train.micro_batch_tokens));
        let forward = self.compute_log_probs_and_values(&mut batch, groups, critic)?;
        let estimator = AdvantageEstimator {
            policy: self.policy,
            old_log_prob_source: self.old_log_prob_source(),
            kl_coefficient: self.kl_coefficient,
            response_tokens_max: self.response_tokens_max,
            reward_min: self.reward_min,
            critic: critic.map(|critic| self.critic_step(&critic.settings, &critic.parameters)),
        };
        let mut metrics = self.timings.time("adv", || estimator.estimate(&mut batch, groups))?;
        metrics.extend(correct_rollout(&mut batch, &self.policy.correction)?);
        let (source, seed) = (self.old_log_prob_source(), self.train.seed);
        metrics.extend(select_tokens(&mut batch, self.policy, source, (seed, self.step))?);
        Ok((batch, forward, metrics))
    }

    pub(super) fn is_critic_warm_up(&self, critic: Option<&Critic>) -> bool {
        critic.is_some_and(|critic| self.step <= critic.settings.warmup_steps)
    }

    /// Runs the critic's updates. Their targets, the returns, are already computed.
    fn update_critic(&self, batch: &Batch, critic: &mut Critic) -> Result<Metrics> {
        let Critic { settings, parameters, optimizer } = critic;
        let view = self.critic_step(settings, parameters);
        let schedule = (settings.minibatches, settings.epochs);
        let gradients = |minibatch: &Batch| {
            let stage = self.console.start_inner_stage("critic's update", 0);
            view.gradients(minibatch).inspect(|_| stage.finish())
        };
        let target =
            UpdateTarget { name: "critic", runner: view.runner, norm_limit: self.norm_limits.critic };
        self.update(target, batch, optimizer, schedule, gradients)?.metrics.finish()
    }

    /// Runs the policy's updates. Returns their metrics and the result of the first update's forward pass.
    fn update_policy(
        &self,
        batch: &Batch,
        optimizer: &mut Optimizer,
    ) -> Result<(Metrics, Option<ForwardResult>)> {
        let &TrainSettings { minibatches, epochs, .. } = self.train;
        let lr = optimizer.learning_rate(self.step, self.train.steps);
        let mut first_forward = None;
        let gradients = |minibatch: &Batch| {
            let Some(update) = self.gradients(minibatch)? else { return Ok(None) };
            first_forward.get_or_insert(update.forward);
            Ok(Some(update.metrics))
        };
        let target = UpdateTarget { name: "actor", runner: self.runner, norm_limit: self.norm_limits.actor };
        let summary = self.update(target, batch, optimizer, (minibatches, epochs), gradients)?;
        let UpdateSummary { metrics, updates, rejected_minibatches } = summary;
        let mut metrics = metrics.finish()?;
        metrics.set("actor/lr", lr);
        if minibatches * epochs > 1 || rejected_minibatches > 0 {
            metrics.set("actor/updates", updates as f64);
            metrics.set("actor/updates_skipped", rejected_minibatches as f64);
        }
        Ok((metrics, first_forward))
    }

    /// Updates a model. For each minibatch of each epoch, runs loss and backward pass (`gradients`), clip,
    /// and optimizer. `gradients` returns `None` if all tokens of the minibatch are rejected.
    fn update(
        &self,
        UpdateTarget { name, runner, norm_limit }: UpdateTarget,
        batch: &Batch,
        optimizer: &mut Optimizer,
        (minibatches, epochs): (usize, usize),
        mut gradients: impl FnMut(&Batch) -> Result<Option<Metrics>>,
    ) -> Result<UpdateSummary> {
        let lr = optimizer.learning_rate(self.step, self.train.steps);
        let (mut metrics, mut updates, mut rejected_minibatches) = (Accumulator::new(), 0, 0);
        for epoch in 0..epochs as u64 {
            for indices in batch.minibatches(minibatches, self.train.seed, self.step, epoch) {
                let minibatch = batch.select(&indices)?;
                let result = self.timings.time(&format!("update_{name}"), || gradients(&minibatch))?;
                let Some(minibatch_metrics) = result else {
                    rejected_minibatches += 1;
                    continue;
                };
                let update = || optimizer.clip_and_update(runner.threads, runner.parameters, lr, norm_limit);
                let norm = match self.run_stage(("optimizer", "optimizer"), update)? {
                    GradientNorm::Applied(norm) => norm,
                    GradientNorm::Skipped(norm) => {
                        metrics.sum(&format!("{name}/updates_bad"), 1.0);
                        if norm.is_finite() {
                            metrics.max(&format!("{name}/grad_norm_bad"), norm);
                        }
                        continue;
                    }
                };
                metrics.mean(&format!("{name}/grad_norm"), norm, 1.0);
                metrics.mean(&format!("{name}/lr"), lr, 1.0);
                minibatch_metrics.iter().for_each(|(name, value)| metrics.mean(name, value, 1.0));
                updates += 1;
            }
        }
        Ok(UpdateSummary { metrics, updates, rejected_minibatches })
    }

    /// Computes the loss and the gradients of the policy over `batch`, which may be a minibatch. Returns
    /// `None` if every token was rejected.
    ///
    /// # Errors
    /// When a pass fails, or a log-probability is NaN.
    pub fn gradients(&self, batch: &Batch) -> Result<Option<PolicyUpdate>> {
        if batch.masked_sequences()?.valid_tokens() == 0 {
            return Ok(None);
        }
        let updates = self.train.minibatches * self.train.epochs;
        let source = self.old_log_prob_source();
        let loss = UpdateLoss::new(batch, self.policy, source, updates, self.response_tokens_max)?;
        let (shares, outputs) = match &self.policy.distill {
            None => self.accumulate::<2>(batch, &loss, None)?,
            Some(_) => {
                let teacher = self.teacher.context("policy.distill needs a teacher")?.passes(batch)?;
                let (shares, outputs) = self.accumulate::<3>(batch, &loss, Some(&teacher))?;
                (shares, outputs.into_iter().map(PassOutput::without_divergences).collect())
            }
        };
        let metrics = loss.metrics(&shares, &outputs, self.pass.load_balance_coefficient > 0.0);
        Ok(Some(PolicyUpdate { metrics, forward: batch.join_forward(&outputs)? }))
    }

    /// Runs the passes of an update. Returns the loss and the output of each micro-batch.
    fn accumulate<const N: usize>(
        &self,
        batch: &Batch,
        loss: &UpdateLoss,
        teacher: Option<&TeacherPasses>,
    ) -> Result<(Vec<LossShare>, Vec<PassOutput<N>>)> {
        let shares = MicroBatchValues::new(&batch.micro_batches);
        let objective: BatchObjective<'_, N> = &|index, columns| {
            let (share, gradient) = loss.loss_share(index, columns)?;
            shares.set(index, share);
            Ok(gradient)
        };
        let stage = self.console.start_pass("update", self.runner.local_tokens(&batch.micro_batches));
        let batches = &batch.micro_batches;
        let pass = PassSettings { keeps_routed_experts: batch.rollout_experts.is_some(), ..self.pass };
        let outputs = self.runner.accumulate(batches, pass, teacher, objective, &stage)?;
        stage.finish();
        Ok((shares.into_values()?, outputs))
    }
}
