//! A run that tells the truth: failures that are heard, a resumed run that says what it does, starts that
//! leave nothing.

use super::ended::bounded;
use super::*;
use crate::skips;

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
    fs::write(&path, text.replace("REWARD", reward)).unwrap();
    path
}

/// The settings of a run on the program at `path`.
fn on_program(path: &Path) -> Vec<String> {
    let command = format!("task.command=[\"python3\", \"{}\"]", path.display());
    ["task.name=command", &command, "cold_start.steps=0", "train.steps=2"].map(str::to_owned).to_vec()
}

#[test]
fn a_program_that_answers_wrongly_is_heard_and_a_run_that_failed_whole_exits_1() {
    let Some(()) = skips::python3() else { return };
    let (folder, [out]) = scratch(["run"]);
    let sets = on_program(&program(folder.path(), "{\"rewrd\": 1.0}"));
    let words = [
        "unknown key `rewrd` in the answer; did you mean `reward`?; the request was {\"request\":\"reward\"",
        "warning: step 1: 8 of 8 trajectories failed for reasons outside the policy: outcome/task_failed = 8",
        "docs/TASKS.md",
        "error: 16 of 16 trajectories failed for reasons outside the policy: the task's program",
    ];
    let text = ended(&mut small(&out, &texts(&sets)), 1, &words);
    assert!(!text.contains("step 0: "), "nothing was held out, so nothing was evaluated: {text}");
    assert_eq!(phase(&rows(&out), "rl").filter(|row| row["trajectory/failed_fraction"] == 1).count(), 2);
    // Resumed, it has nothing left to do and tells no failure: it names what does.
    ended(&mut resumed(&out, &texts(&sets)), 1, &["rloss check RECIPE tests the program again"]);
}

/// All steps were made, each failing after its time limits, and the folder stood in the way of the next
/// start.
#[test]
fn a_run_whose_first_evaluation_failed_whole_ends_there_and_leaves_nothing() {
    let Some(()) = skips::python3() else { return };
    let (folder, [out]) = scratch(["run"]);
    let path = program(folder.path(), "{\"rewrd\": 1.0}");
    replace(&path, "\"mine\"", "\"mine\", \"validation_problems\": 4");
    let sets = on_program(&path);
    let mut command = small(&out, &[&texts(&sets)[..], &["eval.before_training=true"]].concat());
    let text = ended(&mut command, 1, &["error: every trajectory of the first evaluation failed"]);
    assert!(!text.contains("step 1: "), "{text}");
    assert!(!out.exists(), "{text}");
}

/// Tracebacks ran over the terminal without end, and a run most of whose trajectories failed ended well.
#[test]
fn tracebacks_are_limited_and_a_run_ends_with_the_count_of_failures() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let path = program(folder.path(), "wrong if ask[\"answer\"] in FAIL else {\"reward\": 0.0}");
    let text = text_of(&path).replace("\"answer\": 6", "\"answer\": ask[\"index\"]");
    let run = |fail: &str, code: i32, words: &[&str]| {
        fs::write(&path, text.replace("FAIL", fail)).unwrap();
        let sets = [on_program(&path), vec!["task.command_processes=1".to_owned()]].concat();
        ended(&mut small(&folder.path().join(fail), &texts(&sets)), code, words)
    };
    let count = "error: 12 of 16 trajectories failed for reasons outside the policy";
    let told = run("[0, 1, 2]", 1, &["their standard error is no longer shown", count]);
    assert!((9..=10).contains(&told.matches("NameError: name 'wrong'").count()), "{told}");
    run("[0]", 0, &["warning: 4 of 16 trajectories failed for reasons outside the policy"]);
}

#[test]
fn what_the_policy_does_is_no_failure() {
    let Some(()) = skips::python3() else { return };
    let (folder, [out]) = scratch(["run"]);
    let sets = on_program(&program(folder.path(), "{\"reward\": 0.0}"));
    let told = "no group has two different rewards (between groups they go from 0 to 0)";
    let text = ended(&mut small(&out, &texts(&sets)), 0, &[told]);
    assert!(!text.contains("trajectories failed"), "{text}");
}

#[test]
fn an_evaluation_that_failed_whole_exits_1() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let sets = on_program(&program(folder.path(), "{\"reward\": \"high\"}"));
    let mut command = rloss();
    command.current_dir(&folder).args(["rollout", "quickstart", "--out", "out"]).sets(&sets);
    ended(command.sets(["rollout.response_tokens_max=8"]), 1, &["error: 64 of 64 trajectories failed"]);
    assert!(folder.path().join("out/metrics.jsonl").exists(), "what was sampled is kept");
}

