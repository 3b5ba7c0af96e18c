//! The rollouts of a step, with dynamic sampling or partial trajectories if the recipe enables them.

use super::observer::Stages;
use crate::actor::{PassSettings, PolicyColumns};
use crate::engine::{Engine, PassScheduler};
use crate::learner::batch::Batch;
use crate::metrics::{Metrics, Phase, Progress};
use crate::ops::threads::Threads;
use crate::policy::advantage::Advantage;
use crate::policy::advantage::informative_groups;
use crate::rollout::partial::GroupInProgress;
use crate::rollout::{self, Prompt, RolloutPlan, RolloutProgress, Rollouts, trajectory_file};
use crate::run::sampling::Sampling;
use crate::trajectory::{Group, TokenStats, TrajectoryRow};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The rollouts of a step, and the groups used for training.
#[derive(Serialize, Deserialize)]
pub(super) struct SampleOutput {
    /// All sampled groups, including discarded groups. The rollout metrics are computed over all of them.
    pub rollouts: Rollouts,
    /// Indices in `rollouts.groups` of the groups used for training.
    training_indices: Vec<usize>,
    /// Number of extra sampling rounds; `None` without dynamic sampling.
    rounds: Option<u64>,
    /// Counts of a step with partial trajectories.
    partial: Option<PartialCounts>,
    /// The comparison of sampling with a training forward by the same weights; `None` if every step trains on
    /// what the newest weights sampled whole.
    engine: Option<EngineAgreement>,
    /// Seconds that sampling took. 0 if the samples were read from a checkpoint.
    #[serde(skip)]
    pub seconds: f64,
}

/// Counts of a step with partial trajectories.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct PartialCounts {
    /// Number of rounds until a group was complete.
    rounds: u64,
    /// Groups that a later step continues.
    unfinished_groups: usize,
    /// Trajectories of these groups that are not finished.
    paused_trajectories: usize,
}

/// Compares the log-probabilities of sampling with those of a training forward by the weights that sampled.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct EngineAgreement {
    bit_equal_fraction: f64,
    log_prob_abs_diff_max: f64,
}

/// The groups of partial trajectories that the next step continues.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct InProgress {
    groups: Vec<GroupInProgress>,
    /// Number of groups that were begun so far. It is the index of the next problem.
    begun: u64,
}

impl InProgress {
    /// Checks groups that were read from a file: `samples` trajectories each, with tokens below `vocab_size`.
    /// The error says what is wrong.
    pub fn check(&self, samples: usize, vocab_size: usize) -> Result<(), String> {
        self.groups.iter().try_for_each(|group| group.check(samples))?;
        check_tokens(self.groups.iter().flat_map(GroupInProgress::tokens), vocab_size)
    }
}

fn check_tokens<'a>(mut all: impl Iterator<Item = &'a [u32]>, vocab_size: usize) -> Result<(), String> {
    match all.find_map(|tokens| tokens.iter().find(|&&token| token as usize >= vocab_size)) {
        Some(token) => Err(format!("token {token} is not below {vocab_size}, the model's number of tokens")),
        None => Ok(()),
    }
}

impl SampleOutput {
    /// Returns all groups of `rollouts` as a step's samples. A group of which failures left fewer than two
    /// episodes has nothing to compare, unless groups have one sample.
    pub fn all_of(rollouts: Rollouts) -> Self {
        let is_kept = |group: &Group| group.kept().episodes() >= group.episodes().min(2);
        let indices = rollouts.groups.iter().enumerate().filter(|(_, group)| is_kept(group));
        let training_indices = indices.map(|(index, _)| index).collect();
        Self { rollouts, training_indices, rounds: None, partial: None, engine: None, seconds: 0.0 }
    }

