//! Bytes of memory that requests share.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A number of bytes. A request takes a share before it allocates.
#[derive(Debug)]
pub struct Budget {
    /// Bytes of the whole budget.
    pub bytes: usize,
    left: Mutex<usize>,
    freed: Condvar,
}

/// Bytes that were taken from a budget. They return when the share is dropped.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self { bytes, left: Mutex::new(bytes), freed: Condvar::new() })
    }

    /// Takes `bytes`. Returns `None` if so many do not become free within `wait`.
    pub fn take(self: &Arc<Self>, bytes: usize, wait: Duration) -> Option<Share> {
        if bytes > self.bytes {
            return None;
        }
        // Nothing panics while the lock is held.
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(left, wait, |left| *left < bytes);
        let (mut left, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(bytes)?;
        Some(Share { budget: self.clone(), bytes })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        *self.budget.left.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.budget.freed.notify_all();
    }
}
