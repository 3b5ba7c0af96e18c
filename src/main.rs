mod allocator;

use std::io::Write;
use std::process::ExitCode;

// In the binary, items that no command uses are dead code to the compiler; a library's items may have other
// users.
#[cfg(feature = "whole")]
#[path = "lib.rs"]
mod rloss;
#[cfg(feature = "whole")]
use rloss::*;

use rloss::error::EXIT_FAILED;

/// Stack size of the main thread, in bytes. Some parsers recurse as deep as their input, within their own
/// limits; the shell's limit (ulimit -s) must not matter.
const STACK_BYTES: usize = 64 << 20;

fn main() -> ExitCode {
    // The Python tool's worker is this binary, started again; it must run nothing else first.
    if std::env::args_os().nth(1).is_some_and(|a| a == rloss::interpreter::WORKER_ARGUMENT) {
        std::process::exit(rloss::interpreter::worker_main());
    }
    allocator::retain_freed_memory();
    // candle's elementwise ops would use a pool of threads that spin while they wait, beside the run's own
    // threads. One thread disables the pool; results do not depend on the number.
    // SAFETY: no other thread has been started yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    rloss::panics::install_panic_hook(EXIT_FAILED);
    let work = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(rloss::cli::run);
    let code = match work.map(|work| work.join()) {
        Ok(Ok(code)) => code,
        // A panic; the hook has reported it.
        Ok(Err(_)) => EXIT_FAILED,
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "error: cannot start a thread: {error}; raise the limits of processes and memory (ulimit -u, -v)"
            );
            EXIT_FAILED
        }
    };
    ExitCode::from(code)
}
