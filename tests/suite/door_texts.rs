//! Texts of files and programs: a tokenizer that takes too many steps, a task's long answer, a server's long
//! description. Each is an error that names its place.

use crate::cli::{Sets, assert_has, bad_input, done, refused, rloss, scratch};
use crate::skips;
use rloss::error::BadInput;
use rloss::harmony::Message;
use rloss::metrics::Console;
use rloss::settings::Choice;
use rloss::tasks::{
    self, McpSettings, McpTask, Task, TaskContext, TaskName, TaskSettings, Transcript, clip_reply,
};
use rloss::trajectory::Outcome;
use rloss::vocabulary::{Vocabulary, embedded_json};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The embedded tokenizer of the quickstart with a pre-tokenizer that takes 2^18 steps at each `2`.
fn slow_tokenizer() -> Vec<u8> {
    let special = ["<|pad|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"];
    let words = ["user", "assistant", "system", "python", "final", "analysis", "commentary", " to=python"];
    let mut tokenizer: Value = serde_json::from_slice(&embedded_json(&special, &[], &words)).unwrap();
    let regex = r"(?=2(?:(?=)[\s\S]|[\s\S](?=)){18}\x00)|[\s\S]";
    let bytes = tokenizer["pre_tokenizer"].clone();
    let split =
        json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
    tokenizer.to_string().into_bytes()
}

/// It took 34 s, or fell back to a token a byte in silence.
#[test]
fn bug_a_text_that_cannot_be_split_is_an_error_that_names_it() {
    let vocabulary = Vocabulary::from_bytes(slow_tokenizer(), "slow.json").unwrap();
    assert_eq!(vocabulary.encode_text("2+3?").unwrap().len(), 4, "a short text takes few steps");
    for error in [
        vocabulary.encode_text(&"2+3? ".repeat(48)).unwrap_err(),
        vocabulary.encode_with_special(&"2+3? ".repeat(48)).unwrap_err(),
    ] {
        let told = &error.downcast_ref::<BadInput>().expect("bad input").0;
        assert_has(told, &["240 bytes", "begins with \"2+3? 2+3?", "too many steps", "tokenizer.json"]);
    }
}

/// Writes a model folder without weights, with the slow tokenizer.
fn slow_model(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    std::fs::create_dir(&model).unwrap();
    let config = json!({
        "model_type": "gpt_oss", "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "sliding_window": 16, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": {"rope_type": "default"}, "max_position_embeddings": 1024,
        "tie_word_embeddings": false, "eos_token_id": 6, "pad_token_id": 0
    });
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    std::fs::write(model.join("tokenizer.json"), slow_tokenizer()).unwrap();
    model
}

#[test]
fn bug_a_row_or_a_prompt_that_cannot_be_split_is_refused_by_its_number() {
    let folder = TempDir::new().unwrap();
    let model = format!("model.path={}", slow_model(folder.path()).display());
    let row = |text: &str| {
        json!({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}]})
            .to_string()
    };
    let rows = folder.path().join("rows.jsonl");
    std::fs::write(&rows, [row("2"), row(&"2+3? ".repeat(20))].join("\n")).unwrap();
    let file = format!("cold_start.train_file={}", rows.display());
    let problems = folder.path().join("problems.jsonl");
    std::fs::write(&problems, json!({"question": "2+3? ".repeat(20), "answer": "#### 5"}).to_string())
        .unwrap();
    let [train, validation] =
        ["train", "validation"].map(|split| format!("task.{split}_file={}", problems.display()));
    let run = folder.path().join("refused");
    let steps = "cold_start.steps=0";
    for (sets, places) in [
        (&[&*model, &file][..], ["rows.jsonl", "row 2"]),
        (
            &[&model, "task.name=gsm8k", &train, &validation, steps],
            ["problem ", "cannot tokenise the text of"],
        ),
    ] {
        let text = refused(rloss().args(["train", "quickstart", "--out"]).arg(&run).sets(sets), &places);
        assert_has(&text, &["too many steps"]);
    }
}

