//! `rloss eval`, `rloss rollout` and training on stored trajectories, through the binary.

use crate::cli::{assert_has, done, json_of, output, refused, rloss};
use rloss::trajectory::TrajectoryRow;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small run: two problems a step, a few demonstrations, checkpoints without rounding.
const SMALL: &str = r#"
[chat]
system_message = false
[task]
name = "arithmetic"
[model.architecture]
hidden_size = 32
num_hidden_layers = 2
[rollout]
prompts_per_step = 2
samples_per_prompt = 3
response_tokens_max = 24
[cold_start]
steps = 20
batch_size = 8
[train]
steps = 2
[train.optimizer]
lr = 1e-3
[eval]
problems_max = 5
samples = 4
pass_at = [1, 2]
before_training = false
[checkpoint]
dtype = "f32"
[logging]
tensorboard = false
trajectories_per_step = 100
"#;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a folder"));
        fs::write(place.path("small.toml"), SMALL).expect("the recipe");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn rloss(&self, arguments: &[&str]) -> Command {
        let mut command = rloss();
        command.current_dir(self.0.path()).args(arguments);
        command
    }

    #[track_caller]
    fn done(&self, arguments: &[&str]) -> String {
        done(&mut self.rloss(arguments)).stdout
    }

    /// The one error that `arguments` end in, which holds all of `parts`.
    #[track_caller]
    fn refused(&self, arguments: &[&str], parts: &[&str]) {
        let error = refused(&mut self.rloss(arguments), parts);
        assert_eq!(error.matches("error: ").count(), 1, "{error}");
    }
}

fn rows(path: &Path) -> Vec<TrajectoryRow> {
    let text = fs::read_to_string(path).expect("a file of trajectories");
    text.lines().map(|line| TrajectoryRow::from_line(line.as_bytes()).expect("a trajectory")).collect()
}

/// The rows of `text` with row `index` changed.
fn changed_row(text: &str, index: usize, change: &dyn Fn(&mut Value)) -> String {
    let mut lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).expect("a row")).collect();
    change(&mut lines[index]);
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Rows as they were sampled: without the time that tool calls took, and what a step learned from them.
fn timeless(mut rows: Vec<TrajectoryRow>) -> Vec<TrajectoryRow> {
    for row in &mut rows {
        (row.trajectory.tool_s, row.token_stats) = (0.0, None);
    }
    rows
}

