//! The Python tool: runs model-written code in confined worker processes. The reply is text.
//!
//! [`Interpreter`] is the interface for the rollout. [`EmbeddedInterpreter`] runs a small Python written in
//! Rust, without any installation. [`CPython`] runs the machine's own Python with all its packages.
//! `docs/SANDBOX.md` documents the confinement and its limits.

use crate::bad_input;
use crate::chat::ToolForm;
use crate::metrics::Console;
use crate::settings::{above, choice, from, table};
use crate::trajectory::CallOutcome;
use anyhow::{Context, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

mod cpython;
mod embedded_interpreter;
mod embedded_worker;
mod frames;
mod output;
mod process;
pub mod sandbox;
mod worker_deaths;

pub use cpython::CPython;
pub use embedded_interpreter::EmbeddedInterpreter;

/// Starts the interpreter that `settings` selects, for up to `sessions_max` live trajectories. `console`
/// reports dead workers.
///
/// # Errors
/// The errors of [`EmbeddedInterpreter::new`] and [`CPython::new`].
pub fn open(
    settings: InterpreterSettings,
    sessions_max: usize,
    console: &Console,
) -> Result<Box<dyn Interpreter>> {
    let program =
        std::env::current_exe().context("finding this program's binary, which also runs as a worker")?;
    Ok(match settings.kind {
        InterpreterKind::Embedded => {
            Box::new(EmbeddedInterpreter::new(settings, program)?.reporting_to(console))
        }
        InterpreterKind::CPython => {
            Box::new(CPython::new(settings, program, sessions_max)?.reporting_to(console))
        }
    })
}

/// First command-line argument of a worker process. With it, `main` must call [`worker_main`].
pub const WORKER_ARGUMENT: &str = "interpreter-worker";

/// Identifies one trajectory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Text for the model: printed output and the last expression's value, or the exception. If it is longer
    /// than [`InterpreterSettings::output_chars_max`], its middle is removed. It depends only on the
    /// session's code.
    pub text: String,
    pub outcome: CallOutcome,
    /// Seconds from the call to the reply, including the time to wait for a free worker.
    pub seconds: f64,
}

/// Runs model-written Python. Many threads may call it at the same time.
pub trait Interpreter: Send + Sync {
    /// Runs `code` for `session` and blocks until the reply. It never fails; every failure is a reply.
    fn call(&self, session: SessionId, code: &str) -> Reply;

    /// Ends the trajectory, whose state may then be dropped.
    fn close(&self, session: SessionId);

    /// Describes the active confinement, for the run folder and the console.
    fn sandbox_description(&self) -> String;
}

choice! {
    /// The interpreters.
    pub enum InterpreterKind {
        /// The Python subset inside the binary. It has no files, no network and no processes.
        Embedded = "embedded",
        /// The machine's own Python with all its packages, in an operating-system sandbox. Linux only.
        CPython = "cpython",
    }
}

choice! {
    /// Lifetime of an interpreter's state.
    pub enum InterpreterState {
        /// Each call has a new state.
        Call = "call",
        /// The calls of a trajectory share their variables.
        Trajectory = "trajectory",
    }
}

table! {
    /// The Python tool, which runs in confined worker processes.
    pub struct InterpreterSettings {
        /// The interpreter that runs the code.
        pub kind: InterpreterKind = InterpreterKind::Embedded,
        /// How the model uses the tool. With a form other than `"call"`, tasks without the tool have it too,
        /// except with `"none"`, and the chat format's calls are text.
        pub form: ToolForm = ToolForm::default(),
        /// Text at the end of the system prompt that offers the tool. Absent means a sentence about blocks
        /// ```` ```python ```` or tags, by `form`. An empty text is none; with `"call"` and `"none"` there is
        /// none either.
        pub instructions: Option<String> = None,
        /// Which calls share state.
        pub state: InterpreterState = InterpreterState::Call,
        /// Maximum running time of a call inside the interpreter, in seconds. With `"cpython"`, only CPU time
        /// counts.
        pub time_limit_s: f64 = 1.0 => above(0.0).to(86400.0),
        /// Wall-clock time in seconds after which the worker is killed. It must exceed `time_limit_s`,
        /// because it is a second limit in case the first one fails.
        pub wall_clock_s: f64 = 3.0 => above(0.0).to(86400.0),
        /// Memory that code may use, in MiB.
        pub memory_mib: u64 = 256 => from(16.0).to(1048576.0),
        /// Maximum length of the output that the model gets, in characters. The middle of longer output is
        /// removed. The calls of a turn share it.
        pub output_chars_max: usize = 1024 => from(64.0).to(1048576.0),
        /// Number of worker processes; 0 means one per thread.
        pub workers: usize = 0 => from(0.0).to(4096.0),
        /// The Python program of `"cpython"`: a name on the `PATH`, or a path.
        pub python: String = "python3".to_owned(),
        /// Modules that `"cpython"` loads only once, so that importing them in a call takes no time. A
        /// missing module is an error.
        pub preload: Vec<String> = Vec::new(),
        /// With `"cpython"` and `state = "trajectory"`: seconds without a call after which a trajectory's
        /// process is ended.
        pub idle_s_max: f64 = 600.0 => from(0.0).to(86400.0),
        /// With `"cpython"`: size of the files that a call may write in `/tmp/scratch`, in MiB of memory; 0
        /// means no files. Each call has its own folder, which is deleted after the call. With `state =
        /// "trajectory"`, each trajectory has one. Needs Linux 6.2 with user namespaces.
        pub scratch_mib: u64 = 0 => from(0.0).to(1048576.0),
        /// Run without the operating system's sandbox if it is not available. Code from the model can then
        /// harm the machine.
        pub dangerously_allow_unsandboxed: bool = false,
    }
}

