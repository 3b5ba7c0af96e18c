//! Small runs of a built-in recipe, for the tests of model families.

use crate::cli::{self, Sets, in_repository, json_lines};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const SMALL: [&str; 9] = [
    "cold_start.steps=60",
    "cold_start.optimizer.warmup_steps=5",
    "train.steps=2",
    "rollout.prompts_per_step=2",
    "eval.every_steps=0",
    "eval.before_training=false",
    "eval.problems_max=8",
    "checkpoint.every_steps=1",
    "parallel.threads=2",
];

/// The file of the built-in recipe `name`.
pub fn recipe(name: &str) -> PathBuf {
    in_repository("recipes").join(name).with_extension("toml")
}

/// `rloss` with `arguments`.
pub fn rloss(arguments: &[&str]) -> Command {
    let mut command = cli::rloss();
    command.args(arguments);
    command
}

/// Trains the recipe `name` for a few steps, with more settings in `sets`.
pub fn train(name: &str, out: &Path, sets: &[&str]) -> Command {
    let mut command = cli::rloss();
    command.arg("train").arg(recipe(name)).arg("--out").arg(out).sets(SMALL).sets(sets);
    command
}

/// The rows of metrics of reinforcement learning.
pub fn rl_rows(run: &Path) -> Vec<Value> {
    let mut rows = json_lines(run.join("metrics.jsonl"));
    rows.retain(|row| row["phase"] == "rl");
    rows
}

/// Whether rollout and training agreed to the bit in each of the two steps of `run`.
pub fn assert_no_gap(run: &Path) {
    let rows = rl_rows(run);
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|row| row["mismatch/logprob_abs_diff_max"] == 0.0), "{rows:?}");
}

/// A copy of the trajectories in `file` in `folder`, as sampled at temperature 0.7.
pub fn hotter(folder: &Path, file: &Path) -> PathBuf {
    let hotter = folder.join("hotter.jsonl");
    let row = |mut row: Value| {
        row["temperature"] = 0.7.into();
        format!("{row}\n")
    };
    std::fs::write(&hotter, json_lines(file).into_iter().map(row).collect::<String>()).unwrap();
    hotter
}
