//! SIGINT and SIGTERM: the first asks for a stop, the second exits at once.

use crate::error::EXIT_STOPPED;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
        Ok(Self(asked))
    }

    /// True after the first signal.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
