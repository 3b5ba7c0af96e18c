//! The forward passes of a step before its first update: log-probs of the reference and the policy, and the
//! critic's values.

use super::step::PolicyStep;
use crate::learner::CriticSettings;
use crate::learner::batch::{Batch, ForwardResult};
use crate::actor::batch_runner::BatchRunner;
use crate::learner::critic::{Critic, CriticStep};
use crate::actor::forward_backward::{PassOutput, PassSettings};
use crate::actor::micro_batch::MicroBatch;
use crate::actor::routed_experts;
use crate::model::forward::ForwardOptions;
use crate::model::parameters::Parameters;
use crate::policy::ratio::OldLogProbSource;
use crate::policy::{KlPlacement, RouterReplay};
use crate::trajectory::Group;
use anyhow::{Context, Result};

impl PolicyStep<'_> {
    /// Runs the forward passes before the first update: of the reference, the policy and the critic. They
    /// fill in columns of `batch`, and the experts to replay. Returns the result of the policy's forward pass
    /// if it ran.
    pub(super) fn compute_log_probs_and_values(
        &self,
        batch: &mut Batch,
        groups: &[&Group],
        critic: Option<&Critic>,
    ) -> Result<Option<ForwardResult>> {
        let replay = self.policy.router_replay;
        if self.policy.kl.place != KlPlacement::None {
            let parameters = self.reference.context("policy.kl needs a reference")?;
            let runner = BatchRunner { parameters, ..self.runner };
            let outputs = self.forward(("ref", "reference"), runner, &batch.micro_batches, self.pass)?;
            batch.reference_log_probs = Some(batch.join_forward(&outputs)?.log_probs);
        }
        let config = &self.runner.model.config;
        let sampled_experts = routed_experts::experts_from_sampling(
            groups,
            config.num_hidden_layers,
            config.num_experts_per_tok,
        );
        match replay == RouterReplay::Rollout {
            true => batch.set_replay(sampled_experts?)?,
            false => batch.rollout_experts = sampled_experts.ok(),
        }
        let mut forward = None;
        if self.needs_forward(critic) {
            let options = self.old_log_prob_forward.unwrap_or(self.pass.forward);
            let keeps_routed_experts = batch.rollout_experts.is_some() || replay == RouterReplay::Recompute;
            let pass = PassSettings { forward: options, keeps_routed_experts, ..self.pass };
            let names = ("old_log_prob", "old log-probs");
            let outputs = self.forward(names, self.runner, &batch.micro_batches, pass)?;
            let result = batch.join_forward(&outputs)?;
            batch.training_log_probs = Some(result.log_probs.clone());
            if replay == RouterReplay::Recompute {
                batch.set_replay(routed_experts::experts_from_forward(&batch.micro_batches, &outputs)?)?;
            }
            forward = Some(result);
        }
        if let Some(critic) = critic {
            let step = self.critic_step(&critic.settings, &critic.parameters);
            batch.values = Some(self.run_stage(("values", "values"), || step.values(batch))?);
        }
        Ok(forward)
    }

    /// Runs `work` as a stage of the progress display. The stage shows no count. `timing` is the stage's name
    /// in the timings, and `label` its name on the console.
    pub(super) fn run_stage<T>(
        &self,
        (timing, label): (&str, &str),
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let stage = self.console.start_inner_stage(label, 0);
        let result = self.timings.time(timing, work)?;
        stage.finish();
        Ok(result)
    }

    /// Runs a forward pass of `runner` as a stage of the progress display. The stage is named as in
    /// [`Self::run_stage`].
    fn forward(
        &self,
        (timing, label): (&str, &str),
        runner: BatchRunner,
        batches: &[MicroBatch],
        pass: PassSettings,
    ) -> Result<Vec<PassOutput>> {
        let stage = self.console.start_pass(label, runner.local_tokens(batches));
        let outputs = self.timings.time(timing, || runner.forward(batches, pass, &stage))?;
        stage.finish();
        Ok(outputs)
    }

    /// Returns whether the policy runs a forward pass before its first update. If not, the rollout is
    /// compared with the forward pass of the first update.
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

    /// Returns the source of the old log-probs.
    pub(super) fn old_log_prob_source(&self) -> OldLogProbSource {
        if self.old_log_prob_forward.is_some() {
            OldLogProbSource::Recompute
        } else {
            self.policy.old_logprob
        }
    }

    pub(super) fn critic_step<'c>(
        &'c self,
        settings: &'c CriticSettings,
        parameters: &'c Parameters,
    ) -> CriticStep<'c> {
        CriticStep {
            runner: BatchRunner { parameters, ..self.runner },
            settings,
            aggregation: self.policy.aggregation,
            response_tokens_max: self.response_tokens_max,
            // Ablations do not apply to the critic's forward pass.
            pass: PassSettings {
                forward: ForwardOptions::default(),
                temperature: 1.0,
                load_balance_coefficient: 0.0,
                ..self.pass
            },
            micro_batch_tokens: self.train.micro_batch_tokens,
        }
    }
}
