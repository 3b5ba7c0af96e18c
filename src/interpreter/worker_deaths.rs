//! Counts workers that died or could not start during a call. The model gets a reply, and the user gets a
//! warning.

use super::lock;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Mutex;

/// Maximum number of deaths without a warning. Model-written code may end its own worker, so a few deaths are
/// normal.
const UNREPORTED_MAX: u64 = 5;

/// Number of deaths, and the cause of the last one.
#[derive(Debug, Default)]
pub struct WorkerDeaths(Mutex<DeathCount>);

#[derive(Debug, Default)]
struct DeathCount {
    count: u64,
    reported: u64,
    cause: String,
}

impl WorkerDeaths {
    pub fn record(&self, cause: String) {
        let mut deaths = lock(&self.0);
        deaths.count += 1;
        deaths.cause = cause;
    }

    /// Returns a warning when there are more than [`UNREPORTED_MAX`] deaths, and again whenever their number
    /// has grown tenfold.
    pub fn take_warning(&self) -> Option<String> {
        let mut deaths = lock(&self.0);
        if deaths.count <= UNREPORTED_MAX || deaths.count < 10 * deaths.reported {
            return None;
        }
        deaths.reported = deaths.count;
        let DeathCount { count, cause, .. } = &*deaths;
        Some(format!(
            "{count} calls of the Python tool ended with a dead worker so far; cause of the last death: {cause}"
        ))
    }
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
    fn more_than_a_handful_is_told_once_and_again_at_ten_times_as_many() {
        let deaths = WorkerDeaths::default();
        let mut reported = vec![];
        for number in 1..=100 {
            deaths.record(format!("number {number}"));
            reported.extend(deaths.take_warning());
        }
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert!(reported[0].starts_with("6 calls") && reported[0].ends_with("number 6"));
        assert!(reported[1].starts_with("60 calls"));
    }

    #[test]
    fn the_cause_is_the_signal_or_the_last_words() {
        assert!(cause(Some(ExitStatus::from_raw(9)), "").contains("memory runs out"));
        assert!(cause(Some(ExitStatus::from_raw(11)), "").contains("signal: 11"));
        assert!(cause(Some(ExitStatus::from_raw(256)), "a\nb").ends_with(": b"));
    }
}
