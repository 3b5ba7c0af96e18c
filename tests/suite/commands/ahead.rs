//! Sampling ahead of training and partial trajectories: the schedule, the same metrics on any number of
//! threads and after kills, and what is refused.

use super::ended::{killed_and_resumed, quiet, signal};
use super::*;
use crate::skips;

const ROLLOUT: &str = "policy.old_logprob=rollout";

/// A task without the Python tool. The reward depends on the length of the answer, so that rewards differ
/// within a group.
const LENGTHS: &str = r#"
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "describe":
        answer = {"version": 2, "name": "lengths", "validation_problems": 3}
    elif ask["request"] == "problem":
        answer = {"prompt": f"{ask['split']} {ask['index']}", "answer": ask["index"]}
    else:
        text = "".join(message["content"] or "" for message in ask["messages"])
        answer = {"reward": len(text) * 7 % 5 / 4, "success": ask["outcome"] == "finished"}
    print(json.dumps({"request_id": ask["request_id"], **answer}), flush=True)
"#;

/// The settings of a run of [`LENGTHS`] with partial trajectories. Answers have up to 72 tokens.
fn partial(folder: &Path, more: &[&str]) -> Vec<String> {
    let program = folder.join("lengths.py");
    fs::write(&program, LENGTHS).unwrap();
    let command = format!("task.command=[\"python3\",\"{}\"]", program.display());
    let sets = ["task.name=command", &command, "task.command_processes=1", "cold_start.steps=0", ROLLOUT];
    let sizes = ["train.steps=6", "rollout.step_tokens_max=20", "checkpoint.every_steps=1"];
    sets.iter().chain(&sizes).chain(more).map(|set| (*set).to_owned()).collect()
}

/// Runs `sets` on 1, 2 and 3 threads, expects the same metrics, and returns the folder of one run.
fn same_on_all_threads(folder: &Path, sets: &[&str]) -> PathBuf {
    let run = |threads: usize| {
        let out = folder.join(format!("threads-{threads}"));
        let threads = format!("parallel.threads={threads}");
        done(&mut small(&out, &[sets, &[&threads]].concat()));
        out
    };
    let one = run(1);
    for threads in [2, 3] {
        assert_same_results(&run(threads), &one);
    }
    one
}

fn rl_rows(run: &Path) -> Vec<Value> {
    phase(&rows(run), "rl").cloned().collect()
}

