//! Causes of the death of a worker during a call. The model gets a reply, and the console reports the
//! failure.

use crate::metrics::Console;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Reports a call whose worker died or could not start.
pub fn report(console: &Console, cause: &str) {
    console.report_failure(&format!("Python tool: a call ended with a dead worker: {cause}"));
}

/// Returns the likely cause of a worker's death.
pub fn cause(status: Option<ExitStatus>, stderr_tail: &str) -> String {
    let word = stderr_tail.lines().next_back().map(|line| format!(": {line}")).unwrap_or_default();
    match status {
        Some(status) if status.signal() == Some(libc::SIGKILL) => {
            "killed from outside, as the system does when memory runs out (see the kernel log): lower interpreter.workers or \
             interpreter.memory_mib"
                .to_owned()
        }
        Some(status) => format!("{status}{word}"),
        None => format!("it sent an invalid reply{word}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_the_signal_or_the_last_words() {
        assert!(cause(Some(ExitStatus::from_raw(9)), "").contains("memory runs out"));
        assert!(cause(Some(ExitStatus::from_raw(11)), "").contains("signal: 11"));
        assert!(cause(Some(ExitStatus::from_raw(256)), "a\nb").ends_with(": b"));
    }
}
