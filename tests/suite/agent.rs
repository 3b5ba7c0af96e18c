//! The task `agent`, with a program of Python's standard library (tests/fixtures/agent_client.py): what is
//! trained, what is refused, and programs that lie, hang, flood and die.

use crate::cli::{
    self, Ended, Sets, assert_has, done, ended, in_repository, json_lines, output, refused, text_of,
};
use crate::skips;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A run of a small random model. Its name is the mode of the program.
struct AgentRun {
    folder: TempDir,
    ended: Ended,
}

fn program() -> String {
    in_repository("tests/fixtures/agent_client.py").display().to_string()
}

fn recipe(mode: &str) -> String {
    format!(
        "[task]\nname = \"agent\"\ncommand = [\"python3\", {:?}, {mode:?}]\n\
         [model.architecture]\nmax_position_embeddings = 768\n\
         [rollout]\nprompts_per_step = 1\nsamples_per_prompt = 8\nprompt_tokens_max = 600\nresponse_tokens_max = 64\n\
         [train]\nsteps = 3\nrecompute_layers = false\n[train.optimizer]\nlr = 1e-3\n\
         [eval]\nevery_steps = 0\nbefore_training = false\n[checkpoint]\nevery_steps = 1\n\
         [logging]\ntrajectories_per_step = 1000\n[parallel]\nthreads = 2\n",
        program()
    )
}

fn rloss(folder: &Path) -> Command {
    let mut command = cli::rloss();
    command.current_dir(folder);
    command.env("AGENT_LOG", folder.join("answers.jsonl")).env_remove("RLOSS_SERVE_TOKEN");
    command
}

impl AgentRun {
    fn start(mode: &str, sets: &[&str]) -> Self {
        Self::start_with(mode, sets, 1)
    }

