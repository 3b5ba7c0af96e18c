//! Rollout: continuous batching over token ids, sampling, the message loop.
//!
//! A problem becomes a prompt, a prompt a [`Group`] of sampled conversations. Sampled ids are kept as they are:
//! generated text is never tokenised again. Every result is a function of the seed, the step, the prompt's index and
//! the sample's index alone, whatever shares a batch with it, in whatever order tools answer, on however many threads.

pub mod accuracy;
mod conversation;
mod engine;
mod metrics;
mod prompt;
mod queue;
mod room;
mod sampler;
mod settings;
pub mod stored;

pub use crate::ops::logits::Sampling;
pub use engine::FORWARD_TOKENS_MAX;
pub use metrics::metrics;
pub use prompt::{Prompt, PromptLimits, preamble};
pub use queue::Observer;
pub use sampler::{SampledPlace, TokenSource};
pub use settings::{EvalSettings, PreambleSettings, RolloutPlan, RolloutSettings};

use crate::chat::Chat;
use crate::harmony::Message;
use crate::interpreter::Interpreter;
use crate::metrics::{Phase, Progress};
use crate::model::cache::{CacheRoom, Caches};
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::tasks::Task;
use crate::trajectory::{CallOutcome, Group, Trajectory, TrajectoryRow};
use anyhow::{Context, Result};
use engine::Engine;
use queue::{Hooks, Queue};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::{Mutex, PoisonError};

/// Models up to this size decode in one engine a thread; larger ones in one engine whose ops share the threads, so that
/// weights are read once for the whole batch. Bytes of all weights, times the threads.
const SIDE_BY_SIDE_BYTES_MAX: u64 = 512 << 20;

/// How many engines decode side by side a model of `weight_bytes`, given so many threads.
pub fn engines(weight_bytes: u64, threads: usize) -> usize {
    if weight_bytes.saturating_mul(threads as u64) <= SIDE_BY_SIDE_BYTES_MAX { threads } else { 1 }
}

/// Everything a rollout reads.
#[derive(Clone, Copy)]
pub struct Rollout<'a> {
    pub threads: &'a Threads,
    /// What samples: model, weights and forward.
    pub policy: &'a PolicyView<'a>,
    pub chat: &'a Chat,
    pub task: &'a dyn Task,
    /// The Python tool, of one rollout at a time; `None` for tasks without one.
    pub interpreter: Option<&'a dyn Interpreter>,
    /// Messages put before every problem's own, as [`preamble`] makes them.
    pub preamble: &'a [Message],
    pub plan: &'a RolloutPlan,
    /// Keys and values that a GPU holds at the same time; the host holds what is needed.
    pub room: CacheRoom,
}

/// How far a rollout is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RolloutProgress {
    /// Trajectories that ended, and all of them.
    pub finished: usize,
    pub trajectories: usize,
    /// Tokens sampled, those of unfinished trajectories included.
    pub sampled_tokens: u64,
    /// Sum of the rewards of the finished ones.
    pub reward_sum: f64,
}

impl RolloutProgress {
    /// Shows a rollout's progress as that of `stage`, whose pieces are trajectories.
    pub fn shown_by(stage: &Progress) -> impl Fn(Self) + Sync {
        let before = Mutex::new(Self::default());
        move |now| {
            let mut before = before.lock().unwrap_or_else(PoisonError::into_inner);
            let reward = (now.finished > 0).then(|| ("reward", now.reward_sum / now.finished as f64));
            let finished = (now.finished - before.finished) as u64;
            stage.advance(finished, now.sampled_tokens - before.sampled_tokens, reward.as_slice());
            *before = now;
        }
    }
}

/// Work done, for `perf/` metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens fed that were not sampled: each group's prompt once, and what was inserted.
    pub prefilled_tokens: usize,
    pub sampled_tokens: usize,
    /// Calls that reached the interpreter.
    pub tool_calls: usize,
}

/// What a rollout gives: groups in prompt order, trajectories in sample order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollouts {
    pub groups: Vec<Group>,
    /// The whole conversation of each trajectory, the prompt included, in the shape of `groups`.
    pub messages: Vec<Vec<Vec<Message>>>,
    /// The right answer to each group's problem, null where the task gives none.
    pub answers: Vec<Value>,
}

impl Rollouts {
    /// Those of several stretches of prompts, one after the other.
    pub fn joined(parts: Vec<Self>) -> Self {
        let mut all = Self::default();
        parts.into_iter().for_each(|part| all.extend(part));
        all
    }

    /// Adds those of further prompts.
    pub fn extend(&mut self, more: Self) {
        self.groups.extend(more.groups);
        self.messages.extend(more.messages);
        self.answers.extend(more.answers);
    }

    /// The trajectories of all groups, in order.
    pub fn trajectories(&self) -> impl Iterator<Item = &Trajectory> {
        self.groups.iter().flat_map(|group| &group.trajectories)
    }

