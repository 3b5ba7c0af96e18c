//! The machine's own Python: what the model reads, limits, hostile code, and processes that die.

use super::{alive, call, children, expect, in_own_process, own_process, settings};
use rloss::interpreter::{CPython, Interpreter, SessionId, Settings, State};
use rloss::trajectory::CallOutcome::*;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// `None`, said on stderr, where there is no Python to test with.
pub fn cpython(change: impl FnOnce(&mut Settings)) -> Option<CPython> {
    let there = Command::new("python3").arg("--version").output();
    if there.is_err() {
        eprintln!("skipped: no python3 on the PATH");
        return None;
    }
    let mut settings = settings();
    // A shared machine may stall any of the tests' processes for a while.
    settings.wall_clock_s = 20.0;
    settings.time_limit_s = 10.0;
    change(&mut settings);
    Some(CPython::new(settings).expect("this machine must be able to confine Python"))
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
    eprintln!("{}", python.confinement());
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
