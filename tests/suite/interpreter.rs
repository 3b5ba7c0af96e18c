//! The Python tool: what the model reads, limits, hostile code, and workers that die.

mod attacks;
mod cpython;
mod cpython_attacks;
mod cpython_scratch;

use crate::cli::{assert_has, scratch, text_of};
use crate::skips;
use rloss::interpreter::{
    EmbeddedInterpreter, Interpreter, InterpreterSettings, InterpreterState, Reply, SessionId,
};
use rloss::metrics::Console;
use rloss::trajectory::CallOutcome::{self, *};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Limits that a busy machine does not reach: a test of a limit sets its own.
fn settings() -> InterpreterSettings {
    InterpreterSettings {
        time_limit_s: 60.0,
        wall_clock_s: 120.0,
        workers: 2,
        output_chars_max: 4096,
        ..InterpreterSettings::default()
    }
}

fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_rloss"))
}

fn embedded(change: impl FnOnce(&mut InterpreterSettings)) -> EmbeddedInterpreter {
    let mut settings = settings();
    change(&mut settings);
    EmbeddedInterpreter::new(settings, program()).expect("this machine must be able to confine a worker")
}

fn call(interpreter: &dyn Interpreter, code: &str) -> Reply {
    interpreter.call(SessionId(0), code)
}

#[track_caller]
fn expect(interpreter: &dyn Interpreter, code: &str, outcome: CallOutcome, text: &str) {
    let reply = call(interpreter, code);
    assert_eq!((reply.outcome, reply.text.as_str()), (outcome, text), "{code}");
}

#[test]
fn the_model_reads_output_and_the_last_value() {
    let python = embedded(|_| {});
    expect(&python, "7*12-5", Answered, "79");
    expect(&python, "print('a')\nprint('b', 2)", Answered, "a\nb 2");
    expect(&python, "print('a', end='')\n'b'", Answered, "a\n'b'");
    expect(&python, "x = [i * i for i in range(4)]\nx", Answered, "[0, 1, 4, 9]");
    expect(&python, "```python\nimport math\nmath.factorial(20)\n```", Answered, "2432902008176640000");
    expect(&python, "x = 1", Answered, "(no output: use print() to see a value)");
    expect(&python, "", MalformedCall, "(no code to run)");
    expect(&python, "```python\n```", MalformedCall, "(no code to run)");
    // Exceptions of the code's own are not taken for the limits'.
    for name in ["TimeoutError", "MemoryError"] {
        let reply = call(&python, &format!("raise {name}('mine')"));
        assert_eq!(reply.outcome, Raised);
        assert_eq!(reply.text, format!("{name}: mine"));
    }
}

#[test]
fn an_exception_is_one_line_after_the_output() {
    let python = embedded(|_| {});
    let reply = call(&python, "print('before')\n1/0");
    assert_eq!(reply.outcome, Raised);
    assert_eq!(reply.text, "before\nZeroDivisionError: division by zero");
    let reply = call(&python, "def f(:\n  pass");
    assert_eq!(reply.outcome, Raised);
    assert!(reply.text.starts_with("SyntaxError: "), "{}", reply.text);
    assert!(!reply.text.contains('\n'), "{}", reply.text);
}

#[test]
fn long_output_is_cut_in_the_middle() {
    let python = embedded(|s| s.output_chars_max = 20);
    expect(
        &python,
        "for i in range(1000): print(i)",
        Answered,
        "0\n1\n2\n3\n4\n\n[... 3870 characters cut ...]\n7\n998\n999",
    );
    let python = embedded(|_| {});
    let reply = call(&python, "line = 'x' * 1000000\nfor i in range(1000): print(line)\n'end'");
    assert_eq!(reply.outcome, Answered, "{}", reply.text);
    assert!(reply.text.contains("\n[... 999996909 characters cut ...]\n"), "{}", reply.text);
    assert!(reply.text.ends_with("x\n'end'") && reply.text.len() < 4200);
}