    fn start_with(mode: &str, sets: &[&str], threads: usize) -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("agent.toml"), recipe(mode)).unwrap();
        let mut command = rloss(folder.path());
        command.args(["train", "agent.toml", "--out", "run"]).env("AGENT_THREADS", threads.to_string());
        let ended = output(command.sets(sets));
        Self { folder, ended }
    }

    fn errors(&self) -> &str {
        &self.ended.stderr
    }

    fn done(self) -> Self {
        assert_eq!(self.ended.code, Some(0), "{}", self.errors());
        self
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn lines(&self, file: &str) -> Vec<Value> {
        json_lines(self.folder.path().join(file))
    }

    /// The rows of reinforcement learning, without times.
    fn rows(&self) -> Vec<BTreeMap<String, Value>> {
        let rows = self.lines("run/metrics.jsonl").into_iter().filter(|row| row["phase"] == "rl");
        let is_time =
            |name: &str| ["timing_s/", "perf/", "timing_per_token"].iter().any(|p| name.starts_with(p));
        rows.map(|row| {
            let row: BTreeMap<String, Value> = serde_json::from_value(row).unwrap();
            row.into_iter().filter(|(name, _)| !is_time(name)).collect()
        })
        .collect()
    }

    fn trajectories(&self, step: u64) -> Vec<Value> {
        self.lines(&format!("run/trajectories/step-{step:06}.jsonl"))
    }
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// The tokens before an answer, and the answer's own.
type Stretch = (Vec<u64>, Vec<u64>);

/// The sampled stretches of a trajectory.
fn stretches(row: &Value) -> Vec<Stretch> {
    let tokens = ids(&row["tokens"]);
    let turns = row["turns"].as_array().unwrap();
    let range =
        |turn: &Value| (turn["start"].as_u64().unwrap() as usize, turn["end"].as_u64().unwrap() as usize);
    let mask: Vec<bool> = row["mask"].as_array().unwrap().iter().map(|m| m.as_bool().unwrap()).collect();
    let mut expected = vec![false; mask.len()];
    turns.iter().for_each(|turn| expected[range(turn).0..range(turn).1].fill(true));
    assert_eq!(mask, expected, "trained is what the turns cover");
    turns
        .iter()
        .map(range)
        .map(|(start, end)| (tokens[..start].to_vec(), tokens[start..end].to_vec()))
        .collect()
}

/// Checks that the trained tokens are those that the program received, each once, after its own prompt.
fn check_trained(run: &AgentRun, steps: u64) -> (usize, usize) {
    let mut received: BTreeMap<String, Vec<Stretch>> = BTreeMap::new();
    for answer in run.lines("answers.jsonl") {
        let episode = answer["episode"].as_str().unwrap().to_owned();
        received.entry(episode).or_default().push((ids(&answer["prompt"]), ids(&answer["tokens"])));
    }
    let (mut trained, mut parts): (BTreeMap<String, Vec<Stretch>>, usize) = (BTreeMap::new(), 0);
    for step in 1..=steps {
        for row in run.trajectories(step) {
            let id = format!("t{step}-{}-{}", row["prompt"], row["sample"]);
            trained.entry(id).or_default().extend(stretches(&row));
            parts += usize::from(row.get("part").is_some());
        }
    }
    let answers = received.values().map(Vec::len).sum();
    received.values_mut().chain(trained.values_mut()).for_each(|all| all.sort());
    assert_eq!(trained, received);
    (answers, parts)
}

#[test]
fn an_agents_run_trains_on_exactly_what_was_sampled_and_runs_twice_alike() {
    let Some(()) = skips::python3() else { return };
    let sets = ["task.validation_rows_max=3", "eval.every_steps=3", "eval.before_training=true"];
    let run = AgentRun::start("arithmetic", &sets).done();
    let rows = run.rows();
    assert_eq!(rows.len(), 3);
    for row in &rows {
        assert_eq!(row["mismatch/log_ppl_abs_diff_max"], 0.0);
        let counts = ["episodes", "failed", "answers", "trajectories"];
        assert_eq!(counts.map(|name| row[&format!("agent/{name}")].as_f64().unwrap()), [8.0, 0.0, 16.0, 8.0]);
        assert!(row.contains_key("reward/sum/mean") && row.contains_key("actor/grad_norm"));
    }
    let evaluation = run.lines("run/metrics.jsonl").into_iter().filter(|row| row["phase"] == "eval");
    let names = ["acc", "reward", "reward/sum"];
    let keys =
        names.map(|name| format!("val-{}/agent/{name}/mean@1", if name == "acc" { "core" } else { "aux" }));
    assert_eq!(evaluation.filter(|row| keys.iter().all(|key| row.get(key).is_some())).count(), 2);
    assert!(run.errors().contains("a function of its recipe only as far as the program is"));
    let again = AgentRun::start("arithmetic", &sets).done();
    assert_eq!(again.rows(), rows);
    // Resumed after step 2, the run is the same again.
    std::fs::remove_dir_all(again.path().join("checkpoints/step-000003")).unwrap();
    let mut resume = rloss(again.folder.path());
    done(resume.args(["train", "agent.toml", "--out", "run", "--resume"]).sets(sets));
    assert_eq!(again.rows(), rows);
}

/// A stream gets each token when it is drawn, a whole answer all of them at its end. Both end with the turn, of
/// which a random model malforms many.
#[test]
fn a_whole_answer_has_the_tokens_of_a_streamed_one() {
    let Some(()) = skips::python3() else { return };
    for family in ["model.architecture.model_type=gpt_oss", "model.architecture.model_type=qwen2"] {
        let sets = ["rollout.samples_per_prompt=24", "train.steps=2", family];
        let (whole, streamed) =
            (AgentRun::start("arithmetic", &sets).done(), AgentRun::start("streamed", &sets).done());
        assert_eq!(streamed.rows(), whole.rows(), "{family}");
        let tokens = |run: &AgentRun| -> Vec<Value> {
            run.trajectories(1).iter().map(|row| row["tokens"].clone()).collect()
        };
        assert_eq!(tokens(&streamed), tokens(&whole), "{family}");
        check_trained(&whole, 2);
        check_trained(&streamed, 2);
    }
}

#[test]
fn a_client_that_rewrites_its_history_trains_each_sampled_token_once() {
    let Some(()) = skips::python3() else { return };
    for family in ["model.architecture.model_type=gpt_oss", "model.architecture.model_type=qwen2"] {
        let sets = ["rollout.samples_per_prompt=24", "train.steps=2", family];
        let run = AgentRun::start_with("wild", &sets, 4).done();
        let (answers, parts) = check_trained(&run, 2);
        assert!(answers > 100 && parts > 20, "{answers} answers, {parts} further trajectories");
        assert!(run.rows().iter().all(|row| row["mismatch/log_ppl_abs_diff_max"] == 0.0));
    }
}

/// 1,000 episodes, for a person to run.
#[test]
#[ignore = "a minute"]
fn a_thousand_wild_episodes() {
    let run = AgentRun::start_with("wild", &["rollout.samples_per_prompt=250", "train.steps=4"], 8).done();
    println!("{:?} answers, further trajectories", check_trained(&run, 4));
}

#[test]
fn nothing_is_learned_from_a_program_that_lies() {
    let Some(()) = skips::python3() else { return };
    let sets = ["train.steps=1", "task.episode_timeout_s=8", "rollout.samples_per_prompt=9"];
    let run = AgentRun::start("liar", &sets).done();
    let row = &run.rows()[0];
    for (name, count) in [
        ("episodes", 5.0),
        ("failed", 4.0),
        ("failed_bad_reward", 1.0),
        ("failed_no_answer", 1.0),
        ("failed_error", 1.0),
        ("failed_timeout", 1.0),
        ("failed_not_asked", 0.0),
    ] {
        assert_eq!(row[&format!("agent/{name}")], count, "{name}\n{}", run.errors());
    }
    let samples: Vec<u64> = run.trajectories(1).iter().map(|row| row["sample"].as_u64().unwrap()).collect();
    assert_eq!(samples, [0, 2, 6, 7, 8]);
    assert!(run.rows()[0]["critic/rewards/min"].as_f64().unwrap() >= 0.0, "the first reward stays");
    let errors = run.errors();
    for told in [
        "has another reward or error, which stays",
        "NaN and Infinity are not numbers in JSON",
        "my disk is full",
        "it got a reward, but asked for no answer",
        "no reward came within task.episode_timeout_s = 8 s",
    ] {
        assert_eq!(errors.matches(told).count(), 1, "{told} in {errors}");
    }
}

/// The rows of such episodes have no tokens, and were refused when they were read again.
#[test]
fn bug_a_rollout_with_episodes_that_failed_is_read_again_and_trained_on() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("agent.toml"), recipe("liar")).unwrap();
    let run = |command: &str, sets: &[&str]| {
        let mut command_line = rloss(folder.path());
        command_line.args([command, "agent.toml", "--out", command, "--set", "task.episode_timeout_s=8"]);
        done(command_line.sets(sets));
    };
    let sets = ["rollout.samples_per_prompt=12"];
    run("rollout", &sets);
    run("rollout", &sets);
    let file = std::fs::read_dir(folder.path().join("rollout/trajectories")).unwrap().next().unwrap();
    let file = file.unwrap().path();
    let rows = text_of(&file);
    let failed = rows.matches("\"tokens\":[]").count();
    assert!(rows.lines().count() == 12 && failed >= 4, "{failed}");
    run("train", &["train.steps=1", &format!("train.trajectories={}", file.display())]);
    let trained = folder.path().join("train/trajectories/step-000001.jsonl");
    assert_eq!(text_of(trained).lines().count(), 12 - failed);
    // The only episode left of a group trained with its whole reward as its advantage.
    let (failures, rest): (Vec<&str>, Vec<&str>) =
        rows.lines().partition(|row| row.contains("\"tokens\":[]"));
    let lone = folder.path().join("lone.jsonl");
    std::fs::write(&lone, failures.join("\n") + "\n" + rest[0] + "\n").unwrap();
    let mut command = rloss(folder.path());
    command.args(["train", "agent.toml", "--out", "lone"]);
    let set = format!("train.trajectories={}", lone.display());
    refused(command.sets([set]), &["has no sampled token to train on"]);
}

