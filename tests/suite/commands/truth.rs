//! A run that tells the truth: failures that are heard, a resumed run that says what it does, starts that
//! leave nothing.

use super::{done, output, phase, resumed, rloss, rows, small, stderr, train};
use crate::skips;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A task program whose reward is `reward`, a Python dictionary.
fn program(folder: &Path, reward: &str) -> PathBuf {
    let path = folder.join("task.py");
    let text = r#"
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "describe":
        reply = {"version": 2, "name": "mine"}
    elif ask["request"] == "problem":
        reply = {"prompt": "2 * 3?", "answer": 6}
    else:
        reply = REWARD
    print(json.dumps({"request_id": ask["request_id"], **reply}), flush=True)
"#;
    std::fs::write(&path, text.replace("REWARD", reward)).unwrap();
    path
}

/// The settings of a run on the program at `path`.
fn on_program(path: &Path) -> Vec<String> {
    let command = format!("task.command=[\"python3\", \"{}\"]", path.display());
    ["task.name=command", &command, "cold_start.steps=0", "train.steps=2"].map(str::to_owned).to_vec()
}

#[test]
fn a_program_that_answers_wrongly_is_heard_and_a_run_that_failed_whole_exits_1() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    let sets = on_program(&program(folder.path(), "{\"rewrd\": 1.0}"));
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let output = output(&mut small(&out, &sets));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in [
        "unknown key `rewrd` in the answer; did you mean `reward`?; the request was {\"request\":\"reward\"",
        "warning: step 1: 8 of 8 trajectories failed for reasons outside the policy: outcome/task_failed = 8",
        "docs/TASKS.md",
        "error: 16 of 16 trajectories failed for reasons outside the policy: the task's program",
    ] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    assert!(!text.contains("step 0: "), "nothing was held out, so nothing was evaluated: {text}");
    assert_eq!(phase(&rows(&out), "rl").filter(|row| row["trajectory/failed_fraction"] == 1).count(), 2);
    // Resumed, it has nothing left to do and tells no failure: it names what does.
    let again = super::output(&mut resumed(&out, &sets));
    assert_eq!(again.status.code(), Some(1), "{}", stderr(&again));
    assert!(stderr(&again).contains("rloss check RECIPE tests the program again"), "{}", stderr(&again));
}

/// All steps were made, each failing after its time limits, and the folder stood in the way of the next
/// start.
#[test]
fn a_run_whose_first_evaluation_failed_whole_ends_there_and_leaves_nothing() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let (out, path) = (folder.path().join("run"), program(folder.path(), "{\"rewrd\": 1.0}"));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"mine\"", "\"mine\", \"validation_problems\": 4")).unwrap();
    let mut sets = on_program(&path);
    sets.push("eval.before_training=true".to_owned());
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let output = output(&mut small(&out, &sets));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error: every trajectory of the first evaluation failed"), "{text}");
    assert!(!text.contains("step 1: "), "{text}");
    assert!(!out.exists(), "{text}");
}

/// Tracebacks ran over the terminal without end, and a run most of whose trajectories failed ended well.
#[test]
fn tracebacks_are_limited_and_a_run_ends_with_the_count_of_failures() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = program(folder.path(), "wrong if ask[\"answer\"] in FAIL else {\"reward\": 0.0}");
    let text = std::fs::read_to_string(&path).unwrap().replace("\"answer\": 6", "\"answer\": ask[\"index\"]");
    let run = |fail: &str| {
        std::fs::write(&path, text.replace("FAIL", fail)).unwrap();
        let mut sets = on_program(&path);
        sets.push("task.command_processes=1".to_owned());
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let output = output(&mut small(&folder.path().join(fail), &sets));
        (output.status.code(), stderr(&output))
    };
    let (code, told) = run("[0, 1, 2]");
    assert_eq!(code, Some(1), "{told}");
    assert!((9..=10).contains(&told.matches("NameError: name 'wrong'").count()), "{told}");
    assert!(told.contains("their standard error is no longer shown"), "{told}");
    assert!(told.contains("error: 12 of 16 trajectories failed for reasons outside the policy"), "{told}");
    let (code, told) = run("[0]");
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("warning: 4 of 16 trajectories failed for reasons outside the policy"), "{told}");
}

#[test]
fn what_the_policy_does_is_no_failure() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    let sets = on_program(&program(folder.path(), "{\"reward\": 0.0}"));
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let text = stderr(&done(&mut small(&out, &sets)));
    assert!(!text.contains("trajectories failed"), "{text}");
    assert!(
        text.contains("no group has two different rewards (between groups they go from 0 to 0)"),
        "{text}"
    );
}

#[test]
fn an_evaluation_that_failed_whole_exits_1() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let mut sets = on_program(&program(folder.path(), "{\"reward\": \"high\"}"));
    sets.push("rollout.response_tokens_max=8".to_owned());
    let mut command = rloss();
    command.current_dir(&folder).args(["rollout", "quickstart", "--out", "out"]);
    for set in &sets {
        command.args(["--set", set]);
    }
    let output = output(&mut command);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("error: 64 of 64 trajectories failed"), "{}", stderr(&output));
    assert!(folder.path().join("out/metrics.jsonl").exists(), "what was sampled is kept");
}

