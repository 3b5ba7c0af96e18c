//! The thread pools of a run: one pool with all threads for large tasks, and single-thread pools for many
//! small tasks.
//!
//! Results do not depend on the pool, because every op gives the same bits on any number of threads.

use anyhow::{Context, Result, bail};
use candle_core::Device;
use rayon::{ThreadPool, ThreadPoolBuilder, Yield};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Stack size of a thread of a pool, in bytes. Tasks may recurse as deep as on the main thread.
const STACK_BYTES: usize = 64 << 20;
/// The time for which an idle thread spin-waits for work before it sleeps.
const SPIN_MAX: Duration = Duration::from_millis(1);
/// The niceness of threads of low priority, above that of the process. More would give them too little on a
/// machine that other programs use too.
const LOW_NICENESS: i32 = 5;
/// The error message when the system cannot start a thread.
const THREADS_REFUSED: &str =
    "starting threads; lower parallel.threads, or raise the limits of processes and memory (ulimit -u, -v)";

/// The share of the processors that the system gives to a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    Normal,
    /// A third of the share of a thread of normal priority, and all that such threads leave idle.
    Low,
}

impl Priority {
    /// Gives the priority to the calling thread.
    fn set(self) {
        if self == Priority::Low {
            // This changes the calling thread alone. If it is refused, the run is only slower.
            let _ = rustix::process::nice(LOW_NICENESS);
        }
    }
}

/// The thread pools of one run.
pub struct Threads {
    wide: ThreadPool,
    singles: Vec<ThreadPool>,
}

impl Threads {
    /// Creates pools with `threads` threads; 0 means one thread per core.
    ///
    /// # Errors
    /// When the system cannot start the threads.
    pub fn new(threads: usize) -> Result<Self> {
        Self::for_process(threads, 1)
    }

    /// Creates pools with `threads` threads for one of `processes` processes that share the cores of this
    /// machine. If `threads` is 0, the pools get an equal share of the cores.
    ///
    /// # Errors
    /// Errors of [`Self::new`].
    pub fn for_process(threads: usize, processes: usize) -> Result<Self> {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { (available / processes).max(1) } else { threads };
        Self::with_priority(threads, Priority::Normal)
    }

    /// Creates pools with `threads` threads of the priority `priority`.
    ///
    /// # Errors
    /// Errors of [`Self::new`].
    pub fn with_priority(threads: usize, priority: Priority) -> Result<Self> {
        let pool = |n: usize| {
            let builder = ThreadPoolBuilder::new().num_threads(n).stack_size(STACK_BYTES);
            builder.start_handler(move |_| priority.set()).build().context(THREADS_REFUSED)
        };
        let singles = (0..threads).map(|_| pool(1)).collect::<Result<_>>()?;
        Ok(Self { wide: pool(threads)?, singles })
    }

    /// Returns the number of threads.
    pub fn count(&self) -> usize {
        self.singles.len()
    }

    /// Runs `f`. Ops in `f` may use all threads.
    pub fn run_on_all<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.wide.install(f)
    }

    /// Runs `f(worker)` once on every single-thread pool, in parallel. Returns the results in worker order.
    /// All threads exist already, so a lack of threads in the system cannot make the call fail.
    pub fn run_on_each<R: Send>(&self, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
        let mut results = Vec::new();
        results.resize_with(self.singles.len(), || None);
        run_on_pools(&self.singles, 0, &f, &mut results);
        // The scope has propagated a panic of any worker, so every result is present.
        results.into_iter().flatten().collect()
    }

    /// Runs `f(index)` for every index below `count`, in parallel. Returns the results in index order. After
    /// the first error no further index is started.
    pub fn map<R: Send>(&self, count: usize, f: impl Fn(usize) -> Result<R> + Sync) -> Result<Vec<R>> {
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Result<R>>>> = (0..count).map(|_| Mutex::new(None)).collect();
        self.run_on_each(|_| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = results.get(index) else { break };
                let result = f(index);
                if result.is_err() {
                    next.store(count, Ordering::Relaxed);
                }
                *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            }
        });
        let mut values = Vec::with_capacity(count);
        let mut unfinished = 0;
        for place in results {
            match place.into_inner().unwrap_or_else(PoisonError::into_inner) {
                Some(result) => values.push(result?),
                None => unfinished += 1,
            }
        }
        if unfinished > 0 {
            bail!("{unfinished} of {count} parallel tasks did not run");
        }
        Ok(values)
    }
}

