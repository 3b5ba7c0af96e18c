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

use rloss::settings::Choice;
use rloss::tasks::{TaskContext, TaskName, TaskSettings, build};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
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
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/quickstart.toml")
}

fn rloss() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rloss"));
    command.stdin(Stdio::null());
    // The key of this user's runs: the tests leave the user's own alone.
    command.env("XDG_CONFIG_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// `rloss train quickstart` with `sets`, into `out`.
fn train(out: &Path, sets: &[&str]) -> Command {
    let mut command = rloss();
    command.arg("train").arg(quickstart()).arg("--out").arg(out);
    for set in sets {
        command.args(["--set", set]);
    }
    command
}

/// A small run from the warm model; `sets` come after the small run's own.
fn small(out: &Path, sets: &[&str]) -> Command {
    let model = format!("model.path={}", warm_model().display());
    let sets: Vec<&str> = SMALL.iter().copied().chain([model.as_str()]).chain(sets.iter().copied()).collect();
    train(out, &sets)
}

/// [`small`], resumed.
fn resumed(out: &Path, sets: &[&str]) -> Command {
    let mut command = small(out, sets);
    command.arg("--resume");
    command
}

fn output(command: &mut Command) -> Output {
    command.output().expect("the binary starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs to the end and expects exit code 0.
fn done(command: &mut Command) -> Output {
    let output = output(command);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    output
}

/// A model that answers some of the first training problems and fails others, so that rewards differ
/// within a group and updates are real ones: it has learned one right and one wrong conversation for each
/// of them by heart.
fn warm_model() -> &'static Path {
    static WARM: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = WARM.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let rows = folder.path().join("rows.jsonl");
        std::fs::write(&rows, conversations()).unwrap();
        let out = folder.path().join("warm");
        let file = format!("cold_start.train_file={}", rows.display());
        done(&mut train(
            &out,
            &[
                &file,
                "cold_start.steps=80",
                "cold_start.batch_size=16",
                "cold_start.optimizer.warmup_steps=10",
                "train.steps=0",
                "checkpoint.every_steps=0",
                "checkpoint.dtype=f32",
                "parallel.threads=2",
            ],
        ));
        (folder, out)
    });
    path
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
    static BASELINE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BASELINE.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let out = folder.path().join("baseline");
        done(&mut small(&out, &[]));
        (folder, out)
    });
    path
}

/// The rows of `metrics.jsonl`.
fn rows(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
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

fn phase<'a>(rows: &'a [Value], phase: &'a str) -> impl Iterator<Item = &'a Value> {
    rows.iter().filter(move |row| row["phase"] == phase)
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
    let Ok(entries) = std::fs::read_dir(run.join("checkpoints")) else { return vec![] };
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
    std::fs::read(file).map_or(0, |bytes| bytes.iter().filter(|&&b| b == b'\n').count())
}

/// The model of a checkpoint as one from elsewhere: without manifest, and without what only a run reads.
fn copy_model(from: &Path, to: &Path) {
    copy_folder(from, to);
    for name in ["manifest.b3", "trainer.json", "trainer.safetensors", "trainer.toml"] {
        std::fs::remove_file(to.join(name)).unwrap();
    }
}

/// A copy of a flat folder, such as a checkpoint.
fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
