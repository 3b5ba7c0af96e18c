//! Panics: those of libraries are caught where their input comes in; of any other one line is said, and no trace.

use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};

/// In the standard library's words where a thread that starts is given no memory for its signal handlers' stack.
const NO_ALTERNATIVE_STACK: &str = "failed to allocate an alternative stack";
/// What a user is told of that.
const NO_MEMORY_FOR_A_THREAD: &str =
    "memory ran out where a thread began; lower parallel.threads, or raise the limit of memory (ulimit -v)";

thread_local! {
    /// Whether a panic of this thread will be caught and told by who caught it.
    static AWAITED: Cell<bool> = const { Cell::new(false) };
}

/// What `work` gives, or the words of its panic. `work` must leave nothing half done behind that is used afterwards.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let before = AWAITED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    AWAITED.set(before);
    result.map_err(|payload| words(payload.as_ref()))
}

/// From now on a panic that nobody awaits is told in one line on standard error. The process's, so for `main` alone: it ends with
/// `exit_failed` where memory does not suffice for a thread.
pub fn tell_in_one_line(exit_failed: u8) {
    std::panic::set_hook(Box::new(move |panic| {
        if words(panic.payload()).contains(NO_ALTERNATIVE_STACK) {
            // Thrown before the thread can be unwound, and so followed by an abort.
            let _ = writeln!(std::io::stderr(), "error: {NO_MEMORY_FOR_A_THREAD}");
            std::process::exit(exit_failed.into());
        }
        if !AWAITED.get() {
            // A closed stderr is nobody to report to.
            let _ = writeln!(std::io::stderr(), "{}", line(panic));
        }
    }));
}

fn line(panic: &PanicHookInfo) -> String {
    let place = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
    let words: String = words(panic.payload()).chars().filter(|c| !c.is_control()).collect();
    format!("error: internal error: {words}{place}; this is a bug, please report it. Checkpoints are whole")
}

fn words(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without words").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::panic)]
    fn a_panic_is_caught_with_its_words() {
        assert_eq!(caught(|| 3), Ok(3));
        let name = "vocab";
        assert_eq!(caught(|| -> u8 { panic!("no {name}") }), Err("no vocab".to_owned()));
        assert_eq!(caught(|| caught(|| -> u8 { panic!("inner") })), Ok(Err("inner".to_owned())));
    }
}