fn rates(run: &Path) -> Vec<f64> {
    phase(&rows(run), "rl").map(|row| row["actor/lr"].as_f64().unwrap()).collect()
}

#[test]
fn a_resumed_run_says_from_where_and_keeps_the_course_of_its_learning_rate() {
    let folder = TempDir::new().unwrap();
    let (out, again) = (folder.path().join("run"), folder.path().join("again"));
    done(&mut small(&out, &[]));
    let before = rates(&out);
    let text = stderr(&done(&mut resumed(&out, &["train.steps=6"])));
    assert!(text.contains(&format!("resuming {} after step 4 of 6", out.display())), "{text}");
    assert!(text.contains("the learning-rate schedule, linear, still ends at step 4"), "{text}");
    let after = rates(&out);
    assert_eq!(after[..4], before);
    // The recipe asks for a tenth of 7e-4 at the end of its course, and the rate stays there.
    assert!((after[3] - 7e-5).abs() < 1e-12 && after[4..] == [after[3]; 2], "{after:?}");
    // The recipe it now has is this run, begun anew.
    done(rloss().arg("train").arg(out.join("recipe.toml")).arg("--out").arg(&again));
    assert_eq!(rates(&again), after);
    // Nothing left to do is said; a course that is moved by hand jumps, and is said to.
    let text = stderr(&done(&mut resumed(&out, &["train.steps=6"])));
    assert!(text.contains("all 6 steps are done; for more steps, add --set train.steps=N"), "{text}");
    let moved = ["train.steps=8", "train.optimizer.schedule_steps=8"];
    let text = stderr(&done(&mut resumed(&out, &moved)));
    assert!(
        text.contains("changes to another schedule: train.optimizer.schedule_steps is now 8, and was 4"),
        "{text}"
    );
    assert!(rates(&out)[6] > after[5]);
}

#[test]
fn bug_a_run_that_stopped_in_its_warm_up_keeps_the_course_of_its_learning_rate() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    done(&mut small(&out, &["checkpoint.keep=9"]));
    let before = rates(&out);
    // What is left of a run that was killed after its warm-up.
    for step in ["step-000002", "step-000004"] {
        std::fs::remove_dir_all(out.join("checkpoints").join(step)).unwrap();
    }
    let text = stderr(&done(&mut resumed(&out, &["checkpoint.keep=9", "train.steps=6"])));
    assert!(text.contains("of the SFT warm-up"), "{text}");
    assert!(text.contains("the learning-rate schedule, linear, still ends at step 4"), "{text}");
    assert_eq!(rates(&out)[..4], before);
}

/// Rewards of an earlier data file were printed as if they were new.
#[test]
fn bug_results_of_a_data_file_that_has_changed_are_not_those_of_the_new_one() {
    let folder = TempDir::new().unwrap();
    let data = folder.path().join("rows.jsonl");
    let write = |answer: u32| {
        std::fs::write(&data, format!("{{\"question\": \"2+2?\", \"answer\": \"#### {answer}\"}}\n"))
            .unwrap();
    };
    let file = format!("task.validation_file={}", data.display());
    let train = format!("task.train_file={}", data.display());
    let out = folder.path().join("eval");
    let eval = || {
        let sets = ["task.name=gsm8k", &file, &train, "rollout.response_tokens_max=8"];
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let more = ["--set", "model.architecture.max_position_embeddings=512", "--out"];
        output(rloss().args(["eval", "quickstart"]).args(sets).args(more).arg(&out))
    };
    write(4);
    let first = eval();
    assert_eq!(first.status.code(), Some(0), "{}", stderr(&first));
    let again = eval();
    assert!(again.status.success() && stderr(&again).contains("nothing to sample: "), "{}", stderr(&again));
    write(13);
    let changed = eval();
    assert_eq!(changed.status.code(), Some(2), "{}", stderr(&changed));
    assert!(
        stderr(&changed).contains("before its data files or its program were changed"),
        "{}",
        stderr(&changed)
    );
}

