//! Sampling from a run's actor in its environment: policies, engines, rollouts.

use super::environment::Environment;
use crate::actor::Actor;
use crate::agents::EpisodeTrajectories;
use crate::engine::Engine;
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::random::Purpose;
use crate::rollout::partial::GroupInProgress;
use crate::rollout::{
    Hooks, Observer, Prompt, Rollout, RolloutPlan, RolloutProgress, RolloutSettings, Rollouts,
};
use anyhow::Result;

/// An actor that samples, and the environment that it samples in.
#[derive(Clone, Copy)]
pub struct Sampling<'a> {
    pub actor: &'a Actor,
    pub environment: &'a Environment,
}

impl<'a> Sampling<'a> {
    /// Returns the policy that samples for training, with the ablations applied.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when an ablation does not fit the model.
    pub fn training_policy(self) -> Result<PolicyView<'a>> {
        let recipe = self.environment.recipe();
        self.actor.policy(Some((&recipe.arms, recipe.train.seed)))
    }

    /// Returns the policy without ablations, for evaluation.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn policy_without_ablations(self) -> Result<PolicyView<'a>> {
        self.actor.policy(None)
    }

    /// Returns an engine for `policy`, whose weights are those after step `version`.
    ///
    /// # Errors
    /// When a GPU's memory does not suffice for the KV caches.
    pub fn engine(
        self,
        policy: PolicyView<'a>,
        version: u64,
        settings: &RolloutSettings,
    ) -> Result<Engine<'a>> {
        self.engine_on(&self.actor.execution.threads, policy, version, settings)
    }

    /// Returns an engine as [`Self::engine`] does, which computes on `threads`.
    ///
    /// # Errors
    /// The errors of [`Self::engine`].
    pub fn engine_on(
        self,
        threads: &'a Threads,
        policy: PolicyView<'a>,
        version: u64,
        settings: &RolloutSettings,
    ) -> Result<Engine<'a>> {
        let decode = (settings.sequences_max, settings.cuda_graphs);
        self.actor.engine(threads, policy, version, decode)
    }

    /// Returns a rollout according to `plan` on `engine`.
    pub fn rollout<'e>(self, engine: &'e Engine<'e>, plan: &'e RolloutPlan) -> Rollout<'e>
    where
        'a: 'e,
    {
        let environment = self.environment;
        let recipe = environment.recipe();
        let (task, interpreter) = (environment.task.as_ref(), environment.interpreter.as_deref());
        Rollout {
            reward_min: recipe.task.name.reward_min,
            on_failure: recipe.task.on_failure,
            engine,
            chat: &environment.chat,
            task,
            interpreter,
            form: recipe.interpreter.form,
            reply_chars_max: recipe.reply_chars_max(task, interpreter.is_some()),
            system_prompt: &environment.system_prompt,
            plan,
        }
    }

    /// Samples `samples` conversations for each of `prompts`, or has an agent play as many episodes. Each
    /// process converses for a part of the prompts, and then receives all results. Each finished trajectory
    /// of this process is passed to `finished`; an agent's episodes then give one trajectory each, when the
    /// rollout ends. Returns `None` if `stop` returned true.
    ///
    /// # Errors
    /// When a rollout or the agent fails, or when a rank does not reply in time.
    pub fn sample_groups(
        self,
        engine: &Engine,
        plan: &RolloutPlan,
        (prompts, samples): (&[Prompt], usize),
        progress: &(dyn Fn(RolloutProgress) + Sync),
        finished: Option<&Observer<'_>>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        if let Some(agent) = &self.environment.agent {
            let kept = match (finished, plan.purpose) {
                (Some(finished), _) => EpisodeTrajectories::OneEach(finished),
                (None, Purpose::Sampling) => EpisodeTrajectories::All,
                (None, _) => EpisodeTrajectories::OneEach(&|_, _| ()),
            };
            return agent.play_episodes(engine, plan, (prompts, samples), kept, progress, stop);
        }
        let (mesh, rollout) = (self.actor.mesh(), self.rollout(engine, plan));
        let keeps_parts = finished.is_none();
        let finished = finished.unwrap_or(&|_, _| ());
        let hooks = Hooks { progress, finished, keeps_parts, ..Hooks::until(stop) };
        let converse = |prompts: &[Prompt]| rollout.run(prompts, samples, hooks);
        let (rank, ranks) = (mesh.rank(), mesh.ranks());
        if ranks == 1 {
            return converse(prompts);
        }
        let local = converse(&prompts[prompts.len() * rank / ranks..prompts.len() * (rank + 1) / ranks])?;
        let all: Vec<Option<Rollouts>> = mesh.all_gather_records("rollouts", &local)?;
        Ok(all.into_iter().collect::<Option<Vec<_>>>().map(Rollouts::concat))
    }

    /// Samples `rollout.step_tokens_max` tokens of each unfinished trajectory of `groups`. Each process
    /// samples a part of the groups, and then receives all results. Returns `None` if `stop` returned true.
    ///
    /// # Errors
    /// The errors of [`Self::sample_groups`].
    pub fn sample_in_progress(
        self,
        engine: &Engine,
        plan: &RolloutPlan,
        groups: Vec<GroupInProgress>,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Vec<GroupInProgress>>> {
        let (mesh, rollout) = (self.actor.mesh(), self.rollout(engine, plan));
        let (rank, ranks, count) = (mesh.rank(), mesh.ranks(), groups.len());
        let own = count * rank / ranks..count * (rank + 1) / ranks;
        let local: Vec<GroupInProgress> = groups.into_iter().take(own.end).skip(own.start).collect();
        let prompt = |group: &GroupInProgress| Prompt {
            index: group.prompt,
            problem: self.environment.task.training_problem(plan.seed, group.prompt),
        };
        let prompts: Vec<Prompt> = local.iter().map(prompt).collect();
        let limits = (plan.settings.samples_per_prompt, plan.settings.step_tokens_max);
        let local = rollout.sample_in_progress(&prompts, local, limits, progress, stop)?;
        if ranks == 1 {
            return Ok(local);
        }
        let all: Vec<Option<Vec<GroupInProgress>>> = mesh.all_gather_records("rollouts", &local)?;
        Ok(all.into_iter().collect::<Option<Vec<_>>>().map(|parts| parts.concat()))
    }
}