/// Runs `f`, a pass on `device`, on this thread of a pool. Meanwhile the other threads of the pool spin-wait
/// for work instead of sleeping. Waking a sleeping thread takes tens of microseconds, which is also the
/// duration of many ops of decode. Threads of rayon would sleep after fifteen microseconds.
///
/// A thread that has no work for [`SPIN_MAX`] still sleeps. If `device` is a GPU, or the thread belongs to no
/// pool or to a pool of one thread, this function just calls `f()`, and no thread spins.
pub fn with_spinning_threads<R>(device: &Device, f: impl FnOnce() -> R) -> R {
    let own = rayon::current_thread_index();
    if !device.is_cpu() || own.is_none() || rayon::current_num_threads() == 1 {
        return f();
    }
    let is_over = AtomicBool::new(false);
    rayon::in_place_scope(|scope| {
        scope.spawn_broadcast(|_, context| {
            let mut found = Instant::now();
            while Some(context.index()) != own
                && !is_over.load(Ordering::Relaxed)
                && found.elapsed() < SPIN_MAX
            {
                match rayon::yield_now() {
                    Some(Yield::Executed) => found = Instant::now(),
                    _ => std::thread::yield_now(),
                }
            }
        });
        let _over = SetOnDrop(&is_over);
        f()
    })
}

/// A guard that sets a flag when its scope ends, also after a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `f` once on each pool of `pools`, and stores the result in the pool's entry of `results`. The number
/// of the first pool is `worker`. This thread waits for all pools.
fn run_on_pools<R: Send>(
    pools: &[ThreadPool],
    worker: usize,
    f: &(impl Fn(usize) -> R + Sync),
    results: &mut [Option<R>],
) {
    if let ([pool, pools @ ..], [result, results @ ..]) = (pools, results) {
        pool.in_place_scope(|scope| {
            scope.spawn(|_| *result = Some(f(worker)));
            run_on_pools(pools, worker + 1, f, results);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn only_threads_of_low_priority_are_nicer_than_the_process() {
        let own = || rustix::process::getpriority_process(None).unwrap();
        let before = own();
        let low = (before + LOW_NICENESS).min(19);
        for (priority, expected) in [(Priority::Low, low), (Priority::Normal, before)] {
            let pools = Threads::with_priority(2, priority).unwrap();
            assert_eq!(pools.run_on_each(|_| own()), [expected; 2]);
            assert_eq!(pools.run_on_all(own), expected);
        }
        assert_eq!(own(), before);
    }

    #[test]
    fn what_runs_awake_may_share_out_nest_and_panic_in_a_pool_and_outside_of_one() {
        let cpu = &Device::Cpu;
        let sum = || with_spinning_threads(cpu, || with_spinning_threads(cpu, || rayon::join(|| 20, || 22)));
        assert_eq!(with_spinning_threads(cpu, || 7), 7);
        for threads in [1, 2, 3] {
            let pools = Threads::new(threads).unwrap();
            for _ in 0..if cfg!(miri) { 2 } else { 100 } {
                assert_eq!(pools.run_on_all(sum), (20, 22));
            }
            // This takes longer than the other threads spin-wait.
            assert_eq!(
                pools.run_on_all(|| with_spinning_threads(cpu, || std::thread::sleep(2 * SPIN_MAX))),
                ()
            );
            let panics = || pools.run_on_all(|| with_spinning_threads(cpu, || panic!("of f")));
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            assert_eq!(pools.run_on_all(sum), (20, 22));
        }
    }
}
