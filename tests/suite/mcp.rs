//! Tools of an MCP server: declared, called, and refused if the server is wrong. `rollout/mcp.rs` has the
//! message loop.

use crate::cli::{Ended, Sets, assert_has, done, refused, rloss};
use crate::skips;
use rloss::error::BadInput;
use rloss::harmony::Message;
use rloss::metrics::Console;
use rloss::tasks::{self, McpSettings, McpTask, Task, TaskContext, TaskSettings, Transcript};
use rloss::trajectory::Outcome;
use std::process::Command;
use std::time::{Duration, Instant};

fn program() -> String {
    format!("{}/tests/fixtures/mcp_server.py", env!("CARGO_MANIFEST_DIR"))
}

fn settings(wrong: &str) -> McpSettings {
    let command = ["python3".to_owned(), program(), wrong.to_owned()].to_vec();
    McpSettings { command, processes: 2, ..McpSettings::default() }
}

fn start(settings: &McpSettings) -> anyhow::Result<McpTask> {
    let arithmetic = tasks::build(&TaskSettings::default(), &TaskContext::default()).unwrap();
    McpTask::start(arithmetic, settings, Console::silent())
}

/// The quickstart's task with the tools of the fixture's server.
pub fn task(wrong: &str) -> McpTask {
    start(&settings(wrong)).unwrap()
}

fn names(task: &McpTask) -> Vec<&str> {
    task.tools().iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect()
}

/// Calls a tool of `task`.
fn call(task: &McpTask, recipient: &str, arguments: &str) -> anyhow::Result<Option<String>> {
    let messages = [Message::call(recipient, "commentary", arguments)];
    let transcript = Transcript::new(&messages, Outcome::Finished);
    task.tool_reply(&task.training_problem(0, 0), &transcript)
}

/// Calls the tool `add`, which answers.
fn add(task: &McpTask, arguments: &str) -> String {
    call(task, "functions.add", arguments).unwrap().expect("the tool exists")
}

#[test]
fn the_tools_of_a_server_are_declared_and_called() {
    let Some(()) = skips::python3() else { return };
    let task = task("");
    assert_eq!(names(&task), ["add", "picture"], "of both pages");
    let expected = serde_json::json!({"type": "function", "function": {
        "name": "add", "description": "The sum of two numbers.", "parameters": {
            "type": "object", "required": ["a", "b"],
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "description": "Added to a."}}}}});
    assert_eq!(task.tools()[0], expected);
    for a in 0..3 {
        assert_eq!(add(&task, &format!("{{\"a\": {a}, \"b\": 40}}")), (40 + a).to_string());
    }
    let seen = "seen\n[image: image/png]\nread\n[resource: file:///b]\n[resource_link: file:///c]";
    assert_eq!(call(&task, "picture", "{}").unwrap().as_deref(), Some(seen));
    assert_eq!(call(&task, "functions.other", "{}").unwrap(), None);
    assert!(task.answers_calls() && task.uses_python(), "the task keeps its Python tool");
}

#[test]
fn what_the_model_does_wrong_is_told_to_it() {
    let Some(()) = skips::python3() else { return };
    let right = task("");
    assert_eq!(add(&right, "[1]"), "Error: the arguments are not a JSON object.");
    assert_eq!(add(&right, "{\"a\": \"1\", \"b\": 2}"), "a and b must be integers");
    // An error of the protocol, which the server reports: it goes on, and so does the conversation.
    let error = task("error");
    assert_eq!(add(&error, "{\"a\": 1, \"b\": 2}"), "Error: no such thing");
}

#[test]
fn replies_are_text_of_a_limited_length() {
    let Some(()) = skips::python3() else { return };
    assert_eq!(add(&task("structured"), "{\"a\": 1, \"b\": 2}"), "{\"sum\":3}");
    let long = start(&McpSettings { output_chars_max: 64, ..settings("long") }).unwrap();
    assert_eq!(add(&long, "{\"a\": 64, \"b\": 0}"), "9".repeat(64));
    let half = "9".repeat(32);
    assert_eq!(add(&long, "{\"a\": 100, \"b\": 0}"), format!("{half}\n[... 36 characters cut ...]\n{half}"));
    assert_eq!(add(&task("floods"), "{\"a\": 1, \"b\": 2}"), "3");
}

#[test]
fn only_the_allowed_tools_are_declared() {
    let Some(()) = skips::python3() else { return };
    let only = |tools: &[&str], wrong: &str| {
        let allowed_tools = tools.iter().map(|tool| (*tool).to_owned()).collect();
        start(&McpSettings { allowed_tools, ..settings(wrong) })
    };
    let picture = only(&["picture"], "").unwrap();
    assert_eq!(names(&picture), ["picture"]);
    assert_eq!(call(&picture, "functions.add", "{\"a\": 1, \"b\": 2}").unwrap(), None);
    // A tool that cannot be declared may stay out.
    assert_eq!(names(&only(&["add"], "name").unwrap()), ["add"]);
    let error = only(&["ad"], "").err().expect("refused");
    let told =
        "tools.mcp.allowed_tools: the server has no tool \"ad\"; did you mean \"add\"?; it has add, picture";
    assert_eq!(error.downcast_ref::<BadInput>().expect("bad input").0, told);
}

