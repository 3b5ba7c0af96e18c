//! The Python tool: model-written code runs in confined worker processes and answers with text.
//!
//! [`Interpreter`] is what rollout sees. [`Embedded`] runs a small Python written in Rust (nothing to install),
//! [`CPython`] the machine's own with all its packages.
//! What confines it, and what nothing does, is in `docs/SANDBOX.md`.

use crate::bad_input;
use crate::choice::choice;
use crate::trajectory::CallOutcome;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg_attr(not(target_os = "linux"), path = "confine_unsupported.rs")]
pub mod confine;
#[cfg_attr(not(target_os = "linux"), path = "cpython_unsupported.rs")]
mod cpython;
mod deaths;
mod embedded;
mod embedded_worker;
mod frames;
mod output;
mod pool;
mod process;

pub use cpython::CPython;
pub use embedded::Embedded;

/// First command-line argument that turns the binary into a worker: `main` must then call [`worker_main`].
pub const WORKER_ARGUMENT: &str = "interpreter-worker";

/// Names one trajectory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// What a call came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// What the model reads: printed output and the last expression's value, or the exception;
    /// cut in the middle to [`Settings::output_chars_max`]. A function of the session's codes alone.
    pub text: String,
    pub outcome: CallOutcome,
    /// Seconds from the call to the reply, the wait for a free worker included.
    pub seconds: f64,
}

/// Runs model-written Python. Called from many threads at once.
pub trait Interpreter: Send + Sync {
    /// Runs `code` for `session`; blocks until the reply. Never fails: every failure is a reply.
    fn call(&self, session: SessionId, code: &str) -> Reply;

    /// The trajectory is over: its state may be dropped.
    fn close(&self, session: SessionId);

    /// What confines the code on this machine, for the run folder and the console.
    fn confinement(&self) -> String;

    /// What the user has to hear of dead workers since it was asked last, if anything.
    fn dead_workers(&self) -> Option<String> {
        None
    }
}

choice! {
    /// The interpreters.
    pub enum InterpreterKind {
        /// The Python subset inside the binary: no files, no network, no processes.
        Embedded = "embedded",
        /// The machine's own Python with all its packages, in an operating-system sandbox. Linux only.
        CPython = "cpython",
    }
}

choice! {
    /// How long an interpreter's state lives.
    pub enum InterpreterState {
        /// Each call starts afresh.
        Call = "call",
        /// The calls of a trajectory share their variables.
        Trajectory = "trajectory",
    }
}

/// Limits and size of an interpreter's pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub state: InterpreterState,
    /// The interpreter stops a call after this long; for CPython, time on a processor.
    pub time_limit_s: f64,
    /// The parent kills a worker that has not answered after this long; above `time_limit_s`.
    pub wall_clock_s: f64,
    /// Memory a worker may take beyond what it needs to exist.
    pub memory_mib: u64,
    /// Characters of a reply, beyond which its middle is cut.
    pub output_chars_max: usize,
    /// Worker processes.
    pub workers: usize,
    /// CPython's program: a path or a name on the `PATH`.
    pub python: PathBuf,
    /// Modules that CPython loads once, so that a snippet's import costs nothing.
    pub preload: Vec<String>,
    /// A trajectory's CPython process is ended when no call came for this long.
    pub idle_s_max: f64,
    /// Files that CPython's code may write in a file system of its own, which is gone with its process, in MiB; 0 for none.
    pub scratch_mib: u64,
    /// Trajectories that may be live at once.
    pub sessions_max: usize,
    /// Go on when the kernel cannot confine the workers.
    pub dangerously_allow_unsandboxed: bool,
    /// The binary to start as a worker; `None` is the running one.
    pub program: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            state: InterpreterState::Call,
            time_limit_s: 1.0,
            wall_clock_s: 3.0,
            memory_mib: 256,
            output_chars_max: 4096,
            workers: 2,
            python: "python3".into(),
            preload: Vec::new(),
            idle_s_max: 600.0,
            scratch_mib: 0,
            sessions_max: 64,
            dangerously_allow_unsandboxed: false,
            program: None,
        }
    }
}

impl Settings {
    /// # Errors
    /// [`crate::error::BadInput`] names a limit that is out of range.
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

    fn worker_program(&self) -> Result<PathBuf> {
        match &self.program {
            Some(program) => Ok(program.clone()),
            None => std::env::current_exe().context("finding the running binary, to start it as a worker"),
        }
    }
}

/// What to do where the kernel cannot confine.
const CONFINEMENT_REMEDY: &str = "Model-written code would run with your own rights; use a kernel with landlock and \
    seccomp (Linux 5.13 or newer), or accept the risk with `interpreter.dangerously_allow_unsandboxed = true`";
/// What to do where it could, and had no room to.
const SHORTAGE_REMEDY: &str = "The system is short of descriptors, processes or memory for the Python tool's workers; raise \
    the limits (ulimit -n, -u, -v), or lower `interpreter.workers`";

/// Why a worker was not confined, and what to do. A shortage is no reason to run without a sandbox.
fn refusal(error: &anyhow::Error) -> String {
    format!("{error:#}. {}", if is_shortage(error) { SHORTAGE_REMEDY } else { CONFINEMENT_REMEDY })
}

/// The error of a worker that could not be started, with what to do where the system is short of something.
fn not_started(error: anyhow::Error) -> anyhow::Error {
    if is_shortage(&error) { bad_input!("{error:#}. {SHORTAGE_REMEDY}") } else { error }
}

fn is_shortage(error: &anyhow::Error) -> bool {
    let short = [libc::EMFILE, libc::ENFILE, libc::EAGAIN, libc::ENOMEM];
    error.chain().any(|cause| {
        let code = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        code.is_some_and(|code| short.contains(&code))
    })
}

/// Longest code or stored state a worker reads.
const FRAME_BYTES_MAX: usize = 64 << 20;

/// The code inside a call's text, or what is wrong with it.
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

/// Poisoning is ignored: every guarded value is whole between statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A worker's whole life; returns the process's exit code.
pub fn worker_main() -> i32 {
    match std::env::args_os().nth(2) {
        Some(kind) if kind == cpython::STAGE_ARGUMENT => cpython::stage_main(),
        _ => embedded_worker::main(),
    }
}
