//! Packs all stored trajectories of the runs for the page's browser: tokens, log-probabilities, advantages
//! and log-prob mismatches.
//!
//! A column holds one entry a trajectory. `vocabulary` holds each token text once. A trajectory's tokens are
//! indices into it, and its figures are bytes. Both are base64, so that ten thousand trajectories fit in a
//! page.

use super::run::Run;
use crate::harmony::Role;
use crate::metrics::{Phase, sanitize_terminal};
use crate::model::families::Family;
use crate::settings::Choice;
use crate::trajectory::{Outcome, Trajectory, TrajectoryRow};
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Maximum bytes of the packed trajectories of a page.
const BYTES_MAX: usize = 50 << 20;
/// The lowest log-probability that a byte represents; lower values become it.
const LOG_PROB_MIN: f64 = -16.0;
/// The lower end of the mismatch scale.
const GAP_MIN: f64 = 1e-8;
/// Steps of a mismatch byte in a decade.
const GAP_STEPS: f64 = 12.0;
/// Estimated bytes of a trajectory's other entries.
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
    /// Each problem's name and correct answer, if known.
    problems: Vec<(String, Option<String>)>,
    rows: Vec<Packed>,
    /// The scales of the figures' bytes.
    log_prob_min: f64,
    gap_min: f64,
    gap_steps: f64,
    /// Shown if some stored trajectories are not on the page.
    pub(super) left_out: Option<String>,
}

/// One trajectory. The field names are short because the page repeats them ten thousand times.
#[derive(Serialize)]
struct Packed {
    /// Indices of run and phase in their lists.
    r: usize,
    h: usize,
    /// Step, prompt and sample.
    t: u64,
    p: u64,
    s: u64,
    reward: f32,
    success: bool,
    /// Indices of outcome and problem in their lists.
    o: usize,
    q: usize,
    /// Number of sampled tokens.
    n: usize,
    /// Ranges of sampled tokens: start and end, which is excluded.
    turns: Vec<(usize, usize)>,
    /// Vocabulary indices, little-endian u32 truncated to three bytes; absent without a tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    k: Option<String>,
    /// Log-probabilities of the sampled tokens.
    l: String,
    /// A common advantage of all sampled tokens, or the largest one and each token's share of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    a: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    b: Option<String>,
    /// Log-prob mismatches: absent if unknown, empty if all are exactly 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    g: Option<String>,
    /// The messages, if there is no tokenizer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    m: Vec<(String, String)>,
    /// Index within its step.
    #[serde(skip)]
    nth: usize,
    #[serde(skip)]
    bytes: usize,
}

/// Packs the trajectories in the folders of `runs`; `None` if there are none.
///
/// # Errors
/// [`crate::error::BadInput`] with file and line for a line that is not a trajectory.
pub(super) fn pack(runs: &[Run]) -> Result<Option<BrowserData>> {
    let mut packer = Packer { limit: usize::MAX, ..Packer::default() };
    for (index, run) in runs.iter().enumerate() {
        packer.begin(index, tokenizer(run));
        for file in super::conversation::files(&run.folder.join("trajectories"))? {
            super::conversation::read_file(&file, |row| packer.add(&row))?;
        }
    }
    if packer.rows.is_empty() {
        return Ok(None);
    }
    let left_out = (packer.seen > packer.rows.len()).then(|| {
        format!(
            "{} of {} written trajectories are here, the first of each step, so that the page stays below 60 MB.",
            packer.rows.len(),
            packer.seen
        )
    });
    Ok(Some(BrowserData {
        runs: runs.iter().map(|run| sanitize_terminal(&run.label).into_owned()).collect(),
        phases: Phase::ALL.map(Phase::name).to_vec(),
        outcomes: Outcome::ALL.map(Outcome::name).to_vec(),
        vocabulary: packer.vocabulary,
        special: packer.special.into_iter().collect(),
        problems: packer.problems,
        rows: packer.rows,
        log_prob_min: LOG_PROB_MIN,
        gap_min: GAP_MIN,
        gap_steps: GAP_STEPS,
        left_out,
    }))
}

/// Returns the tokenizer of the run's last checkpoint, or the embedded one if the recipe names it.
fn tokenizer(run: &Run) -> Option<Vocabulary> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(run.folder.join("checkpoints"))
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
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

#[derive(Default)]
struct Packer {
    run: usize,
    tokenizer: Option<Vocabulary>,
    vocabulary: Vec<String>,
    special: BTreeSet<usize>,
    places: BTreeMap<(usize, u32), usize>,
    problems: Vec<(String, Option<String>)>,
    problem_places: BTreeMap<(String, Option<String>), usize>,
    rows: Vec<Packed>,
    counts: BTreeMap<(usize, Phase, u64), usize>,
    bytes: usize,
    seen: usize,
    /// Maximum trajectories of a step.
    limit: usize,
}

impl Packer {
    fn begin(&mut self, run: usize, tokenizer: Option<Vocabulary>) {
        (self.run, self.tokenizer) = (run, tokenizer);
    }

    fn add(&mut self, row: &TrajectoryRow) {
        self.seen += 1;
        let nth = self.counts.entry((self.run, row.phase, row.trajectory.step)).or_default();
        let at = *nth;
        *nth += 1;
        if at >= self.limit {
            return;
        }
        let packed = self.pack_row(row, at);
        self.bytes += packed.bytes;
        self.rows.push(packed);
        while self.bytes > BYTES_MAX && self.limit > 1 {
            let most = self.rows.iter().map(|row| row.nth + 1).max().unwrap_or(1);
            self.limit = (most / 2).max(1);
            self.rows.retain(|row| row.nth < self.limit);
            self.bytes = self.rows.iter().map(|row| row.bytes).sum();
        }
        if self.bytes > BYTES_MAX {
            self.limit = 0;
        }
    }

