//! A user of verl or TRL moves in: rows and rewards as they lie there, models by the hub's name, plans for
//! another machine.

use super::*;

fn tables() -> PathBuf {
    in_repository("tests/fixtures/tables")
}

/// A model of bytes with a context for the rows, and steps of a moment.
const SMALL: &str = "[model.architecture]\nmax_position_embeddings = 320\n[rollout]\nprompts_per_step = 4\nsamples_per_prompt = 6\n\
     prompt_tokens_max = 250\nresponse_tokens_max = 24\n[checkpoint]\nevery_steps = 0\n";

const BASE: &str = "base = \"gsm8k\"\n[rollout]\nresponse_tokens_max = 16\n[train]\nsteps = 1\n";

/// Writes `rewards.py` and `r.toml` for the rows of `table`, and returns the folder and its training.
fn train(rewards: &str, table: &str, task: &str, rest: &str) -> (TempDir, Command) {
    let (folder, [file, recipe]) = scratch(["rewards.py", "r.toml"]);
    fs::write(file, rewards).unwrap();
    let task =
        format!("name = \"python\"\nfile = \"rewards.py\"\ntrain_file = {:?}\n{task}", tables().join(table));
    fs::write(recipe, format!("[task]\n{task}\n{SMALL}{rest}")).unwrap();
    let mut command = rloss();
    command.current_dir(folder.path()).args(["train", "r.toml", "--out", "run"]);
    (folder, command)
}

/// The stored trajectories of a step of the run in `folder`.
fn stored(folder: &TempDir, step: u64) -> Vec<Value> {
    json_lines(folder.path().join(format!("run/trajectories/step-{step:06}.jsonl")))
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
    let (table, task) =
        ("pyarrow_snappy.parquet", "rewards = { length = 1.0, short = 0.5 }\ncommand_processes = 2");
    let (folder, mut run) = train(rewards, table, task, "[train]\ndata_epochs = 0.5\n");
    ended(&mut run, 0, &["no reward: length: ValueError: "]);
    let recipe = text_of(folder.path().join("run/recipe.toml"));
    assert!(recipe.contains("steps = 5\n"), "half of 40 rows are 5 steps of 4");
    let metrics = rows(&folder.path().join("run"));
    let steps: Vec<&Value> = phase(&metrics, "rl").collect();
    assert_eq!(steps.len(), 5);
    let sum = |name: &str| steps.iter().filter_map(|row| row[name].as_f64()).sum::<f64>();
    let (mut dropped, mut trained) = (0, 0);
    for step in 1..=5 {
        for row in stored(&folder, step) {
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
    let task = format!("{task}\non_failure = \"zero\"");
    let (folder, mut run) = train(rewards, table, &task, "[train]\nsteps = 1\n");
    done(&mut run);
    assert!(stored(&folder, 1).iter().all(|row| row["dropped"].is_null() && !row["learned"].is_null()));
}

/// The stored trajectories were those of discarded groups, so nobody saw what the step learned from.
#[test]
fn the_stored_trajectories_begin_with_those_that_were_trained_on() {
    let rewards =
        "def rare(completions, **k):\n    return [float(sum(str(completions).encode()) % 24 == 0)]\n";
    let sets =
        ["rollout.prompts_per_step=2", "rollout.resample_rounds_max=6", "logging.trajectories_per_step=12"];
    let (folder, mut run) = train(rewards, "rows.jsonl.gz", "", "[train]\nsteps = 2\n");
    done(run.sets(sets));
    let metrics = rows(&folder.path().join("run"));
    assert!(metrics.iter().any(|row| row["group/discarded"].as_f64() > Some(0.0)), "{metrics:?}");
    for step in 1..=2 {
        let stored = stored(&folder, step);
        assert!(stored.iter().all(|row| !row["learned"].is_null()), "all 12 of a step: {stored:?}");
    }
}

/// Held-out problems could not join a run: one message asked for --accept-changes, and the next refused it.
#[test]
fn held_out_problems_may_join_a_run_if_the_user_accepts_it() {
    let rewards = "def a(completions, **k):\n    return [float(len(str(completions)) % 5)]\n";
    let (folder, mut run) = train(rewards, "rows.jsonl.gz", "", "[train]\nsteps = 1\n");
    done(&mut run);
    fs::write(folder.path().join("held.jsonl"), "{\"prompt\": \"new?\", \"answer\": \"1\"}\n").unwrap();
    let mut resume = rloss();
    resume.current_dir(folder.path()).args(["train", "run", "--resume"]);
    resume.sets(["train.steps=2", "task.validation_file=held.jsonl"]);
    refused(&mut resume, &["task.validation_file (", "--accept-changes"]);
    done(resume.arg("--accept-changes"));
    let metrics = rows(&folder.path().join("run"));
    assert!(metrics.iter().any(|row| row["phase"] == "eval" && row["step"] == 2), "{metrics:?}");
}

#[test]
fn a_step_without_a_reward_is_skipped_and_such_a_run_fails() {
    let rewards = "def broken(completions, **kwargs):\n    raise RuntimeError('never')\n";
    let (_folder, mut run) = train(rewards, "rows.json", "", "[train]\nsteps = 2\n");
    ended(&mut run, 1, &["this step changes no weight", "RuntimeError: never"]);
}

#[test]
fn both_kinds_of_truncated_answers_train_and_gdpo_with_named_rewards() {
    let rewards = "def a(completions, **k):\n    return [float(len(str(completions)) % 5)]\n\
                   def b(completions, **k):\n    return [float(len(str(completions)) % 3)]\n";
    for truncated in ["mask", "zero"] {
        let policy =
            format!("[train]\nsteps = 2\n[policy]\ntruncated = \"{truncated}\"\nadvantage = \"gdpo\"\n");
        let (folder, mut run) = train(rewards, "rows.jsonl.gz", "rewards = { a = 1.0, b = 0.5 }", &policy);
        done(&mut run);
        for row in stored(&folder, 1) {
            assert!(row["rewards"]["a"].is_number(), "{truncated}: {row}");
        }
    }
}

/// F1: `init` accepted Parquet, and `check` refused each of its lines.
#[test]
fn init_reads_the_rows_and_writes_the_columns_that_they_need() {
    let (folder, [model, base, own, none]) = scratch(["model", "base.toml", "own.csv", "no.toml"]);
    copy_model(&first_checkpoint(warm_model()), &model);
    fs::write(base, BASE).unwrap();
    let init = |name: &str, file: &Path| {
        let mut command = rloss();
        command.current_dir(&folder).args(["init", name, "--from", "base.toml", "--model"]);
        command.arg(&model).arg("--train-file").arg(file);
        command
    };
    done(&mut init("verl", &tables().join("pandas.parquet")));
    let recipe = text_of(folder.path().join("verl.toml"));
    assert!(!recipe.contains("columns"), "{recipe}");
    fs::write(&own, "id,input,target\n1,What is 2+2?,4\n").unwrap();
    done(&mut init("own", &own));
    let columns = "columns = { answer = \"target\", question = \"input\" }";
    assert_has(&text_of(folder.path().join("own.toml")), &[columns]);
    fs::write(&own, "a,b\n1,2\n").unwrap();
    refused(&mut init("no", &own), &["no column for `question`; the rows have a, b"]);
    assert!(!none.exists());
}

/// F3: the advice named a file that did not exist and an option that `init` lacks.
#[test]
fn bug_f3_a_model_is_found_by_the_hubs_name_or_its_download_is_told() {
    let (folder, [base, home, blobs]) = scratch(["base.toml", "hf", "blobs"]);
    fs::write(base, BASE).unwrap();
    let rloss = |arguments: &[&str]| {
        let mut command = rloss();
        command.current_dir(&folder).env("HF_HOME", &home).env_remove("HF_HUB_CACHE").args(arguments);
        command
    };
    let init = |name| rloss(&["init", name, "--from", "base.toml", "--model", "Owner/Some-0.5B"]);
    let said = output(&mut init("missing")).stderr;
    assert_has(&said, &["download it with: hf download Owner/Some-0.5B"]);
    assert!(!said.contains("--set") && !said.contains("missing.toml"), "{said}");
    let model = home.join("hub/models--Owner--Some-0.5B");
    let snapshot = model.join("snapshots/0a1b2c");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), "0a1b2c").unwrap();
    copy_model(&first_checkpoint(warm_model()), &blobs);
    for entry in fs::read_dir(blobs).unwrap() {
        let path = entry.unwrap().path();
        // The client's snapshots are links.
        std::os::unix::fs::symlink(&path, snapshot.join(path.file_name().unwrap())).unwrap();
    }
    done(&mut init("found"));
    assert_has(&text_of(folder.path().join("found.toml")), &["path = \"Owner/Some-0.5B\""]);
    let check = ["check", "--no-run", "quickstart", "--set", "model.path=Owner/Some-0.5B"];
    assert_has(&done(&mut rloss(&check)).stdout, &["snapshots/0a1b2c"]);
}

