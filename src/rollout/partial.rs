//! Partial trajectories: conversations that pause after a number of sampled tokens and go on later, by other
//! weights.
//!
//! A paused conversation has no cache. When it goes on, its tokens are read again, and the random stream of
//! its turn continues after the tokens that were drawn. So a conversation that pauses and goes on by the same
//! weights has the same tokens as one that never paused.

use super::driver::{Driver, Hooks};
use super::{Prompt, Rollout, RolloutProgress, trajectory_file};
use crate::bad_input;
use crate::harmony::Message;
use crate::ops::token_set::TokenSet;
use crate::trajectory::{Group, Trajectory, Turn, VersionRun};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A conversation that has paused. Fields with the names of [`Trajectory`]'s have their meaning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PausedConversation {
    pub(super) tokens: Vec<u32>,
    pub(super) mask: Vec<bool>,
    pub(super) log_probs: Vec<f32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) kept_tokens: Vec<Option<TokenSet>>,
    /// Routed experts of the tokens that were read before the pause.
    pub(super) routed_experts: Vec<Vec<u16>>,
    pub(super) versions: Vec<VersionRun>,
    /// The turns that have ended.
    pub(super) turns: Vec<Turn>,
    /// Start of the turn in progress.
    pub(super) turn_start: usize,
    /// Messages after the prompt, without those of the turn in progress.
    pub(super) messages: Vec<Message>,
    pub(super) calls_answered: usize,
    pub(super) tool_s: f64,
}

/// A trajectory of a group in progress.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum TrajectoryInProgress {
    /// The trajectory and its messages.
    Finished(Box<Trajectory>, Vec<Message>),
    /// The trajectories, with their messages, of a conversation whose earlier turns the chat template wrote
    /// again.
    InParts(Vec<(Trajectory, Vec<Message>)>),
    Paused(Box<PausedConversation>),
}

/// A group in progress.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupInProgress {
    /// Index of the problem.
    pub prompt: u64,
    /// The step that began the group. The group's random streams depend on it.
    pub step: u64,
    /// One entry per sample; empty before the group has begun.
    pub(super) trajectories: Vec<TrajectoryInProgress>,
}

impl TrajectoryInProgress {
    /// Returns the result of a conversation, in parts.
    pub(super) fn from_parts(mut parts: Vec<(Trajectory, Vec<Message>)>) -> Self {
        match parts.pop() {
            Some((only, messages)) if parts.is_empty() => Self::Finished(Box::new(only), messages),
            last => Self::InParts(parts.into_iter().chain(last).collect()),
        }
    }

    /// Returns the trajectories with their messages; none of a paused one.
    pub(super) fn into_finished(self) -> Vec<(Trajectory, Vec<Message>)> {
        match self {
            Self::Finished(trajectory, messages) => vec![(*trajectory, messages)],
            Self::InParts(parts) => parts,
            Self::Paused(_) => vec![],
        }
    }
}

impl GroupInProgress {
    /// Returns the group of problem `prompt`, which step `step` begins.
    pub fn new(prompt: u64, step: u64) -> Self {
        Self { prompt, step, trajectories: vec![] }
    }

    /// Returns whether every trajectory is finished.
    pub fn is_complete(&self) -> bool {
        !self.trajectories.is_empty() && self.paused() == 0
    }

    /// Returns the number of paused trajectories.
    pub fn paused(&self) -> usize {
        let is_paused = |t: &&TrajectoryInProgress| matches!(t, TrajectoryInProgress::Paused(_));
        self.trajectories.iter().filter(is_paused).count()
    }

    /// Returns whether every trajectory begins with `prompt`.
    fn begins_with(&self, prompt: &[u32]) -> bool {
        self.trajectories.iter().all(|trajectory| match trajectory {
            TrajectoryInProgress::Finished(trajectory, _) => trajectory.tokens.starts_with(prompt),
            TrajectoryInProgress::InParts(parts) => {
                parts.first().is_some_and(|(first, _)| first.tokens.starts_with(prompt))
            }
            TrajectoryInProgress::Paused(paused) => paused.tokens.starts_with(prompt),
        })
    }

