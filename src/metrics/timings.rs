//! Wall-clock seconds of the named stages of a step.

use super::Metrics;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Seconds by stage, measured on any thread. Stages may nest (`step` around `gen`). The times of a repeated
/// stage add up.
#[derive(Debug, Default)]
pub struct Timings(Mutex<BTreeMap<String, f64>>);

impl Timings {
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `work` and adds its seconds to `timing_s/<stage>`, even if `work` fails.
    pub fn time<T>(&self, stage: &str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.add(stage, start.elapsed().as_secs_f64());
        result
    }

    /// Adds seconds that the caller measured.
    pub fn add(&self, stage: &str, seconds: f64) {
        *self.lock().entry(format!("timing_s/{stage}")).or_default() += seconds;
    }

    /// Returns the seconds so far as `timing_s/<stage>`, and resets them for the next step.
    pub fn take(&self) -> Metrics {
        std::mem::take(&mut *self.lock()).into_iter().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, f64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