/// F7: a CPU build printed no plan of a GPU's memory.
#[test]
fn bug_f7_a_cpu_build_plans_for_a_machine_with_gpus() {
    let check = |machine: &str| {
        let mut command = rloss();
        command.args(["check", "quickstart_cuda", "--for", machine]);
        command
    };
    let plan = done(&mut check("2 x H200, 500 GB")).stdout;
    assert_has(&plan, &["keys and values", "in each of 2 processes"]);
    assert_has(&plan, &["free on each H200", "Host memory of a process"]);
    let head = "adapter.targets=[\"lm_head.weight\"]";
    let words = [
        "rollout.top_p: no GPU kernel",
        "model.dtype: a GPU supports only bf16",
        "adapter.targets: no GPU kernel adapts the head yet",
    ];
    refused(check("H200, 500 GB").sets(["rollout.top_p=0.9", "model.dtype=f32", head]), &words);
    refused(&mut check("0.01 GB, 500 GB"), &[]);
    assert_has(&output(&mut check("8 x A100, 1 GB")).stderr, &["no GPU \"A100\"; known are H100"]);
}

/// F2: `check` says what the rows are used for.
#[test]
fn check_says_how_many_rows_a_step_uses_up_and_how_many_are_too_long() {
    let folder = TempDir::new().unwrap();
    let recipe = format!(
        "[task]\nname = \"python\"\nfile = \"r.py\"\ntrain_file = {:?}\n",
        tables().join("rows.json")
    );
    fs::write(folder.path().join("r.py"), "def compute_score(solution_str, **k): return 0.5\n").unwrap();
    fs::write(folder.path().join("r.toml"), format!("{recipe}{SMALL}[train]\nsteps = 20\n")).unwrap();
    let check = |sets: &[&str]| output(rloss().current_dir(&folder).args(["check", "r.toml"]).sets(sets));
    let whole = check(&[]);
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);
    let data = "Data: 40 training rows, and 0 with too long prompts. A step uses up 4: an epoch is 10.0 steps, and the run 2.00 epochs.";
    assert_has(&whole.stdout, &[data]);
    let long = check(&["rollout.prompt_tokens_max=110", "task.long_prompts=refuse"]);
    assert_eq!(long.code, Some(2));
    assert_has(&long.stderr, &["task.long_prompts: "]);
    assert_has(&check(&["train.data_epochs=2"]).stderr, &["train.data_epochs: both count the run's steps"]);
}