/// The smallest and the largest value of a metric.
fn range(rows: &[Value], metric: &str) -> (f64, f64) {
    let values = rows.iter().map(|row| row[metric].as_f64().unwrap_or_else(|| panic!("{metric} in {row}")));
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// The mismatch of the weights that sampled is 0 in every step.
fn assert_engine_agrees(rows: &[Value]) {
    assert_eq!(range(rows, "engine/bit_equal_fraction"), (1.0, 1.0));
    assert_eq!(range(rows, "engine/logprob_abs_diff_max"), (0.0, 0.0));
}

/// The versions of the weights that sampled the stored trajectories of a step.
fn versions(run: &Path, step: u64) -> Vec<u64> {
    let rows = json_lines(run.join(format!("trajectories/step-{step:06}.jsonl")));
    rows.iter().map(|row| row["policy_version"].as_u64().unwrap()).collect()
}

#[test]
fn a_step_trains_on_what_the_weights_of_the_lag_before_sampled_on_any_number_of_threads() {
    for lag in [1, 2] {
        let folder = TempDir::new().unwrap();
        let key = format!("rollout.lag_steps={lag}");
        let run = same_on_all_threads(folder.path(), &[ROLLOUT, &key]);
        let rows = rl_rows(&run);
        for (step, row) in (1..).zip(&rows) {
            let version = u64::saturating_sub(step, 1 + lag);
            let stored = versions(&run, step);
            assert!(!stored.is_empty() && stored.iter().all(|&found| found == version), "{step}: {stored:?}");
            let staleness = (step - 1 - version) as f64;
            for end in ["mean", "max", "min"] {
                assert_eq!(row[format!("staleness/steps/{end}")].as_f64(), Some(staleness), "step {step}");
            }
        }
        assert_engine_agrees(&rows);
        // The weights move, so staleness alone makes a mismatch.
        assert_eq!(rows[0]["mismatch/bit_equal_fraction"].as_f64(), Some(1.0));
        assert!(range(&rows, "mismatch/bit_equal_fraction").0 < 1.0);
        assert_ne!(results(&run), results(baseline()));
        // The first step is that of a run without a lag.
        let first = |run: &Path| rl_rows(run)[0]["critic/rewards/mean"].clone();
        assert_eq!(first(&run), first(baseline()));
    }
}

#[test]
fn without_a_lag_no_file_and_no_metric_is_added() {
    let files = baseline().join("checkpoints/step-000004");
    assert!(!files.join("sampled_ahead.json").exists());
    let rows = rl_rows(baseline());
    assert!(
        rows.iter()
            .all(|row| row["staleness/steps/mean"].is_null() && row["engine/bit_equal_fraction"].is_null())
    );
}

#[test]
fn a_killed_run_that_samples_ahead_goes_on_to_the_same_metrics() {
    let folder = TempDir::new().unwrap();
    let sets = [ROLLOUT, "rollout.lag_steps=2", "rollout.resample_rounds_max=1"];
    let straight = folder.path().join("straight");
    done(&mut small(&straight, &sets));
    let out = folder.path().join("killed");
    // Rows: 5 of the cold start, an evaluation, then the steps, with an evaluation after the second.
    for (rows, delay) in [(9, 1), (10, 8)] {
        killed_and_resumed(&out, &sets, (rows, Duration::from_millis(delay)));
        assert_same_results(&out, &straight);
    }
}

/// The checkpoint of the step that a signal ends has the samples of the next one.
#[test]
fn a_stopped_run_that_samples_ahead_goes_on_to_the_same_metrics() {
    let folder = TempDir::new().unwrap();
    let sets = [ROLLOUT, "rollout.lag_steps=1", "checkpoint.every_steps=0"];
    let straight = folder.path().join("straight");
    done(&mut small(&straight, &sets));
    let out = folder.path().join("stopped");
    let file = out.join("metrics.jsonl");
    // Rows: 5 of the cold start, an evaluation, then the steps.
    let stopped = || {
        let _ = fs::remove_dir_all(&out);
        let mut child = quiet(&mut small(&out, &sets)).spawn().unwrap();
        wait_until(&mut child, || file.exists() && line_count(&file) >= 7);
        signal(child.id() as i32, libc::SIGTERM);
        let code = child.wait().unwrap().code();
        assert!(matches!(code, Some(0 | 130)), "{code:?}");
        code == Some(130) && checkpoints(&out).last().is_some_and(|last| last.as_str() < "step-000004")
    };
    // On a busy machine this process may look too late.
    assert!((0..100).any(|_| stopped()), "never stopped before the end");
    let last = checkpoints(&out).pop().unwrap();
    let ahead = json_of(out.join("checkpoints").join(&last).join("sampled_ahead.json"));
    let step: u64 = last.trim_start_matches("step-").parse().unwrap();
    assert_eq!(ahead["steps"][0][0], step + 1);
    done(&mut resumed(&out, &sets));
    assert_same_results(&out, &straight);
}

#[test]
fn partial_trajectories_are_the_same_on_any_number_of_threads_and_after_a_kill() {
    let Some(()) = skips::python3() else { return };
    for more in [&[][..], &["rollout.lag_steps=1"]] {
        let folder = TempDir::new().unwrap();
        let sets = partial(folder.path(), more);
        let run = same_on_all_threads(folder.path(), &texts(&sets));
        let rows = rl_rows(&run);
        assert_engine_agrees(&rows);
        assert!(
            range(&rows, "partial/trajectories_paused").1 > 0.0,
            "some trajectory goes on in a later step"
        );
        let (_, stale) = range(&rows, "staleness/steps/max");
        assert!(stale > more.len() as f64, "tokens of an earlier step are trained on: {stale}");
        let text = text_of(run.join("trajectories/step-000006.jsonl"));
        let earlier = (1..=6).map(|step| run.join(format!("trajectories/step-{step:06}.jsonl")));
        let all: String = earlier.map(|file| text_of(file)).collect();
        assert!(all.contains("\"policy_versions\":[{\"start\":"), "{text}");
        let killed = folder.path().join("killed");
        killed_and_resumed(&killed, &texts(&sets), (5, Duration::from_millis(3)));
        assert_same_results(&killed, &run);
    }
}

/// Samples carry the tokens that they were drawn from through the queue, through pauses and checkpoints.
/// Its tokens would have gone on under another problem, whose answer graded them.
#[test]
fn bug_a_paused_trajectory_does_not_go_on_under_another_prompt() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let sets = partial(folder.path(), &["checkpoint.keep=9"]);
    let run = folder.path().join("run");
    done(&mut small(&run, &texts(&sets)));
    let is_paused = |row: &Value| row["partial/trajectories_paused"].as_f64().unwrap() > 0.0;
    let paused = rl_rows(&run).iter().position(is_paused).unwrap() + 1;
    for step in paused + 1..=6 {
        fs::remove_dir_all(run.join(format!("checkpoints/step-{step:06}"))).unwrap();
    }
    let program = LENGTHS.replace("\"prompt\": f\"", "\"prompt\": f\"Now ");
    fs::write(folder.path().join("lengths.py"), program).unwrap();
    refused(resumed(&run, &texts(&sets)).arg("--accept-changes"), &["with another prompt"]);
}

