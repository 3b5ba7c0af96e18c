//! The Python tool: model-written code runs in confined worker processes and answers with text.
//!
//! [`Interpreter`] is what rollout sees. [`Embedded`] runs a small Python written in Rust (nothing to install).
//! What confines it, and what nothing does, is in `docs/SANDBOX.md`.

use crate::trajectory::CallOutcome;
use std::path::PathBuf;

#[cfg_attr(not(target_os = "linux"), path = "confine_unsupported.rs")]
pub mod confine;
mod embedded;
mod embedded_worker;
mod frames;
mod output;
mod process;

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
}

/// How long variables live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Every call starts in a fresh interpreter.
    Call,
    /// The calls of one trajectory share variables.
    Trajectory,
}

/// Limits and size of an interpreter's pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub state: State,
    /// The interpreter stops a call after this long.
    pub time_limit_s: f64,
    /// The parent kills a worker that has not answered after this long; above `time_limit_s`.
    pub wall_clock_s: f64,
    /// Memory a worker may take beyond what it needs to exist.
    pub memory_mib: u64,
    /// Characters of a reply, beyond which its middle is cut.
    pub output_chars_max: usize,
    /// Worker processes.
    pub workers: usize,
    /// Go on when the kernel cannot confine the workers.
    pub dangerously_allow_unsandboxed: bool,
    /// The binary to start as a worker; `None` is the running one.
    pub program: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            state: State::Call,
            time_limit_s: 1.0,
            wall_clock_s: 3.0,
            memory_mib: 256,
            output_chars_max: 4096,
            workers: 2,
            dangerously_allow_unsandboxed: false,
            program: None,
        }
    }
}

/// A worker's whole life, over its standard input and output; returns the process's exit code.
pub fn worker_main() -> i32 {
    embedded_worker::main()
}