#[test]
fn an_evaluated_run_repeats_its_own_last_evaluation_and_goes_on_where_it_was_cut() {
    let place = Place::new();
    place.done(&["train", "small.toml", "--out", "run"]);
    let shown = place.done(&["eval", "run"]);
    assert_has(&shown, &["mean@4", "pass@1", "pass@2", "maj@4", "truncated_length", "turns", "95%"]);
    let file = place.path("run/eval/step-000002/trajectories/eval-000002.jsonl");
    let found = timeless(rows(&file));
    assert_eq!(found.len(), 5 * 4);
    assert_eq!(found, timeless(rows(&place.path("run/trajectories/eval-000002.jsonl"))));
    let of = |name: &str| {
        let text = fs::read_to_string(place.path(name)).expect(name);
        let last = text.lines().rfind(|line| line.contains("mean@4")).map(str::to_owned);
        let row: Value = serde_json::from_str(&last.expect("an evaluation")).expect("a row");
        let kept = row.as_object().expect("an object").iter().filter(|(key, _)| key.starts_with("val-core/"));
        kept.map(|(key, value)| (key.clone(), value.clone())).collect::<Vec<_>>()
    };
    let metrics = of("run/eval/step-000002/metrics.jsonl");
    assert_eq!(metrics.len(), 3 * 4);
    assert_eq!(metrics, of("run/metrics.jsonl"));

    let document = json_of(place.path("run/eval/step-000002/eval.json"));
    let set = &document["sets"][0];
    assert_eq!(set["problems"].as_array().map(Vec::len), Some(5));
    assert_eq!(set["problems"][0]["id"], found[0].trajectory.problem_id.as_str());
    assert_eq!(set["problems"][4]["samples"].as_array().map(Vec::len), Some(4));
    let counted: u64 = ["outcomes", "turns"]
        .iter()
        .flat_map(|kind| set[kind].as_object().expect("counts").values())
        .map(|count| count["trajectories"].as_u64().expect("a count"))
        .sum();
    assert_eq!(counted, 2 * 20);

    // As a kill leaves it: one problem whole in any order, one half, one line torn.
    let text = fs::read_to_string(&file).expect("rows");
    let lines: Vec<&str> = text.lines().collect();
    let kept = [lines[7], lines[5], lines[6], lines[4], lines[9]].join("\n");
    fs::write(file.with_extension("jsonl.partial"), format!("{kept}\n{}", &lines[0][..100]))
        .expect("written");
    fs::remove_file(&file).expect("removed");
    assert_eq!(place.done(&["eval", "run"]), shown);
    assert_eq!(timeless(rows(&file)), found);
    assert!(!file.with_extension("jsonl.partial").exists());
    // Problem 1's rows, times included, are those that were kept.
    assert_eq!(fs::read_to_string(&file).expect("rows").lines().nth(5), Some(lines[5]));
    assert_eq!(json_of(place.path("run/eval/step-000002/eval.json")), document);

    // Other settings are another evaluation, with rows of its own; the first stays, and either goes on as
    // it was.
    let fewer = ["eval", "run", "--set", "eval.samples=2", "--set", "eval.pass_at=[]"];
    let second = place.done(&fewer);
    assert!(second.contains("mean@2"), "{second}");
    assert_eq!(rows(&place.path("run/eval/step-000002-2/trajectories/eval-000002.jsonl")).len(), 5 * 2);
    assert_eq!((place.done(&fewer), place.done(&["eval", "run"])), (second, shown.clone()));
    assert!(!place.path("run/eval/step-000002-3").exists());
    place.refused(&[&fewer[..], &["--out", "run/eval/step-000002"]].concat(), &["eval.samples", "--out"]);
    // A checkpoint's folder names its run's recipe and itself.
    assert_eq!(place.done(&["eval", "run/checkpoints/step-000002"]), shown);
    place.refused(
        &["train", "run/checkpoints/step-000002"],
        &["is a checkpoint", "--resume", "--set model.path="],
    );
    place.refused(&["eval", "run", "--out", "run"], &["already contains a run", "--out"]);
    // The folder is refused before the model is read.
    fs::create_dir(place.path("no_weights")).expect("a folder");
    let config = place.path("run/checkpoints/step-000002/config.json");
    fs::copy(config, place.path("no_weights/config.json")).expect("a copy");
    let model = ["small.toml", "--set", "model.path=no_weights", "--out", "run"];
    place.refused(&[&["eval"], &model[..]].concat(), &["already contains a run", "--out"]);
    place.refused(&[&["rollout"], &model[..]].concat(), &["already contains a run", "--out"]);
    place.refused(&["rollout", "run", "--out", "run/eval/step-000002"], &["rloss eval", "--out"]);
    // A checkpoint is a model like any other, in whatever recipe; so is the run that it belongs to.
    for (recipe, model, out) in [("small.toml", "run", "a"), ("run", "run/checkpoints/step-000002", "b")] {
        let model = format!("model.path={model}");
        assert_eq!(place.done(&["eval", recipe, "--set", &model, "--out", out]), shown);
    }
}

