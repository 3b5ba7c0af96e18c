//! A user's own task over JSON lines: programs that work, crash, hang and speak garbage.

mod lies;

use super::*;
use crate::cli::text_of;
use crate::skips;
use rloss::error::BadInput;
use rloss::metrics::Console;
use rloss::recipe::resolve;
use rloss::run::memory::ModelCommand;
use rloss::run::startup::Startup;
use rloss::tasks::Reward;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Answers by `answer(ask)`; `started` counts the processes in a file, a byte each.
const FRAME: &str = r#"
import json, os, sys, time
def answer(ask):
    kind = ask["request"]
    if kind == "describe":
        return {"version": 2, "name": "mine", "validation_problems": 3, "functions": True, "turns": True}
    if kind == "problem":
        return {"prompt": f"{ask['split']} {ask['seed']} {ask['index']}", "answer": ask["index"]}
    if kind == "call":
        call = ask["messages"][-1]
        if call["recipient"] == "functions.long":
            return {"content": "a" * 3000 + "b" * 3000}
        return {"content": "21" if call["recipient"] == "functions.half" else None}
    if kind == "turn":
        return {"content": "And twice that?" if len(ask["messages"]) == 1 else None}
    if ask["answer"] == 1:
        os._exit(3)
    if ask["answer"] == 2:
        time.sleep(1000)
    if ask["answer"] == 4:
        return {"reward": "high"}
    if ask["answer"] == 5:
        return {"error": "no grade for this"}
    wrong = {6: {"rewrd": 1.0}, 7: {"reward": 1.0, "sucess": True}, 8: {}, 9: {"reward": 1.0, "success": "yes"}}
    if ask["answer"] in wrong:
        return wrong[ask["answer"]]
    return {"reward": 0.25 * len(ask["messages"]), "success": ask["outcome"] == "finished"}
open("started", "a").write("x")
for line in sys.stdin:
    ask = json.loads(line)
    if ask["request"] == "reward" and ask["answer"] == 3:
        print("grading...", flush=True)
    else:
        print(json.dumps({"request_id": ask["request_id"], **answer(ask)}), flush=True)
"#;

struct Script {
    folder: tempfile::TempDir,
    path: PathBuf,
}

impl Script {
    fn new(text: &str) -> Self {
        let (folder, [path]) = scratch(["task.py"]);
        let text = text.replace("\"started\"", &format!("{:?}", folder.path().join("started")));
        std::fs::write(&path, text).unwrap();
        Self { folder, path }
    }

    fn command(&self) -> [String; 2] {
        ["python3".into(), self.path.display().to_string()]
    }

    fn build(&self) -> anyhow::Result<Box<dyn Task>> {
        open(&settings(&self.command()))
    }

    /// For a program that hangs, which is waited for. It is long, since Python starts within it on a busy
    /// machine.
    fn build_with_a_limit(&self) -> anyhow::Result<Box<dyn Task>> {
        open(&TaskSettings { command_timeout_s: Some(10.0), ..settings(&self.command()) })
    }

    fn started(&self) -> usize {
        std::fs::read(self.folder.path().join("started")).unwrap().len()
    }
}

fn settings(command: &[String]) -> TaskSettings {
    TaskSettings {
        name: TaskName::from_name("command").unwrap(),
        command: command.to_vec(),
        command_processes: Some(2),
        ..Default::default()
    }
}

fn open(settings: &TaskSettings) -> anyhow::Result<Box<dyn Task>> {
    build(settings, &TaskContext { validation_problems_max: 2, ..TaskContext::default() })
}

fn transcript(messages: &[Message]) -> Transcript<'_> {
    Transcript::new(messages, Outcome::Finished)
}

