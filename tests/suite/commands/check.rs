//! `rloss check`: what a recipe comes to, and memory that does not suffice.

use super::*;
use crate::skips;

#[test]
fn it_shows_recipe_prompt_and_memory_and_does_nothing() {
    let folder = TempDir::new().unwrap();
    let check = |arguments: &[&str]| {
        done(rloss().current_dir(&folder).args(["check", "quickstart"]).args(arguments)).stdout
    };
    let text = check(&["--set", "train.seed=3"]);
    assert!(
        !text.contains("[model.architecture]") && !text.contains("clip_low"),
        "only what differs: {text}"
    );
    assert_has(&check(&["--all"]), &["[model.architecture]", "clip_low = 0.2"]);
    assert_has(&text, &["train.seed = 3\n", "First prompt of arithmetic", "<|start|>user<|message|>"]);
    assert_has(&text, &["<|start|>assistant", "reward  -1, no success", "weights", "optimizer"]);
    assert_has(&text, &["keys and values", "peak", "`rloss check-mismatch`: "]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written");
    let fence = check(&["--set", "interpreter.form=fence", "--set", "interpreter.instructions="]);
    assert_has(&fence, &["```python\nprint(6 * 7)\n```\n```output\n42\n```\n"]);
    // Regression test: every key of an adapter was listed, its defaults too.
    let text = check(&["--set", "adapter.rank=4"]);
    assert_has(&text, &["\n[adapter]\nadapter.rank = 4\n"]);
    assert!(!text.contains("adapter.alpha = "), "{text}");
    // A recipe that trains nothing is not measured by what training it would take.
    let text = check(&["--set", "train.steps=0", "--set", "cold_start.steps=0"]);
    assert!(text.contains("Peak memory of `rloss rollout`") && !text.contains("optimizer "), "{text}");
}

#[test]
fn what_does_not_fit_is_refused_before_any_work_with_what_would_help() {
    let (_folder, [out]) = scratch(["run"]);
    let large = [
        "model.architecture.hidden_size=4096",
        "model.architecture.intermediate_size=8192",
        "model.architecture.num_hidden_layers=64",
        "model.architecture.num_local_experts=128",
    ];
    for name in ["train", "rollout", "eval"] {
        let mut command = rloss();
        let words = ["of memory, but", "remedies"];
        refused(command.args([name, "quickstart", "--out"]).arg(&out).sets(large), &words);
        assert!(!out.exists(), "{name}");
    }
    let output = output(rloss().args(["check", "quickstart"]).sets(large));
    assert_eq!(output.code, Some(2));
    assert_has(&output.stderr, &["train.freeze = [\"*.mlp.experts.*\"]"]);
    assert!(!output.stderr.contains("rloss check"), "it is this command: {}", output.stderr);
    assert!(output.stdout.contains("optimizer"), "the plan is shown");
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
    command.arg(quickstart()).sets(large);
    refused(&mut command, &["left under ulimit -v"]);
}

#[test]
fn it_shows_what_muon_computes() {
    let mut command = rloss();
    command.args(["check", "quickstart", "--set", "train.optimizer.kind=muon"]);
    assert_has(&done(&mut command).stdout, &["\nMuon: 0.4 GFLOP an update, "]);
    let refused = refused(command.args(["--processes", "2"]), &[]);
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
    fs::write(folder.path().join("program.py"), program).unwrap();
    let recipe = folder.path().join("recipe.toml");
    let text = "[task]\nname = \"command\"\ncommand = [\"python3\", \"program.py\"]\n";
    fs::write(&recipe, text).unwrap();
    recipe
}

#[test]
fn it_shows_a_dialogue_with_a_task_program() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let recipe = task_program(&folder, "nothing", "pass");
    let text = done(rloss().current_dir(folder.path()).arg("check").arg(recipe)).stdout;
    assert_has(&text, &["Say it.", "user    Say it again.", "reward  0.25, no success", "answer  \"it\""]);
}

#[test]
fn a_task_program_that_dies_or_prints_garbage_is_named_at_whatever_it_was_asked() {
    let Some(()) = skips::python3() else { return };
    for ask in ["describe", "problem", "turn", "reward"] {
        let ended = "the process ended without an answer (exit status: 3)";
        let not_a_number = "print(json.dumps({'reward': float('nan')}), flush=True); continue";
        for (instead, told) in [
            ("sys.exit(3)", ended),
            // The end of a program takes a while after its output has closed.
            ("import os; sys.stdout.close(); time.sleep(0.1); os._exit(3)", ended),
            ("print('garbage', flush=True)", "is not JSON: expected value"),
            (not_a_number, "is not JSON: NaN is not a number"),
            (
                "print('{\"a\": [1, -Infinity]}', flush=True); continue",
                "is not JSON: Infinity is not a number",
            ),
        ] {
            let folder = TempDir::new().unwrap();
            let recipe = task_program(&folder, ask, instead);
            let output = output(rloss().current_dir(folder.path()).arg("check").arg(recipe));
            let text = output.stderr;
            assert_eq!(output.code, Some(2), "{ask}, {instead}: {text}");
            assert!(text.contains(told) && text.contains(ask), "{ask}, {instead}: {text}");
            assert_eq!(text.matches(told).count(), 1, "{ask}, {instead}: {text}");
        }
    }
}

