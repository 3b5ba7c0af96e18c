//! Reads a run folder for the report.

use super::conversation::{self, SelectedTrajectory};
use super::plot::Points;
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX, TOKENIZER_BYTES_MAX, TOML_BYTES_MAX};
use crate::metrics::{Metrics, Phase, Row, Warning, read_rows, read_warnings};
use anyhow::Result;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The contents of one run folder.
#[derive(Clone, Default)]
pub(super) struct Run {
    /// The folder's name. If another run's folder has the same name, this is the path that the user gave.
    pub label: String,
    pub folder: PathBuf,
    /// Index among the page's curves. Seeds of one recipe share a curve.
    pub curve: usize,
    /// The seeds, if several runs share the curve.
    pub seeds: String,
    /// `model.json`, if present.
    pub model: Option<serde_json::Value>,
    pub rows: Vec<Row>,
    pub warnings: Vec<Warning>,
    /// The resolved recipe. Empty if the folder has none.
    pub recipe: toml::Table,
    pub sample_trajectories: Vec<SelectedTrajectory>,
    /// `mismatch.json`, if present.
    pub mismatch: Option<serde_json::Value>,
    /// For a folder of samples instead of a run: `eval` or `rollout`. `None` for a run.
    pub sampling: Option<String>,
}

impl Run {
    /// Reads all folders, in order. With `awaits_runs`, a run that has not begun is empty.
    pub fn load_all(folders: &[PathBuf], awaits_runs: bool) -> Result<Vec<Run>> {
        let full = |folder: &PathBuf| std::fs::canonicalize(folder).unwrap_or_else(|_| folder.clone());
        let mut seen = BTreeSet::new();
        if let Some(again) = folders.iter().find(|folder| !seen.insert(full(folder))) {
            return Err(bad_input!("{}: this run is given twice. Name each run once.", again.display()));
        }
        let load = |(label, folder): (String, &PathBuf)| match awaits_runs && !has_begun(folder) {
            true => Ok(Run { label, folder: folder.clone(), ..Run::default() }),
            false => Self::load(label, folder),
        };
        labels(folders).into_iter().zip(folders).map(load).collect()
    }

    /// Reads only a folder's metrics and recipe, which is enough for a figure.
    pub fn load_metrics(label: String, folder: &Path) -> Result<Run> {
        Ok(Run {
            label,
            folder: folder.to_owned(),
            rows: [read_rows(&folder.join("metrics.jsonl"))?, later_evaluations(folder)?].concat(),
            warnings: read_warnings(folder),
            recipe: read_recipe(&folder.join("recipe.toml"))?,
            sampling: sampling_kind(&folder.join("sampling.json")),
            ..Run::default()
        })
    }

    fn load(label: String, folder: &Path) -> Result<Run> {
        let path_text = folder.display();
        if !folder.is_dir() {
            return Err(bad_input!(
                "{path_text}: no such run folder. Name a folder that `rloss train` wrote, or a model's folder in a Tinker store."
            ));
        }
        if !has_begun(folder) {
            return Err(bad_input!(
                "{path_text}: has no metrics.jsonl, so it is not a run folder. Name a folder that `rloss train` wrote."
            ));
        }
        Ok(Run {
            model: bounded_file::read(&folder.join("model.json"), SMALL_FILE_BYTES_MAX)
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok()),
            sample_trajectories: conversation::pick(&folder.join("trajectories"))?,
            mismatch: read_mismatch(&folder.join("mismatch.json"))?,
            ..Self::load_metrics(label, folder)?
        })
    }

    /// Returns the values of `metric` in the rows of `phase`.
    pub fn series(&self, phase: Phase, metric: &str) -> Points {
        let rows = self.rows.iter().filter(|row| row.phase == phase);
        let mut points: Points = rows.filter_map(|row| Some((row.step, row.metrics.get(metric)?))).collect();
        points.sort_by_key(|point| point.0);
        points
    }

    /// Returns the recipe's value at a dotted key, as text.
    pub fn setting(&self, key: &str) -> Option<String> {
        let (table, keys) = key.split_once('.')?;
        match keys.split('.').try_fold(self.recipe.get(table)?, |value, key| value.get(key))? {
            toml::Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }
}

