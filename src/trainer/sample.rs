//! A step's rollouts, with dynamic sampling if the recipe enables it.

use super::Trainer;
use crate::metrics::{Metrics, Phase};
use crate::policy::advantage::Advantage;
use crate::policy::advantage::informative_groups;
use crate::rollout::{self, Prompt, RolloutPlan, RolloutProgress, Rollouts};
use crate::trajectory::{Group, TokenStats, TrajectoryRow};
use anyhow::{Context, Result};

/// The rollouts of a step, and the groups used for training.
pub(super) struct SampleOutput {
    /// All sampled groups, including discarded ones. The rollout metrics cover all of them.
    pub drawn: Rollouts,
    /// Indices into `drawn.groups`.
    trained: Vec<usize>,
    /// Number of extra sampling rounds; `None` without dynamic sampling.
    rounds: Option<u64>,
    /// Seconds that sampling took.
    pub seconds: f64,
}

impl SampleOutput {
    pub fn training_groups(&self) -> Vec<&Group> {
        self.trained.iter().map(|&index| &self.drawn.groups[index]).collect()
    }

    /// Returns the first `count` rows of the step. Trained trajectories have the token figures `learned`, in
    /// their order.
    pub fn rows(&self, count: usize, learned: &[TokenStats]) -> Vec<TrajectoryRow> {
        let mut rows: Vec<TrajectoryRow> = self.drawn.rows(Phase::Rl).take(count).collect();
        let sizes: Vec<usize> = self.drawn.groups.iter().map(|group| group.trajectories.len()).collect();
        let start = |group: usize| -> usize { sizes[..group].iter().sum() };
        let row_indices = self.trained.iter().flat_map(|&group| start(group)..start(group) + sizes[group]);
        for (row_index, figures) in row_indices.zip(learned) {
            if let Some(row) = rows.get_mut(row_index) {
                row.learned = Some(figures.clone());
            }
        }
        rows
    }

    /// Returns the rollout's metrics.
    pub fn metrics(&self) -> Result<Metrics> {
        let mut metrics = rollout::metrics(&self.drawn.groups).finish()?;
        if let Some(rounds) = self.rounds {
            metrics.set("group/resample_rounds", rounds as f64);
            metrics.set("group/discarded", (self.drawn.groups.len() - self.trained.len()) as f64);
        }
        Ok(metrics)
    }
}

impl Trainer {
    /// Samples the groups of step `step`, or reads stored ones. Dynamic sampling replaces groups without
    /// signal, up to the limit of rounds.
    pub(super) fn sample(&self, step: u64) -> Result<SampleOutput> {
        let recipe = &self.context.plan.recipe;
        let (count, rounds_max) = (recipe.rollout.prompts_per_step, recipe.rollout.resample_rounds_max);
        if let Some(stored) = &self.data.stored {
            let drawn = stored.step_groups(step, count as u64);
            let trained = (0..drawn.groups.len()).collect();
            return Ok(SampleOutput { drawn, trained, rounds: None, seconds: 0.0 });
        }
        let started = std::time::Instant::now();
        let mut drawn = Rollouts::default();
        let (mut informative, mut without_signal, mut round) = (vec![], vec![], 0);
        loop {
            let prompts = self.context.training_prompts(step, round, count - informative.len());
            let draw = self.draw(step, &prompts)?;
            for index in drawn.groups.len()..drawn.groups.len() + draw.groups.len() {
                let group = &draw.groups[index - drawn.groups.len()];
                let rewards: Vec<f32> = group.trajectories.iter().map(|t| t.reward).collect();
                let has_signal = rounds_max == 0 || informative_groups(&rewards, &[rewards.len()])?[0];
                if has_signal { informative.push(index) } else { without_signal.push(index) }
            }
            drawn.extend(draw);
            if informative.len() >= count || round == rounds_max {
                break;
            }
            round += 1;
        }
        let mut trained: Vec<usize> = informative.into_iter().chain(without_signal).take(count).collect();
        trained.sort_unstable();
        let (rounds, seconds) = ((rounds_max > 0).then_some(round), started.elapsed().as_secs_f64());
        Ok(SampleOutput { drawn, trained, rounds, seconds })
    }

    /// Samples one group a prompt, and a greedy sample if the advantage needs one.
    fn draw(&self, step: u64, prompts: &[Prompt]) -> Result<Rollouts> {
        let context = &self.context;
        let recipe = &context.plan.recipe;
        let plan = context.training_rollout(step);
        let mut drawn = self.conversations("gen", &plan, prompts, recipe.rollout.samples_per_prompt)?;
        if recipe.policy.advantage == Advantage::Remax {
            let plan = RolloutPlan::for_greedy_baseline(&recipe.rollout, recipe.train.seed, step);
            let single = self.conversations("gen_max", &plan, prompts, 1)?.groups;
            let greedy = single.into_iter().map(|group| group.trajectories.into_iter().next());
            drawn.groups.iter_mut().zip(greedy).for_each(|(group, greedy)| group.greedy = greedy);
        }
        Ok(drawn)
    }

    /// Samples `samples` conversations of each prompt, timed as `stage`.
    fn conversations(
        &self,
        stage: &'static str,
        plan: &RolloutPlan,
        prompts: &[Prompt],
        samples: usize,
    ) -> Result<Rollouts> {
        let context = &self.context;
        let inner = self.console.inner_stage("rollout", (prompts.len() * samples) as u64);
        let policy = context.rollout_policy()?;
        let rollouts = self.timings.time(stage, || {
            context
                .sample_groups(&policy, plan, prompts, samples, &RolloutProgress::show_on(&inner), &|| false)
        })?;
        inner.finish();
        rollouts.context("the rollout ended early")
    }
}