/// Side by side, since each is waited for. The limit is long, since Python starts within it on a busy
/// machine.
#[test]
fn a_task_program_that_hangs_is_named_at_whatever_it_was_asked() {
    let Some(()) = skips::python3() else { return };
    std::thread::scope(|scope| {
        for ask in ["describe", "problem", "turn", "reward"] {
            scope.spawn(move || {
                let folder = TempDir::new().unwrap();
                let recipe = task_program(&folder, ask, "time.sleep(1000)");
                let mut command = rloss();
                command.current_dir(folder.path()).args(["check", "--set", "task.command_timeout_s=10"]);
                let text = output(command.arg(recipe)).stderr;
                assert_eq!(text.matches("no answer within 10 s").count(), 1, "{ask}: {text}");
                assert!(text.contains(ask), "{ask}: {text}");
            });
        }
    });
}

/// It was tokenised whole before it was refused.
#[test]
fn a_prompt_of_megabytes_is_refused_by_its_size() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let long = "print(json.dumps({'request_id': asked['request_id'], 'prompt': 'x' * 12_000_000, 'answer': 'it'}), flush=True); continue";
    let recipe = task_program(&folder, "problem", long);
    refused(rloss().current_dir(folder.path()).arg("check").arg(recipe), &["the prompt has 12000000 bytes"]);
}

/// Trains on the rows `train_rows` of the task `name`, with prompts of up to `tokens` tokens.
fn train_on(folder: &TempDir, name: &str, [train_rows, held_out]: [&str; 2], tokens: u64) -> Command {
    let file = |split: &str, text: &str| {
        let path = folder.path().join(split).with_extension("jsonl");
        fs::write(&path, text).unwrap();
        format!("task.{split}_file={}", path.display())
    };
    let mut command =
        train(&folder.path().join("run"), &[&file("train", train_rows), &file("validation", held_out)]);
    command.sets([format!("task.name={name}"), format!("rollout.prompt_tokens_max={tokens}")]).sets([
        "cold_start.steps=0",
        "train.steps=3",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.response_tokens_max=8",
        "eval.every_steps=0",
    ]);
    command
}

#[test]
fn bug_a_training_problem_with_a_long_prompt_ended_the_run_that_drew_it() {
    let row = |question: &str| format!("{{\"question\": \"{question}\", \"answer\": \"#### 4\"}}\n");
    let rows = [row("2+2?") + &row(&"2+2?".repeat(50)), row("1+3?")];
    let run = |tokens| {
        let folder = TempDir::new().unwrap();
        let mut command = train_on(&folder, "gsm8k", [&rows[0], &rows[1]], tokens);
        output(command.sets(["model.architecture.max_position_embeddings=512"]))
    };
    let told = run(200);
    assert_eq!(told.code, Some(0), "{}", told.stderr);
    assert_has(&told.stderr, &["1 training problem left out: longer than the 200 tokens that"]);
    // If no prompt fits, the error says so before any work.
    let told = run(50);
    assert_eq!(told.code, Some(2), "{}", told.stderr);
    assert_has(&told.stderr, &["more than rollout.prompt_tokens_max = 50"]);
}

/// A question of `verify_if` gets its instructions when it is drawn, so none was left out.
#[test]
fn bug_a_question_too_long_for_its_instructions_ended_the_run_that_drew_it() {
    let folder = TempDir::new().unwrap();
    let questions = format!("{{\"question\": \"2+2?\"}}\n{{\"question\": \"{}\"}}\n", "2+2?".repeat(200));
    let row =
        "{\"prompt\": \"1+3?\", \"instruction_id_list\": [\"punctuation:no_comma\"], \"kwargs\": [{}]}\n";
    let mut command = train_on(&folder, "verify_if", [&questions, row], 850);
    command.sets(["rollout.turns_max=1", "model.architecture.max_position_embeddings=1024"]);
    ended(&mut command, 0, &["1 training problem left out: longer than the 850 tokens that"]);
}

/// `train` refused it, `check` did not.
#[test]
fn a_prompt_that_train_would_refuse_is_refused() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let short = ["model.architecture.max_position_embeddings=8", "rollout.response_tokens_max=4"];
    for (sets, told) in [
        (&["rollout.prompt_tokens_max=5"][..], "more than rollout.prompt_tokens_max = 5"),
        (&short, "the model's context has 8, so no token can be sampled"),
        (&["cold_start.steps=2"], "has no demonstrations; name a JSONL file"),
    ] {
        let recipe = task_program(&folder, "nothing", "pass");
        refused(rloss().current_dir(&folder).arg("check").arg(recipe).sets(sets), &[told]);
    }
}
