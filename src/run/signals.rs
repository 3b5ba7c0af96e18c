//! Stop signals: SIGINT, SIGTERM, SIGHUP and SIGUSR1 request a stop. A second SIGINT or SIGTERM exits
//! immediately. In a conversation, SIGINT ends the current answer.

use crate::error::EXIT_STOPPED;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Polling interval of the thread that prints the notice.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A repeated signal within this time is ignored. GNU `timeout` and batch schedulers send a signal twice: to
/// the process and to its group.
const REPEAT_TIME: Duration = Duration::from_secs(1);

/// A flag that a signal sets to request a stop.
#[derive(Clone)]
pub struct StopFlag(Arc<StopRequest>);

#[derive(Default)]
struct StopRequest {
    requested: AtomicBool,
    /// Callback for the first stop request.
    notice: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Callback before a second signal ends the program.
    at_exit: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl StopFlag {
    /// Starts to listen for signals.
    ///
    /// # Errors
    /// When a signal handler or a thread cannot be created.
    pub fn listen() -> Result<Self> {
        // Slurm sends SIGUSR1 before the end of a job (`--signal`), and mpirun forwards the signal to its
        // processes.
        let mut kinds = vec![SIGINT, SIGTERM, SIGUSR1];
        // `nohup` ignores SIGHUP, so this process must ignore it too.
        if !is_ignored(SIGHUP) {
            kinds.push(SIGHUP);
        }
        let mut signals = Signals::new(kinds).context("listening for signals")?;
        let stop = Self(Arc::default());
        let request = stop.0.clone();
        let wait = move || {
            let mut first = None;
            for kind in signals.forever() {
                let (first_kind, start) = *first.get_or_insert_with(|| (kind, Instant::now()));
                let repeated = kind == first_kind && start.elapsed() < REPEAT_TIME;
                if request.requested.swap(true, Ordering::Relaxed)
                    && !repeated
                    && [SIGINT, SIGTERM].contains(&kind)
                {
                    let at_exit = request.at_exit.lock().unwrap_or_else(PoisonError::into_inner).take();
                    if let Some(at_exit) = at_exit {
                        at_exit();
                    }
                    signal_hook::low_level::exit(EXIT_STOPPED.into());
                }
            }
        };
        // The thread ends with the process.
        std::thread::Builder::new().name("signals".into()).spawn(wait).context("starting a thread")?;
        Ok(stop)
    }

    /// Calls `notice` once, as soon as a stop is requested. The current step may still take a long time.
    ///
    /// # Errors
    /// When no thread can be created.
    pub fn on_request(&self, notice: impl FnOnce() + Send + 'static) -> Result<()> {
        *self.0.notice.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(notice));
        let stop = self.clone();
        let wait = move || {
            while !stop.is_requested() {
                std::thread::sleep(POLL_INTERVAL);
            }
        };
        // The thread ends with the process.
        std::thread::Builder::new().name("stop".into()).spawn(wait).map(drop).context("starting a thread")
    }

    /// Calls `at_exit` before a second signal ends the program at once.
    pub fn before_exit(&self, at_exit: impl FnOnce() + Send + 'static) {
        *self.0.at_exit.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(at_exit));
    }

    /// Returns whether a stop was requested. If so, returns only after the notice was given.
    pub fn is_requested(&self) -> bool {
        let requested = self.0.requested.load(Ordering::Relaxed);
        if requested {
            // A short step may end before the waiting thread wakes up, so the notice is also called here. The
            // lock is held until the notice returns.
            let mut notice = self.0.notice.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(notice) = notice.take() {
                notice();
            }
        }
        requested
    }
}

/// Ctrl-C in a conversation on a terminal. It ends the current answer. If there is no current answer, it ends
/// the program with exit code 130.
#[derive(Clone)]
pub struct AnswerInterrupt(Arc<Mutex<InterruptState>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InterruptState {
    /// There is no current answer.
    Idle,
    /// An answer is being sampled.
    Answering,
    /// A signal at this time ended the current answer, or will end it.
    Interrupted(Instant),
}

impl InterruptState {
    /// Returns the state after a signal at `now`. `None` if the program must end.
    fn after_signal(self, now: Instant) -> Option<Self> {
        match self {
            Self::Answering => Some(Self::Interrupted(now)),
            Self::Interrupted(at) if now.saturating_duration_since(at) < REPEAT_TIME => Some(self),
            Self::Idle | Self::Interrupted(_) => None,
        }
    }
}

impl AnswerInterrupt {
    /// Starts to listen for SIGINT.
    ///
    /// # Errors
    /// When the signal handler or a thread cannot be created.
    pub fn listen() -> Result<Self> {
        let interrupt = Self(Arc::new(Mutex::new(InterruptState::Idle)));
        let mut signals = Signals::new([SIGINT]).context("listening for signals")?;
        let shared = interrupt.clone();
        let wait = move || {
            for _ in signals.forever() {
                let mut state = shared.lock();
                match state.after_signal(Instant::now()) {
                    Some(next) => *state = next,
                    None => {
                        // The shell's prompt must begin on a new line. A write to a closed terminal may fail.
                        let _ = std::io::stderr().write_all(b"\r\x1b[K\n");
                        signal_hook::low_level::exit(EXIT_STOPPED.into());
                    }
                }
            }
        };
        // The thread ends with the process.
        std::thread::Builder::new().name("signals".into()).spawn(wait).context("starting a thread")?;
        Ok(interrupt)
    }

    /// Records that an answer begins.
    pub fn begin(&self) {
        *self.lock() = InterruptState::Answering;
    }

    /// Records that the answer has ended. If a signal ended the answer, its time is kept, so that a repeated
    /// signal does not end the program.
    pub fn end(&self) {
        let mut state = self.lock();
        if *state == InterruptState::Answering {
            *state = InterruptState::Idle;
        }
    }

    /// Returns whether the current answer must end.
    pub fn is_requested(&self) -> bool {
        matches!(*self.lock(), InterruptState::Interrupted(_))
    }

    fn lock(&self) -> MutexGuard<'_, InterruptState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether this process was started with `signal` ignored. False if that is unknown.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_ends_an_answer_and_without_one_the_program() {
        let now = Instant::now();
        let interrupted = InterruptState::Answering.after_signal(now);
        assert_eq!(interrupted, Some(InterruptState::Interrupted(now)));
        assert_eq!(InterruptState::Idle.after_signal(now), None);
        // A repeated signal counts only after some time, because the program may see the first one late.
        let again = |later| InterruptState::Interrupted(now).after_signal(now + later);
        assert_eq!(again(REPEAT_TIME / 2), interrupted);
        assert_eq!(again(REPEAT_TIME), None);
    }
}
