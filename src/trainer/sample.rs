//! The rollouts of a step, with dynamic sampling if the recipe enables it.

use super::Trainer;
use crate::engine::Engine;
use crate::metrics::{Metrics, Phase};
use crate::policy::advantage::Advantage;
use crate::policy::advantage::informative_groups;
use crate::rollout::{self, Prompt, RolloutPlan, RolloutProgress, Rollouts};
use crate::trajectory::{Group, TokenStats, TrajectoryRow};
use anyhow::{Context, Result};

/// The rollouts of a step, and the groups used for training.
pub(super) struct SampleOutput {
    /// All sampled groups, including discarded groups. The rollout metrics are computed over all of them.
    pub rollouts: Rollouts,
    /// Indices in `rollouts.groups` of the groups used for training.
    training_indices: Vec<usize>,
    /// Number of extra sampling rounds; `None` without dynamic sampling.
    rounds: Option<u64>,
    /// Seconds that sampling took.
    pub seconds: f64,
}

impl SampleOutput {
    pub fn training_groups(&self) -> Vec<&Group> {
        self.training_indices.iter().map(|&index| &self.rollouts.groups[index]).collect()
    }

    /// Returns the first `count` rows of the step. `token_stats` has one entry for each trajectory used for
    /// training, in order. Each entry is added to the row of its trajectory.
    pub fn rows(&self, count: usize, token_stats: &[TokenStats]) -> Vec<TrajectoryRow> {
        let mut rows: Vec<TrajectoryRow> = self.rollouts.rows(Phase::Rl).take(count).collect();
        let sizes: Vec<usize> = self.rollouts.groups.iter().map(|group| group.trajectories.len()).collect();
        let start = |group: usize| -> usize { sizes[..group].iter().sum() };
        let row_indices =
            self.training_indices.iter().flat_map(|&group| start(group)..start(group) + sizes[group]);
        for (row_index, stats) in row_indices.zip(token_stats) {
            if let Some(row) = rows.get_mut(row_index) {
                row.token_stats = Some(stats.clone());
            }
        }
        rows
    }

    /// Returns the rollout's metrics.
    pub fn metrics(&self) -> Result<Metrics> {
        let mut metrics = rollout::metrics(&self.rollouts.groups).finish()?;
        if let Some(rounds) = self.rounds {
            metrics.set("group/resample_rounds", rounds as f64);
            metrics.set("group/discarded", (self.rollouts.groups.len() - self.training_indices.len()) as f64);
        }
        if let Some(episodes) = &self.rollouts.episodes {
            metrics.extend(episodes.metrics());
        }
        Ok(metrics)
    }
}

impl Trainer {
    /// Samples the groups of step `step`, or reads stored groups. Dynamic sampling replaces groups without
    /// signal, until the limit of rounds is reached.
    pub(super) fn sample(&self, step: u64) -> Result<SampleOutput> {
        let recipe = &self.context.plan.recipe;
        let (count, rounds_max) = (recipe.rollout.prompts_per_step, recipe.rollout.resample_rounds_max);
        if let Some(stored) = &self.data.stored {
            let rollouts = stored.step_groups(step, count as u64);
            let training_indices = (0..rollouts.groups.len()).collect();
            return Ok(SampleOutput { rollouts, training_indices, rounds: None, seconds: 0.0 });
        }
        let started = std::time::Instant::now();
        // The weights do not change while a step samples, so one engine samples all of its rounds.
        let engine = self.context.engine(self.context.rollout_policy()?, step - 1, &recipe.rollout)?;
        let mut rollouts = Rollouts::default();
        let (mut informative, mut without_signal, mut round) = (vec![], vec![], 0);
        loop {
            let prompts = self.context.training_prompts(step, round, count - informative.len());
            let new = self.sample_groups(&engine, step, &prompts)?;
            for index in rollouts.groups.len()..rollouts.groups.len() + new.groups.len() {
                let group = &new.groups[index - rollouts.groups.len()];
                let rewards: Vec<f32> = group.trajectories.iter().map(|t| t.reward).collect();
                let has_signal = !rewards.is_empty()
                    && (rounds_max == 0 || informative_groups(&rewards, &[rewards.len()])?[0]);
                if has_signal { informative.push(index) } else { without_signal.push(index) }
            }
            rollouts.extend(new);
            if informative.len() >= count || round == rounds_max {
                break;
            }
            round += 1;
        }
        // Failed episodes of an agent are missing in their groups. The baseline of a group needs two.
        let episodes_min = recipe.rollout.samples_per_prompt.min(2);
        let is_usable = |&index: &usize| rollouts.groups[index].episodes() >= episodes_min;
        let mut training_indices: Vec<usize> =
            informative.into_iter().chain(without_signal).filter(is_usable).take(count).collect();
        training_indices.sort_unstable();
        let (rounds, seconds) = ((rounds_max > 0).then_some(round), started.elapsed().as_secs_f64());
        Ok(SampleOutput { rollouts, training_indices, rounds, seconds })
    }

    /// Samples one group for each prompt. Also takes a greedy sample of each prompt if the advantage needs
    /// it.
    fn sample_groups(&self, engine: &Engine, step: u64, prompts: &[Prompt]) -> Result<Rollouts> {
        let context = &self.context;
        let recipe = &context.plan.recipe;
        let plan = context.training_rollout(step);
        let mut rollouts =
            self.sample_conversations("gen", engine, &plan, prompts, recipe.rollout.samples_per_prompt)?;
        if recipe.policy.advantage == Advantage::Remax {
            let plan = RolloutPlan::for_greedy_baseline(&recipe.rollout, recipe.train.seed, step);
            let groups_of_one = self.sample_conversations("gen_max", engine, &plan, prompts, 1)?.groups;
            let greedy = groups_of_one.into_iter().map(|group| group.trajectories.into_iter().next());
            rollouts.groups.iter_mut().zip(greedy).for_each(|(group, greedy)| group.greedy = greedy);
        }
        Ok(rollouts)
    }

    /// Samples `samples` conversations for each prompt. `timing` is the name of the stage in the timings.
    fn sample_conversations(
        &self,
        timing: &'static str,
        engine: &Engine,
        plan: &RolloutPlan,
        prompts: &[Prompt],
        samples: usize,
    ) -> Result<Rollouts> {
        let context = &self.context;
        let stage = self.console.start_inner_stage("rollout", (prompts.len() * samples) as u64);
        let rollouts = self.timings.time(timing, || {
            context
                .sample_groups(engine, plan, prompts, samples, &RolloutProgress::show_on(&stage), &|| false)
        })?;
        stage.finish();
        rollouts.context("the rollout was stopped")
    }
}
