//! The task `python`: reward files as TRL's and verl's documentation has them, and their failures.

use super::*;
use rloss::tasks::RewardFailure;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

struct Files(tempfile::TempDir);

impl Files {
    fn new(rewards: &str, rows: &[Value]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rewards.py"), rewards).unwrap();
        let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(folder.path().join("rows.jsonl"), rows).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn settings(&self, rewards: &[(&str, f64)]) -> TaskSettings {
        let mut settings = TaskSettings {
            name: TaskName::from_name("python").unwrap(),
            train_file: Some(self.path("rows.jsonl")),
            file: Some(self.path("rewards.py")),
            rewards: rewards.iter().map(|(name, weight)| ((*name).to_owned(), *weight)).collect(),
            command_processes: Some(2),
            ..TaskSettings::default()
        };
        settings.fill_defaults();
        settings
    }

    fn task(&self, rewards: &[(&str, f64)]) -> Box<dyn Task> {
        build(&self.settings(rewards), &TaskContext::default()).unwrap()
    }

    fn refused(&self, rewards: &[(&str, f64)]) -> String {
        build(&self.settings(rewards), &TaskContext::default()).err().unwrap().to_string()
    }
}

fn grade(task: &dyn Task, answer: &str) -> anyhow::Result<(f32, bool, BTreeMap<String, f32>)> {
    let messages = [Message::assistant("final", answer)];
    let transcript = Transcript {
        messages: &messages,
        outcome: Outcome::Finished,
        calls_answered: 0,
        completion_ids: &[5, 6, 7],
        step: 3,
    };
    task.reward(&task.training_problem(0, 0), &transcript).map(|r| (r.value, r.success, r.named))
}

/// F4: a file with `def reward(completions, **kwargs)` was refused as a task program.
#[test]
fn bug_f4_rewards_in_the_form_of_trl_run_unmodified() {
    // Functions as the pages "GRPO Trainer" and "Reward functions" of TRL have them.
    let rewards = r#"
import re, asyncio

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

def format_reward(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

def correct(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion[0]["content"]) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    print("a print must not reach the protocol")
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def math_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]

async def slow(prompts, completions, completion_ids, trainer_state, **kwargs):
    await asyncio.sleep(0.01)
    assert isinstance(prompts[0], list) and kwargs["ground_truth"] == ["4"] and "prompt" not in kwargs
    return [float(sum(completion_ids[0]) + trainer_state.global_step)]
"#;
    let row = |task: &str| {
        let prompt = [json!({"role": "system", "content": "s"}), json!({"role": "user", "content": "2+2?"})];
        json!({"prompt": prompt, "ground_truth": "4", "task": task})
    };
    let files = Files::new(rewards, &[row("math")]);
    let task = files.task(&[("correct", 1.0), ("format_reward", 0.2), ("slow", 0.5), ("math_only", 1.0)]);
    assert_eq!(task.training_problem(0, 0).messages[1], Message::user("2+2?"));
    let (value, success, named) = grade(task.as_ref(), r"so \boxed{4}").unwrap();
    assert_eq!(named["slow"], 21.0);
    assert_eq!((value, success), (1.0 + 0.5 * 21.0 + 1.0, true));
    let files = Files::new(rewards, &[row("code")]);
    let task = files.task(&[("correct", 1.0), ("math_only", 1.0)]);
    let (value, _, named) = grade(task.as_ref(), r"\boxed{5}").unwrap();
    assert_eq!((value, named.get("math_only"), named["correct"]), (0.0, None, 0.0), "None leaves it out");
    // One of two functions of the largest weight made a wrong answer a success.
    let files = Files::new(rewards, &[row("math")]);
    let task = files.task(&[("correct", 1.0), ("math_only", 1.0), ("slow", 0.5)]);
    assert!(!grade(task.as_ref(), r"\boxed{5}").unwrap().1 && grade(task.as_ref(), r"\boxed{4}").unwrap().1);
    // Named functions decide instead.
    let mut settings = files.settings(&[("correct", 1.0), ("math_only", 1.0), ("slow", 0.5)]);
    settings.success = vec!["math_only".to_owned()];
    let task = build(&settings, &TaskContext::default()).unwrap();
    assert!(grade(task.as_ref(), r"\boxed{5}").unwrap().1);
    settings.success = vec!["other".to_owned()];
    let error = build(&settings, &TaskContext::default()).err().unwrap().to_string();
    assert_eq!(
        error,
        "task.success names `other`, which is no reward; the rewards are correct, math_only, slow"
    );
    // A row with a text as prompt has texts as completions.
    let files = Files::new(rewards, &[json!({"prompt": "2+2?"})]);
    let (value, ..) = grade(files.task(&[("reward_len", 1.0)]).as_ref(), "four").unwrap();
    assert_eq!(value, -16.0);
}

/// F2: rows in verl's form were refused, "`question` is missing".
#[test]
fn bug_f2_rows_and_rewards_in_the_form_of_verl_run_unmodified() {
    let rewards = r######"
import re

def extract(text):
    found = re.findall(r"#### (\-?[0-9\.\,]+)", text)
    return found[-1] if found else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 7
    answer = extract(solution_str)
    return {"score": 1.0 if answer == ground_truth else 0.1, "acc": answer == ground_truth, "pred": answer}
"######;
    let row = json!({
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2? Let's think step by step"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 7},
    });
    let files = Files::new(rewards, std::slice::from_ref(&row));
    let task = files.task(&[]);
    assert_eq!(grade(task.as_ref(), "#### 4").unwrap(), (1.0, true, BTreeMap::new()));
    assert_eq!(grade(task.as_ref(), "#### 5").unwrap(), (0.1, false, BTreeMap::new()));
    // The same rows are read by the built-in tasks.
    for (name, answer) in [("gsm8k", "#### 4"), ("retool", r"\boxed{4}")] {
        let mut settings = TaskSettings {
            name: TaskName::from_name(name).unwrap(),
            train_file: Some(files.path("rows.jsonl")),
            ..TaskSettings::default()
        };
        settings.fill_defaults();
        let context = TaskContext { reads_held_out: false, ..TaskContext::default() };
        let task = build(&settings, &context).unwrap();
        assert_eq!(task.training_problem(0, 0).messages, [Message::user("2+2? Let's think step by step")]);
        assert_eq!(grade(task.as_ref(), answer).unwrap().0, 1.0, "{name}");
    }
}

#[test]
fn failures_of_rewards_are_errors_with_the_name_of_the_reward() {
    let rewards = r#"
import os, sys, time

def good(completions, **kwargs):
    return [1.0]

def bad(completions, **kwargs):
    what = completions[0]
    if what == "raise":
        raise ValueError("no number in it")
    if what == "nan":
        return [float("nan")]
    if what == "two":
        return [1.0, 2.0]
    if what == "die":
        os._exit(3)
    if what == "hang":
        time.sleep(60)
    if what == "noise":
        os.write(1, b"{\"rewards\": {}}\n" * 1000)
        os.system("echo noise")
        sys.stdout.write("x" * 100000)
    return [0.5]
"#;
    let files = Files::new(rewards, &[json!({"prompt": "q"})]);
    let settings =
        TaskSettings { command_timeout_s: Some(2.0), ..files.settings(&[("good", 1.0), ("bad", 1.0)]) };
    let task = build(&settings, &TaskContext::default()).unwrap();
    for (answer, names, said) in [
        ("raise", &["bad"][..], "bad: ValueError: no number in it"),
        ("nan", &["bad"], "bad: ValueError: the reward is nan"),
        ("two", &["bad"], "returned 2 rewards for 1 completion"),
        ("die", &[], "the process ended"),
        ("hang", &[], "no answer within 2 s"),
    ] {
        let error = grade(task.as_ref(), answer).unwrap_err();
        assert!(format!("{error:#}").contains(said), "{answer}: {error:#}");
        assert_eq!(error.downcast::<RewardFailure>().unwrap().names, names, "{answer}");
        assert_eq!(grade(task.as_ref(), "noise").unwrap().0, 1.5, "after {answer}");
    }
}

#[test]
fn a_file_that_cannot_be_used_is_refused_with_the_reason() {
    let rows = [json!({"prompt": "q"})];
    let refused = |text: &str, rewards: &[(&str, f64)]| Files::new(text, &rows).refused(rewards);
    let two = "def right(completions, **k): return [0]\ndef short(completions, **k): return [0]\n";
    let said = refused(two, &[]);
    assert!(said.contains("task.rewards = { correct = 1.0 }; it has right, short"), "{said}");
    let said = refused(two, &[("rigth", 1.0)]);
    assert!(said.contains("names `rigth`") && said.contains("did you mean right?"), "{said}");
    let said = refused("import not_there\n", &[]);
    assert!(said.contains("cannot be loaded: ModuleNotFoundError: No module named 'not_there'"), "{said}");
    let said = refused("x = 1\n", &[]);
    assert!(said.contains("no function with a parameter `completions` or `solution_str`"), "{said}");
    let files = Files::new(two, &rows);
    let settings = TaskSettings { command: vec!["no-such-python".into()], ..files.settings(&[]) };
    let said = build(&settings, &TaskContext::default()).err().unwrap().to_string();
    assert!(said.contains("no-such-python") && said.contains("task.command"), "{said}");
}

/// Rewards of 2 s each run in parallel.
#[test]
fn slow_rewards_run_in_parallel_processes() {
    let text = "import time\ndef slow(completions, **k):\n    time.sleep(2)\n    return [1.0]\n";
    let files = Files::new(text, &[json!({"prompt": "q"})]);
    let settings = TaskSettings { command_processes: Some(8), ..files.settings(&[]) };
    let task = build(&settings, &TaskContext::default()).unwrap();
    assert!(task.may_take_long());
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        (0..8).for_each(|_| {
            scope.spawn(|| grade(task.as_ref(), "x").unwrap());
        });
    });
    assert!(start.elapsed() < Duration::from_secs(10), "{:?} for 8 rewards of 2 s", start.elapsed());
    assert!(Path::new(&files.path("rewards.py")).exists());
}
