//! The critic of a run: opened at the start of reinforcement learning, and updated before the policy in every step.

use super::{Trainer, apply};
use crate::checkpoint::{self, ResumePoint};
use crate::learner::CriticSettings;
use crate::learner::batch_runner::BatchRunner;
use crate::learner::critic::{Critic, CriticStep};
use crate::learner::experience::Experience;
use crate::learner::forward_backward::PassSettings;
use crate::learner::optimizer::learning_rate;
use crate::metrics::{Accumulator, Metrics};
use crate::model::forward::ForwardOptions;
use crate::run::context::RunContext;
use anyhow::Result;

impl Trainer {
    /// The critic that the recipe asks for: from the policy's weights as they are, or that of the checkpoint.
    pub(super) fn critic(&self, point: Option<&ResumePoint>) -> Result<Option<Critic>> {
        let context = &self.context;
        let recipe = &context.plan.recipe;
        let (Some(settings), Some(trainable)) = (&recipe.critic, &context.critic_trainable) else {
            return Ok(None);
        };
        let round = recipe.model.dtype.is_bf16();
        let (config, seed) = (&context.model.config, recipe.train.seed);
        let mut critic = Critic::new(config, &context.parameters, trainable, settings, seed, round)?;
        if let Some(point) = point {
            critic.optimizer.updates = point.state.critic_updates;
            checkpoint::restore_critic(&point.folder, &mut critic.parameters)?;
            critic.optimizer.write_weights(&mut critic.parameters)?;
        }
        Ok(Some(critic))
    }

    /// Makes the critic's updates of step `step` and returns their figures, means over updates.
    pub(super) fn update_critic(
        &self,
        step: u64,
        experience: &Experience,
        critic: &mut Critic,
    ) -> Result<Metrics> {
        let train = &self.context.plan.recipe.train;
        let CriticSettings { minibatches, epochs, .. } = critic.settings;
        let mut means = Accumulator::new();
        for epoch in 0..epochs as u64 {
            for indices in experience.minibatches(minibatches, train.seed, step, epoch) {
                let part = experience.select(&indices);
                let found =
                    self.timings.time("update_critic", || self.critic_step(critic).gradients(&part))?;
                let Some(found) = found else { continue };
                let Critic { settings, parameters, optimizer, .. } = &mut *critic;
                let lr = learning_rate(&settings.optimizer, step - 1, train.steps);
                let norm_max = settings.optimizer.grad_norm_max;
                let norm =
                    apply((&self.context.threads, &self.timings), parameters, optimizer, norm_max, lr)?;
                means.mean("critic/grad_norm", norm, 1.0);
                means.mean("critic/lr", lr, 1.0);
                found.iter().for_each(|(name, value)| means.mean(name, value, 1.0));
            }
        }
        means.finish()
    }

    pub(super) fn critic_step<'c>(&'c self, critic: &'c Critic) -> CriticStep<'c> {
        let recipe = &self.context.plan.recipe;
        let RunContext { threads, model, .. } = &self.context;
        let Critic { settings, parameters, .. } = critic;
        CriticStep {
            runner: BatchRunner { threads, model, parameters },
            settings,
            aggregation: recipe.policy.aggregation,
            response_tokens_max: recipe.rollout.response_tokens_max,
            // What an arm spoils is the policy's forward.
            pass: PassSettings { forward: ForwardOptions::default(), ..self.pass(1.0) },
            micro_batch_tokens: recipe.train.micro_batch_tokens,
        }
    }
}
