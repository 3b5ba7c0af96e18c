//! The schedule of sampling: which weights sample for which step, and when. [`Schedule::next`] gives the
//! samples of a step; the schedule knows no update.
//!
//! ```text
//! rollout.lag_steps = 2      step 1   step 2   step 3   step 4   step 5
//! trains on samples by       start    start    start    step 1   step 2
//! begins to sample step      3        4        5        6        7
//! ```
//!
//! Step t trains on samples of the weights after step max(0, t - 1 - lag). The first step samples the first
//! `lag` steps before its update. Before the update of step t, sampling of step t + lag begins, by the
//! weights after step t - 1. The schedule counts steps and reads no clock, so a run is a function of its
//! recipe.
//!
//! In a single process, sampling runs beside the update, with a copy of the trained weights. On a GPU it has
//! a stream of its own. On several processes it runs before the update, and gives the same bits.
//!
//! On a CPU, if the memory plan has room, two samplings may be in flight. Then a step's update begins as soon
//! as its own samples are there, and the next sampling begins right after the update before:
//!
//! ```text
//! rollout.lag_steps = 1      time -->
//! updates                    [1]    [2]    [3]    [4]
//! sampling of step 2         -------|
//! sampling of step 3            -----------|
//! sampling of step 4                   -----------|
//! ```
//!
//! Where both compute, the sampling of the earlier step goes first. A checkpoint and an evaluation wait for
//! all samplings. In all other runs, the next step first waits for what a step began to sample. Partial
//! trajectories need that: each sampling continues those of the one before.

use super::in_flight::{InFlight, SamplingInputs};
use super::observer::Stages;
use super::sample::{InProgress, SampleOutput, Sampler};
use crate::actor::Actor;
use crate::bad_input;
use crate::checkpoint::{self, DAMAGE_REMEDY, ResumePoint};
use crate::engine::PassScheduler;
use crate::metrics::Timings;
use crate::ops::cuda::SecondStream;
use crate::ops::threads::{Priority, Threads};
use crate::rollout::trajectory_file::StoredRollouts;
use crate::run::environment::Environment;
use crate::run::sampling::Sampling;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of samplings in flight. Each has a copy of the trained weights, and KV caches.
const IN_FLIGHT_MAX: usize = 2;

/// The samples of later steps. They are part of a checkpoint.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct SampledAhead {
    /// Samples of the next steps, in order, each with its step.
    steps: VecDeque<(u64, SampleOutput)>,
    /// Groups of partial trajectories that the next sampling continues.
    in_progress: InProgress,
}

impl SampledAhead {
    /// Checks what was read from the checkpoint of step `step`. Groups in progress have `samples`
    /// trajectories, and tokens are below `vocab_size`. The error says what is wrong.
    fn check(&self, step: u64, samples: usize, vocab_size: usize) -> Result<(), String> {
        for (next, (sampled, output)) in (step + 1..).zip(&self.steps) {
            if *sampled != next {
                return Err(format!("it has samples of step {sampled} in place of step {next}"));
            }
            output.check(vocab_size)?;
        }
        self.in_progress.check(samples, vocab_size)
    }
}

/// Resources of samplings beside an update.
struct Beside {
    /// The threads of the samplings of odd steps, if two may be in flight. All others have those of the run.
    odd_threads: Option<Arc<Threads>>,
    /// Orders the passes of two samplings.
    pass_scheduler: Arc<PassScheduler>,
    /// The stream of sampling, on a GPU.
    stream: Option<SecondStream>,
}

/// The samples of a run, step by step.
pub(super) struct Schedule {
    environment: Arc<Environment>,
    timings: Arc<Timings>,
    /// Stored trajectories, if the recipe trains on them instead of sampling.
    stored: Option<StoredRollouts>,
    /// Whether two samplings may be in flight.
    two_samplings: bool,
    /// Resources of sampling beside the update, if the recipe samples ahead and this process can.
    beside: Option<Beside>,
    /// The samples of later steps.
    ahead: SampledAhead,
    /// The samplings of the steps after those.
    in_flight: VecDeque<InFlight>,
}