impl InterpreterSettings {
    /// Checks the limits.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the limit that is out of range.
    fn check(&self) -> Result<()> {
        let Self { time_limit_s, wall_clock_s, memory_mib, workers, idle_s_max, .. } = *self;
        let in_order = 0.0 < time_limit_s && time_limit_s < wall_clock_s && wall_clock_s <= 86_400.0;
        if !in_order {
            return Err(bad_input!(
                "interpreter: `time_limit_s` ({time_limit_s}) must be above 0 and below `wall_clock_s` \
                 ({wall_clock_s}), which must be at most 86400"
            ));
        }
        if workers == 0 || !(16..=1 << 20).contains(&memory_mib) {
            return Err(bad_input!(
                "interpreter: `workers` ({workers}) must be at least 1 and `memory_mib` ({memory_mib}) from 16 to \
                 1048576"
            ));
        }
        if !(0.0..=86_400.0).contains(&idle_s_max) {
            return Err(bad_input!("interpreter: `idle_s_max` ({idle_s_max}) must be from 0 to 86400"));
        }
        Ok(())
    }

    /// Returns the text that the model gets when its code was stopped. The text contains no measured times,
    /// process ids or causes.
    fn explain(&self, outcome: CallOutcome) -> String {
        let Self { time_limit_s, wall_clock_s, memory_mib, .. } = *self;
        match outcome {
            CallOutcome::TimeLimit => {
                format!("TimeoutError: the code ran longer than {time_limit_s} s and was stopped.")
            }
            CallOutcome::ToolTimeout => {
                format!("TimeoutError: no answer within {wall_clock_s} s; the interpreter was killed.")
            }
            CallOutcome::MemoryLimit => {
                format!("MemoryError: the code needed more than {memory_mib} MiB and was stopped.")
            }
            _ => "InterpreterError: the interpreter died while running the code.".into(),
        }
    }
}

/// Extracts the code from `text`, the text of a call, and runs it with `run`. Returns the reply.
fn reply(text: &str, run: impl FnOnce(&str) -> (CallOutcome, String)) -> Reply {
    let start = Instant::now();
    let (outcome, text) = match code_to_run(text) {
        Ok(code) => run(&code),
        Err(refused) => (CallOutcome::MalformedCall, refused.into()),
    };
    Reply { text, outcome, seconds: start.elapsed().as_secs_f64() }
}

/// Remedy if the kernel cannot confine a worker.
const CONFINEMENT_REMEDY: &str = "Model-written code would run with your own rights; use a kernel with landlock and \
    seccomp (Linux 5.13 or newer), or accept the risk with `interpreter.dangerously_allow_unsandboxed = true`";
/// Remedy if the kernel can confine a worker but lacks resources.
const SHORTAGE_REMEDY: &str = "The system is short of descriptors, processes or memory for the Python tool's workers; raise \
    the limits (ulimit -n, -u, -v), or lower `interpreter.workers`";

/// Returns why a worker was not confined, and the remedy. If resources are short, running without a sandbox
/// is not proposed.
fn confinement_error(error: &anyhow::Error) -> String {
    format!("{error:#}. {}", if is_shortage(error) { SHORTAGE_REMEDY } else { CONFINEMENT_REMEDY })
}

/// Returns the error of a worker that could not start. Adds the remedy if the system lacks a resource.
fn startup_error(error: anyhow::Error) -> anyhow::Error {
    if is_shortage(&error) { bad_input!("{error:#}. {SHORTAGE_REMEDY}") } else { error }
}

fn is_shortage(error: &anyhow::Error) -> bool {
    let short = [libc::EMFILE, libc::ENFILE, libc::EAGAIN, libc::ENOMEM];
    error.chain().any(|cause| {
        let code = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        code.is_some_and(|code| short.contains(&code))
    })
}

/// Maximum size of code or stored state that a worker reads, in bytes.
const FRAME_BYTES_MAX: usize = 64 << 20;

/// Extracts the code from the text of a call, or returns what is wrong with the text.
fn code_to_run(text: &str) -> Result<String, &'static str> {
    let code = output::extract_code(text);
    if code.trim().is_empty() {
        Err("(no code to run)")
    } else if code.len() > FRAME_BYTES_MAX {
        Err("(the code is too long to run)")
    } else {
        Ok(code)
    }
}

/// Locks a mutex and ignores poisoning. This is safe because every guarded value is consistent between
/// statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a worker until its end. Returns the exit code of the process.
pub fn worker_main() -> i32 {
    match std::env::args_os().nth(2) {
        Some(kind) if kind == cpython::LAUNCHER_ARGUMENT => cpython::launcher_main(),
        _ => embedded_worker::main(),
    }
}