#[test]
fn variables_live_as_long_as_the_settings_say() {
    let fresh = embedded(|_| {});
    assert_eq!(call(&fresh, "x = 5").outcome, Answered);
    assert!(call(&fresh, "x").text.ends_with("NameError: name 'x' is not defined"));

    let python = embedded(|s| {
        s.state = InterpreterState::Trajectory;
        s.workers = 3;
    });
    let (a, b) = (SessionId(1), SessionId(2));
    python.call(a, "import math\nx = [1]\ny = x\ndef f(n): return n + len(x)");
    python.call(b, "x = 'b'");
    python.call(a, "x.append(math.pi)");
    assert_eq!(python.call(a, "(f(1), y is x, y)").text, "(3, True, [1, 3.141592653589793])");
    assert_eq!(python.call(b, "x").text, "'b'");
    assert_eq!(python.call(a, "x.append(0); 1/0").outcome, Raised);
    assert_eq!(python.call(a, "len(y)").text, "3", "effects before an exception stay");
    python.close(a);
    assert_eq!(python.call(a, "x").outcome, Raised);

    // Values of every kind come through the store as they were.
    let c = SessionId(3);
    let kinds = "import math, re, datetime
def counter():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step
class Point:
    def __init__(self, x): self.x = x
    def double(self): return self.x * 2
step = counter(); step()
p = Point(21)
values = [2 ** 200, -0.0, float('nan'), 'ä\\0', b'\\xff', (1, (2,)), {3: {4}}, frozenset([5]), None, True, range(3)]
it = iter([7, 8, 9]); next(it)
square = lambda v: v * v
found = re.match('(a+)', 'aab')
when = datetime.date(2025, 1, 2)
";
    assert_eq!(python.call(c, kinds).outcome, Answered, "{}", python.call(c, kinds).text);
    let shown = "(step(), p.double(), values, next(it), square(3), found.group(1), when, math.sqrt(16))";
    let alone = call(&fresh, &format!("{kinds}\n{shown}"));
    assert_eq!(alone.outcome, Answered, "{}", alone.text);
    assert_eq!(python.call(c, shown).text, alone.text);
}

#[test]
fn a_call_that_was_stopped_leaves_its_session_as_it_was() {
    let python = embedded(|s| {
        s.state = InterpreterState::Trajectory;
        s.time_limit_s = 0.5;
        s.wall_clock_s = 6.0;
    });
    assert_eq!(call(&python, "x = 1").outcome, Answered);
    let undone = "Variables are as they were before this call.";
    for (code, outcome) in [
        ("x = 2\nwhile True: pass", TimeLimit),
        ("x = 2\n10**10**8", ToolTimeout),
        ("x = 2\ny = [0] * 10**9", MemoryLimit),
    ] {
        let reply = call(&python, code);
        assert_eq!(reply.outcome, outcome, "{code}: {}", reply.text);
        assert!(reply.text.ends_with(undone), "{}", reply.text);
        expect(&python, "x", Answered, "1");
    }
    let reply = call(&python, "big = 'x' * 5000000");
    assert!(reply.text.ends_with("(The variables could not be kept: the next call starts afresh.)"));
    assert_eq!(call(&python, "x").outcome, Raised);
}

#[test]
fn hungry_and_endless_code_is_stopped_and_counted() {
    let python = embedded(|s| {
        s.time_limit_s = 0.5;
        s.wall_clock_s = 6.0;
    });
    let time = "TimeoutError: the code ran longer than 0.5 s and was stopped.";
    let wall = "TimeoutError: no answer within 6 s; the interpreter was killed.";
    for (code, outcome, text) in [
        ("while True: pass", TimeLimit, time),
        ("while True: print(1)", TimeLimit, time),
        ("try:\n  while True: pass\nexcept BaseException:\n  print('caught')", TimeLimit, time),
        ("10**10**8", ToolTimeout, wall),
        // Each comparison doubles at every level, inside the interpreter's own code.
        ("x, y = [1], [1]\nfor i in range(60): x, y = [x, x], [y, y]\nx == y", ToolTimeout, wall),
    ] {
        expect(&python, code, outcome, text);
        expect(&python, "1 + 1", Answered, "2");
    }
    let python = embedded(|s| s.memory_mib = 128);
    let memory = "MemoryError: the code needed more than 128 MiB and was stopped.";
    for code in [
        "x = 'a' * 10**9",
        "x = [0] * 10**9",
        // More than any memory has.
        "x = [0] * 10**19",
        "x = []\nwhile True: x.append('ab' * 100000)",
        "x = 'ab'\nwhile True: x += x",
        "print('x' * 10**9)",
        "x = {}\ni = 0\nwhile True:\n  i += 1\n  x[i] = [i]",
        "try:\n  x = [0] * 10**9\nexcept BaseException:\n  print('caught')",
    ] {
        expect(&python, code, MemoryLimit, memory);
        expect(&python, "1 + 1", Answered, "2");
    }
    // The limit is of what is held, not of what has passed: a worker that served large calls serves more
    // of them.
    for _ in 0..30 {
        expect(&python, "x = 'a' * (60 << 20)\nlen(x)", Answered, "62914560");
    }
}