    fn pack_row(&mut self, row: &TrajectoryRow, nth: usize) -> Packed {
        let t = &row.trajectory;
        let sampled = |values: &[f32]| -> Vec<f32> {
            t.mask.iter().zip(values).filter(|(mask, _)| **mask).map(|(_, value)| *value).collect()
        };
        let learned = row.learned.as_ref();
        let (a, b) = advantages(learned.map(|learned| sampled(&learned.advantages)));
        let gaps = learned.and_then(|learned| learned.log_prob_diffs.as_ref()).map(|gaps| sampled(gaps));
        let messages = || {
            let name = |role: Role| format!("{role:?}").to_lowercase();
            row.messages
                .iter()
                .map(|m| (name(m.role), sanitize_terminal(&m.content).into_owned()))
                .collect::<Vec<_>>()
        };
        let k = self.tokens(t);
        let mut packed = Packed {
            r: self.run,
            h: Phase::ALL.iter().position(|phase| *phase == row.phase).unwrap_or_default(),
            t: t.step,
            p: t.prompt,
            s: t.sample,
            reward: t.reward,
            success: t.success,
            o: Outcome::ALL.iter().position(|outcome| *outcome == t.outcome).unwrap_or_default(),
            q: self.problem(row),
            n: t.sampled_tokens(),
            turns: t.turns.iter().map(|turn| (turn.start, turn.end)).collect(),
            l: STANDARD.encode(sampled(&t.logprobs).iter().map(|l| log_prob_byte(*l)).collect::<Vec<_>>()),
            a,
            b,
            g: gaps.map(|gaps| gap_text(&gaps)),
            m: if k.is_none() { messages() } else { vec![] },
            k,
            nth,
            bytes: ROW_BYTES,
        };
        let texts = [packed.k.as_ref(), Some(&packed.l), packed.b.as_ref(), packed.g.as_ref()];
        packed.bytes += texts.into_iter().flatten().map(String::len).sum::<usize>();
        packed.bytes += packed.m.iter().map(|(role, text)| role.len() + 2 * text.len()).sum::<usize>();
        packed
    }

    /// Packs three bytes a token: the page's vocabulary is far below 16 million entries.
    fn tokens(&mut self, t: &Trajectory) -> Option<String> {
        let tokenizer = self.tokenizer.take()?;
        let mut bytes = Vec::with_capacity(3 * t.tokens.len());
        for &token in &t.tokens {
            let place = *self.places.entry((self.run, token)).or_insert_with(|| {
                if tokenizer.is_special(token) {
                    self.special.insert(self.vocabulary.len());
                }
                self.vocabulary.push(spelling(&tokenizer, token));
                self.vocabulary.len() - 1
            });
            bytes.extend_from_slice(&place.to_le_bytes()[..3]);
        }
        self.tokenizer = Some(tokenizer);
        Some(STANDARD.encode(bytes))
    }

    fn problem(&mut self, row: &TrajectoryRow) -> usize {
        let text = match &row.answer {
            serde_json::Value::Null => None,
            serde_json::Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let clean = |text: &str| sanitize_terminal(text).into_owned();
        let problem = (clean(&row.trajectory.problem_id), text.as_deref().map(clean));
        *self.problem_places.entry(problem.clone()).or_insert_with(|| {
            self.problems.push(problem);
            self.problems.len() - 1
        })
    }
}

/// Returns a token's text; bytes that are not text by themselves are in hexadecimal.
fn spelling(tokenizer: &Vocabulary, token: u32) -> String {
    match tokenizer.token_bytes(token) {
        None => format!("[{token}]"),
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => sanitize_terminal(text).into_owned(),
            Err(_) => bytes.iter().map(|byte| format!("\\x{byte:02X}")).collect(),
        },
    }
}

/// Returns the square root of the log-probability's share of [`LOG_PROB_MIN`], as a byte. The root gives
/// likely tokens a finer resolution.
fn log_prob_byte(log_prob: f32) -> u8 {
    let share = (f64::from(log_prob) / LOG_PROB_MIN).clamp(0.0, 1.0);
    (share.sqrt() * 255.0).round() as u8
}

fn advantages(values: Option<Vec<f32>>) -> (Option<f32>, Option<String>) {
    let Some(values) = values else { return (None, None) };
    let largest = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    match values.as_slice() {
        [] => (Some(0.0), None),
        [first, rest @ ..] if rest.iter().all(|value| value == first) => (Some(*first), None),
        _ => {
            let byte = |value: &f32| ((value / largest * 127.0).round() as i8).to_le_bytes()[0];
            (Some(largest), Some(STANDARD.encode(values.iter().map(byte).collect::<Vec<_>>())))
        }
    }
}

/// Encodes sign and decade of each mismatch; 0 means exactly 0. The text is empty if all are 0.
fn gap_text(gaps: &[f32]) -> String {
    if gaps.iter().all(|gap| *gap == 0.0) {
        return String::new();
    }
    let byte = |gap: &f32| {
        let size = f64::from(gap.abs());
        if size == 0.0 {
            return 0;
        }
        let steps = ((size / GAP_MIN).log10() * GAP_STEPS).round().clamp(0.0, 126.0) as i8 + 1;
        (if *gap < 0.0 { -steps } else { steps }).to_le_bytes()[0]
    };
    STANDARD.encode(gaps.iter().map(byte).collect::<Vec<_>>())
}
