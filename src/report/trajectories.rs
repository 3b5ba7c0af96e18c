//! Packs all stored trajectories of the runs for the page's trajectory viewer: tokens, log-probs, advantages
//! and log-prob mismatches.
//!
//! `vocabulary` has each token's text once. The tokens of a trajectory are indices into the vocabulary. Each
//! number of a token, such as its log-prob, is one byte. Indices and bytes are encoded as base64. Ten
//! thousand trajectories then fit in a page.

use super::run::Run;
use crate::harmony::Role;
use crate::metrics::{Phase, sanitize_terminal};
use crate::model::families::Family;
use crate::settings::Choice;
use crate::tasks::shown_answer;
use crate::trajectory::{Outcome, Trajectory, TrajectoryRow};
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Maximum size of a page's packed trajectories, in bytes.
const BYTES_MAX: usize = 50 << 20;
/// The lowest log-prob that a byte represents. Lower log-probs are raised to it.
const LOG_PROB_MIN: f64 = -16.0;
/// The smallest mismatch that a byte represents.
const MISMATCH_MIN: f64 = 1e-8;
/// Resolution of mismatches: the number of byte values per power of ten.
const STEPS_PER_DECADE: f64 = 12.0;
/// Estimated size of a packed trajectory without its texts, in bytes.
const ROW_BYTES: usize = 160;

/// The data for the page's script.
#[derive(Serialize, Default)]
pub(super) struct BrowserData {
    runs: Vec<String>,
    phases: Vec<&'static str>,
    outcomes: Vec<&'static str>,
    vocabulary: Vec<String>,
    /// Indices of special tokens in `vocabulary`.
    special: Vec<usize>,
    /// The id and, if known, the reference answer of each problem.
    problems: Vec<(String, Option<String>)>,
    rows: Vec<PackedTrajectory>,
    /// The value of [`LOG_PROB_MIN`].
    log_prob_min: f64,
    /// The value of [`MISMATCH_MIN`].
    mismatch_min: f64,
    /// The value of [`STEPS_PER_DECADE`].
    mismatch_steps: f64,
    /// A message, if the page does not have all stored trajectories.
    pub(super) left_out: Option<String>,
}

/// One trajectory. The field names are short, because a page may have ten thousand trajectories.
#[derive(Serialize)]
struct PackedTrajectory {
    /// Index of the trajectory's run.
    r: usize,
    /// Index of its phase.
    h: usize,
    /// Its step.
    t: u64,
    /// Its prompt's index.
    p: u64,
    /// Its sample's index.
    s: u64,
    reward: f32,
    /// The rewards with a name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    w: BTreeMap<String, f32>,
    success: bool,
    /// Index of its outcome.
    o: usize,
    /// Index of its problem.
    q: usize,
    /// Number of sampled tokens.
    n: usize,
    /// Ranges of sampled tokens: start, and end (exclusive).
    turns: Vec<(usize, usize)>,
    /// Indices into the vocabulary, three bytes each, little-endian. Absent without a tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    k: Option<String>,
    /// Log-probabilities of the sampled tokens.
    l: String,
    /// The advantage, if all sampled tokens have the same one. Otherwise the largest magnitude.
    #[serde(skip_serializing_if = "Option::is_none")]
    a: Option<f32>,
    /// Each sampled token's advantage as a fraction of `a`. Absent if all have the same advantage.
    #[serde(skip_serializing_if = "Option::is_none")]
    b: Option<String>,
    /// Log-prob mismatches. Absent if unknown, empty if all are exactly 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    g: Option<String>,
    /// The messages, if there is no tokenizer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    m: Vec<(String, String)>,
    /// Index of the trajectory within the step.
    #[serde(skip)]
    step_index: usize,
    #[serde(skip)]
    bytes: usize,
}

/// Packs the trajectories in the folders of `runs`. `None` if there are none.
///
/// # Errors
/// [`crate::error::BadInput`] with file and line for a line that is not a trajectory.
pub(super) fn pack(runs: &[Run]) -> Result<Option<BrowserData>> {
    let mut packer = Packer { per_step_max: usize::MAX, ..Packer::default() };
    for (index, run) in runs.iter().enumerate() {
        (packer.run, packer.tokenizer) = (index, tokenizer(run));
        for file in super::conversation::files(&run.folder.join("trajectories"))? {
            super::conversation::read_file(&file, |row| packer.add(&row))?;
        }
    }
    let (total, packed) = (packer.total, packer.data.rows.len());
    let left_out = (total > packed).then(|| {
        format!("the page has {packed} of {total} stored trajectories, the first of each step, so that it stays below 60 MB.")
    });
    Ok((packed > 0).then(|| BrowserData {
        runs: runs.iter().map(|run| sanitize_terminal(&run.label).into_owned()).collect(),
        phases: Phase::ALL.iter().map(|phase| phase.name()).collect(),
        outcomes: Outcome::ALL.iter().map(|outcome| outcome.name()).collect(),
        log_prob_min: LOG_PROB_MIN,
        mismatch_min: MISMATCH_MIN,
        mismatch_steps: STEPS_PER_DECADE,
        left_out,
        ..packer.data
    }))
}

