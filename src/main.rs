mod allocator;

use std::io::Write;
use std::process::ExitCode;

// An item that no command uses is dead code, and in the binary the compiler reports it. In a library the
// compiler cannot report it, because the library may have other users.
#[cfg(feature = "whole")]
#[path = "lib.rs"]
mod rloss;
#[cfg(feature = "whole")]
use rloss::*;

use rloss::error::EXIT_FAILED;

/// Stack size of the main thread, in bytes. Some parsers recurse as deep as their input is nested, within
/// their own limits. The stack must not depend on the shell's limit (ulimit -s).
const STACK_BYTES: usize = 64 << 20;

fn main() -> ExitCode {
    // The worker of the Python tool is a second process of this binary. The worker must run nothing else
    // first.
    if std::env::args_os().nth(1).is_some_and(|a| a == rloss::interpreter::WORKER_ARGUMENT) {
        std::process::exit(rloss::interpreter::worker_main());
    }
    allocator::retain_freed_memory();
    // The elementwise ops of candle would use their own pool of threads, which spin-wait and compete with the
    // threads of the run. The value 1 disables the pool. Results do not depend on the number of threads.
    // SAFETY: no other thread is running yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    rloss::panics::install_panic_hook(EXIT_FAILED);
    let work = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(rloss::cli::run);
    let code = match work.map(|work| work.join()) {
        Ok(Ok(code)) => code,
        // The thread panicked, and the hook has reported the panic.
        Ok(Err(_)) => EXIT_FAILED,
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "error: cannot start a thread: {error}; raise the limits of processes and of memory (ulimit -u, -v)"
            );
            EXIT_FAILED
        }
    };
    ExitCode::from(code)
}
