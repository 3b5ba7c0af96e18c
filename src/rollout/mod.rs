//! Rollout: conversations as clients of the engine, the message loop, tools, rewards, groups.
//!
//! A problem becomes a prompt, and a prompt becomes a [`Group`] of sampled conversations. Sampled ids are
//! kept: generated text is never tokenised again. Every result depends only on the seed, the step, the
//! prompt's index and the sample's index. It does not depend on the batch, the order of tool replies or the
//! number of threads.

pub mod accuracy;
mod conversation;
mod driver;
mod episodes;
mod metrics;
pub mod partial;
mod prompt;
mod settings;
mod tokens_left;
pub mod trajectory_file;

pub use crate::ops::logits::SamplingParameters;
pub use conversation::{REPLY_FRAME_TOKENS, TokenRecord};
pub use driver::{Hooks, Observer};
pub use episodes::{EpisodeCounts, EpisodeFailure};
pub use metrics::{metrics, staleness};
pub use prompt::{Prompt, PromptLimits, first_messages};
pub use settings::{EvalSettings, RolloutPlan, RolloutSettings};

use crate::chat::{Chat, ToolForm};
use crate::engine::Engine;
use crate::harmony::Message;
use crate::interpreter::{Interpreter, SessionId};
use crate::metrics::{Phase, Progress};
use crate::tasks::{OnFailure, Task};
use crate::trajectory::{CallOutcome, Group, Trajectory, TrajectoryRow};
use anyhow::{Context, Result};
use driver::Driver;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::{Mutex, PoisonError};

/// The place of a turn in a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnPosition {
    pub prompt: u64,
    pub sample: u64,
    pub turn: u64,
}

/// Returns the forced tokens at the start of a turn. The engine computes their log-probabilities, but does
/// not draw them. Empty if the model draws all tokens of the turn.
pub type ForcedTokens<'a> = dyn Fn(TurnPosition) -> Vec<u32> + Sync + 'a;

/// The inputs of a rollout.
#[derive(Clone, Copy)]
pub struct Rollout<'a> {
    /// The engine of the policy to sample from.
    pub engine: &'a Engine<'a>,
    pub chat: &'a Chat,
    pub task: &'a dyn Task,
    /// The task's least reward, that of a trajectory whose task failed.
    pub reward_min: f32,
    /// How a trajectory is treated whose program, tool or grader failed.
    pub on_failure: OnFailure,
    /// The Python tool, used by one rollout of a step at a time; `None` for tasks without one.
    pub interpreter: Option<&'a dyn Interpreter>,
    /// How the model uses the Python tool.
    pub form: ToolForm,
    /// Maximum number of characters of all replies to the calls of a turn; `None` without tools.
    pub reply_chars_max: Option<usize>,
    /// Messages before those of every problem, as [`crate::chat::system_prompt`] returns them.
    pub system_prompt: &'a [Message],
    pub plan: &'a RolloutPlan,
}

/// Progress of a rollout.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RolloutProgress {
    /// Number of finished trajectories.
    pub finished: usize,
    /// Number of all trajectories.
    pub trajectories: usize,
    /// Number of sampled tokens, including those of unfinished trajectories.
    pub sampled_tokens: u64,
    /// Number of trajectories with at least one sampled token, including finished ones.
    pub started: usize,
    /// Whether the first tokens come from reading prompts, not from a program's requests.
    pub reads_prompts: bool,
    /// Estimate of the tokens still to sample, if there is one.
    pub tokens_left: Option<f64>,
    /// Sum of the rewards of finished trajectories.
    pub reward_sum: f64,
}

impl RolloutProgress {
    /// Returns a callback that shows a rollout's progress on `stage`, in finished trajectories.
    pub fn show_on(stage: &Progress) -> impl Fn(Self) + Sync {
        let before = Mutex::new(Self::default());
        move |now| {
            let mut before = before.lock().unwrap_or_else(PoisonError::into_inner);
            // Of two workers, the one with the older counts may come second.
            if now.finished < before.finished || now.sampled_tokens < before.sampled_tokens {
                return;
            }
            let reward = (now.finished > 0).then(|| ("reward", now.reward_sum / now.finished as f64));
            let finished = (now.finished - before.finished) as u64;
            let tokens = now.sampled_tokens - before.sampled_tokens;
            let is_reading = now.reads_prompts && now.finished == 0 && now.started < now.trajectories;
            stage.set_note(is_reading.then(|| format!("prompts read {}/{}", now.started, now.trajectories)));
            stage.advance_to(finished, tokens, now.tokens_left, reward.as_slice());
            *before = now;
        }
    }
}