fn rates(run: &Path) -> Vec<f64> {
    phase(&rows(run), "rl").map(|row| number(row, "actor/lr")).collect()
}

#[test]
fn a_resumed_run_says_from_where_and_keeps_the_course_of_its_learning_rate() {
    let (_folder, [out, again]) = scratch(["run", "again"]);
    done(&mut small(&out, &[]));
    let before = rates(&out);
    let from = format!("resuming {} after step 4 of 6", out.display());
    let schedule = "the learning-rate schedule, linear, still ends at step 4";
    ended(&mut resumed(&out, &["train.steps=6"]), 0, &[&from, schedule]);
    let after = rates(&out);
    assert_eq!(after[..4], before);
    // The recipe asks for a tenth of 7e-4 at the end of its course, and the rate stays there.
    assert!((after[3] - 7e-5).abs() < 1e-12 && after[4..] == [after[3]; 2], "{after:?}");
    // The recipe it now has is this run, begun anew.
    done(rloss().arg("train").arg(out.join("recipe.toml")).arg("--out").arg(&again));
    assert_eq!(rates(&again), after);
    // Nothing left to do is said; a course that is moved by hand jumps, and is said to.
    let all_done = "all 6 steps are done; for more steps, add --set train.steps=N";
    ended(&mut resumed(&out, &["train.steps=6"]), 0, &[all_done]);
    let moved = ["train.steps=8", "train.optimizer.schedule_steps=8"];
    let told = "changes to another schedule: train.optimizer.schedule_steps is now 8, and was 4";
    ended(&mut resumed(&out, &moved), 0, &[told]);
    assert!(rates(&out)[6] > after[5]);
}

#[test]
fn bug_a_run_that_stopped_in_its_warm_up_keeps_the_course_of_its_learning_rate() {
    let (_folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &["checkpoint.keep=9"]));
    let before = rates(&out);
    // What is left of a run that was killed after its warm-up.
    for step in ["step-000002", "step-000004"] {
        fs::remove_dir_all(out.join("checkpoints").join(step)).unwrap();
    }
    let words = ["of the SFT warm-up", "the learning-rate schedule, linear, still ends at step 4"];
    ended(&mut resumed(&out, &["checkpoint.keep=9", "train.steps=6"]), 0, &words);
    assert_eq!(rates(&out)[..4], before);
}

/// Rewards of an earlier data file were printed as if they were new.
#[test]
fn bug_results_of_a_data_file_that_has_changed_are_not_those_of_the_new_one() {
    let (_folder, [data, out]) = scratch(["rows.jsonl", "eval"]);
    let write = |answer: u32| {
        fs::write(&data, format!("{{\"question\": \"2+2?\", \"answer\": \"#### {answer}\"}}\n")).unwrap();
    };
    let file = format!("task.validation_file={}", data.display());
    let train = format!("task.train_file={}", data.display());
    let eval = |code: i32, words: &[&str]| {
        let sets = ["task.name=gsm8k", &file, &train, "rollout.response_tokens_max=8"];
        let mut command = rloss();
        command.args(["eval", "quickstart", "--out"]).arg(&out).sets(sets);
        ended(command.sets(["model.architecture.max_position_embeddings=512"]), code, words)
    };
    write(4);
    eval(0, &[]);
    eval(0, &["nothing to sample: "]);
    write(13);
    eval(2, &["before its data files or its program were changed"]);
}