#[test]
fn a_program_gives_problems_tool_replies_turns_and_rewards() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(FRAME);
    let task = script.build().unwrap();
    assert_eq!((task.name(), task.uses_python(), task.answers_calls()), ("mine", false, true));
    let set = &task.validation_sets()[0];
    assert_eq!((&*set.name, set.problems.len()), ("mine", 2), "no more than asked for");
    assert_eq!(set.problems[1].messages, [Message::user("validation 0 1")]);
    let problem = task.training_problem(7, 12);
    assert_eq!(problem.messages, [Message::user("train 7 12")]);
    assert_eq!((&*problem.id, &problem.answer), ("mine/train/12", &serde_json::json!(12)));
    assert_eq!(task.training_problem(7, 12), problem);

    let call = |to: &str| [Message::call(to, "commentary", "{}")];
    let reply = |to: &str| task.tool_reply(&problem, &transcript(&call(to))).unwrap();
    assert_eq!(reply("functions.half").as_deref(), Some("21"));
    assert_eq!(reply("functions.third"), None);
    let mut messages = vec![Message::assistant("final", "21")];
    let next = |messages: &[Message]| task.next_user_message(&problem, &transcript(messages)).unwrap();
    assert_eq!(next(&messages), Some(Message::user("And twice that?")));
    messages.extend([Message::user("And twice that?"), Message::assistant("final", "42")]);
    assert_eq!(next(&messages), None);
    let reward = task.reward(&problem, &transcript(&messages)).unwrap();
    assert_eq!(reward, Reward::new(0.75, true));
}

/// A reply had no limit, and the memory plan had no place for it.
#[test]
fn a_long_tool_reply_loses_its_middle_and_the_memory_plan_counts_the_rest() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(FRAME);
    let messages = [Message::call("functions.long", "commentary", "{}")];
    for (chars_max, kept) in [(None, 4096), (Some(64), 64)] {
        let settings = TaskSettings { command_output_chars_max: chars_max, ..settings(&script.command()) };
        let task = open(&settings).unwrap();
        let reply = task.tool_reply(&task.training_problem(7, 12), &transcript(&messages)).unwrap().unwrap();
        let cut = format!("\n[... {} characters cut ...]\n", 6000 - kept);
        assert_eq!(reply, ["a".repeat(kept / 2), cut, "b".repeat(kept / 2)].concat());

        let mut text = format!("task.name = \"command\"\ntask.command = {:?}\n", script.command());
        text += "model.architecture.max_position_embeddings = 320\n";
        chars_max.iter().for_each(|chars| text += &format!("task.command_output_chars_max = {chars}\n"));
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        assert_eq!(startup.memory_plan_input().tools.reply_chars_max, Some(kept));
    }
}

#[test]
fn a_program_that_crashes_hangs_or_speaks_garbage_fails_one_trajectory_and_goes_on() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(FRAME);
    let task = script.build_with_a_limit().unwrap();
    let cases = [
        (1, "ended without an answer", true),
        (2, "no answer within 10 s", true),
        (3, "is not JSON", true),
        (4, "`reward` of the answer is \"high\", not a number", true),
        (5, "the program reports an error: no grade for this", false),
        (6, "unknown key `rewrd` in the answer; did you mean `reward`?", true),
        (7, "unknown key `sucess` in the answer; did you mean `success`?", true),
        (8, "the answer has no `reward`", true),
        (9, "`success` of the answer is \"yes\", not a boolean", true),
    ];
    let messages = [Message::assistant("final", "x")];
    for (index, reason, restarts) in cases {
        let started = script.started();
        let problem = task.training_problem(0, index);
        let error = format!("{:#}", task.reward(&problem, &transcript(&messages)).unwrap_err());
        assert!(error.contains(reason), "{index}: {error}");
        assert!(
            error.contains("the request was {\"request\":\"reward\",\"id\":\"mine/train/"),
            "{index}: {error}"
        );
        let good = task.training_problem(0, 0);
        assert!(task.reward(&good, &transcript(&messages)).unwrap().success, "after {index}");
        assert_eq!(script.started() - started, usize::from(restarts), "after {index}");
    }
}

#[test]
fn requests_from_many_threads_are_each_answered_with_their_own() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(FRAME);
    let task = script.build_with_a_limit().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let task = &task;
            scope.spawn(move || {
                for index in (thread * 100)..(thread * 100 + 50) {
                    let problem = task.training_problem(1, index);
                    assert_eq!(problem.messages, [Message::user(format!("train 1 {index}"))]);
                    // One in fifty kills its process.
                    let crashes = index == 1;
                    let messages = vec![Message::user("x"); (index % 4) as usize];
                    match task.reward(&problem, &transcript(&messages)) {
                        Ok(reward) => assert_eq!(reward.value, 0.25 * (index % 4) as f32),
                        Err(error) => assert!(crashes || (2..=9).contains(&index), "{index}: {error:#}"),
                    }
                }
            });
        }
    });
}