#[test]
fn a_rollout_is_what_training_samples_and_trains_the_same() {
    let place = Place::new();
    let shown = place.done(&["rollout", "small.toml", "--set", "cold_start.steps=0"]);
    assert!(shown.contains("critic/rewards/mean") && shown.contains("outcome/finished"));
    let file = place.path("runs/small-rollout/trajectories/step-000001.jsonl");
    let written = rows(&file);
    assert_eq!(written.len(), 2 * 3);
    assert!(written.iter().all(|row| row.trajectory.log_probs.len() == row.trajectory.tokens.len()));
    place.done(&["report", "runs/small-rollout"]);

    let train = |out: &str, sets: &[&str]| {
        let mut arguments = vec!["train", "small.toml", "--out", out, "--set", "cold_start.steps=0"];
        arguments.extend(["--set", "eval.every_steps=0", "--set", "train.steps=1"]);
        sets.iter().for_each(|set| arguments.extend(["--set", set]));
        place.done(&arguments);
        let text = fs::read_to_string(place.path(out).join("metrics.jsonl")).expect("metrics");
        let row: Value = serde_json::from_str(text.lines().last().expect("a row")).expect("a row");
        let row = row.as_object().expect("an object").clone().into_iter();
        row.filter(|(key, _)| !key.starts_with("timing_s/") && !key.starts_with("perf/")).collect::<Vec<_>>()
    };
    let sampled = train("sampled", &[]);
    assert_eq!(timeless(rows(&place.path("sampled/trajectories/step-000001.jsonl"))), timeless(written));
    let stored = format!("train.trajectories={}", file.display());
    for old in ["detach", "rollout", "recompute"] {
        assert_eq!(train(old, &[&stored, &format!("policy.old_logprob={old}")]), sampled, "{old}");
    }
    // From another policy, the stored log-probabilities no longer agree with the forward.
    let other = train("other", &[&stored, "train.seed=7", "policy.old_logprob=rollout"]);
    let gap = other.iter().find(|(key, _)| key == "mismatch/log_ppl_abs_diff_max").expect("the gap");
    assert!(gap.1.as_f64().expect("a number") > 0.0);
}

#[test]
fn stored_trajectories_are_checked_row_by_row() {
    let place = Place::new();
    place.done(&["rollout", "small.toml", "--out", "out"]);
    let text = fs::read_to_string(place.path("out/trajectories/step-000001.jsonl")).expect("rows");
    let third = |change: &dyn Fn(&mut Value)| changed_row(&text, 2, change);
    let log_prob = |value: Value| {
        third(&|row| {
            let first_sampled = row["prompt_tokens"].as_u64().expect("a number") as usize;
            row["logprobs"][first_sampled] = value.clone();
        })
    };
    let cases: [(String, &str); 7] = [
        (third(&|row| row["tokens"][3] = 999_999.into()), "token 999999"),
        (third(&|row| drop(row["mask"].as_array_mut().expect("a list").pop())), "`mask` has"),
        (third(&|row| drop(row.as_object_mut().expect("an object").remove("logprobs"))), "`logprobs`"),
        (log_prob(0.5.into()), "is not a log-probability"),
        (log_prob(Value::Null), "not a trajectory"),
        (third(&|row| row["mask"][0] = true.into()), "`prompt_tokens`"),
        (third(&|row| row["tokens"] = "none".into()), "not a trajectory"),
    ];
    for (text, what) in cases {
        fs::write(place.path("bad.jsonl"), text).expect("written");
        let arguments = ["train", "small.toml", "--set", "train.trajectories=bad.jsonl", "--out", "never"];
        place.refused(&arguments, &["bad.jsonl: line 3", what]);
        assert!(!place.path("never").exists());
    }
    fs::write(place.path("bad.jsonl"), "").expect("written");
    place.refused(
        &["train", "small.toml", "--set", "train.trajectories=bad.jsonl"],
        &["bad.jsonl", "no sampled token"],
    );
    place.refused(
        &["train", "small.toml", "--set", "train.trajectories=gone.jsonl"],
        &["train.trajectories", "gone.jsonl"],
    );
}

#[test]
fn stored_experts_are_replayed_only_if_the_model_could_have_chosen_them() {
    let place = Place::new();
    let keep = "rollout.keep_routes=true";
    place.done(&["rollout", "small.toml", "--out", "out", "--set", keep]);
    let text = fs::read_to_string(place.path("out/trajectories/step-000001.jsonl")).expect("rows");
    let replay = |out: &'static str| {
        let mut arguments =
            vec!["train", "small.toml", "--out", out, "--set", "train.trajectories=rows.jsonl"];
        let sets = [
            keep,
            "policy.router_replay=rollout",
            "cold_start.steps=0",
            "eval.every_steps=0",
            "train.steps=1",
        ];
        sets.iter().for_each(|set| arguments.extend(["--set", set]));
        arguments
    };
    fs::write(place.path("rows.jsonl"), &text).expect("written");
    place.done(&replay("runs/replayed"));
    let second =
        |change: &dyn Fn(&mut Value)| changed_row(&text, 1, &|row: &mut Value| change(&mut row["routes"]));
    for rows in [
        second(&|routes| routes[0][0] = 4.into()),
        second(&|routes| drop(routes[3].as_array_mut().expect("a list").pop())),
        second(&|routes| *routes = Value::Array(vec![])),
    ] {
        fs::write(place.path("rows.jsonl"), rows).expect("written");
        place.refused(&replay("never"), &["rows.jsonl: line 2", "`routes`", "rollout.keep_routes = true"]);
        assert!(!place.path("never").exists());
    }
}