/// Amounts of work, for `perf/` metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// Number of tokens that the model read but did not sample: each group's prompt once, and inserted
    /// messages.
    pub prefilled_tokens: usize,
    pub sampled_tokens: usize,
    /// Number of calls that reached the Python tool or the task.
    pub tool_calls: usize,
}

/// Results of a rollout: groups in prompt order, trajectories in sample order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollouts {
    pub groups: Vec<Group>,
    /// The whole conversation of each trajectory, including the prompt, grouped like `groups`.
    pub messages: Vec<Vec<Vec<Message>>>,
    /// The right answer to each group's problem, null where the task gives none.
    pub answers: Vec<Value>,
    /// Counts of the episodes, if an agent program played them.
    #[serde(default)]
    pub episodes: Option<EpisodeCounts>,
}

impl Rollouts {
    /// Concatenates the results of several ranges of prompts.
    pub fn concat(parts: Vec<Self>) -> Self {
        let mut all = Self::default();
        parts.into_iter().for_each(|part| all.extend(part));
        all
    }

    /// Appends the results of further prompts.
    pub fn extend(&mut self, more: Self) {
        self.groups.extend(more.groups);
        self.messages.extend(more.messages);
        self.answers.extend(more.answers);
        if let Some(more) = more.episodes {
            self.episodes.get_or_insert_default().add(&more);
        }
    }

    /// Iterates over the trajectories of all groups, in order.
    pub fn trajectories(&self) -> impl Iterator<Item = &Trajectory> {
        self.groups.iter().flat_map(|group| &group.trajectories)
    }

    /// Iterates over rows of `trajectories/*.jsonl`, one per trajectory.
    pub fn rows(&self, phase: Phase) -> impl Iterator<Item = TrajectoryRow> {
        (0..self.groups.len()).flat_map(move |index| self.group_rows(index, phase))
    }

    /// Iterates over the rows of the group at `index`.
    pub fn group_rows(&self, index: usize, phase: Phase) -> impl Iterator<Item = TrajectoryRow> {
        let answer = &self.answers[index];
        let conversations = self.groups[index].trajectories.iter().zip(&self.messages[index]);
        conversations.map(move |(trajectory, messages)| TrajectoryRow {
            phase,
            trajectory: trajectory.clone(),
            messages: messages.clone(),
            answer: answer.clone(),
            token_stats: None,
        })
    }

    /// Returns the amounts of work, including greedy samples.
    pub fn counts(&self) -> WorkCounts {
        let mut counts = WorkCounts::default();
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

    /// Returns true when the wall-clock limit ended a tool call: another run of the recipe may then differ.
    pub fn has_tool_timeout(&self) -> bool {
        let greedy = self.groups.iter().filter_map(|group| group.greedy.as_ref());
        let mut turns = self.trajectories().chain(greedy).flat_map(|t| &t.turns);
        turns.any(|turn| turn.calls.contains(&CallOutcome::ToolTimeout))
    }
}

fn reached_tool(call: CallOutcome) -> bool {
    !matches!(call, CallOutcome::MalformedCall | CallOutcome::UnknownRecipient)
}

impl Rollout<'_> {
    /// Returns the maximum length of a conversation, in tokens.
    fn context_tokens_max(&self) -> usize {
        self.engine.context_tokens_max()
    }

    /// Returns the tool's session of a trajectory. Rollouts of two steps may run at the same time.
    fn session(&self, trajectory: usize) -> SessionId {
        SessionId((self.plan.step << 32) | trajectory as u64)
    }

    /// Checks that no prompt is too long.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a prompt that is too long, naming its problem.
    pub fn check(&self, prompts: &[Prompt]) -> Result<()> {
        prompts.iter().try_for_each(|prompt| self.render(prompt).map(drop))
    }

    /// Samples `samples` conversations of each prompt, with the callbacks of `hooks`: `progress` is called
    /// after every forward, `stop` before each; when it returns true the rollout ends with `None`. Tokens
    /// that `forced` gives begin each turn; their log-probabilities are still the model's.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a prompt that is too long, naming its problem; any other error when
    /// the forward fails or gives logits that are not finite.
    pub fn run(&self, prompts: &[Prompt], samples: usize, hooks: Hooks) -> Result<Option<Rollouts>> {
        let rendered = prompts.iter().map(|p| self.render(p)).collect::<Result<Vec<_>>>()?;
        let driver = Driver::new(self, rendered, samples, hooks);
        let result = driver.run();
        if let Some(interpreter) = self.interpreter {
            driver.close_sessions(interpreter);
        }
        result.context("rollout")?;
        Ok(driver.into_rollouts())
    }
}