#[test]
fn truncated_samples_keep_every_ratio_finite_with_a_lag_four_minibatches_and_pauses() {
    let Some(()) = skips::python3() else { return };
    let truncated =
        ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05", "rollout.temperature=1.3"];
    let updates = ["train.minibatches=4", "train.optimizer.lr=1e-3", "rollout.lag_steps=2"];
    for pauses in [false, true] {
        let folder = TempDir::new().unwrap();
        let sets = match pauses {
            true => partial(folder.path(), &[&truncated[..], &updates].concat()),
            false => {
                [&[ROLLOUT][..], &truncated, &updates].concat().iter().map(|set| (*set).to_owned()).collect()
            }
        };
        let run = same_on_all_threads(folder.path(), &texts(&sets));
        let rows = rl_rows(&run);
        assert_engine_agrees(&rows);
        assert!(range(&rows, "kept_tokens/min").0 >= 1.0 && range(&rows, "kept_tokens/max").1 <= 20.0);
        for row in &rows {
            for (key, value) in row.as_object().unwrap() {
                assert!(!value.is_null() && value.as_f64().is_none_or(f64::is_finite), "{key} in {row}");
            }
        }
        assert!(range(&rows, "actor/ppo_kl").1 > 0.0, "the updates move the policy");
        if pauses {
            let killed = folder.path().join("killed");
            killed_and_resumed(&killed, &texts(&sets), (5, Duration::from_millis(3)));
            assert_same_results(&killed, &run);
        }
    }
}

/// A task that notes in a file when gradings begin and end, and fails from a problem on. The gradings of step
/// `waits_in`, counted from 0, wait until one of a later step has begun.
const SLOW: &str = r#"
import json, sys, time
notes, fails_from, waits_in = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def note(event, index):
    with open(notes, "a") as file:
        file.write(f"{event} {index}\n")
def later_began(step):
    return any(words[0] == "begin" and int(words[1]) // 2 > step for words in map(str.split, open(notes)))
for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "describe":
        answer = {"version": 2, "name": "slow", "validation_problems": 2}
    elif ask["request"] == "problem":
        answer = {"prompt": f"{ask['split']} {ask['index']}", "answer": ask["index"]}
    else:
        note("begin", ask["answer"])
        until = time.monotonic() + 120
        while ask["answer"] // 2 == waits_in and not later_began(waits_in) and time.monotonic() < until:
            time.sleep(0.02)
        note("end", ask["answer"])
        text = "".join(message["content"] or "" for message in ask["messages"])
        answer = {"reward": len(text) * 7 % 5 / 4, "success": True}
        if ask["answer"] >= fails_from:
            answer = {"error": "the grader is gone"}
    print(json.dumps({"request_id": ask["request_id"], **answer}), flush=True)
"#;

/// The settings of a run of [`SLOW`], and the file of its notes.
fn slow(folder: &Path, fails_from: u64, waits_in: i64, more: &[&str]) -> (Vec<String>, PathBuf) {
    let (program, notes) = (folder.join("slow.py"), folder.join("notes"));
    fs::write(&program, SLOW).unwrap();
    let (fails_from, waits_in) = (fails_from.to_string(), waits_in.to_string());
    let words = ["python3", program.to_str().unwrap(), notes.to_str().unwrap(), &fails_from, &waits_in];
    let command = format!("task.command={words:?}");
    let sets = ["task.name=command", &command, "task.command_processes=16", "cold_start.steps=0", ROLLOUT];
    let sizes = ["train.steps=6", "eval.every_steps=0", "eval.before_training=false"];
    (sets.iter().chain(&sizes).chain(more).map(|set| (*set).to_owned()).collect(), notes)
}

/// Whether a grading began before one of an earlier step had ended. A step has two problems.
fn samplings_overlapped(notes: &Path) -> bool {
    let text = text_of(notes);
    let mut newest = 0;
    text.lines().any(|line| {
        let (event, problem) = line.split_once(' ').unwrap();
        let step = problem.parse::<u64>().unwrap() / 2;
        newest = newest.max(step);
        event == "end" && step < newest
    })
}

/// A run that saves after each step has one sampling in flight.
#[test]
fn two_samplings_in_flight_change_no_bit() {
    let Some(()) = skips::python3() else { return };
    for lag in ["rollout.lag_steps=1", "rollout.lag_steps=2"] {
        let folder = TempDir::new().unwrap();
        let run = |name: &str, waits_in: i64, more: &[&str]| {
            let (sets, notes) = slow(folder.path(), u64::MAX, waits_in, &[&[lag][..], more].concat());
            let _ = fs::remove_file(&notes);
            let out = folder.path().join(name);
            done(&mut small(&out, &texts(&sets)));
            (out, samplings_overlapped(&notes))
        };
        let (joined, overlapped) = run("joined", -1, &["checkpoint.every_steps=1"]);
        assert!(!overlapped);
        assert_engine_agrees(&rl_rows(&joined));
        let state = |run: &Path| fs::read(run.join("checkpoints/step-000006/trainer.safetensors")).unwrap();
        for threads in 1..=3 {
            let threads = format!("parallel.threads={threads}");
            let (two, overlapped) = run(&threads, 2, &["checkpoint.every_steps=0", &threads]);
            assert_same_results(&two, &joined);
            assert!(state(&two) == state(&joined), "{lag} {threads}");
            assert!(overlapped, "{lag} {threads}: no two samplings were in flight");
        }
    }
}

/// The checkpoint waits for both.
#[test]
fn a_run_that_saved_with_two_samplings_in_flight_goes_on_to_the_same_metrics() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let more = ["rollout.lag_steps=2", "checkpoint.every_steps=3"];
    let (sets, _) = slow(folder.path(), u64::MAX, 2, &more);
    let (straight, killed) = (folder.path().join("straight"), folder.path().join("killed"));
    done(&mut small(&straight, &texts(&sets)));
    let file = straight.join("checkpoints/step-000003/sampled_ahead.json");
    let ahead = json_of(&file);
    assert_eq!((&ahead["steps"][0][0], &ahead["steps"][1][0]), (&Value::from(4), &Value::from(5)));
    killed_and_resumed(&killed, &texts(&sets), (4, Duration::from_millis(20)));
    assert_same_results(&killed, &straight);
}

