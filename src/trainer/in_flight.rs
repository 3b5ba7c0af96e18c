//! A sampling on a thread of its own.

use super::observer::Stages;
use super::sample::{InProgress, SampleOutput, Sampler};
use crate::actor::Actor;
use crate::engine::PassScheduler;
use crate::metrics::{Console, Timings};
use crate::ops::threads::Threads;
use crate::run::environment::Environment;
use crate::run::sampling::Sampling;
use anyhow::{Context, Result};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The samples of a step, and the partial trajectories that the next sampling continues.
type Sampled = Option<(SampleOutput, InProgress)>;

/// Samples of step `step` that are not there yet. Dropping it stops the sampling and waits for its thread.
pub(super) struct InFlight {
    pub step: u64,
    stop: Arc<AtomicBool>,
    /// `None` after the thread has ended.
    thread: Option<JoinHandle<Result<Sampled>>>,
}

/// The inputs of a sampling that its thread owns.
pub(super) struct SamplingInputs {
    /// A snapshot of the policy, and the version of its weights.
    pub actor: Actor,
    pub version: u64,
    pub environment: Arc<Environment>,
    /// The threads that compute; `None` means those of the run.
    pub threads: Option<Arc<Threads>>,
    pub pass_scheduler: Arc<PassScheduler>,
    pub timings: Arc<Timings>,
    pub in_progress: InProgress,
}

impl InFlight {
    /// Starts to sample step `step`.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn start(step: u64, inputs: SamplingInputs) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .spawn(move || inputs.sample(step, &|| stopped.load(Ordering::Relaxed)))
            .context("starting the thread that samples ahead")?;
        Ok(Self { step, stop, thread: Some(thread) })
    }

    /// Waits for the samples. A panic of the thread continues here.
    ///
    /// # Errors
    /// The error of the sampling.
    pub fn join(mut self) -> Result<(SampleOutput, InProgress)> {
        let thread = self.thread.take().context("the sampling has ended")?;
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))?.context("the rollout was stopped")
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            resume_unwind(panic);
        }
    }
}

impl SamplingInputs {
    fn sample(mut self, step: u64, stop: &(dyn Fn() -> bool + Sync)) -> Result<Sampled> {
        // The console shows the update.
        let console = Console::silent();
        let sampler = Sampler {
            sampling: Sampling { actor: &self.actor, environment: &self.environment },
            version: self.version,
            threads: self.threads.as_deref().unwrap_or(&self.actor.execution.threads),
            pass_scheduler: Some(&self.pass_scheduler),
            stages: Stages { timings: &self.timings, console: &console },
            stop,
        };
        let samples = sampler.sample(step, &mut self.in_progress)?;
        Ok(samples.map(|samples| (samples, self.in_progress)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn in_flight(run: impl FnOnce(&AtomicBool) + Send + 'static) -> InFlight {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            run(&stopped);
            Ok(None)
        });
        InFlight { step: 1, stop, thread: Some(thread) }
    }

    #[test]
    fn dropping_a_sampling_stops_it_and_waits_and_its_panic_goes_on() {
        let ended = Arc::new(AtomicBool::new(false));
        let sets = ended.clone();
        drop(in_flight(move |stop| {
            while !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            sets.store(true, Ordering::Relaxed);
        }));
        assert!(ended.load(Ordering::Relaxed));
        let error = in_flight(|_| ()).join().map(drop).unwrap_err();
        assert_eq!(error.to_string(), "the rollout was stopped");
        let ends: [fn(InFlight); 2] = [drop, |sampling| drop(sampling.join())];
        for ends in ends {
            let panic = catch_unwind(AssertUnwindSafe(|| ends(in_flight(|_| panic!("of sampling")))));
            assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"of sampling"));
        }
    }
}
