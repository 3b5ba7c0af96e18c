//! A user of verl or TRL moves in: rows and rewards as they lie there, models by the hub's name, plans for
//! another machine.

use super::{done, output, rloss, stderr};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn tables() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tables")
}

/// A model of bytes with a context for the rows, and steps of a moment.
const SMALL: &str = "[model.architecture]\nmax_position_embeddings = 320\n[rollout]\nprompts_per_step = 4\nsamples_per_prompt = 6\n\
     prompt_tokens_max = 250\nresponse_tokens_max = 24\n[checkpoint]\nevery_steps = 0\n";

const BASE: &str = "base = \"gsm8k\"\n[rollout]\nresponse_tokens_max = 16\n[train]\nsteps = 1\n";

fn rows(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Writes `rewards.py` and `r.toml`, and trains.
fn train(folder: &Path, rewards: &str, task: &str, rest: &str) -> std::process::Output {
    train_with(folder, rewards, task, rest, &[])
}

fn train_with(folder: &Path, rewards: &str, task: &str, rest: &str, more: &[&str]) -> std::process::Output {
    std::fs::write(folder.join("rewards.py"), rewards).unwrap();
    let recipe = format!("[task]\nname = \"python\"\nfile = \"rewards.py\"\n{task}\n{SMALL}{rest}");
    std::fs::write(folder.join("r.toml"), recipe).unwrap();
    output(rloss().current_dir(folder).args(["train", "r.toml", "--out", "run"]).args(more))
}

/// The failures of a reward function were trained as rewards of 0.
#[test]
fn bug_failures_of_a_reward_are_dropped_and_counted_and_not_trained() {
    let rewards = r#"
def length(completions, extra_info, **kwargs):
    if extra_info[0]["index"] % 10 == 0:
        raise ValueError("the row has no reference")
    text = completions[0][-1]["content"] if completions[0] else ""
    if text and sum(text.encode()) % 4 == 0:
        return [float("nan")]
    return [float(sum(text.encode()) % 7)]

def short(completions, **kwargs):
    return [1.0]
"#;
    let task = format!(
        "rewards = {{ length = 1.0, short = 0.5 }}\ntrain_file = {:?}\ncommand_processes = 2",
        tables().join("pyarrow_snappy.parquet")
    );
    let folder = TempDir::new().unwrap();
    let run = train(folder.path(), rewards, &task, "[train]\ndata_epochs = 0.5\n");
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    assert!(stderr(&run).contains("no reward: length: ValueError: "), "{}", stderr(&run));
    let stored = std::fs::read_to_string(folder.path().join("run/recipe.toml")).unwrap();
    assert!(stored.contains("steps = 5\n"), "half of 40 rows are 5 steps of 4");
    let metrics = rows(&folder.path().join("run/metrics.jsonl"));
    let steps: Vec<&Value> = metrics.iter().filter(|row| row["phase"] == "rl").collect();
    assert_eq!(steps.len(), 5);
    let sum = |name: &str| steps.iter().filter_map(|row| row[name].as_f64()).sum::<f64>();
    let (mut dropped, mut trained) = (0, 0);
    for step in 1..=5 {
        for row in rows(&folder.path().join(format!("run/trajectories/step-{step:06}.jsonl"))) {
            let is_dropped = row["dropped"] == true;
            dropped += usize::from(is_dropped);
            trained += usize::from(!row["learned"].is_null());
            assert!(
                !is_dropped || (row["learned"].is_null() && row["failed_rewards"][0] == "length"),
                "{row}"
            );
        }
    }
    assert!(dropped > 0 && trained > 0, "{dropped} dropped, {trained} trained");
    assert!(sum("trajectory/dropped") >= dropped as f64);
    assert_eq!(sum("reward/length/failed"), sum("outcome/task_failed"));
    assert_eq!(sum("trajectory/dropped"), sum("outcome/task_failed"));
    // The old way, by a key.
    let other = TempDir::new().unwrap();
    let run = train(other.path(), rewards, &format!("{task}\non_failure = \"zero\""), "[train]\nsteps = 1\n");
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    let all = rows(&other.path().join("run/trajectories/step-000001.jsonl"));
    assert!(all.iter().all(|row| row["dropped"].is_null() && !row["learned"].is_null()));
}

/// The stored trajectories were those of discarded groups, so nobody saw what the step learned from.
#[test]
fn the_stored_trajectories_begin_with_those_that_were_trained_on() {
    let rewards =
        "def rare(completions, **k):\n    return [float(sum(str(completions).encode()) % 24 == 0)]\n";
    let folder = TempDir::new().unwrap();
    let task = format!("train_file = {:?}", tables().join("rows.jsonl.gz"));
    let sets =
        ["rollout.prompts_per_step=2", "rollout.resample_rounds_max=6", "logging.trajectories_per_step=12"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let run = train_with(folder.path(), rewards, &task, "[train]\nsteps = 2\n", &sets);
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    let metrics = rows(&folder.path().join("run/metrics.jsonl"));
    assert!(metrics.iter().any(|row| row["group/discarded"].as_f64() > Some(0.0)), "{metrics:?}");
    for step in 1..=2 {
        let stored = rows(&folder.path().join(format!("run/trajectories/step-{step:06}.jsonl")));
        assert!(stored.iter().all(|row| !row["learned"].is_null()), "all 12 of a step: {stored:?}");
    }
}

/// Held-out problems could not join a run: one message asked for --accept-changes, and the next refused it.
#[test]
fn held_out_problems_may_join_a_run_if_the_user_accepts_it() {
    let rewards = "def a(completions, **k):\n    return [float(len(str(completions)) % 5)]\n";
    let folder = TempDir::new().unwrap();
    let task = format!("train_file = {:?}", tables().join("rows.jsonl.gz"));
    let run = train(folder.path(), rewards, &task, "[train]\nsteps = 1\n");
    assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
    std::fs::write(folder.path().join("held.jsonl"), "{\"prompt\": \"new?\", \"answer\": \"1\"}\n").unwrap();
    let resume = |more: &[&str]| {
        let mut command = rloss();
        command.current_dir(folder.path()).args(["train", "run", "--resume", "--set", "train.steps=2"]);
        output(command.args(["--set", "task.validation_file=held.jsonl"]).args(more))
    };
    let refused = resume(&[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        stderr(&refused).contains("task.validation_file (") && stderr(&refused).contains("--accept-changes")
    );
    let accepted = resume(&["--accept-changes"]);
    assert_eq!(accepted.status.code(), Some(0), "{}", stderr(&accepted));
    let metrics = rows(&folder.path().join("run/metrics.jsonl"));
    assert!(metrics.iter().any(|row| row["phase"] == "eval" && row["step"] == 2), "{metrics:?}");
}

#[test]
fn a_step_without_a_reward_is_skipped_and_such_a_run_fails() {
    let rewards = "def broken(completions, **kwargs):\n    raise RuntimeError('never')\n";
    let folder = TempDir::new().unwrap();
    let task = format!("train_file = {:?}", tables().join("rows.json"));
    let run = train(folder.path(), rewards, &task, "[train]\nsteps = 2\n");
    assert_eq!(run.status.code(), Some(1), "{}", stderr(&run));
    let said = stderr(&run);
    assert!(said.contains("this step changes no weight") && said.contains("RuntimeError: never"), "{said}");
}

#[test]
fn both_kinds_of_truncated_answers_train_and_gdpo_with_named_rewards() {
    let rewards = "def a(completions, **k):\n    return [float(len(str(completions)) % 5)]\n\
                   def b(completions, **k):\n    return [float(len(str(completions)) % 3)]\n";
    let task = format!("rewards = {{ a = 1.0, b = 0.5 }}\ntrain_file = {:?}", tables().join("rows.jsonl.gz"));
    for truncated in ["mask", "zero"] {
        let folder = TempDir::new().unwrap();
        let policy =
            format!("[train]\nsteps = 2\n[policy]\ntruncated = \"{truncated}\"\nadvantage = \"gdpo\"\n");
        let run = train(folder.path(), rewards, &task, &policy);
        assert_eq!(run.status.code(), Some(0), "{truncated}: {}", stderr(&run));
        for row in rows(&folder.path().join("run/trajectories/step-000001.jsonl")) {
            assert!(row["rewards"]["a"].is_number(), "{row}");
        }
    }
}

/// F1: `init` accepted Parquet, and `check` refused each of its lines.
#[test]
fn init_reads_the_rows_and_writes_the_columns_that_they_need() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("model");
    super::copy_model(&super::first_checkpoint(super::warm_model()), &model);
    std::fs::write(folder.path().join("base.toml"), BASE).unwrap();
    let init = |name: &str, file: &Path| {
        let mut command = rloss();
        command.current_dir(&folder).args(["init", name, "--from", "base.toml", "--model"]);
        command.arg(&model).arg("--train-file").arg(file);
        output(&mut command)
    };
    let said = init("verl", &tables().join("pandas.parquet"));
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    let recipe = std::fs::read_to_string(folder.path().join("verl.toml")).unwrap();
    assert!(!recipe.contains("columns"), "{recipe}");
    let own = folder.path().join("own.csv");
    std::fs::write(&own, "id,input,target\n1,What is 2+2?,4\n").unwrap();
    let said = init("own", &own);
    assert_eq!(said.status.code(), Some(0), "{}", stderr(&said));
    let recipe = std::fs::read_to_string(folder.path().join("own.toml")).unwrap();
    assert!(recipe.contains("columns = { answer = \"target\", question = \"input\" }"), "{recipe}");
    std::fs::write(&own, "a,b\n1,2\n").unwrap();
    let said = init("no", &own);
    assert_eq!(said.status.code(), Some(2));
    assert!(stderr(&said).contains("no column for `question`; the rows have a, b"), "{}", stderr(&said));
    assert!(!folder.path().join("no.toml").exists());
}

/// F3: the advice named a file that did not exist and an option that `init` lacks.
#[test]
fn bug_f3_a_model_is_found_by_the_hubs_name_or_its_download_is_told() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("base.toml"), BASE).unwrap();
    let init = |name: &str| {
        let mut command = rloss();
        command.current_dir(&folder).env("HF_HOME", folder.path().join("hf")).env_remove("HF_HUB_CACHE");
        command.args(["init", name, "--from", "base.toml", "--model", "Owner/Some-0.5B"]);
        output(&mut command)
    };
    let said = stderr(&init("missing"));
    assert!(said.contains("download it with: hf download Owner/Some-0.5B"), "{said}");
    assert!(!said.contains("--set") && !said.contains("missing.toml"), "{said}");
    let model = folder.path().join("hf/hub/models--Owner--Some-0.5B");
    let snapshot = model.join("snapshots/0a1b2c");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::write(model.join("refs/main"), "0a1b2c").unwrap();
    let blobs = folder.path().join("blobs");
    super::copy_model(&super::first_checkpoint(super::warm_model()), &blobs);
    for entry in std::fs::read_dir(blobs).unwrap() {
        let path = entry.unwrap().path();
        // The client's snapshots are links.
        std::os::unix::fs::symlink(&path, snapshot.join(path.file_name().unwrap())).unwrap();
    }
    let found = init("found");
    assert_eq!(found.status.code(), Some(0), "{}", stderr(&found));
    let recipe = std::fs::read_to_string(folder.path().join("found.toml")).unwrap();
    assert!(recipe.contains("path = \"Owner/Some-0.5B\""), "{recipe}");
    let mut check = rloss();
    check.current_dir(&folder).env("HF_HOME", folder.path().join("hf")).env_remove("HF_HUB_CACHE");
    check.args(["check", "--no-run", "quickstart", "--set", "model.path=Owner/Some-0.5B"]);
    let shown = done(&mut check);
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("snapshots/0a1b2c"), "{shown}");
}