/// Returns whether the run in `folder` has written its metrics file.
pub(super) fn has_begun(folder: &Path) -> bool {
    folder.join("metrics.jsonl").is_file()
}

/// Returns the folders that `rloss eval` wrote into the run in `folder`, sorted.
pub(super) fn evaluation_folders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.join("eval")).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| has_begun(path)).collect();
    folders.sort();
    folders
}

/// Returns the held-out success that `rloss eval` measured of the run in `folder`. Its name differs from that
/// of the run's own evaluations, which may have other settings.
fn later_evaluations(folder: &Path) -> Result<Vec<Row>> {
    let mut rows = vec![];
    for folder in evaluation_folders(folder) {
        for Row { step, phase, metrics } in read_rows(&folder.join("metrics.jsonl"))? {
            let renamed = metrics.iter().filter_map(|(name, value)| {
                let (_, measure) = name.strip_prefix("val-core/")?.split_once("/acc/")?;
                let end = measure.find('/').map_or("", |at| &measure[at..]);
                Some((format!("{} by rloss eval{end}", name.strip_suffix(end)?), value))
            });
            rows.push(Row { step, phase, metrics: Metrics::from_iter(renamed) });
        }
    }
    Ok(rows)
}

/// Returns the kind of samples that the marker file at `path` names, if the file exists.
fn sampling_kind(path: &Path) -> Option<String> {
    let text = bounded_file::read(path, SMALL_FILE_BYTES_MAX).ok()?;
    let marker: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(marker.get("kind")?.as_str()?.to_owned())
}

/// Returns the folders' names. For folders with equal names, returns their paths as the user gave them.
fn labels(folders: &[PathBuf]) -> Vec<String> {
    let name = |folder: &PathBuf| {
        let full = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.clone());
        full.file_name().map_or_else(|| full.display().to_string(), |n| n.to_string_lossy().into_owned())
    };
    let names: Vec<String> = folders.iter().map(name).collect();
    let unique = |n: &String| names.iter().filter(|other| *other == n).count() == 1;
    let pairs = names.iter().zip(folders);
    pairs.map(|(n, f)| if unique(n) { n.clone() } else { f.display().to_string() }).collect()
}

/// Returns the text of a file; `None` if there is no file.
fn read_optional(path: &Path, bytes_max: u64) -> Result<Option<String>> {
    let read = || bounded_file::read_text(path, bytes_max);
    let text = path.exists().then(read).transpose();
    text.map_err(|e| bad_input!("{}: cannot be read ({e}).", path.display()))
}

fn read_recipe(path: &Path) -> Result<toml::Table> {
    let Some(text) = read_optional(path, TOML_BYTES_MAX)? else { return Ok(toml::Table::new()) };
    let path_text = path.display();
    text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map_or(1, |span| text.get(..span.start).unwrap_or("").matches('\n').count() + 1);
        bad_input!("{path_text}: line {line}: {}. Restore the run's recipe, or remove the file.", e.message())
    })
}

fn read_mismatch(path: &Path) -> Result<Option<serde_json::Value>> {
    let Some(text) = read_optional(path, TOKENIZER_BYTES_MAX)? else { return Ok(None) };
    let path_text = path.display();
    let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| {
        bad_input!("{path_text}: line {}: {e}. Run check-mismatch again, or remove the file.", e.line())
    })?;
    let rows = value.get("rows").and_then(serde_json::Value::as_array);
    if !rows.is_some_and(|rows| rows.iter().all(serde_json::Value::is_object)) {
        return Err(bad_input!(
            "{path_text}: `rows` is not a list of objects. Run check-mismatch again, or remove the file."
        ));
    }
    Ok(Some(value))
}
