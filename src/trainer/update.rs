//! A step's updates of critic and policy, and the reference the policy may be held to.

use super::{Trainer, apply};
use crate::checkpoint::ResumePoint;
use crate::checkpoint::reference;
use crate::learner::critic::{Critic, CriticStep};
use crate::learner::forward_backward::PassSettings;
use crate::learner::optimizer::Optimizer;
use crate::learner::policy_step::PolicyStep;
use crate::metrics::{Accumulator, Metrics};
use crate::model::forward::ForwardOptions;
use crate::policy::KlPlace;
use crate::policy::KlSettings;
use crate::policy::kl_in_reward::KlController;
use crate::trajectory::{Group, TokenFigures};
use anyhow::Result;

impl Trainer {
    /// Makes the updates of step `step` and returns their figures: means over updates, and the gap between training
    /// and rollout over the whole batch as it was before the first, also token by token. While a critic warms up it alone learns.
    pub(super) fn update(
        &mut self,
        step: u64,
        groups: &[&Group],
        optimizer: &mut Optimizer,
        critic: Option<&mut Critic>,
        lr: f64,
    ) -> Result<(Metrics, Vec<TokenFigures>)> {
        let train = self.context.plan.recipe.train.clone();
        let view = critic.as_deref().map(|critic| self.critic_step(critic));
        let experience = self.timings.time("old_log_prob", || self.policy_step(view).prepare(groups))?;
        let mut metrics = experience.metrics.clone();
        let mut training = experience.training.clone();
        if let Some(kl) = metrics.get("actor/reward_kl_penalty") {
            self.kl.update(kl, experience.sequences.len());
        }
        let mut warming_up = false;
        if let Some(critic) = critic {
            metrics.extend(self.update_critic(step, &experience, critic)?);
            warming_up = step <= critic.settings.warmup_steps;
        }
        if (train.minibatches > 1 || warming_up) && experience.training.is_none() {
            let (gap, forward) =
                self.timings.time("old_log_prob", || self.policy_step(None).gap(&experience))?;
            metrics.extend(gap);
            training = Some(forward);
        }
        if warming_up {
            return Ok((metrics, experience.token_figures(training.as_deref())));
        }
        metrics.set("actor/lr", lr);
        let mut means = Accumulator::new();
        let (mut updates, mut skipped) = (0, 0);
        for epoch in 0..train.epochs as u64 {
            for indices in experience.minibatches(train.minibatches, train.seed, step, epoch) {
                let part = experience.select(&indices);
                let Some(update) =
                    self.timings.time("update_actor", || self.policy_step(None).gradients(&part))?
                else {
                    skipped += 1;
                    continue;
                };
                // A whole batch shows its own gap, whatever an arm does to the forward before it.
                if updates == 0 && train.minibatches == 1 {
                    metrics.extend(self.policy_step(None).gap_of(&part, &update)?);
                    training.get_or_insert_with(|| update.log_probs.clone());
                }
                let (parameters, norm_max) = (&mut self.context.parameters, train.optimizer.grad_norm_max);
                let norm =
                    apply((&self.context.threads, &self.timings), parameters, optimizer, norm_max, lr)?;
                means.mean("actor/grad_norm", norm, 1.0);
                update.metrics.iter().for_each(|(name, value)| means.mean(name, value, 1.0));
                updates += 1;
            }
        }
        metrics.extend(means.finish()?);
        if train.minibatches * train.epochs > 1 || skipped > 0 {
            metrics.set("actor/updates", f64::from(updates));
            metrics.set("actor/updates_skipped", f64::from(skipped));
        }
        Ok((metrics, experience.token_figures(training.as_deref())))
    }

    /// Fixes the reference: the weights as they are, or those that the run which goes on from `point` began with; under an adapter
    /// the model without it.
    pub(super) fn set_reference(&mut self, point: Option<&ResumePoint>) -> Result<()> {
        let context = &self.context;
        let (config, parameters) = (&context.model.config, &context.parameters);
        if context.plan.recipe.policy.kl.place == KlPlace::None {
            return Ok(());
        }
        if parameters.adapter().is_some() {
            self.reference = Some(parameters.without_adapter());
            return Ok(());
        }
        let run = &self.folder.path;
        let (reference, digest) = match point {
            Some(point) => (reference::read(run, config, parameters)?, point.state.reference_digest),
            None => {
                let reference = reference::copy(config, parameters)?;
                let mut digest = None;
                let write = || {
                    digest = Some(reference::write(run, &reference)?);
                    Ok(())
                };
                parameters.mesh().lead(write, |asked| reference.answer(None, &asked))?;
                (reference, digest)
            }
        };
        (self.reference, self.reference_digest) = (Some(reference), digest);
        Ok(())
    }

    /// The coefficient of the divergence: the recipe's, or what the run that goes on had steered it to.
    pub(super) fn kl_controller(kl: &KlSettings, steered: Option<f64>) -> Result<KlController> {
        match kl.target {
            None => Ok(KlController::Fixed { coefficient: kl.coefficient }),
            Some(target) => KlController::adaptive(steered.unwrap_or(kl.coefficient), target, kl.horizon),
        }
    }

    /// `critic` is read by [`PolicyStep::prepare`] alone.
    fn policy_step<'s>(&'s self, critic: Option<CriticStep<'s>>) -> PolicyStep<'s> {
        let recipe = &self.context.plan.recipe;
        let load_balance = recipe.train.load_balance_coefficient;
        PolicyStep {
            runner: self.runner(),
            reference: self.reference.as_ref(),
            critic,
            policy: &recipe.policy,
            kl_coefficient: self.kl.coefficient(),
            pass: PassSettings { load_balance, ..self.pass(recipe.rollout.temperature) },
            second_forward: ForwardOptions::second_forward(&recipe.arms, recipe.train.seed),
            micro_batch_tokens: recipe.train.micro_batch_tokens,
            updates: recipe.train.minibatches * recipe.train.epochs,
            response_tokens_max: recipe.rollout.response_tokens_max,
        }
    }
}
