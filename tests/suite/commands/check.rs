//! `rloss check`: what a recipe comes to, and memory that does not suffice.

use super::{done, output, quickstart, rloss, stderr, train};
use crate::skips;
use tempfile::TempDir;

#[test]
fn it_shows_recipe_prompt_and_memory_and_does_nothing() {
    let folder = TempDir::new().unwrap();
    let output = done(
        rloss().current_dir(folder.path()).arg("check").arg(quickstart()).args(["--set", "train.seed=3"]),
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        !text.contains("[model.architecture]") && !text.contains("clip_low"),
        "only what differs: {text}"
    );
    let all = done(rloss().current_dir(folder.path()).args(["check", "--all"]).arg(quickstart()));
    let all = String::from_utf8(all.stdout).unwrap();
    assert!(all.contains("[model.architecture]") && all.contains("clip_low = 0.2"), "{all}");
    for part in [
        "train.seed = 3\n",
        "First prompt of arithmetic",
        "<|start|>user<|message|>",
        "<|start|>assistant",
        "reward  -1, no success",
        "weights",
        "optimizer",
        "keys and values",
        "peak",
        "`rloss check-mismatch`: ",
    ] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written");
    let form = ["--set", "interpreter.form=fence", "--set", "interpreter.instructions="];
    let fence = done(rloss().arg("check").arg(quickstart()).args(form));
    let text = String::from_utf8(fence.stdout).unwrap();
    assert!(text.contains("```python\nprint(6 * 7)\n```\n```output\n42\n```\n"), "{text}");
    // Regression test: every key of an adapter was listed, its defaults too.
    let adapter = done(rloss().arg("check").arg(quickstart()).args(["--set", "adapter.rank=4"]));
    let text = String::from_utf8(adapter.stdout).unwrap();
    assert!(text.contains("\n[adapter]\nadapter.rank = 4\n"), "{text}");
    assert!(!text.contains("adapter.alpha = "), "{text}");
}

#[test]
fn what_does_not_fit_is_refused_before_any_work_with_what_would_help() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("run");
    let large = [
        "model.architecture.hidden_size=4096",
        "model.architecture.intermediate_size=8192",
        "model.architecture.num_hidden_layers=64",
        "model.architecture.num_local_experts=128",
    ];
    for name in ["train", "rollout", "eval"] {
        let mut command = rloss();
        command.arg(name).arg(quickstart()).arg("--out").arg(&out);
        for set in large {
            command.args(["--set", set]);
        }
        let output = output(&mut command);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("of memory, but") && text.contains("remedies"), "{text}");
        assert!(!out.exists());
    }
    let mut training = rloss();
    training.arg("check").arg(quickstart());
    for set in large {
        training.args(["--set", set]);
    }
    let output = output(&mut training);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("train.freeze = [\"*.mlp.experts.*\"]"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("rloss check"), "it is this command: {}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("optimizer"), "the plan is shown");
}

#[test]
fn an_address_space_that_is_too_small_is_named() {
    // One thread: the stacks of more may be all that fits.
    let large = [
        "parallel.threads=1",
        "model.architecture.hidden_size=512",
        "model.architecture.num_hidden_layers=32",
    ];
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -v 600000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_rloss"), "check"]);
    command.arg(quickstart()).args(large.map(|set| ["--set", set]).concat());
    let output = output(&mut command);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("left under ulimit -v"), "{text}");
}

#[test]
fn a_recipe_that_trains_nothing_is_not_measured_by_what_training_it_would_take() {
    let folder = TempDir::new().unwrap();
    let sets = ["train.steps=0", "cold_start.steps=0"].map(|set| ["--set", set]).concat();
    let output = done(rloss().current_dir(folder.path()).arg("check").arg(quickstart()).args(sets));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("Peak memory of `rloss rollout`") && !text.contains("optimizer "), "{text}");
}

