//! Wall-clock seconds of the named stages of a step.

use super::Metrics;
use crate::panics::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The metric with a row's time of day, in seconds since 1970. It is a timing: comparisons of runs leave it
/// out.
pub const CLOCK: &str = "timing_s/clock";

/// Returns the seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

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
        *lock(&self.0).entry(format!("timing_s/{stage}")).or_default() += seconds;
    }

    /// Returns the seconds so far as `timing_s/<stage>` with [`CLOCK`], and resets them for the next step.
    pub fn take(&self) -> Metrics {
        let mut metrics: Metrics = std::mem::take(&mut *lock(&self.0)).into_iter().collect();
        metrics.set(CLOCK, now());
        metrics
    }
}
