//! The machine's own Python: what the model reads, limits, hostile code, and processes that die.

use super::*;
use rloss::interpreter::CPython;

/// The Python to test: `RLOSS_TEST_PYTHON`, or `python3`.
pub fn program() -> PathBuf {
    std::env::var_os("RLOSS_TEST_PYTHON").map_or("python3".into(), PathBuf::from)
}

/// Whether there is one; noted where there is none.
pub fn there() -> bool {
    if std::env::var_os("RLOSS_TEST_PYTHON").is_none() {
        return skips::python3().is_some();
    }
    let there = Command::new(program()).arg("--version").output().is_ok();
    assert!(there, "RLOSS_TEST_PYTHON is set, but cannot be run");
    there
}

/// `None` where there is no Python to test with.
pub fn cpython(change: impl FnOnce(&mut InterpreterSettings)) -> Option<CPython> {
    if !there() {
        return None;
    }
    let mut settings = settings();
    settings.python = program().display().to_string();
    change(&mut settings);
    Some(CPython::new(settings, super::program(), 64).expect("this machine must be able to confine Python"))
}

/// [`cpython`] with a scratch; `None` also where this user may make no namespace for it.
pub fn with_scratch(change: impl FnOnce(&mut InterpreterSettings)) -> Option<CPython> {
    if skips::namespaces() { cpython(change) } else { None }
}

/// The Python to test, or the end of a test that cannot run.
macro_rules! cpython_or_skip {
    ($change:expr) => {
        match cpython($change) {
            Some(python) => python,
            None => return,
        }
    };
}

#[test]
fn the_model_reads_output_and_the_last_value() {
    let python = cpython_or_skip!(|_| {});
    eprintln!("{}", python.sandbox_description());
    expect(&python, "7*12-5", Answered, "79");
    expect(&python, "print('a')\nprint('b', 2)", Answered, "a\nb 2");
    expect(&python, "print('a', end='')\n'b'", Answered, "a\n'b'");
    expect(&python, "x = [i * i for i in range(4)]\nx", Answered, "[0, 1, 4, 9]");
    expect(
        &python,
        "Let me see.\n```python\nimport math\nmath.factorial(20)\n```",
        Answered,
        "2432902008176640000",
    );
    expect(&python, "x = 1", Answered, "(no output: use print() to see a value)");
    expect(&python, "", MalformedCall, "(no code to run)");
    expect(&python, "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')", Answered, "a\nb\nc");
    expect(&python, "print(1)\nexit()", Answered, "1");
    expect(&python, "def f(): pass\nprint(f)\nf", Answered, "<function f at 0x…>\n<function f at 0x…>");
    expect(&python, "__name__", Answered, "'__main__'");
}

#[test]
fn an_exception_is_short_and_names_no_place_of_this_machine() {
    let python = cpython_or_skip!(|_| {});
    expect(
        &python,
        "print('before')\ndef f(n):\n    return 1 / n\nf(0)",
        Raised,
        "before\nTraceback (most recent call last):\n  File \"<snippet>\", line 4, in <module>\n    f(0)\n  \
         File \"<snippet>\", line 3, in f\n    return 1 / n\nZeroDivisionError: division by zero",
    );
    let syntax = call(&python, "def f(:\n  pass");
    assert_eq!(syntax.outcome, Raised);
    assert!(syntax.text.contains("File \"<snippet>\", line 1") && syntax.text.contains("SyntaxError"));
    let inside = call(&python, "import json\njson.loads('{')");
    assert_eq!(inside.outcome, Raised);
    assert!(inside.text.ends_with("(char 1)") && inside.text.lines().count() == 4, "{}", inside.text);
    let endless = call(&python, "def f(n): return f(n + 1)\nf(0)");
    assert!(endless.text.contains("RecursionError") && endless.text.lines().count() < 24, "{}", endless.text);
    for code in ["from math import nothing", "import nothing", "object().x", "(lambda: 0)(object())"] {
        let reply = call(&python, code);
        assert_eq!(reply.outcome, Raised);
        assert!(!reply.text.contains("/lib") && !reply.text.contains("0x7"), "{}", reply.text);
    }
    // Exceptions of the code's own are not taken for the limits'.
    for name in ["TimeoutError", "MemoryError"] {
        let reply = call(&python, &format!("raise {name}('mine')"));
        assert_eq!(reply.outcome, Raised);
        assert!(reply.text.ends_with(&format!("\n{name}: mine")), "{}", reply.text);
    }
}

