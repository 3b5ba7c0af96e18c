//! Workers that wait, are busy, or are yet to be started.

use super::lock;
use anyhow::Result;
use std::sync::{Condvar, Mutex, PoisonError};

/// At most so many workers, started as they are needed.
pub struct Pool<T> {
    state: Mutex<Counted<T>>,
    freed: Condvar,
    workers_max: usize,
}

struct Counted<T> {
    free: Vec<T>,
    /// Workers alive or being started, free or busy.
    started: usize,
}

impl<T> Pool<T> {
    pub fn new(first: T, workers_max: usize) -> Self {
        let state = Mutex::new(Counted { free: vec![first], started: 1 });
        Self { state, freed: Condvar::new(), workers_max }
    }

    /// A free worker: one that waits, a new one while there are fewer than allowed, or the next to be freed.
    pub fn acquire(&self, start: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = lock(&self.state);
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
        lock(&self.state).free.push(worker);
        self.freed.notify_one();
    }

    /// An acquired worker has died.
    pub fn forget(&self) {
        lock(&self.state).started -= 1;
        self.freed.notify_one();
    }
}