/// Returns the tokenizer of the run's last checkpoint, or the embedded one if the recipe names it.
fn tokenizer(run: &Run) -> Option<Vocabulary> {
    let entries = std::fs::read_dir(run.folder.join("checkpoints")).into_iter().flatten();
    let mut folders: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    folders.extend(run.setting("model.path").map(PathBuf::from));
    let file =
        folders.into_iter().rev().map(|folder| folder.join("tokenizer.json")).find(|file| file.is_file());
    match file {
        Some(file) => Vocabulary::from_file(&file).ok(),
        None if run.setting("model.tokenizer").as_deref() == Some("embedded") => {
            let family = run.setting("model.architecture.model_type");
            let family = family.and_then(|word| Family::from_name(&word)).unwrap_or_default();
            Some(family.chat.from_embedded().ok()?.vocabulary().clone())
        }
        None => None,
    }
}

/// Packs trajectories. If they become too large, keeps only the first ones of each step.
#[derive(Default)]
struct Packer {
    run: usize,
    tokenizer: Option<Vocabulary>,
    data: BrowserData,
    /// Index in the vocabulary for each pair of run and token.
    token_indices: BTreeMap<(usize, u32), usize>,
    problem_indices: BTreeMap<(String, Option<String>), usize>,
    /// Number of trajectories so far, by run, phase and step.
    counts: BTreeMap<(usize, Phase, u64), usize>,
    bytes: usize,
    /// Number of all trajectories so far.
    total: usize,
    /// Maximum number of packed trajectories per step.
    per_step_max: usize,
}

impl Packer {
    fn add(&mut self, row: &TrajectoryRow) {
        self.total += 1;
        let count = self.counts.entry((self.run, row.phase, row.trajectory.step)).or_default();
        let step_index = *count;
        *count += 1;
        if step_index >= self.per_step_max {
            return;
        }
        let packed = self.pack_row(row, step_index);
        self.bytes += packed.bytes;
        self.data.rows.push(packed);
        while self.bytes > BYTES_MAX && self.per_step_max > 1 {
            let largest_step = self.data.rows.iter().map(|row| row.step_index + 1).max().unwrap_or(1);
            self.per_step_max = (largest_step / 2).max(1);
            self.data.rows.retain(|row| row.step_index < self.per_step_max);
            self.bytes = self.data.rows.iter().map(|row| row.bytes).sum();
        }
        if self.bytes > BYTES_MAX {
            self.per_step_max = 0;
        }
    }

    fn pack_row(&mut self, row: &TrajectoryRow, step_index: usize) -> PackedTrajectory {
        let t = &row.trajectory;
        let sampled = |values: &[f32]| -> Vec<f32> {
            t.mask.iter().zip(values).filter(|(mask, _)| **mask).map(|(_, value)| *value).collect()
        };
        let stats = row.token_stats.as_ref();
        let (a, b) = pack_advantages(stats.map(|stats| sampled(&stats.advantages)));
        let diffs = stats.and_then(|stats| stats.log_prob_diffs.as_ref()).map(|diffs| sampled(diffs));
        let messages = || {
            let name = |role: Role| format!("{role:?}").to_lowercase();
            row.messages
                .iter()
                .map(|m| (name(m.role), sanitize_terminal(&m.content).into_owned()))
                .collect::<Vec<_>>()
        };
        let k = self.pack_tokens(t);
        let mut packed = PackedTrajectory {
            r: self.run,
            h: Phase::ALL.iter().position(|phase| *phase == row.phase).unwrap_or_default(),
            t: t.step,
            p: t.prompt,
            s: t.sample,
            reward: t.reward,
            w: t.rewards.clone(),
            success: t.success,
            o: Outcome::ALL.iter().position(|outcome| *outcome == t.outcome).unwrap_or_default(),
            q: self.problem_index(row),
            n: t.sampled_tokens(),
            turns: t.turns.iter().map(|turn| (turn.start, turn.end)).collect(),
            l: STANDARD.encode(sampled(&t.log_probs).iter().map(|l| log_prob_byte(*l)).collect::<Vec<_>>()),
            a,
            b,
            g: diffs.map(|diffs| pack_mismatches(&diffs)),
            m: if k.is_none() { messages() } else { vec![] },
            k,
            step_index,
            bytes: ROW_BYTES,
        };
        let texts = [packed.k.as_ref(), Some(&packed.l), packed.b.as_ref(), packed.g.as_ref()];
        packed.bytes += texts.into_iter().flatten().map(String::len).sum::<usize>();
        packed.bytes += packed.m.iter().map(|(role, text)| role.len() + 2 * text.len()).sum::<usize>();
        packed
    }

