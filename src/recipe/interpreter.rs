//! `[interpreter]`: the Python tool.

use super::limits::{above, from};
use super::table::table;
pub use crate::interpreter::{InterpreterKind, InterpreterState};

table! {
    /// The Python tool, run in confined worker processes.
    pub struct InterpreterConfig {
        /// Which interpreter runs the code.
        pub kind: InterpreterKind = InterpreterKind::Embedded,
        /// What a call remembers of the calls before it.
        pub state: InterpreterState = InterpreterState::Call,
        /// Running time that the interpreter allows a call, in seconds; for `"cpython"`, time on a processor.
        pub time_limit_s: f64 = 1.0 => above(0.0).to(86400.0),
        /// Wall-clock time after which the worker is killed, in seconds: the backstop, so more than `time_limit_s`.
        pub wall_clock_s: f64 = 3.0 => above(0.0).to(86400.0),
        /// Memory of a worker, in MiB.
        pub memory_mib: usize = 256 => from(16.0).to(1048576.0),
        /// Longest output given back to the model, in characters; longer output is cut in the middle.
        pub output_chars_max: usize = 1024 => from(64.0).to(1048576.0),
        /// Worker processes; 0 means one a thread.
        pub workers: usize = 0 => from(0.0).to(4096.0),
        /// The Python program of `"cpython"`: a name on the `PATH`, or a path.
        pub python: String = "python3".to_owned(),
        /// Modules that `"cpython"` loads once, so that a call's own import of them takes no time. A module that is
        /// missing is refused.
        pub preload: Vec<String> = Vec::new(),
        /// With `"cpython"` and `state = "trajectory"`: seconds without a call after which a trajectory's process ends.
        pub idle_s_max: f64 = 600.0 => from(0.0).to(86400.0),
        /// With `"cpython"`: files that a call may write in `/tmp/scratch`, in MiB, in memory; 0 means none. Each call, or with
        /// `state = "trajectory"` each trajectory, has its own, gone with it. Needs user namespaces.
        pub scratch_mib: usize = 0 => from(0.0).to(1048576.0),
        /// Run without the operating system's sandbox where it has none. Code from the model can then harm the machine.
        pub dangerously_allow_unsandboxed: bool = false,
    }
}