#[test]
fn a_program_that_dies_is_started_again_and_its_episodes_begin_again() {
    let Some(()) = skips::python3() else { return };
    let died = AgentRun::start("dying", &[]).done();
    assert_eq!(died.errors().matches("the program ended (exit status: 3)").count(), 1, "{}", died.errors());
    assert!(died.errors().contains("out of luck"));
    let whole = AgentRun::start("arithmetic", &[]).done();
    let (mut rows, expected) = (died.rows(), whole.rows());
    assert_eq!(rows[1].insert("agent/begun_again".into(), 0.into()), Some(1.into()));
    assert_eq!(rows, expected, "the death changes nothing");
    assert!(text_of(died.path().join("agent.log")).contains("out of luck"));
}

#[test]
fn a_program_that_gives_up_ends_the_run_with_its_last_words() {
    let Some(()) = skips::python3() else { return };
    let run = AgentRun::start("dead", &[]);
    assert_eq!(run.ended.code, Some(1));
    assert_has(run.errors(), &["before it asked for an episode", "No module named"]);
    let run = AgentRun::start("silent", &["task.episode_timeout_s=0.3", "train.steps=9"]);
    assert_eq!(run.ended.code, Some(1));
    assert_has(run.errors(), &["for 3 steps no group has had enough episodes"]);
    assert_eq!(run.errors().matches("the program did not ask for it").count(), 1);
    // An episode that failed because the program ended counted as progress, so such a program never gave up.
    let run = AgentRun::start("crashing", &["train.steps=1"]);
    assert_eq!(run.ended.code, Some(1), "{}", run.errors());
    assert_has(run.errors(), &["again and again, without a finished episode in between"]);
}