#[test]
fn the_reply_is_a_function_of_the_code() {
    let codes = [
        "class A: pass\nprint(A(), hash('a'))",
        "print({'b', 'a', 'c', 3, 1}, lambda: 0, print)",
        "{object, int, str, type('T', (), {}), type('U', (), {})}",
        "import random\nrandom.random(), random.sample(range(1000), 5)",
        "import os\nsorted(os.environ.items()), os.getcwd()",
        "1/0",
    ];
    let texts = |python: &CPython| codes.map(|code| call(python, code).text);
    let first = texts(&cpython_or_skip!(|_| {}));
    assert_eq!(texts(&cpython_or_skip!(|_| {})), first);
    assert!(first[4].contains("('PYTHONHASHSEED', '0')") && !first[4].contains("CARGO"), "{}", first[4]);
}

#[test]
fn long_output_is_cut_in_the_middle_and_never_held() {
    let python = cpython_or_skip!(|s| s.output_chars_max = 20);
    expect(
        &python,
        "for i in range(1000): print(i)",
        Answered,
        "0\n1\n2\n3\n4\n\n[... 3870 characters cut ...]\n7\n998\n999",
    );
    let python = cpython_or_skip!(|_| {});
    let reply = call(&python, "line = 'x' * 1000000\nfor i in range(1000): print(line)\n'end'");
    assert_eq!(reply.outcome, Answered, "{}", reply.text);
    assert!(reply.text.contains("\n[... 999996909 characters cut ...]\n"), "{}", reply.text);
    assert!(reply.text.ends_with("x\n'end'") && reply.text.len() < 4200);
}

#[test]
fn variables_live_as_long_as_the_settings_say() {
    let fresh = cpython_or_skip!(|s| s.workers = 1);
    assert_eq!(call(&fresh, "x = 5\nimport builtins, math\nbuiltins.y = 6\nmath.pi = 3").outcome, Answered);
    assert!(call(&fresh, "x").text.ends_with("NameError: name 'x' is not defined"));
    assert!(call(&fresh, "y").text.ends_with("NameError: name 'y' is not defined"));
    expect(&fresh, "import math\nmath.pi", Answered, "3.141592653589793");

    let python = cpython_or_skip!(|s| (s.state, s.workers, s.time_limit_s, s.wall_clock_s) =
        (InterpreterState::Trajectory, 2, 1.0, 120.0));
    let sessions: Vec<SessionId> = (0..10).map(SessionId).collect();
    for &session in &sessions {
        let code =
            format!("x = [{}]\ndef f(n):\n    return n + x[0]\nlines = (l for l in range(9))", session.0);
        assert_eq!(python.call(session, &code).outcome, Answered);
    }
    for &session in &sessions {
        let text = format!("({}, 0, 1)", session.0 + 1);
        assert_eq!(python.call(session, "f(1), next(lines), next(lines)").text, text);
        assert_eq!(python.call(session, "x.append(0); 1/0").outcome, Raised);
        assert_eq!(python.call(session, "len(x)").text, "2", "effects before an exception stay");
    }
    python.close(sessions[0]);
    assert_eq!(python.call(sessions[0], "x").outcome, Raised);
    let tail = python.call(sessions[1], "f('')").text;
    assert!(tail.contains("File \"<snippet 5>\", line 1") && tail.contains("return n + x[0]"), "{tail}");

    let reply = python.call(sessions[2], "while True: pass");
    assert_eq!(reply.outcome, TimeLimit);
    assert!(reply.text.ends_with(" All variables are lost."), "{}", reply.text);
    assert_eq!(python.call(sessions[2], "x").outcome, Raised);

    let python = cpython_or_skip!(|s| (s.state, s.idle_s_max) = (InterpreterState::Trajectory, 0.0));
    assert_eq!(call(&python, "x = 1").outcome, Answered);
    std::thread::sleep(std::time::Duration::from_millis(5));
    let reply = call(&python, "'x' in globals()");
    assert_eq!(reply.text, "False\n(Earlier variables were dropped: no call came for 0 s.)");
}

