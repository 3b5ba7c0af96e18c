//! Panics: those of libraries on user input are caught; any other is reported in one line, without a
//! backtrace.

use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

/// The standard library's message when a new thread gets no memory for its signal handlers' stack.
const NO_ALTERNATIVE_STACK: &str = "failed to allocate an alternative stack";
/// The message to the user in that case.
const NO_THREAD_MEMORY: &str =
    "no memory is left for a new thread; lower parallel.threads, or raise the memory limit (ulimit -v)";

thread_local! {
    /// Whether a caller catches and reports panics of this thread.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` and returns its result, or the message of its panic. State that `work` changes must not be
/// used after a panic.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let before = CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(before);
    result.map_err(|payload| message(payload.as_ref()))
}

/// Installs a hook that reports uncaught panics in one line on standard error. For `main` alone, as it holds
/// for the whole process. It exits with `exit_failed` if a thread cannot get its memory.
pub fn install_panic_hook(exit_failed: u8) {
    std::panic::set_hook(Box::new(move |panic| {
        if message(panic.payload()).contains(NO_ALTERNATIVE_STACK) {
            // This panic comes before the thread can unwind, so an abort would follow.
            let _ = writeln!(std::io::stderr(), "error: {NO_THREAD_MEMORY}");
            std::process::exit(exit_failed.into());
        }
        if !CAUGHT.get() {
            // After a closed stderr there is nobody to report to.
            let _ = writeln!(std::io::stderr(), "{}", line(panic));
        }
    }));
}

fn line(panic: &PanicHookInfo) -> String {
    let place = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
    let text: String = message(panic.payload()).chars().filter(|c| !c.is_control()).collect();
    format!("error: internal error: {text}{place}; this is a bug, please report it. Checkpoints are whole")
}

fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
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
