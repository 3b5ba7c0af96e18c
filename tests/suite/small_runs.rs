//! Small runs of a built-in recipe, for the tests of model families.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

pub fn rloss(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rloss")).args(arguments).output().unwrap()
}

/// The file of the built-in recipe `name`.
pub fn recipe(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes").join(name).with_extension("toml")
}

/// Trains the recipe `name` for a few steps, with more settings in `sets`.
pub fn train(name: &str, out: &Path, sets: &[&str]) -> Output {
    let recipe = recipe(name);
    let mut arguments = vec!["train", recipe.to_str().unwrap(), "--out", out.to_str().unwrap()];
    SMALL.iter().chain(sets).for_each(|set| arguments.extend(["--set", set]));
    rloss(&arguments)
}

pub fn done(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The rows of metrics of reinforcement learning.
pub fn rl_rows(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.filter(|row| row["phase"] == "rl").collect()
}
