//! Handling of panics. Panics of libraries on user input are caught. Every other panic is reported in one
//! line, without a backtrace.

use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The panic message of the standard library when a new thread gets no memory for the stack of its signal
/// handlers.
const NO_ALTERNATIVE_STACK: &str = "failed to allocate an alternative stack";
/// The message to the user if a new thread gets no memory.
const NO_THREAD_MEMORY: &str =
    "no memory is left for a new thread; lower parallel.threads, or raise the memory limit (ulimit -v)";

thread_local! {
    /// Whether a caller of [`catch_panic`] on this thread catches and reports panics.
    static IS_CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` and returns its result, or the message of its panic. After a panic, the caller must not use
/// state that `work` changes.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let before = IS_CATCHING.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    IS_CATCHING.set(before);
    result.map_err(|payload| message(payload.as_ref()))
}

/// Installs a hook that reports uncaught panics in one line on standard error. Only `main` may call this,
/// because the hook applies to the whole process. If a new thread gets no memory, the hook exits with code
/// `exit_failed`.
pub fn install_panic_hook(exit_failed: u8) {
    std::panic::set_hook(Box::new(move |panic| {
        if message(panic.payload()).contains(NO_ALTERNATIVE_STACK) {
            // This panic occurs before the thread can unwind, so the process would abort.
            let _ = writeln!(std::io::stderr(), "error: {NO_THREAD_MEMORY}");
            std::process::exit(exit_failed.into());
        }
        if !IS_CATCHING.get() {
            // If stderr is closed, the message is lost: there is no other place for it.
            let _ = writeln!(std::io::stderr(), "{}", line(panic));
        }
    }));
}

fn line(panic: &PanicHookInfo) -> String {
    let location = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
    let text: String = message(panic.payload()).chars().filter(|c| !c.is_control()).collect();
    format!(
        "error: internal error: {text}{location}; this is a bug, please report it. Saved checkpoints are intact"
    )
}

fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

/// Locks `mutex`, also after a thread panicked while it held the lock.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::panic)]
    fn a_panic_is_caught_with_its_words() {
        assert_eq!(catch_panic(|| 3), Ok(3));
        let name = "vocab";
        assert_eq!(catch_panic(|| -> u8 { panic!("no {name}") }), Err("no vocab".to_owned()));
        assert_eq!(catch_panic(|| catch_panic(|| -> u8 { panic!("inner") })), Ok(Err("inner".to_owned())));
    }
}