/// A task program that answers `describe` with `described`, `problem` with `problem` and others with `reply`.
fn program(folder: &TempDir, described: &str, problem: &str, reply: &str) -> [String; 2] {
    let path = folder.path().join("task.py");
    let text = format!(
        "import json, os, sys\nfor line in sys.stdin:\n    ask = json.loads(line)\n    kind = ask['request']\n    \
         reply = {{'version': 2, **{described}}} if kind == 'describe' else {problem} if kind == 'problem' else {reply}\n    \
         print(json.dumps({{'request_id': ask['request_id'], **reply}}), flush=True)\n"
    );
    std::fs::write(&path, text).unwrap();
    ["python3".to_owned(), path.display().to_string()]
}

fn open(command: &[String], console: &Console) -> anyhow::Result<Box<dyn Task>> {
    let settings = TaskSettings {
        name: TaskName::from_name("command").unwrap(),
        command: command.to_vec(),
        command_processes: Some(1),
        ..TaskSettings::default()
    };
    tasks::build(&settings, &TaskContext { console: console.clone(), ..TaskContext::default() })
}

const FINISHED: Transcript = Transcript::new(&[], Outcome::Finished);

/// 50 MB were printed, and 64 MB of small values were parsed.
#[test]
fn bug_an_answer_of_a_program_is_cut_or_refused_where_it_is_read() {
    let Some(()) = skips::python3() else { return };
    let problem = "{'prompt': 'P', 'answer': 1}";
    for (reply, words) in [
        ("{'error': 'E' * 50_000_000}", "the answer has more than 16 MiB"),
        ("{'error': 'E' * 5_000_000}", "reports an error: EEE"),
        ("{'reward': 'R' * 5_000_000}", "of the answer is \"RRR"),
        ("{'K' * 5_000_000: 1}", "unknown key `KKK"),
        ("{'rewards': {'N' * 5_000_000: 1}}", "has `NNN"),
        ("{'reward': [{}] * 300_000}", "the answer has more than 200000 values"),
    ] {
        let (folder, console) = (TempDir::new().unwrap(), Console::silent());
        let task = open(&program(&folder, "{}", problem, reply), &console).unwrap();
        let problem = task.training_problem(0, 0);
        let error = format!("{:#}", task.reward(&problem, &FINISHED).unwrap_err());
        assert!(error.contains(words) && error.len() < 5000, "{reply}: {words} in {:.300}", error);
        assert_eq!(console.failure_count(), 1);
        assert!(console.take_failure_warning().unwrap().len() < 5000);
    }
    for (described, problem, words) in [
        ("{'name': 'n' * 1_000_000}", problem, "at most 100 letters"),
        ("{'rewards': {'n' * 1_000_000: 1}}", problem, "at most 100 letters"),
        (
            "{'tools': [{'type': 'function', 'function': {'name': 'f', 'description': 'd' * 2_000_000}}]}",
            problem,
            "tool 0 has 2000",
        ),
        ("{}", "{'prompt': 'P', 'id': 'i' * 2000}", "`id` of the answer has 2000 characters"),
    ] {
        let folder = TempDir::new().unwrap();
        let error = open(&program(&folder, described, problem, "{}"), &Console::silent()).err().expect(words);
        let error = format!("{error:#}");
        assert!(error.contains(words) && error.len() < 5000, "{words} in {error:.300}");
    }
}