impl Schedule {
    /// Returns the schedule of a new run. If sampling runs beside updates, `actor` gets other threads for
    /// these.
    ///
    /// # Errors
    /// When the system cannot start threads.
    pub fn new(
        environment: &Arc<Environment>,
        timings: &Arc<Timings>,
        actor: &mut Actor,
        stored: Option<StoredRollouts>,
        two_samplings: bool,
    ) -> Result<Self> {
        let runs_beside = actor.mesh().ranks() == 1 && environment.recipe().rollout.lag_steps > 0;
        let beside = match runs_beside {
            false => None,
            true => {
                // Each side has as many threads as there are processors, so neither leaves one idle while the
                // other has work. Sampling goes first: the sooner it ends, the sooner the graders have all
                // answers, and the update fills the time in which they work.
                let count = actor.execution.threads.count();
                actor.set_training_threads(Threads::with_priority(count, Priority::Low)?.into());
                let odd_threads = two_samplings.then(|| Threads::new(count).map(Arc::new)).transpose()?;
                let device = actor.parameters.device();
                let stream = device.is_cuda().then(|| SecondStream::open(device)).transpose()?;
                Some(Beside { odd_threads, pass_scheduler: Arc::default(), stream })
            }
        };
        Ok(Self {
            environment: environment.clone(),
            timings: timings.clone(),
            stored,
            two_samplings,
            beside,
            ahead: SampledAhead::default(),
            in_flight: VecDeque::new(),
        })
    }

    /// Returns the contents of the checkpoint's file of samples; `None` if no sample outlives a step.
    pub fn sampled_ahead(&self) -> Result<Option<Vec<u8>>> {
        let rollout = &self.environment.recipe().rollout;
        let is_kept = rollout.lag_steps > 0 || rollout.step_tokens_max > 0;
        is_kept.then(|| serde_json::to_vec(&self.ahead).context("writing what was sampled ahead")).transpose()
    }

    /// Restores what was sampled ahead from the checkpoint. Tokens are below `vocab_size`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the checkpoint lacks the file, or the file is damaged.
    pub fn restore(&mut self, resume_point: &ResumePoint, vocab_size: usize) -> Result<()> {
        let rollout = &self.environment.recipe().rollout;
        if rollout.lag_steps == 0 && rollout.step_tokens_max == 0 {
            return Ok(());
        }
        let (path, bytes) = checkpoint::read_sampled_ahead(&resume_point.folder)?;
        let damaged = |what: String| bad_input!("{}: damaged: {what}; {DAMAGE_REMEDY}", path.display());
        let ahead: SampledAhead = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        ahead.check(resume_point.state.step, rollout.samples_per_prompt, vocab_size).map_err(damaged)?;
        self.ahead = ahead;
        Ok(())
    }

    /// Returns the samples of step `step`. Samples now, by the current weights of `actor`, what has not been
    /// sampled yet: the first steps of a run, and the steps after those of a run that is made longer. Also
    /// begins to sample step `step + lag_steps`.
    ///
    /// # Errors
    /// When a sampling fails.
    pub fn next(&mut self, step: u64, actor: &Actor, stages: Stages) -> Result<SampleOutput> {
        let recipe = self.environment.recipe();
        if let Some(stored) = &self.stored {
            let groups = stored.step_groups(step, recipe.rollout.prompts_per_step as u64);
            return Ok(SampleOutput::all_of(groups));
        }
        let lag = recipe.rollout.lag_steps;
        let last = if lag == 0 { step } else { step + lag - 1 };
        // The weights after step `step - 1` sample.
        let version = step - 1;
        while let Some(next) = self.next_to_sample(step, last) {
            self.sample_now(next, (actor, version), stages)?;
        }
        if let Some(next) = self.next_to_sample(step, step + lag) {
            self.begin_sampling(next, (actor, version), stages)?;
        }
        if self.ahead.steps.is_empty() {
            self.join_first()?;
        }
        let (_, samples) = self.ahead.steps.pop_front().context("the step was not sampled")?;
        Ok(samples)
    }

    /// Returns the next step to sample at training step `step`; `None` if all steps up to `last` are sampled
    /// or in flight.
    fn next_to_sample(&self, step: u64, last: u64) -> Option<u64> {
        let in_flight = self.in_flight.back().map(|sampling| sampling.step);
        let newest = in_flight.or(self.ahead.steps.back().map(|(sampled, _)| *sampled));
        let next = newest.map_or(step, |newest| newest + 1);
        (next <= last.min(self.environment.recipe().train.steps)).then_some(next)
    }

