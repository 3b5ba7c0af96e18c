//! Stop signals: SIGINT, SIGTERM, SIGHUP and SIGUSR1 request a stop. A second SIGINT or SIGTERM exits at
//! once.

use crate::error::EXIT_STOPPED;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Polling interval of the thread that prints the notice.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A repeated signal within this time is ignored. GNU `timeout` and batch schedulers send a signal twice: to
/// the process and to its group.
const REPEAT_TIME: Duration = Duration::from_secs(1);

/// A flag that a signal sets to request a stop.
#[derive(Clone)]
pub struct StopFlag(Arc<Request>);

#[derive(Default)]
struct Request {
    requested: AtomicBool,
    /// Is called once when a stop is requested.
    notice: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl StopFlag {
    /// Starts to listen for signals.
    ///
    /// # Errors
    /// When the system refuses the handlers or a thread.
    pub fn listen() -> Result<Self> {
        // Slurm sends SIGUSR1 before the end of a job (`--signal`), and mpirun forwards it to its processes.
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
                    signal_hook::low_level::exit(EXIT_STOPPED.into());
                }
            }
        };
        // The thread ends with the process.
        std::thread::Builder::new().name("signals".into()).spawn(wait).context("starting a thread")?;
        Ok(stop)
    }

    /// Calls `notice` once, as soon as a stop is requested. The current step may still take long.
    ///
    /// # Errors
    /// When the system refuses a thread.
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

    /// Returns true after the first signal, and after the notice.
    pub fn is_requested(&self) -> bool {
        let requested = self.0.requested.load(Ordering::Relaxed);
        if requested {
            // A short step may end before the waiting thread wakes, so the notice is also called here. The
            // lock is held until the notice returns.
            let mut notice = self.0.notice.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(notice) = notice.take() {
                notice();
            }
        }
        requested
    }
}

/// Returns whether this process was started with `signal` ignored; false if the system does not say.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