#[test]
fn it_shows_what_muon_computes() {
    let folder = TempDir::new().unwrap();
    let mut command = rloss();
    command.current_dir(folder.path()).arg("check").arg(quickstart());
    command.args(["--set", "train.optimizer.kind=muon"]);
    let text = String::from_utf8(done(&mut command).stdout).unwrap();
    assert!(text.contains("\nMuon: 0.4 GFLOP an update, "), "{text}");
    let several = output(command.args(["--processes", "2"]));
    let refused = stderr(&several);
    assert_eq!(several.status.code(), Some(2), "{refused}");
    let message = "train.optimizer.kind: \"muon\" needs whole matrices, and the 2 processes of this run have";
    assert!(refused.contains(message) && refused.lines().count() == 1, "{refused}");
}

/// A recipe of a task program, written in `folder`: it answers until `ill`, which it then does `instead`.
fn task_program(folder: &TempDir, ill: &str, instead: &str) -> std::path::PathBuf {
    let program = format!(
        r#"
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    ask = asked["request"]
    if ask == "{ill}":
        {instead}
    reply = {{
        "describe": {{"version": 2, "name": "echo", "turns": True}},
        "problem": {{"prompt": "Say it.", "answer": "it"}},
        "turn": {{"content": "Say it again."}},
        "reward": {{"reward": 0.25, "success": False}},
    }}[ask]
    print(json.dumps({{"request_id": asked["request_id"], **reply}}), flush=True)
"#
    );
    std::fs::write(folder.path().join("program.py"), program).unwrap();
    let recipe = folder.path().join("recipe.toml");
    let text = "[task]\nname = \"command\"\ncommand = [\"python3\", \"program.py\"]\n";
    std::fs::write(&recipe, text).unwrap();
    recipe
}

#[test]
fn it_shows_a_dialogue_with_a_task_program() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let recipe = task_program(&folder, "nothing", "pass");
    let output = done(rloss().current_dir(folder.path()).arg("check").arg(recipe));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["Say it.", "user    Say it again.", "reward  0.25, no success", "answer  \"it\""] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn a_task_program_that_dies_or_prints_garbage_is_named_at_whatever_it_was_asked() {
    if !skips::python3() {
        return;
    }
    for ask in ["describe", "problem", "turn", "reward"] {
        for (instead, told) in [
            ("sys.exit(3)", "the process ended without an answer (exit status: 3)"),
            // The end of a program takes a while after its output has closed.
            (
                "import os; sys.stdout.close(); time.sleep(0.1); os._exit(3)",
                "the process ended without an answer (exit status: 3)",
            ),
            ("print('garbage', flush=True)", "is not JSON: expected value"),
            (
                "print(json.dumps({'reward': float('nan')}), flush=True); continue",
                "is not JSON: NaN is not a number",
            ),
            (
                "print('{\"a\": [1, -Infinity]}', flush=True); continue",
                "is not JSON: Infinity is not a number",
            ),
        ] {
            let folder = TempDir::new().unwrap();
            let recipe = task_program(&folder, ask, instead);
            let output = output(rloss().current_dir(folder.path()).arg("check").arg(recipe));
            let text = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{ask}, {instead}: {text}");
            assert!(text.contains(told) && text.contains(ask), "{ask}, {instead}: {text}");
            assert_eq!(text.matches(told).count(), 1, "{ask}, {instead}: {text}");
        }
    }
}

/// Side by side, since each is waited for. The limit is long, since Python starts within it on a busy
/// machine.
#[test]
fn a_task_program_that_hangs_is_named_at_whatever_it_was_asked() {
    if !skips::python3() {
        return;
    }
    std::thread::scope(|scope| {
        for ask in ["describe", "problem", "turn", "reward"] {
            scope.spawn(move || {
                let folder = TempDir::new().unwrap();
                let recipe = task_program(&folder, ask, "time.sleep(1000)");
                let mut command = rloss();
                command.current_dir(folder.path()).args(["check", "--set", "task.command_timeout_s=10"]);
                let text = stderr(&output(command.arg(recipe)));
                assert_eq!(text.matches("no answer within 10 s").count(), 1, "{ask}: {text}");
                assert!(text.contains(ask), "{ask}: {text}");
            });
        }
    });
}

