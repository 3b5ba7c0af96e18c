//! The binary as a user runs it: whole small runs, ended and resumed in every way, and refused ones.

mod adapter;
mod ahead;
mod bad_step;
mod bf16_dot;
mod check;
mod consent;
mod console;
mod critic;
mod distill;
mod ended;
mod ends;
mod first_hour;
mod hostile;
mod inputs;
mod integrity;
mod killed_worker;
mod limits;
mod memory;
mod move_in;
mod packed_file;
mod policy;
mod policy_view;
mod processes;
mod refused;
mod same_run;
mod serve;
mod serve_fields;
mod sft;
mod tinker;
mod truncated;
mod truth;

use crate::cli::{
    Ended, KilledOnDrop, Sets, Shared, assert_has, done, ended, in_repository, json_lines, json_of, output,
    refused, rloss, scratch, shared, text_of,
};
use rloss::settings::Choice;
use rloss::tasks::{TaskContext, TaskName, TaskSettings, build};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// A shrunken quickstart: both stages, evaluations and checkpoints in about a second.
const SMALL: &[&str] = &[
    "cold_start.steps=4",
    "cold_start.batch_size=4",
    "cold_start.validation_rows_max=8",
    "cold_start.eval_every_steps=2",
    "cold_start.optimizer.lr=1e-4",
    "cold_start.optimizer.warmup_steps=1",
    "train.steps=4",
    "eval.problems_max=16",
    "eval.every_steps=2",
    "checkpoint.every_steps=2",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "parallel.threads=2",
    // A busy machine may stall a tool call, and a call that is ended by the clock changes a run.
    "interpreter.time_limit_s=60",
    "interpreter.wall_clock_s=120",
];

fn quickstart() -> PathBuf {
    in_repository("recipes/quickstart.toml")
}

/// `rloss train quickstart` with `sets`, into `out`.
fn train(out: &Path, sets: &[&str]) -> Command {
    let mut command = rloss();
    command.arg("train").arg(quickstart()).arg("--out").arg(out).sets(sets);
    command
}

/// A small run from the warm model; `sets` come after the small run's own.
fn small(out: &Path, sets: &[&str]) -> Command {
    train(out, &[SMALL, &[&model_path(warm_model())], sets].concat())
}

/// [`small`], resumed.
fn resumed(out: &Path, sets: &[&str]) -> Command {
    let mut command = small(out, sets);
    command.arg("--resume");
    command
}

/// A model that answers some of the first training problems and fails others, so that rewards differ
/// within a group and updates are real ones: it has learned one right and one wrong conversation for each
/// of them by heart.
fn warm_model() -> &'static Path {
    static WARM: Shared = OnceLock::new();
    shared(&WARM, "warm", |out| {
        let rows = out.with_file_name("rows.jsonl");
        fs::write(&rows, conversations()).unwrap();
        let file = format!("cold_start.train_file={}", rows.display());
        let sets = [
            &file,
            "cold_start.steps=80",
            "cold_start.batch_size=16",
            "cold_start.optimizer.warmup_steps=10",
            "train.steps=0",
            "checkpoint.every_steps=0",
            "checkpoint.dtype=f32",
            "parallel.threads=2",
        ];
        done(&mut train(out, &sets));
    })
}

/// The setting that starts a run from the model at `path`.
fn model_path(path: &Path) -> String {
    format!("model.path={}", path.display())
}

fn conversations() -> String {
    let task = build(
        &TaskSettings { name: TaskName::from_name("arithmetic").unwrap(), ..TaskSettings::default() },
        &TaskContext::default(),
    )
    .unwrap();
    let mut text = String::new();
    for index in 0..8 {
        let problem = task.training_problem(0, index);
        let question = &problem.messages[0].content;
        let answer = problem.answer.as_str().expect("a number in a string").to_owned();
        let user = json!({"role": "user", "content": question});
        let call = json!({"role": "assistant", "channel": "analysis", "recipient": "python", "content": format!("print({answer})")});
        let reply = json!({"role": "tool", "name": "python", "channel": "analysis", "content": answer});
        let last = |text: &str| json!({"role": "assistant", "channel": "final", "content": text});
        text += &format!("{}\n", json!({"messages": [user, call, reply, last(&answer)]}));
        text += &format!("{}\n", json!({"messages": [user, last("0")]}));
    }
    text
}