#[test]
fn a_problem_is_asked_for_again_and_one_that_never_comes_fails_its_trajectories() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(&FRAME.replace(
        "    if kind == \"problem\":",
        "    if kind == \"problem\" and ask[\"index\"] == 9:\n        os._exit(1)\n    if kind == \"problem\":",
    ));
    let task = script.build().unwrap();
    let before = script.started();
    let problem = task.training_problem(0, 9);
    assert_eq!(problem.id, "mine/train/9");
    assert!(script.started() > before);
    let error = task.reward(&problem, &transcript(&[])).unwrap_err();
    assert!(error.to_string().contains("the program did not give the problem"), "{error}");
    assert_eq!(task.training_problem(0, 10).messages, [Message::user("train 0 10")]);
}

#[test]
fn a_program_that_cannot_do_the_task_is_refused_before_any_work() {
    let Some(()) = skips::python3() else { return };
    let refused = |text: &str| {
        let error = Script::new(text).build().err().expect("refused");
        error.downcast_ref::<BadInput>().expect("bad input").0.clone()
    };
    // Answers the description with `described`, and a problem with `problem`.
    let program = |described: &str, problem: &str| {
        format!(
            "import json, sys\nfor line in sys.stdin:\n    ask = json.loads(line)\n    \
             reply = {described} if ask['request'] == 'describe' else {problem}\n    \
             print(json.dumps({{'request_id': ask['request_id'], **reply}}), flush=True)"
        )
    };
    let describes = |keys: &str| program(&format!("{{'version': 2, {keys}}}"), "{}");
    let problem = |answer: &str| program("{'version': 2}", answer);
    let cases = [
        ("", "the process"),
        ("print('hello')", "is not JSON"),
        ("print([1])", "is not a JSON object"),
        ("raise ValueError", "the process"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "not UTF-8"),
        (&describes("'name': 'a b'"), "`name` of the answer"),
        (&describes("'python': 1"), "`python` of the answer is 1, not a boolean"),
        (&describes("'functoins': True"), "unknown key `functoins` in the answer; did you mean `functions`?"),
        (
            &describes("'rows': 1"),
            "unknown key `rows` in the answer; it may have version, name, validation_problems",
        ),
        ("print('{\"version\": 2}')", "the answer has no `request_id`, the id of its request; write print("),
        (&program("{}", "{}"), "no `version`; add \"version\": 2"),
        (&program("{'version': 1}", "{}"), "`version` of the answer is 1; write \"version\": 2"),
        (&program("{'version': 3}", "{}"), "`version` of the answer is 3; write \"version\": 2"),
        (
            "print('{\"version\": 2, \"request_id\": \"x\"}')",
            "the answer belongs to request \"x\", not to \"",
        ),
        (&describes("'validation_problems': '64'"), "`validation_problems` of the answer is \"64\""),
        (&describes(""), "neither `prompt`"),
        (
            &problem("{'messages': [{'role': 'assistant', 'content': '', 'tool_calls': []}]}"),
            "the answer: message 1: unknown field `tool_calls`",
        ),
        (&problem("{'prompt': 'x', 'messages': []}"), "both `prompt` and `messages`"),
    ];
    for (text, reason) in cases {
        let message = refused(text);
        for part in ["task.command: python3", reason, "docs/TASKS.md"] {
            assert!(message.contains(part), "{text:?}: {part} in {message}");
        }
    }
    // The limit is over before Python has started, or while it sleeps.
    let sleeper = Script::new("import time; time.sleep(1000)");
    let short = TaskSettings { command_timeout_s: Some(0.5), ..settings(&sleeper.command()) };
    let message = open(&short).err().expect("refused").to_string();
    assert!(message.contains("no answer within 0.5 s"), "{message}");
    let missing = open(&settings(&["no-such-program-here".into()])).err().expect("refused").to_string();
    assert!(missing.contains("cannot start \"no-such-program-here\""), "{missing}");
    assert!(open(&settings(&[])).err().expect("refused").is::<BadInput>());
    // A relative path counts from the working directory, which the message names.
    let here = std::env::current_dir().unwrap();
    for command in [&["python3", "nowhere/task.py"][..], &["python3", "task.py"], &["./task.sh"]] {
        let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
        let missing = open(&settings(&command)).err().expect("refused").to_string();
        let file = &command[command.len() - 1];
        let told = format!(
            "; no file {file} in {}, the working directory, to which paths are relative",
            here.display()
        );
        assert!(missing.ends_with(&told), "{missing}");
    }
}