    /// Samples step `step` by the current weights of `actor`, with their version.
    fn sample_now(&mut self, step: u64, (actor, version): (&Actor, u64), stages: Stages) -> Result<()> {
        let sampler = Sampler {
            sampling: Sampling { actor, environment: &self.environment },
            version,
            threads: &actor.execution.threads,
            pass_scheduler: None,
            stages,
            stop: &|| false,
        };
        let mut in_progress = std::mem::take(&mut self.ahead.in_progress);
        let samples = sampler.sample(step, &mut in_progress)?;
        self.ahead.steps.push_back((step, samples.context("the rollout was stopped")?));
        self.ahead.in_progress = in_progress;
        Ok(())
    }

    /// Begins to sample step `step` by the current weights of `actor`, with their version. Several processes
    /// sample it now.
    fn begin_sampling(&mut self, step: u64, weights: (&Actor, u64), stages: Stages) -> Result<()> {
        let others_max = if self.two_samplings { IN_FLIGHT_MAX - 1 } else { 0 };
        while self.in_flight.len() > others_max {
            self.join_first()?;
        }
        let Some(beside) = &self.beside else { return self.sample_now(step, weights, stages) };
        let mut actor = weights.0.snapshot(beside.stream.as_ref())?;
        let threads = beside.odd_threads.clone().filter(|_| step % 2 == 1);
        if let Some(threads) = &threads {
            actor.set_training_threads(threads.clone());
        }
        let inputs = SamplingInputs {
            actor,
            version: weights.1,
            environment: self.environment.clone(),
            threads,
            pass_scheduler: beside.pass_scheduler.clone(),
            timings: self.timings.clone(),
            in_progress: std::mem::take(&mut self.ahead.in_progress),
        };
        self.in_flight.push_back(InFlight::start(step, inputs)?);
        Ok(())
    }

    /// Waits for the first sampling in flight, if there is one.
    fn join_first(&mut self) -> Result<()> {
        let Some(sampling) = self.in_flight.pop_front() else { return Ok(()) };
        let step = sampling.step;
        let (samples, in_progress) = self.timings.time("gen_wait", || sampling.join())?;
        self.ahead.steps.push_back((step, samples));
        self.ahead.in_progress = in_progress;
        Ok(())
    }

    /// Waits for all samplings in flight. [`SampledAhead`] then has their samples.
    pub fn join_all(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.join_first()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn damaged_samples_are_refused() {
        let trajectory = |tokens: &[u32], turns: usize| {
            json!({
                "step": 3, "prompt": 0, "sample": 0, "problem_id": "", "tokens": tokens, "prompt_tokens": 1,
                "mask": [false, true], "logprobs": [0.0, -0.5], "turns": [{"start": 1, "end": turns, "calls": []}],
                "outcome": "finished", "reward": 1.0, "success": true
            })
        };
        let ahead = |step: u64, index: usize, trajectory: serde_json::Value| {
            let rollouts =
                json!({"groups": [{"trajectories": [trajectory]}], "messages": [[[]]], "answers": [null]});
            let output = json!({"rollouts": rollouts, "training_indices": [index], "rounds": null});
            let paused = json!({
                "tokens": [1, 2], "mask": [false, true], "log_probs": [0.0, -1.0], "routed_experts": [],
                "versions": [], "turns": [], "turn_start": 1, "messages": [], "calls_answered": 0, "tool_s": 0.0
            });
            let group = json!({"prompt": 4, "step": 2, "trajectories": [{"Paused": paused}]});
            let in_progress = json!({"groups": [group], "begun": 5});
            json!({"steps": [[step, output]], "in_progress": in_progress})
        };
        let check = |ahead: serde_json::Value, samples: usize| {
            serde_json::from_value::<SampledAhead>(ahead).unwrap().check(2, samples, 10)
        };
        assert_eq!(check(ahead(3, 0, trajectory(&[1, 2], 2)), 1), Ok(()));
        for (found, samples, reason) in [
            (ahead(4, 0, trajectory(&[1, 2], 2)), 1, "samples of step 4 in place of step 3"),
            (ahead(3, 1, trajectory(&[1, 2], 2)), 1, "do not agree"),
            (ahead(3, 0, trajectory(&[1, 10], 2)), 1, "token 10 is not below 10"),
            (ahead(3, 0, trajectory(&[1], 1)), 1, "2 entries for 1 tokens"),
            (ahead(3, 0, trajectory(&[1, 2], 3)), 1, "outside the 2 tokens"),
            (ahead(3, 0, trajectory(&[1, 2], 2)), 2, "1 trajectories, not 2"),
        ] {
            let error = check(found, samples).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
