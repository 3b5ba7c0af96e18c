//! Reads trajectories from JSON lines: as fixed training data, and to resume an interrupted rollout.

use super::Rollouts;
use crate::bad_input;
use crate::bounded_file::{self, ROWS_BYTES_MAX};
use crate::trajectory::{Group, Outcome, Trajectory, TrajectoryRow, check_kept_tokens};
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Reads every row of `path`. With `may_be_partial`, a last line without a line feed is skipped, because a
/// kill may have truncated it. Also returns the number of bytes read.
///
/// # Errors
/// [`crate::error::BadInput`] that names the file and the line.
pub fn read(path: &Path, may_be_partial: bool) -> Result<(Vec<TrajectoryRow>, u64)> {
    let shown = path.display();
    let text = bounded_file::read(path, ROWS_BYTES_MAX).map_err(|e| {
        bad_input!("{shown}: cannot be read: {e}; give a file that `rloss rollout` or a run wrote")
    })?;
    let (mut rows, mut bytes) = (vec![], 0);
    for (line, number) in text.split_inclusive(|&byte| byte == b'\n').zip(1..) {
        if may_be_partial && !line.ends_with(b"\n") {
            break;
        }
        rows.push(parse(line).map_err(|what| {
            bad_input!("{shown}: line {number}: {what}; remove the line or restore the file")
        })?);
        bytes += line.len() as u64;
    }
    Ok((rows, bytes))
}

fn parse(line: &[u8]) -> Result<TrajectoryRow, String> {
    let row = TrajectoryRow::from_line(line).map_err(|e| format!("not a trajectory: {e}"))?;
    check(&row.trajectory).map(|()| row)
}

/// Checks that the fields of a trajectory agree. The error says what is wrong.
///
/// # Errors
/// When lengths differ, an index is out of range, or a number is not finite.
pub fn check(t: &Trajectory) -> Result<(), String> {
    let n = t.tokens.len();
    for (name, length) in [("mask", t.mask.len()), ("logprobs", t.log_probs.len())] {
        if length != n {
            return Err(format!("`{name}` has {length} entries for {n} tokens"));
        }
    }
    if !t.reward.is_finite() {
        return Err("`reward` is not a finite number".into());
    }
    // An episode of an agent that failed has no tokens.
    if n == 0 && t.prompt_tokens == 0 && t.outcome == Outcome::TaskFailed {
        return Ok(());
    }
    if t.prompt_tokens == 0 || t.prompt_tokens > n || t.mask.iter().take(t.prompt_tokens).any(|&m| m) {
        return Err(format!(
            "`prompt_tokens` = {} is wrong: it must be from 1 to {n}, and the mask must be false in the prompt",
            t.prompt_tokens
        ));
    }
    if t.turns.iter().any(|turn| turn.start > turn.end || turn.end > n) {
        return Err(format!("`turns` has a range outside the {n} tokens"));
    }
    check_kept_tokens(&t.kept_tokens, &t.tokens)?;
    match (0..n).find(|&i| t.mask[i] && !(t.log_probs[i].is_finite() && t.log_probs[i] <= 0.0)) {
        Some(i) => Err(format!("`logprobs`[{i}] = {} is not a log-probability", t.log_probs[i])),
        None => Ok(()),
    }
}

/// Shape of a token's routed experts, for a model that replays them.
#[derive(Debug, Clone, Copy)]
pub struct RoutedExpertsShape {
    /// Number of layers times experts per token.
    pub per_token: usize,
    /// Experts per layer.
    pub experts: usize,
}

impl RoutedExpertsShape {
    fn fits(&self, t: &Trajectory) -> bool {
        let fed = t.tokens.len().saturating_sub(1);
        let is_valid = |token: &Vec<u16>| {
            token.len() == self.per_token && token.iter().all(|&expert| usize::from(expert) < self.experts)
        };
        t.routed_experts.get(..fed).is_some_and(|routes| routes.iter().all(is_valid))
    }
}

/// Stored trajectories that replace sampling: groups in the file's order. After the last group, the first
/// group follows again.
#[derive(Debug)]
pub struct StoredRollouts {
    /// Rows of each (step, prompt) pair. Pairs are in the order of their first row.
    groups: Vec<Vec<TrajectoryRow>>,
}