    /// Packs the tokens in three bytes each. That is enough for 16 million entries of the page's vocabulary.
    fn pack_tokens(&mut self, t: &Trajectory) -> Option<String> {
        let tokenizer = self.tokenizer.take()?;
        let mut bytes = Vec::with_capacity(3 * t.tokens.len());
        for &token in &t.tokens {
            let index = *self.token_indices.entry((self.run, token)).or_insert_with(|| {
                let vocabulary = &mut self.data.vocabulary;
                if tokenizer.is_special(token) {
                    self.data.special.push(vocabulary.len());
                }
                vocabulary.push(token_text(&tokenizer, token));
                vocabulary.len() - 1
            });
            bytes.extend_from_slice(&index.to_le_bytes()[..3]);
        }
        self.tokenizer = Some(tokenizer);
        Some(STANDARD.encode(bytes))
    }

    /// Returns the index of the row's problem. A new problem is added.
    fn problem_index(&mut self, row: &TrajectoryRow) -> usize {
        let text = match &row.answer {
            serde_json::Value::Null => None,
            serde_json::Value::String(text) => Some(text.clone()),
            row => Some(shown_answer(row)),
        };
        let sanitize = |text: &str| sanitize_terminal(text).into_owned();
        let problem = (sanitize(&row.trajectory.problem_id), text.as_deref().map(sanitize));
        *self.problem_indices.entry(problem.clone()).or_insert_with(|| {
            self.data.problems.push(problem);
            self.data.problems.len() - 1
        })
    }
}

/// Returns a token's text. Bytes that are not UTF-8 are written in hexadecimal.
fn token_text(tokenizer: &Vocabulary, token: u32) -> String {
    match tokenizer.token_bytes(token) {
        None => format!("[{token}]"),
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => sanitize_terminal(text).into_owned(),
            Err(_) => bytes.iter().map(|byte| format!("\\x{byte:02X}")).collect(),
        },
    }
}

/// Returns a log-prob as a byte: 255 times the square root of its ratio to [`LOG_PROB_MIN`]. The root gives
/// likely tokens a finer resolution.
fn log_prob_byte(log_prob: f32) -> u8 {
    let share = (f64::from(log_prob) / LOG_PROB_MIN).clamp(0.0, 1.0);
    (share.sqrt() * 255.0).round() as u8
}

/// Returns the fields `a` and `b` of [`PackedTrajectory`].
fn pack_advantages(values: Option<Vec<f32>>) -> (Option<f32>, Option<String>) {
    let Some(values) = values else { return (None, None) };
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    match values.as_slice() {
        [] => (Some(0.0), None),
        [first, rest @ ..] if rest.iter().all(|value| value == first) => (Some(*first), None),
        _ => {
            let byte = |value: &f32| ((value / largest * 127.0).round() as i8).to_le_bytes()[0];
            (Some(largest), Some(STANDARD.encode(values.iter().map(byte).collect::<Vec<_>>())))
        }
    }
}

/// Encodes each log-prob difference as a byte: the sign, and the magnitude on a logarithmic scale. The byte 0
/// means exactly 0. The result is empty if all differences are 0.
fn pack_mismatches(diffs: &[f32]) -> String {
    if diffs.iter().all(|diff| *diff == 0.0) {
        return String::new();
    }
    let byte = |diff: &f32| {
        let size = f64::from(diff.abs());
        if size == 0.0 {
            return 0;
        }
        let steps = ((size / MISMATCH_MIN).log10() * STEPS_PER_DECADE).round().clamp(0.0, 126.0) as i8 + 1;
        (if *diff < 0.0 { -steps } else { steps }).to_le_bytes()[0]
    };
    STANDARD.encode(diffs.iter().map(byte).collect::<Vec<_>>())
}