#[test]
fn hungry_and_endless_code_is_stopped_and_counted() {
    // Only code that sleeps meets the wall clock: a loaded machine may take long over half a second of work.
    let busy = cpython_or_skip!(|s| (s.time_limit_s, s.wall_clock_s) = (0.5, 120.0));
    let time = "TimeoutError: the code ran longer than 0.5 s and was stopped.";
    let wall = "TimeoutError: no answer within 6 s; the interpreter was killed.";
    let died = "InterpreterError: the interpreter died while running the code.";
    let deaf = "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n";
    for (code, outcome, text) in [
        ("while True: pass".to_string(), TimeLimit, time),
        ("while True: print(1)".to_string(), TimeLimit, time),
        (format!("{deaf}while True: pass"), TimeLimit, time),
        (
            "while True:\n  try:\n    while True: pass\n  except BaseException: pass".to_string(),
            TimeLimit,
            time,
        ),
        ("10**10**8".to_string(), TimeLimit, time),
        ("import re\nre.match('(a*)*b', 'a' * 40)".to_string(), TimeLimit, time),
        ("import os\nos._exit(0)".to_string(), WorkerDied, died),
        ("import os\nos.abort()".to_string(), WorkerDied, died),
        ("import ctypes\nctypes.string_at(0)".to_string(), WorkerDied, died),
        (
            "import os\nfor d in range(3, 64):\n  try: os.close(d)\n  except OSError: pass".to_string(),
            WorkerDied,
            died,
        ),
    ] {
        expect(&busy, &code, outcome, text);
        expect(&busy, "1 + 1", Answered, "2");
    }
    // Side by side: each waits for the limit.
    let asleep = cpython_or_skip!(|s| (s.time_limit_s, s.wall_clock_s, s.workers) = (0.5, 6.0, 3));
    std::thread::scope(|scope| {
        for code in [
            "import time\ntime.sleep(1000)".to_string(),
            format!("{deaf}signal.pause()"),
            "import os\nos.close(1)\nos.close(2)\nimport time\ntime.sleep(1000)".to_string(),
        ] {
            let asleep = &asleep;
            scope.spawn(move || {
                expect(asleep, &code, ToolTimeout, wall);
                expect(asleep, "1 + 1", Answered, "2");
            });
        }
    });
    let python = cpython_or_skip!(|s| s.memory_mib = 128);
    let memory = "MemoryError: the code needed more than 128 MiB and was stopped.";
    for code in [
        "x = 'a' * 10**9",
        "x = [0] * 10**9",
        "x = []\nwhile True: x.append('ab' * 100000)",
        "x = 'ab'\nwhile True: x += x",
        "print('x' * 10**9)",
        "x = {}\ni = 0\nwhile True:\n  i += 1\n  x[i] = [i]",
        "1 << 10**10",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = [0] * 10**9",
    ] {
        let reply = call(&python, code);
        match code.starts_with("import resource") {
            true => {
                assert!(reply.outcome == Raised && reply.text.contains("not "), "{}", reply.text)
            }
            false => assert_eq!((reply.outcome, reply.text.as_str()), (MemoryLimit, memory), "{code}"),
        }
        expect(&python, "1 + 1", Answered, "2");
    }
    expect(&python, "try:\n  x = [0] * 10**9\nexcept MemoryError:\n  print('caught')", Answered, "caught");
}

#[test]
fn odd_code_gets_an_answer() {
    // A million calls deep is seconds of work.
    let python = cpython_or_skip!(|s| (s.time_limit_s, s.wall_clock_s) = (60.0, 240.0));
    expect_odd(
        &python,
        &[
            ("x = []\nfor i in range(100000): x = [x]\nx", Raised),
            ("raise ValueError('\\ud800')", Raised),
            ("import os\nos.write(1, b'\\xff\\xfe')", Answered),
            ("raise SystemExit", Answered),
            ("raise KeyboardInterrupt", Raised),
            ("raise BaseExceptionGroup('g', [ValueError(1)])", Raised),
            ("class E(Exception):\n  def __str__(self): raise self\nraise E", Raised),
            ("class R:\n  def __repr__(self): return 1\nR()", Raised),
            ("input()", Raised),
            ("import sys\nsys.stdout = None\nsys.stderr = None\n1", Answered),
            ("import sys\nsys.setrecursionlimit(10**6)\ndef f(): return f()\nf()", Raised),
        ],
    );
}