#[test]
fn bug_files_of_the_user_are_neither_overwritten_nor_removed() {
    let (_folder, [out]) = scratch(["mine"]);
    for name in ["model.json", "tensorboard/notes.txt", "base/model.safetensors", "eval.json"] {
        let file = out.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "mine").unwrap();
        let shown = format!("{}: already exists", out.join(name.split('/').next().unwrap()).display());
        for command in ["train", "eval"] {
            refused(rloss().args([command, "quickstart", "--out"]).arg(&out), &[&shown]);
        }
        assert_eq!(text_of(&file), "mine");
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn fewer_steps_than_are_done_are_refused_and_a_run_resumes_by_its_folder_alone() {
    let (folder, [out]) = scratch(["run"]);
    done(&mut small(&out, &[]));
    refused(&mut resumed(&out, &["train.steps=3"]), &["train.steps: 3 is less than the 4 steps that"]);
    let before = fs::read(out.join("metrics.jsonl")).unwrap();
    ended(rloss().current_dir(&folder).args(["train", "run", "--resume"]), 0, &["all 4 steps are done"]);
    assert_eq!(fs::read(out.join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn a_start_that_fails_leaves_no_folder() {
    let Some(()) = skips::python3() else { return };
    let (folder, [out]) = scratch(["run"]);
    // A disk that is full at once, and one that is when the frozen reference is written.
    for (kib, sets) in
        [(1, &[][..]), (64, &["policy.kl.place=loss", "policy.kl.coefficient=0.1", "cold_start.steps=0"][..])]
    {
        assert_eq!(bounded(&small(&out, sets), kib), Some(1), "{kib}");
        assert!(!out.exists(), "{kib}");
    }
    // What the task itself raises comes before the folder.
    let path = program(folder.path(), "{\"reward\": 0.0}");
    replace(&path, "\"2 * 3?\"", "\"2 * 3?\" + \"x\" * 500 * (ask[\"index\"] >= 2)");
    let sets = [on_program(&path), vec!["rollout.prompts_per_step=4".to_owned()]].concat();
    let words = ["problem mine/train/2: the prompt has", "so no token can be sampled"];
    refused(&mut small(&out, &texts(&sets)), &words);
    assert!(!out.exists(), "a prompt that is too long is found before the folder is made");
}

#[test]
fn a_recipe_with_nothing_but_steps_runs() {
    let (folder, [run, no]) = scratch(["runs/two", "no"]);
    fs::write(folder.path().join("two.toml"), "[train]\nsteps = 2\n").unwrap();
    let arguments = ["train", "two.toml", "--set", "eval.problems_max=8"];
    ended(rloss().current_dir(&folder).args(arguments), 0, &["done: "]);
    assert_eq!(phase(&rows(&run), "rl").count(), 2);
    let recipe: toml::Table = text_of(run.join("recipe.toml")).parse().unwrap();
    assert_eq!(recipe["chat"]["system_message"].as_bool(), Some(false));
    // Where a preamble is asked for that does not fit, the remedy named is the one that helps.
    refused(&mut train(&no, &["chat.system_message=true"]), &["system_message = false"]);
    assert!(!no.exists());
}

/// Tracebacks of reward functions ran on after the last that was said to be shown, a column's other name was
/// called a broken line, the same problems were trained on and held out, and the page showed whole rows.
#[test]
fn a_file_of_rewards_is_told_in_the_words_of_its_user() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    let row = |n: u64| json!({"talk": [{"role": "user", "content": n.to_string()}], "gold": n});
    fs::write(path("rows.jsonl"), (0..16).map(|n| format!("{}\n", row(n))).collect::<String>()).unwrap();
    let file = |key: &str, name: &str| format!("task.{key}={}", path(name).display());
    let run = |name: &str, function: &str, more: &[&str], code: i32, words: &[&str]| {
        let text = format!("def right(completions, **row):\n    return [{function}]\n");
        fs::write(path("rewards.py"), text).unwrap();
        let files = [file("train_file", "rows.jsonl"), file("file", "rewards.py")];
        let sets = ["task.name=python", "task.command_processes=1", "cold_start.steps=0", "train.steps=2"];
        ended(&mut small(&path(name), &[&sets[..], &texts(&files), more].concat()), code, words)
    };
    let remedy = "row 1: `prompt` is missing; and 15 more. The rows have talk, gold; name the columns to read in task.columns";
    run("unnamed", "1.0", &[], 2, &[remedy]);
    let columns = "task.columns.prompt=talk";
    let kind = "(the row's prompt is messages, so a completion is a list of messages)";
    let told = run("failing", "completions[0].strip()", &[columns], 1, &[kind]);
    assert_eq!(told.matches("Traceback").count(), 10, "{told}");
    let same = file("validation_file", "rows.jsonl");
    run("same", "1.0", &[columns, &same], 2, &["row 1 has the prompt of"]);
    let told = run("good", "float(str(row['gold'][0]) in str(completions[0]))", &[columns], 0, &[]);
    assert!(!told.contains("left: evaluation"), "{told}");
    done(rloss().arg("report").arg(path("good")));
    assert_has(&text_of(path("good").join("report.html")), &["python rewards.py", "{\\\"gold\\\":"]);
}