#[test]
fn a_huge_separator_ends_by_a_limit_with_a_reply_that_says_so() {
    let python = embedded(|s| {
        s.time_limit_s = 0.5;
        s.wall_clock_s = 6.0;
    });
    let reply = call(&python, "print(*range(10**6), sep='x' * 10**6)");
    assert!(
        matches!(reply.outcome, TimeLimit | ToolTimeout | MemoryLimit),
        "{:?}: {}",
        reply.outcome,
        reply.text
    );
    assert!(reply.text.contains("Error: "), "{}", reply.text);
    expect(&python, "1 + 1", Answered, "2");
}

#[test]
fn odd_code_gets_an_answer_and_the_worker_lives() {
    let python = embedded(|s| s.workers = 1);
    let sum = format!("1{}", "+1".repeat(100_000));
    expect_odd(
        &python,
        &[
            ("def f(n): return f(n + 1)\nf(0)", Raised),
            (&sum, Raised),
            ("x = []\nfor i in range(100000): x = [x]\nx", Answered),
            ("\\", Raised),
            ("exit()", Raised),
            ("raise SystemExit", Raised),
        ],
    );
}

/// Runs odd code, and `more`, with its outcomes: it gets an answer, and so does the call after it.
fn expect_odd(python: &dyn Interpreter, more: &[(&str, CallOutcome)]) {
    let nested = |open: &str, close: &str| format!("{}1{}", open.repeat(100_000), close.repeat(100_000));
    let deep = [("[", "]"), ("(", ")"), ("-", ""), ("lambda: ", "")].map(|(open, close)| nested(open, close));
    let both = [
        ("x = []\nx.append(x)\nx", Answered),
        ("'\\ud800'", Answered),
        ("print('\\ud800')", Answered),
        ("print('a\\0b')", Answered),
        ("x = 1\0", Raised),
        ("\u{feff}1\r\n2\u{2028}3", Raised),
        ("😀", Raised),
        ("'''", Raised),
        ("import sys\nsys.exit(3)", Raised),
        ("await f()", Raised),
        ("yield 1", Raised),
    ];
    let deep = deep.iter().map(|code| (&**code, Raised));
    for (code, outcome) in deep.chain(both).chain(more.iter().copied()) {
        let reply = call(python, code);
        let code: String = code.chars().take(60).collect();
        assert_eq!(reply.outcome, outcome, "{code:?}: {}", reply.text);
        expect(python, "1 + 1", Answered, "2");
    }
}

#[test]
fn python_code_reaches_nothing_outside() {
    let (_folder, [secret]) = scratch(["secret.txt"]);
    std::fs::write(&secret, "a-secret-text").unwrap();
    let python = embedded(|_| {});
    for code in [
        "print(open('PATH').read())",
        "open('PATH', 'w').write('gone')",
        "from pathlib import Path\nprint(Path('PATH').read_text())",
        "import os\nprint(os.environ)",
        "import os\nos.system('cat PATH')",
        "import os\nos.listdir('/')",
        "import subprocess",
        "import socket",
        "import ctypes",
        "__import__('os').system('id')",
        "import time\ntime.sleep(1)",
    ] {
        let reply = call(&python, &code.replace("PATH", secret.to_str().unwrap()));
        assert_eq!(reply.outcome, Raised, "{code}: {}", reply.text);
        assert!(!reply.text.contains("a-secret-text"), "{code}");
    }
    assert_eq!(text_of(&secret), "a-secret-text");
}