/// What is written to it, for who looks later.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_first_ten_failures_are_told_as_they_are_and_the_rest_counted() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(FRAME);
    let written = Written::default();
    let settings = settings(&script.command());
    let console = Console::lines(written.clone(), Duration::ZERO, 0);
    let task =
        build(&settings, &TaskContext { validation_problems_max: 2, console, ..TaskContext::default() })
            .unwrap();
    let problem = task.training_problem(0, 4);
    for _ in 0..12 {
        task.reward(&problem, &transcript(&[Message::assistant("final", "a \"quote\"\u{1b}[2J")]))
            .unwrap_err();
    }
    let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 11, "{text}");
    let told = "warning: task.command: problem mine/train/4: `reward` of the answer is \"high\", not a number; the request was {";
    assert!(lines[0].starts_with(told), "not escaped a second time: {}", lines[0]);
    assert!(
        lines[10].contains("further failures of the task's program, its tools and workers are only counted"),
        "{}",
        lines[10]
    );
    assert!(!text.contains('\u{1b}'));
}

/// Each later answer reached the request after its own, in silence.
#[test]
fn an_answer_printed_twice_is_an_error_before_the_next_request() {
    let Some(()) = skips::python3() else { return };
    let answer = "json.dumps({\"request_id\": ask[\"request_id\"], **answer(ask)})";
    let twice = &format!("print({answer} + \"\\n\" + {answer}, flush=True)");
    let text = FRAME.replace(
        "if ask[\"request\"] == \"reward\" and ask[\"answer\"] == 3:",
        "if ask[\"request\"] == \"turn\":",
    );
    let script = Script::new(&text.replace("print(\"grading...\", flush=True)", twice));
    let settings = TaskSettings { command_processes: Some(1), ..settings(&script.command()) };
    let task = open(&settings).unwrap();
    let messages = [Message::assistant("final", "x")];
    let problem = task.training_problem(0, 0);
    let next = || task.next_user_message(&problem, &transcript(&messages));
    assert_eq!(next().unwrap(), Some(Message::user("And twice that?")));
    let error = format!("{:#}", task.reward(&problem, &transcript(&messages)).unwrap_err());
    assert_has(&error, &["printed \"{\\\"request_id\\\": ", "without a request"]);
    assert_eq!(
        task.reward(&problem, &transcript(&messages)).unwrap().value,
        0.25,
        "of a process started anew"
    );
}

/// Whether a process runs in whose command line `text` stands.
fn runs(text: &str) -> bool {
    let commands = std::fs::read_dir("/proc").unwrap().flatten();
    commands
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok())
        .any(|command| command.contains(text))
}

#[test]
fn a_hanging_program_goes_with_its_children_and_none_outlives_the_task() {
    let Some(()) = skips::python3() else { return };
    let script = Script::new(&FRAME.replace(
        "        time.sleep(1000)",
        "        import subprocess; subprocess.run([\"sleep\", \"98.7651\"])",
    ));
    let task = script.build_with_a_limit().unwrap();
    let hanging = task.training_problem(0, 2);
    task.reward(&hanging, &transcript(&[])).unwrap_err();
    let path = script.path.display().to_string();
    crate::interpreter::wait_until("the program's child ends with it", || !runs("98.7651"));
    task.training_problem(0, 0);
    assert!(runs(&path));
    drop(task);
    assert!(!runs(&path));
}

