//! The engine: token ids in, token ids out. It knows no message, no task and no reward.
//!
//! A client submits an [`EngineRequest`] and receives the tokens of its samples one by one, then a
//! [`Completion`]. The result depends on request and weights alone: not on other requests, their order, the
//! batch or the number of threads. A request may hold its own version of the weights; otherwise it uses the
//! engine's.

mod cache_admission;
mod draw;
mod pass_scheduler;
mod policy_version;
mod prefix_cache;
mod queue;
mod request;
mod work;
mod worker;

pub use pass_scheduler::PassScheduler;
pub use policy_version::PolicyVersion;
pub use request::{
    Completion, Continuation, EngineRequest, FinishReason, NewToken, SampleRequest, TokenScores,
};

use crate::model::cache::{CacheCapacity, CacheFactory};
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::panics::lock;
use anyhow::{Error, Result, ensure};
use pass_scheduler::RunningPass;
use prefix_cache::PrefixCache;
use queue::Queue;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use worker::Worker;

/// Maximum tokens per forward pass. Decode has priority; long prompts take the rest, so they are fed in
/// chunks.
pub const FORWARD_TOKENS_MAX: usize = 1024;

/// Limit for the bytes of all weights multiplied by the number of threads. Up to this limit, each thread runs
/// a worker of its own. Larger models use one worker whose ops use all threads, so weights are read once per
/// batch.
const PARALLEL_WORKERS_BYTES_MAX: u64 = 512 << 20;

/// Returns the number of workers that decode in parallel, for `threads` threads and weights of `weight_bytes`
/// bytes.
pub fn worker_count(weight_bytes: u64, threads: usize) -> usize {
    if weight_bytes.saturating_mul(threads as u64) <= PARALLEL_WORKERS_BYTES_MAX { threads } else { 1 }
}

/// Limits of an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineLimits {
    /// Maximum number of sequences that a worker decodes together.
    pub sequences_max: usize,
    /// Whether decoding on a GPU uses CUDA graphs.
    pub cuda_graphs: bool,
    /// Capacity of the KV caches on a GPU. On the host, caches grow as needed.
    pub cache_capacity: CacheCapacity,
    /// Maximum number of tokens whose keys and values are kept for later requests with the same first tokens.
    /// 0 keeps none. On a GPU and beside a mesh nothing is kept.
    pub prefix_tokens_max: usize,
}

/// Counts the prompt tokens of an engine.
#[derive(Default)]
struct PrefillCounters {
    read: AtomicU64,
    reused: AtomicU64,
}

/// Prompt tokens of an engine so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillCounts {
    /// Prompt tokens that passed through the model.
    pub read: u64,
    /// Prompt tokens whose keys and values were kept from another request.
    pub reused: u64,
    /// Tokens whose keys and values are kept for later requests.
    pub kept: usize,
}

/// The owner of requests. Its methods are called from the engine's threads, never while a lock of the engine
/// is held, so they may submit further requests.
pub trait Client: Sync {
    /// Receives the next token of `sample`. Returns false to end the sample after this token.
    fn token(&self, sample: u64, token: &NewToken) -> bool;

    /// Receives the result of `sample`.
    fn finished(&self, sample: u64, completion: Completion);

    /// Returns whether later requests may begin with a sample's tokens. If so, keys and values of samples are
    /// kept, not of prompts alone.
    fn keeps_samples(&self) -> bool {
        true
    }

    /// Is called by a worker before each forward pass and while it is idle. `sampled` is the number of tokens
    /// that this worker drew since its last call. Returns false to end the work on all requests.
    fn goes_on(&self, sampled: u64) -> bool;
}

/// Continuous batching for versions of one model.
pub struct Engine<'m> {
    threads: &'m Threads,
    /// The version of requests that name none.
    version: PolicyVersion,
    limits: EngineLimits,
    /// Number of workers that decode in parallel.
    workers: usize,
    /// Orders this engine's passes and those of another one; `None` if it has the processors alone.
    pass_scheduler: Option<&'m PassScheduler>,
    caches: CacheFactory,
    queue: Mutex<Queue>,
    /// Blocks of earlier requests; `None` if they are not kept.
    prefixes: Option<Mutex<PrefixCache>>,
    prefill: PrefillCounters,
    /// Wakes idle workers when there is work, or when the work ends.
    work: Condvar,
}

impl<'m> Engine<'m> {
    /// Returns an engine whose own version of the weights is `policy`. Completions name it by `version`.
    ///
    /// # Errors
    /// When a GPU's memory does not suffice for the caches.
    pub fn new(threads: &'m Threads, policy: PolicyView, version: u64, limits: EngineLimits) -> Result<Self> {
        let device = policy.weights.device();
        let workers = match policy.weights.mesh() {
            None if device.is_cpu() => worker_count(policy.weights.bytes, threads.count()),
            // A GPU runs one forward pass at a time.
            _ => 1,
        };
        let caches = CacheFactory::new(&policy.model.config, device, limits.cache_capacity)?;
        let queue = Mutex::new(Queue::new(0));
        let is_alone = device.is_cpu() && policy.weights.mesh().is_none();
        let keeps_prefixes = is_alone && limits.prefix_tokens_max > 0;
        let prefixes = keeps_prefixes.then(|| Mutex::new(PrefixCache::new(limits.prefix_tokens_max)));
        let (prefill, work) = (PrefillCounters::default(), Condvar::new());
        let engine = Self {
            threads,
            version: PolicyVersion::new(version, policy),
            limits,
            workers,
            pass_scheduler: None,
            caches,
            queue,
            prefixes,
            prefill,
            work,
        };
        engine.clear();
        Ok(engine)
    }