/// It was tokenised whole before it was refused.
#[test]
fn a_prompt_of_megabytes_is_refused_by_its_size() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let long = "print(json.dumps({'request_id': asked['request_id'], 'prompt': 'x' * 12_000_000, 'answer': 'it'}), flush=True); continue";
    let recipe = task_program(&folder, "problem", long);
    let output = output(rloss().current_dir(folder.path()).arg("check").arg(recipe));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("the prompt has 12000000 bytes"), "{text}");
}

#[test]
fn bug_a_training_problem_with_a_long_prompt_ended_the_run_that_drew_it() {
    let folder = TempDir::new().unwrap();
    let row = |question: &str| format!("{{\"question\": \"{question}\", \"answer\": \"#### 4\"}}\n");
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let train_file =
        format!("task.train_file={}", file("train.jsonl", row("2+2?") + &row(&"2+2?".repeat(50))));
    let validation_file = format!("task.validation_file={}", file("held_out.jsonl", row("1+3?")));
    let sets = [
        "task.name=gsm8k",
        &train_file,
        &validation_file,
        "cold_start.steps=0",
        "train.steps=3",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.prompt_tokens_max=200",
        "rollout.response_tokens_max=8",
        "model.architecture.max_position_embeddings=512",
        "eval.every_steps=0",
    ];
    let told = stderr(&done(&mut train(&folder.path().join("run"), &sets)));
    assert!(told.contains("1 training problem left out: longer than the 200 tokens that"), "{told}");
    // If no prompt fits, the error says so before any work.
    let none = [&sets[..], &["rollout.prompt_tokens_max=50"]].concat();
    let refused = output(&mut train(&folder.path().join("none"), &none));
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("more than rollout.prompt_tokens_max = 50"), "{}", stderr(&refused));
}

/// A question of `verify_if` gets its instructions when it is drawn, so none was left out.
#[test]
fn bug_a_question_too_long_for_its_instructions_ended_the_run_that_drew_it() {
    let folder = TempDir::new().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let questions = format!("{{\"question\": \"2+2?\"}}\n{{\"question\": \"{}\"}}\n", "2+2?".repeat(200));
    let row =
        "{\"prompt\": \"1+3?\", \"instruction_id_list\": [\"punctuation:no_comma\"], \"kwargs\": [{}]}\n";
    let train_file = format!("task.train_file={}", file("train.jsonl", &questions));
    let validation_file = format!("task.validation_file={}", file("held_out.jsonl", row));
    let sets = [
        "task.name=verify_if",
        &train_file,
        &validation_file,
        "cold_start.steps=0",
        "train.steps=3",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.turns_max=1",
        "rollout.prompt_tokens_max=850",
        "rollout.response_tokens_max=8",
        "model.architecture.max_position_embeddings=1024",
        "eval.every_steps=0",
    ];
    let told = stderr(&done(&mut train(&folder.path().join("run"), &sets)));
    assert!(told.contains("1 training problem left out: longer than the 850 tokens that"), "{told}");
}

/// `train` refused it, `check` did not.
#[test]
fn a_prompt_that_train_would_refuse_is_refused() {
    if !skips::python3() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let short = ["model.architecture.max_position_embeddings=8", "rollout.response_tokens_max=4"];
    for (sets, told) in [
        (&["rollout.prompt_tokens_max=5"][..], "more than rollout.prompt_tokens_max = 5"),
        (&short, "the model's context has 8, so no token can be sampled"),
        (&["cold_start.steps=2"], "has no demonstrations; name a JSONL file"),
    ] {
        let recipe = task_program(&folder, "nothing", "pass");
        let mut command = rloss();
        command.current_dir(folder.path()).args(["check", recipe.to_str().unwrap()]);
        for set in sets {
            command.args(["--set", set]);
        }
        let output = output(&mut command);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(told), "{text}");
    }
}
