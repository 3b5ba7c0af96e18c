//! A pool of workers. A worker is idle, busy or not started yet.

use anyhow::Result;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A pool of at most `workers_max` workers, which are started on demand.
pub struct Pool<T> {
    state: Mutex<Workers<T>>,
    worker_available: Condvar,
    workers_max: usize,
}

struct Workers<T> {
    idle: Vec<T>,
    /// Number of workers alive or being started, idle or busy.
    alive_count: usize,
}

impl<T> Pool<T> {
    /// Makes a pool with the workers `started`, which are idle. A `workers_max` of 0 counts as 1.
    pub fn new(started: Vec<T>, workers_max: usize) -> Self {
        let state = Mutex::new(Workers { alive_count: started.len(), idle: started });
        Self { state, worker_available: Condvar::new(), workers_max: workers_max.max(1) }
    }

    /// Takes a worker: an idle one, a new one while the pool is below its maximum, or else the next one that
    /// is released. The caller gives the worker back with [`Self::release`], or reports its loss with
    /// [`Self::discard`].
    ///
    /// # Errors
    /// Errors of `start`.
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
            state = self.worker_available.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a worker as [`Self::acquire`] does, and replaces an idle one that has ended.
    ///
    /// # Errors
    /// Errors of `start`.
    pub fn acquire_running(
        &self,
        start: impl Fn() -> Result<T>,
        has_ended: impl Fn(&T) -> bool,
    ) -> Result<T> {
        loop {
            let mut is_new = false;
            let worker = self.acquire(|| {
                is_new = true;
                start()
            })?;
            if is_new || !has_ended(&worker) {
                return Ok(worker);
            }
            drop(worker);
            self.discard();
        }
    }

    /// Gives an acquired worker back to the pool.
    pub fn release(&self, worker: T) {
        self.lock().idle.push(worker);
        self.worker_available.notify_one();
    }

    /// Reports that an acquired worker has died.
    pub fn discard(&self) {
        self.lock().alive_count -= 1;
        self.worker_available.notify_one();
    }

    /// Locks the state. Poisoning is ignored, because every statement leaves the state consistent.
    fn lock(&self) -> MutexGuard<'_, Workers<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