    /// Returns the engine with forward passes that `scheduler` starts. Its engines have the same number of
    /// workers.
    pub fn with_pass_scheduler(self, scheduler: &'m PassScheduler) -> Self {
        Self { pass_scheduler: Some(scheduler), ..self }
    }

    /// Waits until a worker's forward pass may start.
    fn start_pass(&self) -> Option<RunningPass<'_>> {
        self.pass_scheduler.map(|scheduler| scheduler.start(self.version(), self.workers))
    }

    /// Returns the engine's own policy.
    pub fn policy(&self) -> PolicyView<'_> {
        self.version.policy()
    }

    /// Returns the number of the engine's own version of the weights.
    pub fn version(&self) -> u64 {
        self.version.number()
    }

    /// Returns the maximum length of a sequence, in tokens.
    pub fn context_tokens_max(&self) -> usize {
        self.version.model().context_tokens_max()
    }

    /// Returns how many prompt tokens were read and how many were reused, and how many tokens are kept now.
    pub fn prefill_counts(&self) -> PrefillCounts {
        let PrefillCounters { read, reused } = &self.prefill;
        let kept = self.prefixes().map_or(0, |prefixes| prefixes.tokens());
        PrefillCounts { read: read.load(Ordering::Relaxed), reused: reused.load(Ordering::Relaxed), kept }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// When the request has no token or no sample, or its samples might outgrow the model's context. When it
    /// names a version of another model or device, or any version beside a mesh whose ranks run every pass
    /// together.
    pub fn submit(&self, mut request: EngineRequest) -> Result<()> {
        ensure!(
            !request.tokens.is_empty() && !request.samples.is_empty(),
            "the request has no token or no sample"
        );
        let version = request.version.take().unwrap_or_else(|| self.version.clone());
        self.check_version(&version)?;
        check_length(&version, request.tokens.len(), request.new_tokens_max)?;
        lock(&self.queue).submit(version, request);
        self.work.notify_one();
        Ok(())
    }

    /// Continues a sequence that was kept.
    ///
    /// # Errors
    /// When no kept sequence has that id, or the sequence might outgrow the model's context.
    pub fn continue_sequence(&self, continuation: Continuation) -> Result<()> {
        lock(&self.queue).continue_sequence(continuation)?;
        self.work.notify_one();
        Ok(())
    }

    /// Removes a kept sequence. Does nothing if no kept sequence has that id.
    pub fn release(&self, id: u64) {
        lock(&self.queue).release(id);
        self.work.notify_one();
    }

    /// Ends a sample before its next token. Its completion has what was drawn so far.
    pub fn cancel(&self, id: u64) {
        lock(&self.queue).cancel(id);
        self.work.notify_one();
    }

    /// Ends the work of all workers with `error`. Only the first error is kept; [`Self::run`] returns it.
    pub fn fail(&self, error: Error) {
        lock(&self.queue).failure.get_or_insert(error);
        self.work.notify_all();
    }

    /// Wakes idle workers, so that they call [`Client::goes_on`].
    pub fn wake(&self) {
        self.work.notify_all();
    }

    /// Removes all requests, all sequences and the failure, if there is one. Kept prefixes stay.
    /// [`Self::run`] must not be active.
    pub fn clear(&self) {
        *lock(&self.queue) = Queue::new(self.slots());
    }

    /// Works on requests until [`Client::goes_on`] returns false. If the ranks of a mesh run every forward
    /// pass together, a rank without work joins the passes of the others.
    ///
    /// # Errors
    /// When a forward pass fails, gives logits that are not finite, or [`Self::fail`] was called.
    pub fn run(&self, client: &dyn Client) -> Result<()> {
        let mesh = self.version.weights().mesh();
        let run = || {
            let worker = Worker::new(self, client);
            if let Some(mesh) = mesh { worker.run_on_mesh(mesh) } else { worker.run() }
        };
        if self.workers > 1 {
            self.threads.run_on_each(|_| run());
        } else {
            self.threads.run_on_all(run);
        }
        lock(&self.queue).failure.take().map_or(Ok(()), Err)
    }

    /// Returns the number of sequences whose caches fit in memory together. On the host it is unlimited.
    fn slots(&self) -> usize {
        let on_host = self.version.weights().device().is_cpu();
        if on_host { usize::MAX } else { self.limits.cache_capacity.sequences }
    }

    /// Checks that the engine's caches and ranks fit `version`.
    fn check_version(&self, version: &PolicyVersion) -> Result<()> {
        if *version == self.version {
            return Ok(());
        }
        let (own, other) = (self.version.weights(), version.weights());
        ensure!(
            version.model().config == self.version.model().config && other.device().same_device(own.device()),
            "version {} of the weights has another model or device than the engine",
            version.number()
        );
        ensure!(
            own.mesh().is_none() && other.mesh().is_none(),
            "processes that run every pass together sample with one version of the weights"
        );
        Ok(())
    }

    fn prefixes(&self) -> Option<MutexGuard<'_, PrefixCache>> {
        self.prefixes.as_ref().map(|prefixes| lock(prefixes))
    }
}

/// Checks that `tokens` tokens and `new_tokens_max` new ones fit the context of `version`.
fn check_length(version: &PolicyVersion, tokens: usize, new_tokens_max: usize) -> Result<()> {
    let context = version.model().context_tokens_max();
    ensure!(
        tokens.saturating_add(new_tokens_max) <= context,
        "{tokens} tokens and up to {new_tokens_max} new ones exceed the context of {context}"
    );
    Ok(())
}

/// Ends the engine's work when a worker's thread panics; otherwise the other workers would wait for its
/// sequences.
struct PanicGuard<'e, 'm>(&'e Engine<'m>);

impl Drop for PanicGuard<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(anyhow::anyhow!("a sampling thread panicked; this is a bug"));
        }
    }
}