    /// Checks samples that were read from a file, whose tokens must be below `vocab_size`. The error says
    /// what is wrong.
    pub fn check(&self, vocab_size: usize) -> Result<(), String> {
        let Rollouts { groups, messages, answers, .. } = &self.rollouts;
        let lengths = |group: &Group, messages: &Vec<_>| group.trajectories.len() == messages.len();
        let agree = groups.len() == messages.len()
            && groups.len() == answers.len()
            && groups.iter().zip(messages).all(|(group, messages)| lengths(group, messages))
            && self.training_indices.iter().all(|&index| index < groups.len());
        if !agree {
            return Err("groups, messages and answers do not agree".to_owned());
        }
        let trajectories = || groups.iter().flat_map(|group| group.trajectories.iter().chain(&group.greedy));
        trajectories().try_for_each(trajectory_file::check)?;
        check_tokens(trajectories().map(|trajectory| &trajectory.tokens[..]), vocab_size)
    }

    /// Returns the groups to train on, without their dropped trajectories.
    pub fn training_groups(&self) -> Vec<Cow<'_, Group>> {
        self.training_indices.iter().map(|&index| self.rollouts.groups[index].kept()).collect()
    }

    /// Returns the first `count` rows of the step: groups that were trained on, then the others.
    /// `token_stats` has one entry for each trajectory used for training, in order. Each entry is added to
    /// the row of its trajectory.
    pub fn rows(&self, count: usize, token_stats: &[TokenStats]) -> Vec<TrajectoryRow> {
        let mut stats = token_stats.iter();
        let trained = self.training_indices.iter().map(|&index| (index, true));
        let others = (0..self.rollouts.groups.len()).filter(|index| !self.training_indices.contains(index));
        let rows = trained.chain(others.map(|index| (index, false))).flat_map(|(index, is_trained)| {
            self.rollouts.group_rows(index, Phase::Rl).map(move |row| (row, is_trained))
        });
        let with_stats = rows.map(|(mut row, is_trained)| {
            let is_trained = is_trained && !row.trajectory.dropped;
            row.token_stats = is_trained.then(|| stats.next().cloned()).flatten();
            row
        });
        with_stats.take(count).collect()
    }

    /// Returns the rollout's metrics for training step `step`.
    pub fn metrics(&self, step: u64) -> Result<Metrics> {
        let mut metrics = rollout::metrics(&self.rollouts.groups).finish()?;
        if let Some(rounds) = self.rounds {
            metrics.set("group/resample_rounds", rounds as f64);
            metrics.set("group/discarded", (self.rollouts.groups.len() - self.training_indices.len()) as f64);
        }
        if let Some(counts) = self.partial {
            metrics.set("partial/rounds", counts.rounds as f64);
            metrics.set("partial/groups_unfinished", counts.unfinished_groups as f64);
            metrics.set("partial/trajectories_paused", counts.paused_trajectories as f64);
        }
        if let Some(engine) = self.engine {
            metrics.set("engine/bit_equal_fraction", engine.bit_equal_fraction);
            metrics.set("engine/logprob_abs_diff_max", engine.log_prob_abs_diff_max);
            let groups = self.training_groups();
            metrics.extend(rollout::staleness(groups.iter().map(|group| &**group), step - 1).finish()?);
        }
        if let Some(episodes) = &self.rollouts.episodes {
            metrics.extend(episodes.metrics());
        }
        Ok(metrics)
    }
}

/// Samples by one version of the weights.
#[derive(Clone, Copy)]
pub(super) struct Sampler<'a> {
    /// The weights and the environment.
    pub sampling: Sampling<'a>,
    /// The version of the weights.
    pub version: u64,
    pub threads: &'a Threads,
    /// Orders the passes of two samplings; `None` if this one is alone.
    pub pass_scheduler: Option<&'a PassScheduler>,
    pub stages: Stages<'a>,
    /// Called before each forward. When it returns true, sampling ends without a result.
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