    /// One row a trajectory for `trajectories/*.jsonl`.
    pub fn rows(&self, phase: Phase) -> impl Iterator<Item = TrajectoryRow> {
        let groups = self.groups.iter().zip(&self.messages).zip(&self.answers);
        let conversations = groups.flat_map(|((group, messages), answer)| {
            group
                .trajectories
                .iter()
                .zip(messages)
                .map(move |(trajectory, messages)| (trajectory, messages, answer))
        });
        conversations.map(move |(trajectory, messages, answer)| TrajectoryRow {
            phase,
            trajectory: trajectory.clone(),
            messages: messages.clone(),
            answer: answer.clone(),
            learned: None,
        })
    }

    /// Work done, greedy samples included.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for group in &self.groups {
            let prompt = group.trajectories.first().map_or(0, |t| t.prompt_tokens);
            counts.prefilled_tokens += prompt;
            counts.prefilled_tokens += group.greedy.as_ref().map_or(0, |t| t.prompt_tokens);
            for trajectory in group.trajectories.iter().chain(&group.greedy) {
                let sampled = trajectory.sampled_tokens();
                counts.sampled_tokens += sampled;
                counts.prefilled_tokens += trajectory.tokens.len() - trajectory.prompt_tokens - sampled;
                let calls = trajectory.turns.iter().flat_map(|turn| &turn.calls);
                counts.tool_calls += calls.filter(|call| reached_tool(**call)).count();
            }
        }
        counts
    }

    /// True when a tool call was ended by the wall clock: another run of the same recipe may then differ.
    pub fn tool_timed_out(&self) -> bool {
        let greedy = self.groups.iter().filter_map(|group| group.greedy.as_ref());
        let mut turns = self.trajectories().chain(greedy).flat_map(|t| &t.turns);
        turns.any(|turn| turn.calls.contains(&CallOutcome::ToolTimeout))
    }
}

fn reached_tool(call: CallOutcome) -> bool {
    !matches!(call, CallOutcome::MalformedCall | CallOutcome::UnknownRecipient)
}

impl Rollout<'_> {
    /// The longest conversation that the model reads, in tokens.
    fn context_tokens_max(&self) -> usize {
        self.policy.model.context_tokens_max()
    }

    /// Whether `prompts` can be sampled at all.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a prompt that is too long, naming its problem.
    pub fn check(&self, prompts: &[Prompt]) -> Result<()> {
        prompts.iter().try_for_each(|prompt| self.render(prompt).map(drop))
    }

    /// Samples `samples` conversations of each prompt. `progress` is told after every forward; `stop` is asked before
    /// each, and once it says true the rollout ends with `None`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a prompt that is too long, naming its problem; any other error when the forward
    /// fails or gives logits that are no numbers.
    pub fn groups(
        &self,
        prompts: &[Prompt],
        samples: usize,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        self.groups_from(&self.plan.settings.sampling(), prompts, samples, progress, stop)
    }

    /// [`Self::groups`] that also hands each trajectory to `finished` as it ends, so that what is done outlives a stop.
    ///
    /// # Errors
    /// Those of [`Self::groups`].
    pub fn groups_observed(
        &self,
        prompts: &[Prompt],
        samples: usize,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        finished: &Observer<'_>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        self.run(&self.plan.settings.sampling(), prompts, samples, Hooks { progress, finished, stop })
    }

    /// [`Self::groups`] with tokens from elsewhere, to replay or to force them; log-probabilities are still the model's.
    ///
    /// # Errors
    /// Those of [`Self::groups`] and of `source`.
    pub fn groups_from(
        &self,
        source: &dyn TokenSource,
        prompts: &[Prompt],
        samples: usize,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        self.run(source, prompts, samples, Hooks { progress, finished: &|_, _| (), stop })
    }

    fn run(
        &self,
        source: &dyn TokenSource,
        prompts: &[Prompt],
        samples: usize,
        hooks: Hooks,
    ) -> Result<Option<Rollouts>> {
        let rendered = prompts.iter().map(|p| self.render(p)).collect::<Result<Vec<_>>>()?;
        let (weights, config) = (&self.policy.weights, &self.policy.model.config);
        let (mesh, device) = (weights.mesh(), weights.device());
        let engines = match mesh {
            None if device.is_cpu() => engines(weights.bytes(), self.threads.count()),
            // A GPU computes one forward after the other.
            _ => 1,
        };
        let places = if device.is_cpu() { usize::MAX } else { self.room.sequences };
        let caches = (Caches::new(config, device, self.room)?, places);
        let queue = Queue::new(self, rendered, samples, engines, caches, hooks);
        std::thread::scope(|scope| {
            let run = || {
                let engine = Engine::new(self, source, &queue);
                match mesh {
                    Some(mesh) => engine.run_with(mesh, scope),
                    None => engine.run(scope),
                }
            };
            if engines > 1 {
                self.threads.each(|_| run());
            } else {
                self.threads.wide(run);
            }
        });
        if let Some(interpreter) = self.interpreter {
            queue.close_sessions(interpreter);
        }
        queue.into_rollouts().context("rollout")
    }
}
