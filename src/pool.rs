//! A pool of workers: those that wait, those that are busy, and those that are yet to be started.

use anyhow::Result;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Up to a number of workers, started as they are needed.
pub struct Pool<T> {
    state: Mutex<Workers<T>>,
    freed: Condvar,
    workers_max: usize,
}

struct Workers<T> {
    free: Vec<T>,
    /// Workers alive or being started, free or busy.
    started: usize,
}

impl<T> Pool<T> {
    /// A pool that begins with the workers `started`; at least one worker is allowed.
    pub fn new(started: Vec<T>, workers_max: usize) -> Self {
        let state = Mutex::new(Workers { started: started.len(), free: started });
        Self { state, freed: Condvar::new(), workers_max: workers_max.max(1) }
    }

    /// Takes a worker: one that waits, a new one while there are fewer than allowed, or the next to be freed. Each worker is given
    /// back by [`Self::release`], or its loss reported by [`Self::forget`].
    ///
    /// # Errors
    /// Those of `start`.
    pub fn acquire(&self, start: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = self.lock();
        loop {
            if let Some(worker) = state.free.pop() {
                return Ok(worker);
            }
            if state.started < self.workers_max {
                state.started += 1;
                drop(state);
                return start().inspect_err(|_| self.forget());
            }
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives back an acquired worker.
    pub fn release(&self, worker: T) {
        self.lock().free.push(worker);
        self.freed.notify_one();
    }

    /// An acquired worker has died.
    pub fn forget(&self) {
        self.lock().started -= 1;
        self.freed.notify_one();
    }

    /// Poisoning is ignored: the state is whole between statements.
    fn lock(&self) -> MutexGuard<'_, Workers<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
