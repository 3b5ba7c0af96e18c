//! A pool of workers: idle ones, busy ones, and ones not started yet.

use anyhow::Result;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Up to a maximum of workers, started on demand.
pub struct Pool<T> {
    state: Mutex<Workers<T>>,
    freed: Condvar,
    workers_max: usize,
}

struct Workers<T> {
    idle: Vec<T>,
    /// Number of workers alive or being started, idle or busy.
    alive_count: usize,
}

impl<T> Pool<T> {
    /// Makes a pool with the workers `started`; the maximum is at least one.
    pub fn new(started: Vec<T>, workers_max: usize) -> Self {
        let state = Mutex::new(Workers { alive_count: started.len(), idle: started });
        Self { state, freed: Condvar::new(), workers_max: workers_max.max(1) }
    }

    /// Takes a worker: an idle one, a new one below the maximum, or the next one released. The caller returns
    /// it by [`Self::release`], or reports its loss by [`Self::discard`].
    ///
    /// # Errors
    /// Those of `start`.
    pub fn acquire(&self, start: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = self.lock();
        loop {
            if let Some(worker) = state.idle.pop() {
                return Ok(worker);
            }
            if state.alive_count < self.workers_max {
                state.alive_count += 1;
                drop(state);
                return start().inspect_err(|_| self.discard());
            }
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns an acquired worker.
    pub fn release(&self, worker: T) {
        self.lock().idle.push(worker);
        self.freed.notify_one();
    }

    /// Reports that an acquired worker has died.
    pub fn discard(&self) {
        self.lock().alive_count -= 1;
        self.freed.notify_one();
    }

    /// Locks the state. Poisoning is ignored: the state is consistent between statements.
    fn lock(&self) -> MutexGuard<'_, Workers<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