impl StoredRollouts {
    /// Reads `path` and groups its rows by step and prompt. Checks that the rows fit the model: its
    /// `vocab_size`, its context of `context_tokens_max` and, if routed experts are replayed, their shape
    /// `expert_shape`. Leaves out groups with fewer than `episodes_min` episodes that did not fail.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the file and the line.
    pub fn open(
        path: &Path,
        vocab_size: usize,
        context_tokens_max: usize,
        expert_shape: Option<RoutedExpertsShape>,
        episodes_min: usize,
    ) -> Result<Self> {
        let shown = path.display();
        let (rows, _) = read(path, false)?;
        let (mut groups, mut group_indices) = (Vec::<Vec<TrajectoryRow>>::new(), BTreeMap::new());
        for (row, number) in rows.into_iter().zip(1..) {
            let t: &Trajectory = &row.trajectory;
            // Nothing is learned from an episode that failed.
            if t.tokens.is_empty() {
                continue;
            }
            if let Some(token) = t.tokens.iter().find(|&&token| token as usize >= vocab_size) {
                return Err(bad_input!(
                    "{shown}: line {number}: token {token} is not below {vocab_size}, the model's number of tokens; use trajectories sampled with this model's tokenizer"
                ));
            }
            let kept = t.kept_tokens.iter().flatten().filter_map(|set| set.ids().pop()).max();
            if let Some(token) = kept.filter(|&token| token as usize >= vocab_size) {
                return Err(bad_input!(
                    "{shown}: line {number}: `kept_tokens` has the token {token}, which is not below {vocab_size}, the model's number of tokens; use trajectories sampled with this model's tokenizer"
                ));
            }
            if t.tokens.len() > context_tokens_max {
                return Err(bad_input!(
                    "{shown}: line {number}: {} tokens do not fit the model's context of {context_tokens_max}; remove the line, or use a model with a longer context",
                    t.tokens.len()
                ));
            }
            if expert_shape.is_some_and(|shape| !shape.fits(t)) {
                return Err(bad_input!(
                    "{shown}: line {number}: `routes` does not fit the experts of this model, but policy.router_replay is \"rollout\"; sample with rollout.keep_routes = true, or use router_replay = \"none\""
                ));
            }
            let group_index = *group_indices.entry((t.step, t.prompt)).or_insert(groups.len());
            match groups.get_mut(group_index) {
                Some(group) => group.push(row),
                None => groups.push(vec![row]),
            }
        }
        groups.retain(|group| {
            let episodes: BTreeSet<u64> = group.iter().map(|row| row.trajectory.sample).collect();
            episodes.len() >= episodes_min
        });
        if !groups.iter().flatten().any(|row| row.trajectory.mask.contains(&true)) {
            return Err(bad_input!(
                "{shown}: has no sampled token to train on; write trajectories with `rloss rollout` (failed episodes, and the only one left of a group, do not count)"
            ));
        }
        Ok(Self { groups })
    }

    /// Returns whether a trajectory was sampled from truncated distributions.
    pub fn has_kept_tokens(&self) -> bool {
        self.groups.iter().flatten().any(|row| !row.trajectory.kept_tokens.is_empty())
    }

    /// Returns `count` groups for training step `step` (from 1). After the last group of the file, the first
    /// group follows again. Log-probabilities and rewards keep their stored values.
    pub fn step_groups(&self, step: u64, count: u64) -> Rollouts {
        let mut rollouts = Rollouts::default();
        let total = self.groups.len().max(1) as u64;
        let first = (step - 1).saturating_mul(count);
        for index in first..first.saturating_add(count) {
            let Some(group) = self.groups.get((index % total) as usize) else { continue };
            let part =
                |row: &TrajectoryRow| (Trajectory { step, ..row.trajectory.clone() }, row.messages.clone());
            let (trajectories, messages) = group.iter().map(part).unzip();
            rollouts.groups.push(Group { trajectories, greedy: None });
            rollouts.messages.push(messages);
            rollouts.answers.push(group.first().map(|row| row.answer.clone()).unwrap_or_default());
        }
        rollouts
    }
}