/// The small run that others are compared with.
fn baseline() -> &'static Path {
    static BASELINE: Shared = OnceLock::new();
    shared(&BASELINE, "baseline", |out| drop(done(&mut small(out, &[]))))
}

/// Runs `sets` whole into `whole`, and into `broken` with `half`, then resumed; expects the same results.
fn assert_resumes(whole: &Path, broken: &Path, sets: &[&str], half: &[&str]) {
    done(&mut small(whole, sets));
    done(&mut small(broken, &[sets, half].concat()));
    done(&mut resumed(broken, sets));
    assert_same_results(broken, whole);
}

/// The rows of `metrics.jsonl`.
fn rows(run: &Path) -> Vec<Value> {
    json_lines(run.join("metrics.jsonl"))
}

/// What of the rows must be the same in the same run: all but `timing_s/` and `perf/`.
fn results(run: &Path) -> Vec<Value> {
    let mut rows = rows(run);
    for row in &mut rows {
        row.as_object_mut()
            .unwrap()
            .retain(|key, _| !key.starts_with("timing_s/") && !key.starts_with("perf/"));
    }
    rows
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no {key} in {row}"))
}

fn phase<'a>(rows: &'a [Value], phase: &'a str) -> impl Iterator<Item = &'a Value> {
    rows.iter().filter(move |row| row["phase"] == phase)
}

/// Asserts that rollout and training agree to the bit in every step.
fn assert_no_gap(run: &Path) {
    for row in phase(&rows(run), "rl") {
        assert_eq!(number(row, "mismatch/log_ppl_abs_diff_max"), 0.0, "{row}");
        assert_eq!(number(row, "mismatch/logprob_abs_diff_max"), 0.0, "{row}");
        assert_eq!(number(row, "mismatch/bit_equal_fraction"), 1.0, "{row}");
    }
}

/// The optimizer's state after step 4.
fn trainer_state(run: &Path) -> Vec<u8> {
    fs::read(run.join("checkpoints/step-000004/trainer.safetensors")).unwrap()
}

fn texts(sets: &[String]) -> Vec<&str> {
    sets.iter().map(String::as_str).collect()
}

/// Says which row and key differ, not all of both.
fn assert_same_results(run: &Path, expected: &Path) {
    let (got, want) = (results(run), results(expected));
    for (got, want) in got.iter().zip(&want) {
        let place = format!("{} {}", want["phase"], want["step"]);
        let (got, want) = (got.as_object().unwrap(), want.as_object().unwrap());
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{place}");
        for (key, value) in want {
            assert_eq!(&got[key], value, "{place}: {key}");
        }
    }
    assert_eq!(got.len(), want.len(), "rows");
}

/// Names of the whole checkpoints, in order.
fn checkpoints(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return vec![] };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

fn first_checkpoint(run: &Path) -> PathBuf {
    run.join("checkpoints").join(&checkpoints(run)[0])
}

/// Waits until `reached`, or the process has ended; returns which.
fn wait_until(child: &mut Child, reached: impl Fn() -> bool) -> bool {
    loop {
        if reached() {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn line_count(file: &Path) -> usize {
    fs::read(file).map_or(0, |bytes| bytes.iter().filter(|&&b| b == b'\n').count())
}

/// The model of a checkpoint as one from elsewhere: without manifest, and without what only a run reads.
fn copy_model(from: &Path, to: &Path) {
    copy_folder(from, to);
    for name in ["manifest.b3", "trainer.json", "trainer.safetensors", "trainer.toml"] {
        fs::remove_file(to.join(name)).unwrap();
    }
}

/// A copy of a flat folder, such as a checkpoint.
fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Replaces the first `from` in a file.
fn replace(file: &Path, from: &str, to: &str) {
    let text = text_of(file);
    assert!(text.contains(from), "{}", file.display());
    fs::write(file, text.replacen(from, to, 1)).unwrap();
}
