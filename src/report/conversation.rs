//! Selects trajectories for the page: the best and the worst of the first and of the last step.

use super::run::Run;
use crate::bad_input;
use crate::bounded_file;
use crate::harmony::{Message, Role};
use crate::metrics::{Phase, format_number};
use crate::trajectory::TrajectoryRow;
use anyhow::{Context, Result};
use minijinja::{Value, context};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A selected trajectory, and the reason for the selection.
#[derive(Clone)]
pub(super) struct SelectedTrajectory {
    pub row: TrajectoryRow,
    pub why: &'static str,
}

/// The trajectories of one step with the highest and the lowest reward. Of several with an equal reward, the
/// first one is taken.
struct Extremes {
    best: TrajectoryRow,
    worst: Option<TrajectoryRow>,
}

impl Extremes {
    fn offer(&mut self, row: TrajectoryRow) {
        let reward = row.trajectory.reward;
        if reward > self.best.trajectory.reward {
            self.worst.get_or_insert(std::mem::replace(&mut self.best, row));
        } else if reward < self.worst.as_ref().unwrap_or(&self.best).trajectory.reward {
            self.worst = Some(row);
        }
    }
}

/// Selects trajectories from the `*.jsonl` files in `folder`. Empty if the folder does not exist.
///
/// # Errors
/// [`crate::error::BadInput`] with file and line for a line that is not a trajectory.
pub(super) fn pick(folder: &Path) -> Result<Vec<SelectedTrajectory>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut steps: BTreeMap<(Phase, u64), Extremes> = BTreeMap::new();
    for file in first_and_last_files(folder)? {
        read_file(&file, |row| {
            let key = (row.phase, row.trajectory.step);
            match steps.get_mut(&key) {
                Some(extremes) => extremes.offer(row),
                None => drop(steps.insert(key, Extremes { best: row, worst: None })),
            }
        })?;
    }
    let mut picked = Vec::new();
    for &phase in Phase::ALL {
        let of_phase = || steps.keys().filter(|key| key.0 == phase).copied();
        let mut ends: Vec<_> = of_phase().next().into_iter().chain(of_phase().next_back()).collect();
        ends.dedup();
        for key in ends {
            let Some(Extremes { best, worst }) = steps.remove(&key) else { continue };
            let alone = worst.is_none();
            let worst = worst.map(|row| SelectedTrajectory { row, why: "lowest reward of those stored" });
            picked.extend(worst);
            let why = if alone {
                "first of the step; all stored rewards are equal"
            } else {
                "highest reward of those stored"
            };
            picked.push(SelectedTrajectory { row: best, why });
        }
    }
    Ok(picked)
}

/// Returns the first and the last file of each kind. A file's kind is the part of its name before the number
/// (`step-000001`, `eval-000080`).
fn first_and_last_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut groups: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for path in files(folder)? {
        groups.entry(kind_and_number(&path).0).or_default().push(path);
    }
    Ok(groups
        .into_values()
        .flat_map(|group| match group.as_slice() {
            [first, .., last] => vec![first.clone(), last.clone()],
            few => few.to_vec(),
        })
        .collect())
}

fn kind_and_number(path: &Path) -> (String, u64) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let kind = stem.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    let number = stem[kind.len()..].parse().unwrap_or(0);
    (kind, number)
}

/// Returns the `*.jsonl` files in `folder`, sorted by kind and number. Empty if the folder does not exist.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(vec![]);
    }
    let list = || -> std::io::Result<Vec<PathBuf>> {
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    };
    let mut files = list().with_context(|| format!("{}: cannot be listed", folder.display()))?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort_by_cached_key(|path| (kind_and_number(path), path.clone()));
    Ok(files)
}

pub(super) fn read_file(path: &Path, mut each: impl FnMut(TrajectoryRow)) -> Result<()> {
    let shown = path.display();
    let file =
        bounded_file::open(path, u64::MAX).map_err(|e| bad_input!("{shown}: cannot be read ({e})."))?;
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line);
        if read.map_err(|e| bad_input!("{shown}: line {number}: cannot be read ({e})."))? == 0 {
            break;
        }
        match TrajectoryRow::from_line(&line) {
            Ok(row) => each(row),
            // A killed run can leave an incomplete last line.
            Err(_) if !line.ends_with(b"\n") => break,
            Err(why) => {
                return Err(bad_input!(
                    "{shown}: line {number}: not a trajectory ({why}). Remove the line, or restore the file."
                ));
            }
        }
    }
    Ok(())
}

/// Returns the selected trajectories of each run that has some, for the template.
pub(super) fn conversation_views(runs: &[Run]) -> Vec<Value> {
    let all = runs.iter().filter(|run| !run.sample_trajectories.is_empty());
    all.map(|run| {
        let trajectories: Vec<Value> = run.sample_trajectories.iter().map(trajectory_view).collect();
        context! { run => run.curve, label => run.label, trajectories }
    })
    .collect()
}

fn trajectory_view(picked: &SelectedTrajectory) -> Value {
    let TrajectoryRow { phase, trajectory, messages, .. } = &picked.row;
    let phase = match phase {
        Phase::SftWarmUp => "SFT warm-up step",
        Phase::Rl => "Step",
        Phase::Eval => "Evaluation at step",
    };
    let mut facts = vec![
        plural(trajectory.sampled_tokens(), "sampled token"),
        plural(trajectory.prompt_tokens, "prompt token"),
        plural(trajectory.turns.len(), "turn"),
    ];
    let mut calls: BTreeMap<_, usize> = BTreeMap::new();
    let all = trajectory.turns.iter().flat_map(|turn| &turn.calls);
    all.for_each(|call| *calls.entry(call).or_default() += 1);
    facts
        .extend(calls.iter().map(|(call, count)| format!("call {} ×{count}", call.name().replace('_', " "))));
    let named = trajectory.rewards.iter();
    facts.extend(named.map(|(name, value)| format!("reward {name} {}", format_number(f64::from(*value)))));
    let (step, prompt, sample) = (trajectory.step, trajectory.prompt, trajectory.sample);
    context! {
        heading => format!("{phase} {step}, prompt {prompt}, sample {sample}"),
        why => picked.why,
        problem => trajectory.problem_id,
        outcome => trajectory.outcome.name(),
        reward => format_number(f64::from(trajectory.reward)),
        success => trajectory.success,
        // Counts of sampled tokens, turns and tool calls, and the named rewards.
        facts,
        messages => messages.iter().map(message_view).collect::<Vec<_>>(),
    }
}

fn message_view(message: &Message) -> Value {
    let arrow = message.recipient.as_ref().map(|to| format!("to {to}"));
    let notes = [message.name.clone(), arrow, message.channel.clone(), message.content_type.clone()];
    context! {
        role => message.role.name(),
        // `python → assistant`, `commentary`, …
        notes => notes.into_iter().flatten().collect::<Vec<_>>(),
        parts => message_parts(message),
        // System and developer messages are long and equal in every trajectory, so they are collapsed at
        // first.
        folded => matches!(message.role, Role::System | Role::Developer),
    }
}

/// Returns the content in parts: sampled text, and inserted outputs of programs.
fn message_parts(message: &Message) -> Vec<Value> {
    let mut parts = vec![];
    let mut add = |range: Range<usize>, inserted: bool| {
        let text = message.content.get(range).filter(|text| !text.is_empty());
        parts.extend(text.map(|text| context! { text, inserted }));
    };
    let mut start = 0;
    for &(from, to) in &message.inserted {
        add(start..from, false);
        add(from..to, true);
        start = to;
    }
    add(start..message.content.len(), false);
    parts
}

fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