/// Returns the task of a program in this repository.
fn program_at(path: &str) -> Box<dyn Task> {
    let program = text_of(Path::new(env!("CARGO_MANIFEST_DIR")).join(path));
    Script::new(&program).build().unwrap()
}

#[test]
fn the_program_that_init_writes_works() {
    let Some(()) = skips::python3() else { return };
    let task = program_at("src/commands/init/task.py");
    assert_eq!((task.name(), task.validation_sets()[0].problems.len()), ("doubling", 2));
    let problem = task.training_problem(3, 4);
    assert_ne!(problem, task.training_problem(3, 5));
    for (text, success) in [(problem.answer.to_string(), true), ("-1".into(), false)] {
        let messages = [Message::assistant("analysis", "so"), Message::assistant("final", text)];
        let value = f32::from(u8::from(success));
        assert_eq!(task.reward(&problem, &transcript(&messages)).unwrap(), Reward::new(value, success));
    }
}

#[test]
fn the_example_with_a_tool_and_named_rewards_works() {
    let Some(()) = skips::python3() else { return };
    let task = program_at("examples/tasks/shop.py");
    assert!(task.answers_calls() && !task.uses_python());
    assert_eq!(task.tools()[0]["function"]["name"], "price");
    let problem = task.training_problem(0, 1);
    let call = |to: &str, text: &str| {
        task.tool_reply(&problem, &transcript(&[Message::call(to, "commentary", text)])).unwrap()
    };
    assert_eq!(call("functions.price", "{\"fruit\": \"pear\"}").as_deref(), Some("4"));
    assert!(call("price", "pear").unwrap().starts_with("Error: "));
    assert_eq!(call("functions.weight", "{}"), None);
    for (text, right, calls_answered) in [(problem.answer.to_string(), 1.0, 1), ("0".into(), 0.0, 0)] {
        let messages = [Message::assistant("final", text)];
        let asked = calls_answered as f32;
        let said = Transcript { calls_answered, ..transcript(&messages) };
        let named = [("right".to_owned(), right), ("asked".to_owned(), asked)].into();
        let expected = Reward { value: right + 0.2 * asked, success: right > 0.0, named };
        assert_eq!(task.reward(&problem, &said).unwrap(), expected);
    }
}

#[test]
fn named_rewards_are_those_that_describe_weighs() {
    let Some(()) = skips::python3() else { return };
    let weighed = FRAME.replace("\"turns\": True}", "\"turns\": True, \"rewards\": {\"a\": 2, \"b\": -0.5}}");
    let of = |reward: &str| {
        let text = weighed.replace("{\"rewrd\": 1.0}", reward);
        let task = Script::new(&text).build().unwrap();
        task.reward(&task.training_problem(0, 6), &transcript(&[]))
    };
    let named = [("a".to_owned(), 3.0), ("b".to_owned(), 4.0)].into();
    assert_eq!(
        of("{\"rewards\": {\"a\": 3, \"b\": 4}}").unwrap(),
        Reward { value: 4.0, success: true, named }
    );
    let booleans = of("{\"rewards\": {\"a\": True, \"b\": False}}").unwrap().named;
    assert_eq!(booleans, [("a".to_owned(), 1.0), ("b".to_owned(), 0.0)].into());
    for (reward, reason) in [
        ("{\"rewards\": {\"a\": 3}}", "`rewards` of the answer has no `b`"),
        ("{\"reward\": 1}", "`rewards` of the answer has no `a`"),
        (
            "{\"rewards\": {\"c\": 3, \"b\": 4}}",
            "has `c`, which has no weight in `describe`; did you mean `a`",
        ),
        ("{\"rewards\": {\"a\": 3, \"b\": 4, \"c\": 5}}", "`rewards` of the answer has `c`; give its weight"),
        ("{\"rewards\": {\"a\": 3, \"b\": \"x\"}}", "not an object of numbers, such as {\"right\": 1.0}"),
        ("{\"reward\": 1, \"rewards\": {\"a\": 3, \"b\": 4}}", "has both `reward` and `rewards`"),
    ] {
        let error = format!("{:#}", of(reward).unwrap_err());
        assert!(error.contains(reason), "{reward}: {error}");
    }
}