    /// Checks a group that was read from a file, and that has `samples` trajectories if it has begun. The
    /// error says what is wrong.
    ///
    /// # Errors
    /// When the number of trajectories differs, or the fields of a trajectory do not agree.
    pub fn check(&self, samples: usize) -> Result<(), String> {
        if !self.trajectories.is_empty() && self.trajectories.len() != samples {
            return Err(format!("a group has {} trajectories, not {samples}", self.trajectories.len()));
        }
        self.trajectories.iter().try_for_each(|trajectory| match trajectory {
            TrajectoryInProgress::Finished(trajectory, _) => trajectory_file::check(trajectory),
            TrajectoryInProgress::InParts(parts) => {
                parts.iter().try_for_each(|(trajectory, _)| trajectory_file::check(trajectory))
            }
            TrajectoryInProgress::Paused(paused) => {
                let n = paused.tokens.len();
                let kept = paused.kept_tokens.len();
                let agree = paused.mask.len() == n
                    && paused.log_probs.len() == n
                    && (kept == 0 || kept == n)
                    && paused.turn_start <= n;
                agree.then_some(()).ok_or_else(|| "the fields of a paused trajectory do not agree".to_owned())
            }
        })
    }

    /// Returns the tokens of all trajectories.
    pub fn tokens(&self) -> impl Iterator<Item = &[u32]> {
        self.trajectories.iter().flat_map(|trajectory| match trajectory {
            TrajectoryInProgress::Finished(trajectory, _) => vec![&trajectory.tokens[..]],
            TrajectoryInProgress::InParts(parts) => parts.iter().map(|(part, _)| &part.tokens[..]).collect(),
            TrajectoryInProgress::Paused(paused) => vec![&paused.tokens[..]],
        })
    }

    /// Returns the finished trajectories, which training step `step` uses, and their messages.
    pub fn into_group(self, step: u64) -> (Group, Vec<Vec<Message>>) {
        let finished = self.trajectories.into_iter().flat_map(TrajectoryInProgress::into_finished);
        let (trajectories, messages) =
            finished.map(|(trajectory, messages)| (Trajectory { step, ..trajectory }, messages)).unzip();
        (Group { trajectories, greedy: None }, messages)
    }
}

impl Rollout<'_> {
    /// Samples up to `tokens_max` tokens of each unfinished trajectory of `groups`, which have `samples`
    /// trajectories each. `prompts` are the groups' problems, in order. Returns the groups, or `None` if
    /// `stop` returned true.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub fn sample_in_progress(
        &self,
        prompts: &[Prompt],
        groups: Vec<GroupInProgress>,
        (samples, tokens_max): (usize, usize),
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Vec<GroupInProgress>>> {
        let rendered = prompts.iter().map(|prompt| self.render(prompt)).collect::<Result<Vec<_>>>()?;
        for (prompt, group) in rendered.iter().zip(&groups) {
            if !group.begins_with(&prompt.tokens) {
                return Err(bad_input!(
                    "problem {}: the checkpoint has trajectories of this problem with another prompt; restore the task's data or \
                     program, or start another run with --out",
                    prompt.problem.id
                ));
            }
        }
        let hooks = Hooks { progress, keeps_parts: true, ..Hooks::until(stop) };
        let places: Vec<(u64, u64)> = groups.iter().map(|group| (group.prompt, group.step)).collect();
        let driver = Driver::for_groups(self, rendered, samples, hooks, groups, tokens_max);
        driver.run().context("rollout")?;
        let Some(mut states) = driver.into_states() else { return Ok(None) };
        let groups = places.into_iter().map(|(prompt, step)| GroupInProgress {
            prompt,
            step,
            trajectories: states.drain(..samples).collect(),
        });
        Ok(Some(groups.collect()))
    }
}