/// The folder of what failed before anything was sampled stood in the way of the next start with other
/// settings.
#[test]
fn a_start_that_fails_leaves_no_folder() {
    let place = Place::new();
    for command in ["eval", "rollout"] {
        let short = ["--set", "rollout.prompt_tokens_max=5"];
        let arguments = [&[command, "small.toml", "--out", "out"][..], &short].concat();
        place.refused(&arguments, &["more than rollout.prompt_tokens_max = 5"]);
        assert!(!place.path("out").exists(), "{command}");
    }
    place.done(&["eval", "small.toml", "--out", "out"]);
}

/// Both told the steps of a training that they do not do.
#[test]
fn the_head_says_what_is_sampled() {
    let place = Place::new();
    for (command, sampled) in
        [("eval", "5 held-out problems × 4"), ("rollout", "2 prompts × 3, as in one training step")]
    {
        let text = output(&mut place.rloss(&[command, "small.toml"])).stderr;
        assert!(text.contains(&format!("sampled  {sampled}\n")) && !text.contains("steps    "), "{text}");
        assert!(!text.contains("trainable"), "{text}");
    }
}

#[test]
fn wrong_input_is_one_error() {
    let place = Place::new();
    fs::create_dir(place.path("empty")).expect("a folder");
    for command in ["eval", "rollout"] {
        place.refused(&[command, "gone.toml"], &["gone.toml", "no such file"]);
        place.refused(&[command, "empty"], &["empty", "recipe.toml"]);
        place.refused(&[command, "small.toml", "--set", "model.path=gone"], &["model.path", "gone"]);
        place.refused(&[command, "small.toml", "--out", "small.toml"], &["small.toml", "--out"]);
    }
    place.refused(&["eval", "small.toml", "--set", "eval.pass_at=[9]"], &["eval.pass_at", "pass@9"]);
    place.done(&["rollout", "small.toml", "--out", "out"]);
    place.refused(&["eval", "out"], &["no checkpoint"]);
    place.refused(
        &["rollout", "small.toml", "--set", "train.seed=1", "--out", "out"],
        &["train.seed", "--out"],
    );
    let file = place.path("out/trajectories/step-000001.jsonl");
    let text = fs::read_to_string(&file).expect("rows");
    fs::write(&file, text.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>())
        .expect("written");
    place.refused(&["rollout", "small.toml", "--out", "out"], &["step-000001.jsonl", "missing"]);
    fs::write(&file, "{}\n").expect("written");
    place.refused(&["rollout", "small.toml", "--out", "out"], &["step-000001.jsonl: line 1"]);
}

#[test]
fn an_interrupt_keeps_what_ended_and_the_same_command_goes_on() {
    let place = Place::new();
    let sets = ["--set", "eval.problems_max=512", "--set", "eval.samples=64", "--set", "parallel.threads=1"];
    let mut command = place.rloss(&["eval", "small.toml", "--out", "out"]);
    let mut child =
        command.args(sets).stderr(std::process::Stdio::null()).spawn().expect("the binary starts");
    let partial = place.path("out/trajectories/eval-000000.jsonl.partial");
    while fs::metadata(&partial).map_or(0, |about| about.len()) < 1 << 20 {
        assert!(child.try_wait().expect("a child").is_none(), "ended before it could be stopped");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // SAFETY: the child is ours and not yet waited for, so its id is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    assert_eq!(child.wait().expect("a child").code(), Some(130));
    let kept = rows(&partial);
    assert!(!kept.is_empty() && !place.path("out/eval.json").exists());
    place.done(&[&["eval", "small.toml", "--out", "out"][..], &sets[..]].concat());
    assert_eq!(rows(&place.path("out/trajectories/eval-000000.jsonl")).len(), 512 * 64);
}
