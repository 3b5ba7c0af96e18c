//! SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask for a stop; a second SIGINT or SIGTERM exits at once.

use crate::error::EXIT_STOPPED;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a signal is looked for to be told of.
const POLL: Duration = Duration::from_millis(50);

/// Whether a stop was asked for.
#[derive(Clone)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub fn listen() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // Order matters: the shutdown looks at the flag before this signal sets it.
            signal_hook::flag::register_conditional_shutdown(signal, EXIT_STOPPED.into(), asked.clone())
                .and_then(|_| signal_hook::flag::register(signal, asked.clone()))
                .context("listening for signals")?;
        }
        // A terminal that closes sends several, so that a second one says nothing. Under `nohup` none is meant.
        if !is_ignored(SIGHUP) {
            signal_hook::flag::register(SIGHUP, asked.clone()).context("listening for signals")?;
        }
        // What mpirun passes on and Slurm sends before the end (`--signal`): of the others it kills within seconds.
        signal_hook::flag::register(SIGUSR1, asked.clone()).context("listening for signals")?;
        Ok(Self(asked))
    }

    /// Has `say` called once, as soon as a stop is asked for: the step under way may take long.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn tell(&self, say: impl FnOnce() + Send + 'static) -> Result<()> {
        let asked = self.0.clone();
        let wait = move || {
            while !asked.load(Ordering::Relaxed) {
                std::thread::sleep(POLL);
            }
            say();
        };
        // It ends with the process.
        std::thread::Builder::new().name("signals".into()).spawn(wait).map(drop).context("starting a thread")
    }

    /// True after the first signal.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether this process was started with `signal` ignored, where the system tells.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