#[test]
fn a_server_that_fails_in_a_call_fails_the_trajectory_and_starts_again() {
    let Some(()) = skips::python3() else { return };
    for (wrong, words) in [
        ("dies", "tools/call: the process ended without an answer (exit status: 1)"),
        ("hangs", "tools/call: no answer within 5 s; the process was killed"),
    ] {
        let task = start(&McpSettings { timeout_s: 5.0, processes: 1, ..settings(wrong) }).unwrap();
        let error = call(&task, "functions.add", "{\"a\": 1, \"b\": 2}").unwrap_err();
        assert_eq!(format!("{error:#}"), words);
        assert!(call(&task, "picture", "{}").unwrap().is_some(), "{wrong}: it starts again");
    }
    // An error without an id can only be about the open request.
    assert_eq!(add(&task("nameless"), "{\"a\": 1, \"b\": 2}"), "Error: cannot read that");
}

/// Such a call failed its trajectory.
#[test]
fn a_process_that_ended_between_two_calls_is_replaced() {
    let Some(()) = skips::python3() else { return };
    let task = start(&McpSettings { processes: 1, ..settings("pid") }).unwrap();
    let first = add(&task, "{\"a\": 1, \"b\": 2}");
    let (stat, start) = (format!("/proc/{first}/stat"), Instant::now());
    let runs = || std::fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z "));
    while runs() {
        assert!(start.elapsed() < Duration::from_secs(60), "process {first} does not end");
        std::thread::yield_now();
    }
    assert_ne!(add(&task, "{\"a\": 1, \"b\": 2}"), first);
}

#[test]
fn many_threads_get_their_own_replies() {
    let Some(()) = skips::python3() else { return };
    let task = task("");
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let task = &task;
            scope.spawn(move || {
                for b in 0..20 {
                    let sum = add(task, &format!("{{\"a\": {}, \"b\": {b}}}", 1000 * thread));
                    assert_eq!(sum, (1000 * thread + b).to_string());
                }
            });
        }
    });
}

/// `rloss check` of `recipe` with a server.
fn check(recipe: &str, sets: &[&str]) -> Command {
    let mut command = rloss();
    let wide = ["rollout.prompt_tokens_max=2000", "model.architecture.max_position_embeddings=4096"];
    command.args(["check", recipe]).sets(wide).sets(sets);
    command
}

fn server(wrong: &str) -> String {
    format!("tools.mcp.command=[\"python3\", \"{}\", \"{wrong}\"]", program())
}

#[test]
fn both_families_declare_the_tools() {
    let Some(()) = skips::python3() else { return };
    let harmony =
        "type add = (_: {\na: number,\n// Added to a.\nb: number,\n}) => any;\n\ntype picture = () => any;";
    let chatml = "\"name\": \"add\", \"description\": \"The sum of two numbers.\", \"parameters\": {\"type\": \"object\", ";
    for (recipe, declared) in [("quickstart", harmony), ("quickstart_dense", chatml)] {
        let Ended { stdout: text, stderr: errors, .. } = done(&mut check(recipe, &[&server("")]));
        let rights = "tools.mcp.command: the server runs with your own rights, outside any sandbox";
        assert_has(&text, &[declared, rights]);
        assert_has(&errors, &["starts   tools.mcp.command = [\"python3\", "]);
        assert!(!errors.contains("INFO"), "standard error is not shown without a failure: {errors}");
    }
    let told = "warning: Harmony shows the type `any` for what a tool's schema writes with `$ref`, `anyOf` or `allOf`: find.at\n";
    assert_has(&done(&mut check("quickstart", &[&server("optional")])).stdout, &[told]);
    // ChatML shows any schema.
    done(&mut check("quickstart_dense", &[&server("choice")]));
}

#[test]
fn a_wrong_server_is_refused_before_any_work() {
    let Some(()) = skips::python3() else { return };
    let missing = "the program of an MCP server and its arguments";
    for (sets, words) in [
        (&[&*server("no_tools")][..], &["the server has no tools; name a program that speaks"][..]),
        (&[&server("empty")], &["the server has no tools"]),
        (&[&server("name")], &["tool 1, \"two words\": `name` must consist of letters", "allowed_tools"]),
        (&[&server("taken")], &["tool 1, \"python\": this is the name of the Python tool; rename the tool"]),
        (&[&server("twice")], &["tool 1, \"add\": the server lists two tools of this name"]),
        (&[&server("array")], &["tool 1, \"sum\": `inputSchema.type` must be \"object\""]),
        (
            &[&server("choice")],
            &[
                "tools.mcp.allowed_tools: tool \"sum\": its parameters are written with `oneOf`, which Harmony",
            ],
        ),
        (&[&server("prints")], &["initialize: the answer \"hello\\n\" is not JSON"]),
        (
            &[&server("revision")],
            &["the server's revision of the protocol is \"1999-12-31\"; known: [\"2025-"],
        ),
        (
            &[&server("dies_at_start")],
            &["no key was given\n", "initialize: the process ended without an answer (exit status: 1); name"],
        ),
        (
            &[&server("hangs_at_start"), "tools.mcp.timeout_s=0.5"],
            &["initialize: no answer within 0.5 s; the process was killed", "tools.mcp.timeout_s limits"],
        ),
        (&["tools.mcp.command=[\"no-such-server\"]"], &["cannot start \"no-such-server\"", "name a program"]),
        (
            &["tools.mcp.command=[\"python3\", \"no/server.py\"]"],
            &["no file no/server.py in ", "can't open file"],
        ),
        (&["tools.mcp.processes=2"], &["tools.mcp.command: missing", missing]),
        (
            &[&server(""), "task.name=agent", "task.command=[\"true\"]"],
            &["the task \"agent\" calls no tools"],
        ),
    ] {
        refused(&mut check("quickstart", sets), words);
    }
}