#[test]
fn bug_files_of_the_user_are_neither_overwritten_nor_removed() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("mine");
    for name in ["model.json", "tensorboard/notes.txt", "base/model.safetensors", "eval.json"] {
        let file = out.join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "mine").unwrap();
        let shown = format!("{}: already exists", out.join(name.split('/').next().unwrap()).display());
        for command in ["train", "eval"] {
            let refused = output(rloss().args([command, "quickstart", "--out"]).arg(&out));
            assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
            assert!(stderr(&refused).contains(&shown), "{}", stderr(&refused));
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn fewer_steps_than_are_done_are_refused_and_a_run_resumes_by_its_folder_alone() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    done(&mut small(&out, &[]));
    let refused = output(&mut resumed(&out, &["train.steps=3"]));
    let text = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("train.steps: 3 is less than the 4 steps that"), "{text}");
    let before = std::fs::read(out.join("metrics.jsonl")).unwrap();
    let text = stderr(&done(rloss().current_dir(&folder).args(["train", "run", "--resume"])));
    assert!(text.contains("all 4 steps are done"), "{text}");
    assert_eq!(std::fs::read(out.join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn a_start_that_fails_leaves_no_folder() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    // A disk that is full at once, and one that is when the frozen reference is written.
    for (kib, sets) in
        [(1, &[][..]), (64, &["policy.kl.place=loss", "policy.kl.coefficient=0.1", "cold_start.steps=0"][..])]
    {
        let command = small(&out, sets);
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", kib * 2), "sh"]);
        let failed = output(shell.arg(command.get_program()).args(command.get_args()));
        assert_eq!(failed.status.code(), Some(1), "{}", stderr(&failed));
        assert!(stderr(&failed).contains("error: writing "), "{}", stderr(&failed));
        assert!(!out.exists(), "{kib}");
    }
    // What the task itself raises comes before the folder.
    let sets = on_program(&program(folder.path(), "{\"reward\": 0.0}"));
    let text = std::fs::read_to_string(folder.path().join("task.py")).unwrap();
    let later = text.replace("\"2 * 3?\"", "\"2 * 3?\" + \"x\" * 500 * (ask[\"index\"] >= 2)");
    std::fs::write(folder.path().join("task.py"), later).unwrap();
    let mut sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    sets.push("rollout.prompts_per_step=4");
    let refused = output(&mut small(&out, &sets));
    let text = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(
        text.contains("problem mine/train/2: the prompt has") && text.contains("so no token can be sampled"),
        "{text}"
    );
    assert!(!out.exists(), "a prompt that is too long is found before the folder is made");
}

#[test]
fn a_recipe_with_nothing_but_steps_runs() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("two.toml"), "[train]\nsteps = 2\n").unwrap();
    let text = stderr(&done(rloss().current_dir(&folder).args([
        "train",
        "two.toml",
        "--set",
        "eval.problems_max=8",
    ])));
    assert!(text.contains("done: "), "{text}");
    assert_eq!(phase(&rows(&folder.path().join("runs/two")), "rl").count(), 2);
    let recipe: toml::Table =
        std::fs::read_to_string(folder.path().join("runs/two/recipe.toml")).unwrap().parse().unwrap();
    assert_eq!(recipe["chat"]["system_message"].as_bool(), Some(false));
    // Where a preamble is asked for that does not fit, the remedy named is the one that helps.
    let refused = output(&mut train(&folder.path().join("no"), &["chat.system_message=true"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("system_message = false"), "{}", stderr(&refused));
    assert!(!folder.path().join("no").exists());
}

/// Tracebacks of reward functions ran on after the last that was said to be shown, a column's other name was
/// called a broken line, the same problems were trained on and held out, and the page showed whole rows.
#[test]
fn a_file_of_rewards_is_told_in_the_words_of_its_user() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    let rows: String = (0..16)
        .map(|gold| {
            format!("{{\"talk\": [{{\"role\": \"user\", \"content\": \"{gold}\"}}], \"gold\": {gold}}}\n")
        })
        .collect();
    std::fs::write(path("rows.jsonl"), rows).unwrap();
    let file = |key: &str, name: &str| format!("task.{key}={}", path(name).display());
    let run = |name: &str, function: &str, more: &[&str]| {
        std::fs::write(
            path("rewards.py"),
            format!("def right(completions, **row):\n    return [{function}]\n"),
        )
        .unwrap();
        let files = [file("train_file", "rows.jsonl"), file("file", "rewards.py")];
        let sets = ["task.name=python", "task.command_processes=1", "cold_start.steps=0", "train.steps=2"];
        let sets: Vec<&str> =
            sets.into_iter().chain(files.iter().map(String::as_str)).chain(more.iter().copied()).collect();
        let output = output(&mut small(&path(name), &sets));
        (output.status.code(), stderr(&output))
    };
    let (code, told) = run("unnamed", "1.0", &[]);
    assert_eq!(code, Some(2), "{told}");
    let remedy = "row 1: `prompt` is missing; and 15 more. The rows have talk, gold; name the columns to read in task.columns";
    assert!(told.contains(remedy), "{told}");
    let columns = "task.columns.prompt=talk";
    let (code, told) = run("failing", "completions[0].strip()", &[columns]);
    assert_eq!(code, Some(1), "{told}");
    assert_eq!(told.matches("Traceback").count(), 10, "{told}");
    assert!(told.contains("(the row's prompt is messages, so a completion is a list of messages)"), "{told}");
    let (code, told) = run("same", "1.0", &[columns, &file("validation_file", "rows.jsonl")]);
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("row 1 has the prompt of"), "{told}");
    let (code, told) = run("good", "float(str(row['gold'][0]) in str(completions[0]))", &[columns]);
    assert_eq!(code, Some(0), "{told}");
    assert!(!told.contains("left: evaluation"), "{told}");
    done(rloss().arg("report").arg(path("good")));
    let page = std::fs::read_to_string(path("good").join("report.html")).unwrap();
    assert!(page.contains("python rewards.py") && page.contains("{\\\"gold\\\":"), "{page}");
}