/// F7: a CPU build printed no plan of a GPU's memory.
#[test]
fn bug_f7_a_cpu_build_plans_for_a_machine_with_gpus() {
    let check = |recipe: &str, machine: &str, sets: &[&str]| {
        let mut command = rloss();
        command.args(["check", recipe, "--for", machine]);
        for set in sets {
            command.args(["--set", set]);
        }
        output(&mut command)
    };
    let plan = check("quickstart_cuda", "2 x H200, 500 GB", &[]);
    let text = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert_eq!(plan.status.code(), Some(0), "{}", stderr(&plan));
    for part in ["keys and values", "in each of 2 processes", "free on each H200", "Host memory of a process"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    let head = "adapter.targets=[\"lm_head.weight\"]";
    let refused = check("quickstart_cuda", "H200, 500 GB", &["rollout.top_p=0.9", "model.dtype=f32", head]);
    let said = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    for part in [
        "rollout.top_p: no GPU kernel",
        "model.dtype: a GPU supports only bf16",
        "adapter.targets: no GPU kernel adapts the head yet",
    ] {
        assert!(said.contains(part), "{part} in {said}");
    }
    let small = check("quickstart_cuda", "0.01 GB, 500 GB", &[]);
    assert_eq!(small.status.code(), Some(2), "{}", stderr(&small));
    let wrong = check("quickstart_cuda", "8 x A100, 1 GB", &[]);
    assert!(stderr(&wrong).contains("no GPU \"A100\"; known are H100"), "{}", stderr(&wrong));
}

/// F2: `check` says what the rows are used for.
#[test]
fn check_says_how_many_rows_a_step_uses_up_and_how_many_are_too_long() {
    let folder = TempDir::new().unwrap();
    let recipe = format!(
        "[task]\nname = \"python\"\nfile = \"r.py\"\ntrain_file = {:?}\n",
        tables().join("rows.json")
    );
    std::fs::write(folder.path().join("r.py"), "def compute_score(solution_str, **k): return 0.5\n").unwrap();
    std::fs::write(folder.path().join("r.toml"), format!("{recipe}{SMALL}[train]\nsteps = 20\n")).unwrap();
    let check = |sets: &[&str]| {
        let mut command = rloss();
        command.current_dir(&folder).args(["check", "r.toml"]);
        for set in sets {
            command.args(["--set", set]);
        }
        output(&mut command)
    };
    let whole = done(&mut {
        let mut command = rloss();
        command.current_dir(&folder).args(["check", "r.toml"]);
        command
    });
    let text = String::from_utf8_lossy(&whole.stdout).into_owned();
    assert!(
        text.contains("Data: 40 training rows, and 0 with too long prompts. A step uses up 4: an epoch is 10.0 steps, and the run 2.00 epochs."),
        "{text}"
    );
    let refused = check(&["rollout.prompt_tokens_max=110", "task.long_prompts=refuse"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("task.long_prompts: "), "{}", stderr(&refused));
    let both = check(&["train.data_epochs=2"]);
    assert!(stderr(&both).contains("train.data_epochs: both count the run's steps"), "{}", stderr(&both));
}