#[test]
fn the_reply_is_a_function_of_the_code() {
    let codes = [
        "class A: pass\nprint(A(), id(A()), hash('a'))",
        "print({'b', 'a', 'c', 3, 1}, lambda: 0, print)",
        "def f(): pass\nf",
        "import datetime\ndatetime.datetime.now()",
        "import random\nrandom.random()",
        "import time\ntime.time()",
        "import uuid\nuuid.uuid4()",
        "1/0",
    ];
    let texts = || {
        let python = embedded(|s| s.state = InterpreterState::Trajectory);
        codes.map(|code| call(&python, code).text)
    };
    assert_eq!(texts(), texts());
}

#[test]
fn bad_settings_are_refused_by_key() {
    for (change, key) in [
        ((|s| s.workers = 0) as fn(&mut InterpreterSettings), "`workers` (0)"),
        (|s| s.memory_mib = 1, "`memory_mib` (1)"),
        (|s| s.time_limit_s = 900.0, "`time_limit_s` (900)"),
        (|s| s.time_limit_s = f64::NAN, "`time_limit_s` (NaN)"),
        (|s| s.wall_clock_s = f64::INFINITY, "`wall_clock_s` (inf)"),
    ] {
        let mut settings = settings();
        change(&mut settings);
        let error = EmbeddedInterpreter::new(settings, program()).err().expect("refused");
        assert!(error.is::<rloss::error::BadInput>() && error.to_string().contains(key), "{error:#}");
    }
    let missing = EmbeddedInterpreter::new(settings(), "/nonexistent/rloss".into()).err().expect("refused");
    assert!(format!("{missing:#}").contains("/nonexistent/rloss"));
    assert!(EmbeddedInterpreter::new(settings(), "/bin/true".into()).is_err(), "not a worker");
}

/// Processes whose parent is `parent`: process id → (state letter, command line).
fn children(parent: u32) -> BTreeMap<u32, (char, String)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(id) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        if fields[1] == parent.to_string() {
            let command = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            found.insert(id, (fields[0].chars().next().unwrap(), command.replace('\0', " ")));
        }
    }
    found
}

fn workers_of(parent: u32) -> Vec<u32> {
    let is_worker = |(_, command): &(char, String)| command.contains("interpreter-worker");
    children(parent).into_iter().filter(|(_, c)| is_worker(c)).map(|(id, _)| id).collect()
}

