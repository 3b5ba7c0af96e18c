mod allocator;

use std::process::ExitCode;

// As a part of the binary, an item that no command uses is dead code to the compiler; in a library it may have users.
#[cfg(feature = "whole")]
#[path = "lib.rs"]
mod rloss;
#[cfg(feature = "whole")]
use rloss::*;

fn main() -> ExitCode {
    // The Python tool's worker is this same binary, started again; it must not pass through anything else.
    if std::env::args_os().nth(1).is_some_and(|a| a == rloss::interpreter::WORKER_ARGUMENT) {
        std::process::exit(rloss::interpreter::worker_main());
    }
    allocator::keep_memory();
    // candle's own elementwise ops would spread over a pool of threads that spin while they wait, beside the run's own
    // threads. Its results do not depend on the number; one thread keeps it out of the way.
    // SAFETY: no other thread has been started yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    ExitCode::from(rloss::cli::run())
}