#[test]
fn what_models_use_runs() {
    let python = cpython_or_skip!(|_| {});
    for (code, text) in [
        ("from fractions import Fraction\nprint(Fraction(1, 3) + Fraction(1, 6))", "1/2"),
        ("from decimal import Decimal\nDecimal(1) / 3", "Decimal('0.3333333333333333333333333333')"),
        ("import itertools\nsum(1 for _ in itertools.permutations(range(7)))", "5040"),
        ("pow(3, -1, 7)", "5"),
        (
            "from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n-1) + f(n-2)\nf(90)",
            "2880067194370816120",
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\nP(3)", "P(x=3)"),
        (
            "import collections, heapq, bisect, statistics, string, re, json, datetime, hashlib, copy, operator, cmath\nhashlib.sha256(b'').hexdigest()[:8]",
            "'e3b0c442'",
        ),
        ("import time\ntime.sleep(0.01)\ntime.perf_counter() > 0", "True"),
        ("import sys\nsys.maxsize", "9223372036854775807"),
    ] {
        expect(&python, code, Answered, text);
    }
    for (module, code, text) in [
        (
            "sympy",
            "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))\nintegrate(x**2, x)",
            "[2, 3]\nx**3/3",
        ),
        (
            "numpy",
            "import numpy as np\na = np.array([[2., 1.], [1., 3.]])\nprint(round(np.linalg.det(a), 6))\nint((a @ a).sum())",
            "5.0\n25",
        ),
    ] {
        if call(&python, &format!("import {module}")).outcome != Answered {
            skips::note(&format!("no {module} in this Python (pip install {module})"), "");
            continue;
        }
        let preloaded = cpython_or_skip!(|s| s.preload = vec![module.into()]);
        expect(&preloaded, code, Answered, text);
        expect(&python, code, Answered, text);
    }
}

#[test]
fn bad_settings_are_refused_by_key() {
    if !there() {
        return;
    }
    for (change, key) in [
        ((|s| s.workers = 0) as fn(&mut InterpreterSettings), "`workers` (0)"),
        (|s| s.idle_s_max = -1.0, "`idle_s_max` (-1)"),
        (
            |s| s.python = "/nonexistent/python3".into(),
            "interpreter.python: /nonexistent/python3 cannot be run",
        ),
        (|s| s.python = "/bin/true".into(), "interpreter.python: /bin/true is not a working Python"),
        (
            |s| s.preload = vec!["no_such_module".into()],
            "`interpreter.preload`: no_such_module cannot be imported",
        ),
    ] {
        let mut settings = InterpreterSettings { python: program().display().to_string(), ..settings() };
        change(&mut settings);
        let error = CPython::new(settings, super::program(), 64).err().expect("refused");
        assert!(error.is::<rloss::error::BadInput>() && error.to_string().contains(key), "{error:#}");
    }
    let settings = InterpreterSettings { python: program().display().to_string(), ..settings() };
    assert!(CPython::new(settings, "/bin/true".into(), 64).is_err(), "not a worker");
}

/// The tests that count processes or descriptors need a process without other tests.
#[test]
fn processes_die_are_replaced_and_leave_nothing_behind() {
    if !there() {
        return;
    }
    run_alone("cpython::alone_processes_come_and_go");
}

#[test]
#[ignore = "run by processes_die_are_replaced_and_leave_nothing_behind in a process of its own"]
fn alone_processes_come_and_go() {
    if !in_own_process() {
        return;
    }
    let own_id = std::process::id();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let python = cpython_or_skip!(|s| s.workers = 2);
    let servers = || -> Vec<u32> { children(own_id).into_keys().collect() };
    assert_eq!(servers().len(), 1, "started lazily");
    let snippets = || -> Vec<u32> { servers().into_iter().flat_map(|id| children(id).into_keys()).collect() };
    let kill = |id: u32| {
        // SAFETY: a plain system call on a process this test started.
        assert_eq!(unsafe { libc::kill(id.cast_signed(), libc::SIGKILL) }, 0);
    };
    for kill_server in [false, true] {
        std::thread::scope(|scope| {
            let busy = scope.spawn(|| call(&python, "import time\ntime.sleep(1000)"));
            let mut running = Vec::new();
            super::wait_until("a snippet runs", || {
                running = snippets();
                !running.is_empty()
            });
            std::thread::sleep(std::time::Duration::from_millis(100));
            kill(if kill_server { servers()[0] } else { running[0] });
            let reply = busy.join().unwrap();
            assert_eq!(reply.outcome, WorkerDied);
            assert_eq!(reply.text, "InterpreterError: the interpreter died while running the code.");
            super::wait_until("a server takes its snippets along", || !alive(running[0]));
        });
        if kill_server {
            // The dead server is found by the next call at the latest; the one after it works.
            call(&python, "2 + 2");
        }
        expect(&python, "2 + 2", Answered, "4");
    }

    println!("CPython, 1000 calls over 4 threads, 2 workers: {:.0} calls/s", calls_per_second(&python));
    assert_eq!(servers().len(), 2);
    assert_eq!(snippets().len(), 0, "no process outlives its call");

    for id in servers() {
        let Some(links) = descriptors_of(id) else { continue };
        let count = |kind: &str| links.iter().filter(|link| link.starts_with(kind)).count();
        assert_eq!(
            (count("/dev/null"), count("pipe:"), count("socket:"), links.len()),
            (2, 1, 1, 4),
            "{links:?}"
        );
    }
    let ids = servers();
    for packages in [vec!["sympy"], vec!["numpy", "sympy"]] {
        let imports = format!("import {}", packages.join(", "));
        if call(&python, &imports).outcome != Answered {
            continue;
        }
        let loaded = cpython_or_skip!(|s| s.preload = packages.iter().map(|p| p.to_string()).collect());
        println!("CPython with {} loaded: {:.0} calls/s", packages.join(" and "), calls_per_second(&loaded));
    }
    drop(python);

    // Between its calls a trajectory's process does not run, whatever timers it has set.
    let python = cpython_or_skip!(|s| (s.state, s.workers) = (InterpreterState::Trajectory, 1));
    let timer = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 0)\nsignal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)";
    for code in [timer, "1", "2"] {
        assert_eq!(call(&python, code).outcome, Answered);
        super::wait_until("the process is halted", || {
            let states: Vec<char> = servers()
                .into_iter()
                .flat_map(|id| children(id).into_values())
                .map(|(state, _)| state)
                .collect();
            states == ['T']
        });
    }
    drop(python);
    assert!(ids.iter().all(|&id| !alive(id)), "dropping the pool kills its servers");
    assert_eq!(children(own_id).len(), 0, "{:?}", children(own_id));
    assert_eq!(descriptors(), before, "no descriptor leaks");
}

/// A parent that is killed takes its servers and their snippets along.
#[test]
fn processes_end_with_a_killed_parent() {
    if !there() {
        return;
    }
    let mut parent = own_process("cpython::alone_parent_hangs", "").spawn().unwrap();
    let mut all = Vec::new();
    super::wait_until("two servers and their snippets run", || {
        all = children(parent.id()).into_keys().collect();
        let snippets: Vec<u32> = all.iter().flat_map(|&id| children(id).into_keys()).collect();
        all.extend(&snippets);
        snippets.len() == 2
    });
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(all.iter().all(|&id| alive(id)));
    parent.kill().unwrap();
    parent.wait().unwrap();
    super::wait_until("the processes died with their parent", || all.iter().all(|&id| !alive(id)));
}

#[test]
#[ignore = "run by processes_end_with_a_killed_parent in a process of its own"]
fn alone_parent_hangs() {
    if !in_own_process() {
        return;
    }
    let python = cpython_or_skip!(|_| {});
    std::thread::scope(|scope| {
        scope.spawn(|| call(&python, "import signal\nsignal.pause()"));
        scope.spawn(|| call(&python, "while True: pass"));
    });
}