impl Sampler<'_> {
    /// Samples the groups of step `step`. With partial trajectories, it also continues the groups of
    /// `in_progress` and leaves there what the next step continues. Returns `None` if it was stopped.
    pub(super) fn sample(&self, step: u64, in_progress: &mut InProgress) -> Result<Option<SampleOutput>> {
        let settings = &self.sampling.environment.recipe().rollout;
        let started = std::time::Instant::now();
        let policy = self.sampling.training_policy()?;
        // The weights do not change while a step samples, so one engine samples all of its rounds.
        let engine = self.sampling.engine_on(self.threads, policy, self.version, settings)?;
        let engine = match self.pass_scheduler {
            Some(scheduler) => engine.with_pass_scheduler(scheduler),
            None => engine,
        };
        let output = match settings.step_tokens_max {
            0 => self.sample_whole(&engine, step)?,
            _ => self.sample_partial(&engine, step, in_progress)?,
        };
        let Some(mut output) = output else { return Ok(None) };
        if settings.lag_steps > 0 || settings.step_tokens_max > 0 {
            output.engine = Some(self.engine_agreement(&output)?);
        }
        output.seconds = started.elapsed().as_secs_f64();
        Ok(Some(output))
    }

    /// Samples whole trajectories. A conversation whose tool or task failed has a counted outcome. No step
    /// trains on it unless `task.on_failure` says so. A failed episode of an agent is missing in its group.
    /// Dynamic sampling replaces groups without signal, until the limit of rounds is reached.
    fn sample_whole(&self, engine: &Engine, step: u64) -> Result<Option<SampleOutput>> {
        let settings = &self.sampling.environment.recipe().rollout;
        let (count, rounds_max) = (settings.prompts_per_step, settings.resample_rounds_max);
        let truncated = self.sampling.environment.recipe().policy.truncated;
        let mut rollouts = Rollouts::default();
        let (mut informative, mut without_signal, mut round) = (vec![], vec![], 0);
        // Failed trajectories are missing in their groups. The baseline of a group needs two.
        let episodes_min = settings.samples_per_prompt.min(2);
        loop {
            let prompts = self.sampling.environment.training_prompts(step, round, count - informative.len());
            let Some(new) = self.sample_prompts(engine, step, &prompts)? else { return Ok(None) };
            for index in rollouts.groups.len()..rollouts.groups.len() + new.groups.len() {
                let group = new.groups[index - rollouts.groups.len()].kept();
                let rewards: Vec<f32> =
                    group.trajectories.iter().map(|t| t.trained_reward(truncated)).collect();
                if group.episodes() < episodes_min || rewards.is_empty() {
                    continue;
                }
                let has_signal = rounds_max == 0 || informative_groups(&rewards, &[rewards.len()])?[0];
                if has_signal { informative.push(index) } else { without_signal.push(index) }
            }
            rollouts.extend(new);
            if informative.len() >= count || round == rounds_max {
                break;
            }
            round += 1;
        }
        let mut training_indices: Vec<usize> =
            informative.into_iter().chain(without_signal).take(count).collect();
        training_indices.sort_unstable();
        let rounds = (rounds_max > 0).then_some(round);
        Ok(Some(SampleOutput { training_indices, rounds, ..SampleOutput::all_of(rollouts) }))
    }

    /// Begins groups until `prompts_per_step` groups are in progress, and samples up to `step_tokens_max`
    /// tokens of each trajectory. Repeats this until at least one group is complete. The complete groups are
    /// the step's samples.
    fn sample_partial(
        &self,
        engine: &Engine,
        step: u64,
        in_progress: &mut InProgress,
    ) -> Result<Option<SampleOutput>> {
        let environment = self.sampling.environment;
        let recipe = environment.recipe();
        let missing = recipe.rollout.prompts_per_step.saturating_sub(in_progress.groups.len());
        for _ in 0..missing {
            in_progress.groups.push(GroupInProgress::new(in_progress.begun, step));
            in_progress.begun += 1;
        }
        let plan = environment.training_rollout(step);
        let mut groups = std::mem::take(&mut in_progress.groups);
        let mut rounds = 0;
        while !groups.iter().any(GroupInProgress::is_complete) {
            rounds += 1;
            let left: usize = groups.len() * recipe.rollout.samples_per_prompt;
            let stage = self.stages.console.start_inner_stage("rollout", left as u64);
            let sampled = self.stages.timings.time("gen", || {
                let progress = RolloutProgress::show_on(&stage);
                self.sampling.sample_in_progress(engine, &plan, groups, &progress, self.stop)
            })?;
            stage.finish();
            let Some(sampled) = sampled else { return Ok(None) };
            groups = sampled;
        }
        let (complete, unfinished): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(GroupInProgress::is_complete);
        let partial = PartialCounts {
            rounds,
            unfinished_groups: unfinished.len(),
            paused_trajectories: unfinished.iter().map(GroupInProgress::paused).sum(),
        };
        in_progress.groups = unfinished;
        let mut rollouts = Rollouts::default();
        for group in complete {
            let answer = environment.task.training_problem(recipe.train.seed, group.prompt).answer;
            let (group, messages) = group.into_group(step);
            rollouts.groups.push(group);
            rollouts.messages.push(messages);
            rollouts.answers.push(answer);
        }
        Ok(Some(SampleOutput { partial: Some(partial), ..SampleOutput::all_of(rollouts) }))
    }

    /// Compares sampling with a training forward by the same weights, for the first group of the step. A
    /// partial trajectory is compared where the engine's version sampled it.
    fn engine_agreement(&self, output: &SampleOutput) -> Result<EngineAgreement> {
        let Sampling { actor, environment } = self.sampling;
        let groups = output.training_groups();
        let Some(first) = groups.first() else {
            return Ok(EngineAgreement { bit_equal_fraction: 1.0, log_prob_abs_diff_max: 0.0 });
        };
        let temperature = environment.recipe().rollout.temperature;
        let pass = PassSettings::new(temperature, environment.training_forward());
        let batch = Batch::new(&[&**first]);
        let forward = || {
            let hidden = |_| Progress::hidden();
            actor.forward::<PolicyColumns>(&batch.input(), pass, &hidden)
        };
        let training = self.stages.timings.time("engine_check", forward)?.columns.log_probs;
        let sampled = first.trajectories.iter().flat_map(|trajectory| {
            let trained = trajectory.mask.iter().enumerate().skip(1).filter(|(_, mask)| **mask);
            trained.map(|(index, _)| (trajectory.log_probs[index], trajectory.version_of(index)))
        });
        let (mut count, mut equal, mut largest) = (0_u64, 0_u64, 0.0_f64);
        for ((sampled, version), &training) in sampled.zip(&training) {
            if version == Some(self.version) {
                count += 1;
                equal += u64::from(sampled.to_bits() == training.to_bits());
                largest = largest.max((f64::from(sampled) - f64::from(training)).abs());
            }
        }
        let bit_equal_fraction = if count == 0 { 1.0 } else { equal as f64 / count as f64 };
        Ok(EngineAgreement { bit_equal_fraction, log_prob_abs_diff_max: largest })
    }

    /// Samples one group for each prompt. Also takes a greedy sample of each prompt if the advantage needs
    /// it.
    fn sample_prompts(&self, engine: &Engine, step: u64, prompts: &[Prompt]) -> Result<Option<Rollouts>> {
        let recipe = self.sampling.environment.recipe();
        let plan = self.sampling.environment.training_rollout(step);
        let samples = recipe.rollout.samples_per_prompt;
        let Some(mut rollouts) = self.sample_conversations("gen", engine, &plan, prompts, samples)? else {
            return Ok(None);
        };
        if recipe.policy.advantage == Advantage::Remax {
            let plan = RolloutPlan::for_greedy_baseline(&recipe.rollout, recipe.train.seed, step);
            let Some(greedy) = self.sample_conversations("gen_max", engine, &plan, prompts, 1)? else {
                return Ok(None);
            };
            let greedy = greedy.groups.into_iter().map(|group| group.trajectories.into_iter().next());
            rollouts.groups.iter_mut().zip(greedy).for_each(|(group, greedy)| group.greedy = greedy);
        }
        Ok(Some(rollouts))
    }

    /// Samples `samples` conversations for each prompt. `timing` is the name of the stage in the timings.
    fn sample_conversations(
        &self,
        timing: &'static str,
        engine: &Engine,
        plan: &RolloutPlan,
        prompts: &[Prompt],
        samples: usize,
    ) -> Result<Option<Rollouts>> {
        let stage = self.stages.console.start_inner_stage("rollout", (prompts.len() * samples) as u64);
        let progress = RolloutProgress::show_on(&stage);
        let rollouts = self.stages.timings.time(timing, || {
            self.sampling.sample_groups(engine, plan, (prompts, samples), &progress, None, self.stop)
        })?;
        stage.finish();
        Ok(rollouts)
    }
}