#[test]
fn a_task_that_fails_while_two_samplings_are_in_flight_ends_the_run_with_one_error() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    // The problems of the steps after the second.
    let (sets, notes) = slow(folder.path(), 4, 2, &["rollout.lag_steps=1", "checkpoint.every_steps=0"]);
    let text = ended(&mut small(&folder.path().join("run"), &texts(&sets)), 1, &[]);
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error:")).collect();
    assert!(samplings_overlapped(&notes));
    let expected = "error: for 3 steps no group has had enough episodes with a reward";
    assert!(errors.len() == 1 && errors[0].starts_with(expected), "{text}");
}

#[test]
fn a_run_that_samples_ahead_is_made_longer() {
    let (_folder, [out]) = scratch(["run"]);
    let sets = [ROLLOUT, "rollout.lag_steps=1", "train.optimizer.schedule=constant"];
    done(&mut small(&out, &[&sets[..], &["train.steps=2"]].concat()));
    // No step is sampled beyond the last one.
    let file = out.join("checkpoints/step-000002/sampled_ahead.json");
    let ahead = json_of(&file);
    assert_eq!(ahead["steps"], Value::Array(vec![]));
    done(&mut resumed(&out, &sets));
    // So the first further step is sampled by the weights before it.
    assert_eq!((versions(&out, 3)[0], versions(&out, 4)[0]), (2, 2));
    assert_eq!(checkpoints(&out).last().unwrap(), "step-000004");
}

#[test]
fn a_checkpoint_without_its_samples_and_another_lag_are_refused() {
    let (_folder, [out]) = scratch(["run"]);
    let sets = [ROLLOUT, "rollout.lag_steps=1"];
    done(&mut small(&out, &[&sets[..], &["train.steps=2"]].concat()));
    let refused = |sets: &[&str]| refused(&mut resumed(&out, sets), &[]);
    let text = refused(&[ROLLOUT, "rollout.lag_steps=2"]);
    assert!(text.contains("started with other values of rollout.lag_steps"), "{text}");
    let checkpoint = out.join("checkpoints/step-000002");
    let file = checkpoint.join("sampled_ahead.json");
    fs::write(&file, "{}").unwrap();
    let text = refused(&sets);
    assert!(text.contains("sampled_ahead.json"), "{text}");
    fs::remove_file(&file).unwrap();
    let text = refused(&sets);
    assert!(text.contains("sampled_ahead.json"), "{text}");
}

#[test]
fn partial_trajectories_with_the_python_tool_are_refused() {
    let folder = TempDir::new().unwrap();
    let words = ["rollout.step_tokens_max: the task's Python tool keeps state"];
    refused(&mut small(&folder.path().join("run"), &[ROLLOUT, "rollout.step_tokens_max=20"]), &words);
}