/// 40 MB took 4.8 GB before the refusal.
#[test]
fn bug_the_texts_of_an_mcp_server_are_cut_or_refused_where_they_are_read() {
    let Some(()) = skips::python3() else { return };
    let server = r#"
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if "id" not in ask:
        continue
    kind = ask["method"]
    tool = {"name": "t", "inputSchema": {"type": "object"}, **eval(sys.argv[1])}
    result = {"tools/list": {"result": {"tools": [tool]}}, "initialize": {"result": {"capabilities": {"tools": {}},
        "protocolVersion": "2025-06-18"}}}.get(kind) or eval(sys.argv[2])
    print(json.dumps({"jsonrpc": "2.0", "id": ask["id"], **result}), flush=True)
"#;
    let console = Console::silent();
    let start = |tool: &str, result: &str| {
        let command = ["python3", "-c", server, tool, result].map(str::to_owned).to_vec();
        let settings = McpSettings { command, processes: 1, ..McpSettings::default() };
        let arithmetic = tasks::build(&TaskSettings::default(), &TaskContext::default()).unwrap();
        McpTask::start(arithmetic, &settings, console.clone())
    };
    for (tool, words) in [
        ("{'description': 'x' * 40_000_000}", "the answer has more than 16 MiB"),
        ("{'description': 'x' * 4_000_000}", "tool 0 has 40000"),
        ("{'inputSchema': {'type': 'object', 'enum': [[]] * 300_000}}", "more than 200000 values"),
        ("{'name': 'é ' * 100_000}", "`name` must consist of letters"),
    ] {
        let error = format!("{:#}", start(tool, "{}").err().expect(words));
        assert!(error.contains(words) && error.len() < 9000, "{words} in {error:.300}");
    }
    let call = |result: &str| {
        let messages = [Message::call("functions.t", "commentary", "{}")];
        let task = start("{}", result).unwrap();
        task.tool_reply(&task.training_problem(0, 0), &Transcript { messages: &messages, ..FINISHED })
    };
    let long = call("{'error': {'code': 1, 'message': 'E' * 5_000_000}}").unwrap().unwrap();
    assert_eq!(long, clip_reply(&format!("Error: {}", "E".repeat(5_000_000)), 4096));
    let error = call("{'error': {'code': 1, 'message': 'E' * 50_000_000}}").unwrap_err();
    assert_eq!(format!("{error:#}"), "tools/call: the answer has more than 16 MiB");
    assert_eq!(console.failure_count(), 1, "an error that the server reports is a reply");
    let told = console.take_failure_warning().unwrap();
    assert!(told.contains("tool t: tools/call: the answer has more than"), "{told}");
}

/// All of it was written to the terminal.
#[test]
fn bug_the_standard_error_of_a_program_is_shown_up_to_a_limit() {
    let Some(()) = skips::python3() else { return };
    let folder = TempDir::new().unwrap();
    let floods = "[{'prompt': 'P'}, sys.stderr.write('e' * 20_000_000)][0]";
    let command = program(&folder, "{'validation_problems': 0}", floods, "{'reward': 1}");
    let recipe = folder.path().join("a.toml");
    std::fs::write(&recipe, format!("[task]\nname = \"command\"\ncommand = {command:?}\n")).unwrap();
    let errors = done(rloss().arg("check").arg(&recipe)).stderr;
    // `check` asks for several problems.
    let shown = errors.matches('e').count();
    assert!((1 << 20..32 << 20).contains(&shown), "{shown}");
    assert!(errors.contains("this request's standard error is not shown"));
}

/// Answers without ids shifted rewards to other trajectories.
#[test]
fn bug_protocol_1_is_refused_with_the_line_to_change() {
    let Some(()) = skips::python3() else { return };
    let (_folder, [path]) = scratch(["task.py"]);
    for (described, words) in [
        (
            "{'name': 'old'}",
            "write print(json.dumps({\"request_id\": ask[\"request_id\"], **reply}), flush=True)",
        ),
        ("{'name': 'old', 'request_id': ask['request_id']}", "add \"version\": 2"),
        ("{'version': 1, 'request_id': ask['request_id']}", "write \"version\": 2"),
    ] {
        let text = format!(
            "import json, sys\nfor line in sys.stdin:\n    ask = json.loads(line)\n    print(json.dumps({described}), flush=True)\n"
        );
        std::fs::write(&path, text).unwrap();
        let command = ["python3".to_owned(), path.display().to_string()];
        bad_input(open(&command, &Console::silent()), &[words]);
    }
}