fn alive(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Gives up after minutes, which no machine is stalled for.
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(300), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs the ignored test `name` of this binary in a process of its own, with `setting` in its environment.
fn own_process(name: &str, setting: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        &format!("interpreter::{name}"),
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.env("RLOSS_TEST_CHILD", setting);
    command
}

/// Runs the ignored test `name` of this binary alone, prints its throughput and notes what it skipped.
fn run_alone(name: &str) {
    let output = own_process(name, "").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    text.lines().filter(|line| line.contains("calls/s")).for_each(|line| eprintln!("{line}"));
    text.lines().filter_map(|line| line.strip_prefix("skipped: ")).for_each(|reason| skips::note(reason, ""));
}

/// What the open descriptors of process `id` lead to; `None`, said, where only root may look.
fn descriptors_of(id: u32) -> Option<Vec<String>> {
    // The processes hide from others of their own user.
    let Ok(entries) = std::fs::read_dir(format!("/proc/{id}/fd")) else {
        println!("skipped: the processes' descriptors can be seen by root alone (run the tests as root)");
        return None;
    };
    let link = |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_link(entry.unwrap().path()).unwrap();
    Some(entries.map(|entry| link(entry).to_string_lossy().into_owned()).collect())
}

/// 1000 calls from four threads, each answered right.
fn calls_per_second(python: &impl Interpreter) -> f64 {
    let start = Instant::now();
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let answered = &answered;
            scope.spawn(move || {
                for i in 0..250 {
                    let reply = python.call(SessionId(thread), &format!("{thread} * 1000 + {i}"));
                    assert_eq!(reply.text, format!("{}", thread * 1000 + i));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(answered.into_inner(), 1000);
    1000.0 / start.elapsed().as_secs_f64()
}

/// False when such a test was started by hand.
fn in_own_process() -> bool {
    std::env::var_os("RLOSS_TEST_CHILD").is_some()
}

/// The tests that count processes or descriptors need a process without other tests.
#[test]
fn workers_die_are_replaced_and_leave_nothing_behind() {
    run_alone("alone_workers_come_and_go");
}

#[test]
#[ignore = "run by workers_die_are_replaced_and_leave_nothing_behind in a process of its own"]
fn alone_workers_come_and_go() {
    if !in_own_process() {
        return;
    }
    let own_id = std::process::id();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let console = Console::silent();
    let python = embedded(|s| s.workers = 2).reporting_to(&console);
    assert_eq!(workers_of(own_id).len(), 1, "started lazily");

    // Killed from outside in the middle of a call.
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| call(&python, "while True: pass"));
        std::thread::sleep(Duration::from_millis(200));
        let victim = workers_of(own_id)[0];
        assert!(!busy.is_finished());
        // SAFETY: a plain system call on a process this test started.
        assert_eq!(unsafe { libc::kill(victim.cast_signed(), libc::SIGKILL) }, 0);
        let reply = busy.join().unwrap();
        assert_eq!(reply.outcome, WorkerDied);
        assert_eq!(reply.text, "InterpreterError: the interpreter died while running the code.");
    });
    expect(&python, "2 + 2", Answered, "4");

    // Killed while idle: the next call says so, the one after it works.
    for _ in 0..5 {
        for id in workers_of(own_id) {
            // SAFETY: as above.
            unsafe { libc::kill(id.cast_signed(), libc::SIGKILL) };
        }
        assert_eq!(call(&python, "2 + 2").outcome, WorkerDied);
        expect(&python, "2 + 2", Answered, "4");
    }
    let told = console.take_failure_warning().expect("six failures");
    assert_has(&told, &["so far: 6; the last one: Python tool: ", "killed from outside"]);
    assert_eq!(console.take_failure_warning(), None, "told once");

    println!("1000 calls over 4 threads, 2 workers: {:.0} calls/s", calls_per_second(&python));
    let workers = workers_of(own_id);
    assert_eq!(workers.len(), 2);
    assert!(children(own_id).values().all(|(state, _)| *state != 'Z'), "no zombies");

    // No worker holds a descriptor but the null device, its error pipe and its two pipes.
    for id in &workers {
        let Some(links) = descriptors_of(*id) else { continue };
        let count = |kind: &str| links.iter().filter(|link| link.starts_with(kind)).count();
        assert_eq!((count("/dev/null"), count("pipe:"), links.len()), (2, 3, 5), "{links:?}");
        let environment = text_of(format!("/proc/{id}/environ"));
        assert_eq!(environment, "MIMALLOC_DISALLOW_ARENA_ALLOC=1\0", "nothing of the parent's environment");
    }
    drop(python);
    assert!(workers.iter().all(|&id| !alive(id)), "dropping the pool kills its workers");
    assert_eq!(children(own_id).len(), 0, "{:?}", children(own_id));
    assert_eq!(descriptors(), before, "no descriptor leaks");
}

/// A parent that is killed takes its workers along, even one that hangs in an operation without a time check.
#[test]
fn workers_end_with_a_killed_parent() {
    let mut parent = own_process("alone_parent_hangs", "").spawn().unwrap();
    let mut workers = Vec::new();
    wait_until("two workers started", || {
        workers = workers_of(parent.id());
        workers.len() == 2
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(workers.iter().all(|&id| alive(id)));
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_until("the workers died with their parent", || workers.iter().all(|&id| !alive(id)));
}

#[test]
#[ignore = "run by workers_end_with_a_killed_parent in a process of its own"]
fn alone_parent_hangs() {
    if !in_own_process() {
        return;
    }
    let python = embedded(|_| {});
    std::thread::scope(|scope| {
        scope.spawn(|| call(&python, "10**10**8"));
        scope.spawn(|| call(&python, "while True: pass"));
    });
}

/// Threads that start workers may end: the workers must not end with them.
#[test]
fn a_worker_outlives_the_thread_that_first_needed_it() {
    let python = embedded(|s| s.state = InterpreterState::Trajectory);
    for i in 0..20 {
        let reply = std::thread::scope(|s| s.spawn(|| call(&python, "1 + 1")).join().unwrap());
        assert_eq!(reply.outcome, Answered, "call {i}");
    }
}
