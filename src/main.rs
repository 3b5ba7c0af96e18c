mod allocator;

use std::io::Write;
use std::process::ExitCode;

// As a part of the binary, an item that no command uses is dead code to the compiler; in a library it may have users.
#[cfg(feature = "whole")]
#[path = "lib.rs"]
mod rloss;
#[cfg(feature = "whole")]
use rloss::*;

use rloss::error::EXIT_FAILED;

/// Stack of the thread that does the work, bytes: input decides how deep some parsers recurse, within limits of their own,
/// and the shell's limit (ulimit -s) shall not decide whether that fits.
const STACK_BYTES: usize = 64 << 20;

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
    rloss::panics::tell_in_one_line(EXIT_FAILED);
    let work = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(rloss::cli::run);
    let code = match work.map(|work| work.join()) {
        Ok(Ok(code)) => code,
        // A panic, which was told.
        Ok(Err(_)) => EXIT_FAILED,
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "error: no thread can be started: {error}; raise the limits of processes and memory (ulimit -u, -v)"
            );
            EXIT_FAILED
        }
    };
    ExitCode::from(code)
}
