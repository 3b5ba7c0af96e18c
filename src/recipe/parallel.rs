//! `[parallel]`: threads and processes.

use super::limits::from;
use super::table::table;

table! {
    /// Threads and processes. No result depends on them.
    pub struct Parallel {
        /// Threads; 0 means all that the machine offers.
        pub threads: usize = 0 => from(0.0).to(4096.0),
        /// Processes that share a sequence; only 1 in this build.
        pub sequence: usize = 1 => from(1.0),
    }
}