#[test]
fn bug_an_evaluation_that_ended_early_lost_the_episodes_that_were_finished() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("agent.toml"), recipe("halting")).unwrap();
    let eval = |code: i32| {
        let mut command = rloss(folder.path());
        command.args(["eval", "agent.toml", "--out", "eval"]);
        ended(command.sets(["task.validation_rows_max=8", "eval.samples=1"]), code, &[])
    };
    let file = |end: &str| text_of(folder.path().join(format!("eval/trajectories/eval-000000.jsonl{end}")));
    eval(1);
    let kept = file(".partial");
    assert!(kept.lines().count() == 3 && !kept.contains("\"tokens\":[]"), "{kept}");
    std::fs::write(folder.path().join("ready"), "").unwrap();
    eval(0);
    let all = file("");
    assert!(all.lines().count() == 8 && all.starts_with(&kept), "{kept}\n{all}");
    assert!(!all.contains("\"tokens\":[]"), "a crashed episode is played again: {all}");
}

#[test]
fn a_flood_of_output_is_bounded() {
    let Some(()) = skips::python3() else { return };
    let run = AgentRun::start("flood", &["train.steps=1"]).done();
    assert_eq!(std::fs::metadata(run.path().join("agent.log")).unwrap().len(), 16 << 20);
    assert!(run.errors().contains("further output is dropped"));
}

#[test]
fn a_wrong_agent_is_refused_before_any_work() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("task.serve_on={}", taken.local_addr().unwrap());
    let file = format!("train.trajectories={}", program());
    for (sets, expected) in [
        (&["task.command=[\"no-such-program\"]"][..], "task.command: cannot start \"no-such-program\""),
        (&["task.command=[]"], "task.command: missing: write the program that plays the episodes"),
        (&["task.command=[]", "task.serve_on=127.0.0.1:0"], "set RLOSS_SERVE_TOKEN to a secret"),
        (&["task.serve_on=here"], "task.serve_on: \"here\" is not an address with a port"),
        (&["task.serve_on=0.0.0.0:0"], "task.serve_on: everyone who can reach 0.0.0.0:0"),
        (&[taken.as_str()], "is not available"),
        (
            &["task.command_processes=2"],
            "task.command_processes: only the task command or python uses this key",
        ),
        (&["task.train_file=nowhere.jsonl"], "task.train_file: no file at"),
        (&["task.train_rows_max=3"], "task.train_rows_max: the task agent reads no file"),
        (&["policy.advantage=remax"], "policy.advantage: remax needs a greedy sample"),
        (&["rollout.keep_routes=true"], "rollout.keep_routes: an agent's episodes keep no routed experts"),
        (
            &["rollout.lag_steps=1", "policy.old_logprob=rollout"],
            "rollout.lag_steps: an agent's episodes are sampled by the weights of their step",
        ),
        (
            &["rollout.step_tokens_max=8", "policy.old_logprob=rollout"],
            "rollout.step_tokens_max: an agent's episodes cannot pause",
        ),
        (&["task.episodes_at_once=0"], "task.episodes_at_once"),
        (&[file.as_str()], "agent_client.py"),
    ] {
        let run = AgentRun::start("arithmetic", sets);
        assert_eq!(run.ended.code, Some(2), "{sets:?}: {}", run.errors());
        assert!(run.errors().contains(expected), "{sets:?}: {}", run.errors());
        assert!(!run.path().exists(), "{sets:?} leaves a folder");
    }
}

#[test]
fn the_examples_are_short_and_their_recipes_resolve() {
    let folder = in_repository("examples/agents");
    let mut recipes = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".py") {
            let lines = text_of(&path).lines().count();
            assert!(lines <= 60, "{name} has {lines} lines");
        } else if name.ends_with(".toml") {
            let mut command = rloss(Path::new(env!("CARGO_MANIFEST_DIR")));
            command.args(["check", "--no-run"]).arg(&path);
            if name == "openai_client.toml" {
                // Its model comes from a warm-up.
                command.args(["--set", "model.path=src"]);
            }
            done(&mut command);
            recipes += 1;
        }
    }
    assert!(recipes >= 4, "{recipes}");
}
