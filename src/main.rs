use std::alloc::{GlobalAlloc, Layout};
use std::io::Write;
use std::process::ExitCode;

// As a part of the binary, an item that no command uses is dead code to the compiler; in a library it may have users.
#[cfg(feature = "whole")]
#[path = "lib.rs"]
mod rloss;
#[cfg(feature = "whole")]
use rloss::*;

use rloss::error::EXIT_FAILED;

/// The allocator, which ends the process in one line where it would abort: no caller gets on without its memory.
struct Refusing(mimalloc::MiMalloc);

#[global_allocator]
static ALLOCATOR: Refusing = Refusing(mimalloc::MiMalloc);

// SAFETY: every call is passed on as it came, and what comes back is passed back, or the process ends.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { self.0.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(pointer, layout) }
    }
}

/// `pointer`, or the end of the process when the system refused it `bytes`. The interpreter's parent knows the first words.
fn or_end(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() {
        let mut line = [0; 160];
        let mut rest = &mut line[..];
        let _ = writeln!(
            rest,
            "error: memory allocation of {bytes} bytes was refused; free memory, raise its limit (ulimit -v), or make the model or batches smaller"
        );
        let length = 160 - rest.len();
        // SAFETY: the buffer outlives the call; no destructor, which might allocate, runs any more.
        unsafe {
            libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), length);
            libc::_exit(i32::from(EXIT_FAILED));
        }
    }
    pointer
}

/// Stack of the thread that does the work, bytes: input decides how deep some parsers recurse, within limits of their own,
/// and the shell's limit (ulimit -s) shall not decide whether that fits.
const STACK_BYTES: usize = 64 << 20;

fn main() -> ExitCode {
    // The Python tool's worker is this same binary, started again; it must not pass through anything else.
    if std::env::args_os().nth(1).is_some_and(|a| a == rloss::interpreter::WORKER_ARGUMENT) {
        std::process::exit(rloss::interpreter::worker_main());
    }
    // candle's own elementwise ops would spread over a pool of threads that spin while they wait, beside the run's own
    // threads. Its results do not depend on the number; one thread keeps it out of the way.
    // SAFETY: no other thread has been started yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    rloss::panics::tell_in_one_line();
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
