//! Peak memory of one training pass, with recomputed layers, against experts, vocabulary and tokens.
//!
//! A counting allocator tells the peak above what lay in memory before the pass: weights are not in it. Gradients are
//! what the pass must give, so they are shown beside it: the whole model's, and those of its largest layer or head,
//! of which copies exist while they are added up. `cargo bench --bench memory`.

mod models;

use models::{Shape, TINY, model, sequences};
use rloss::model::forward::ForwardOptions;
use rloss::train::batch::MicroBatch;
use rloss::train::forward_backward::{HeadGradient, Pass, PassSettings};
use rloss::train::gradients::GradientSum;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn measure(shape: Shape, tokens: usize) {
    let (model, parameters) = model(shape);
    let batch = &MicroBatch::split(&sequences(shape.vocabulary, tokens / 64, 65), usize::MAX)[0];
    let settings = PassSettings {
        recompute_layers: true,
        temperature: 1.0,
        load_balance: 0.0,
        forward: ForwardOptions::default(),
    };
    let sum = GradientSum::begin(&parameters).expect("gradients");
    let weights = &parameters.learning(&sum.of_pass(0)).expect("weights");
    let pass = Pass { model: &model, weights, batch, settings };
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    pass.forward_backward(&|log_probs, _| {
        Ok(HeadGradient { log_probs: vec![-1.0; log_probs.len()], entropies: vec![0.0; log_probs.len()] })
    })
    .expect("pass");
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    let whole = PEAK.load(Ordering::Relaxed) - before;
    let gradients = 4 * parameters.element_count();
    let of_layer = |layer| {
        let sizes = parameters.specs.iter().filter(|s| s.layer == layer).map(|s| s.element_count());
        4 * sizes.sum::<usize>()
    };
    let largest = of_layer(Some(0)).max(4 * shape.vocabulary * shape.hidden);
    let logits = 4 * tokens * shape.vocabulary;
    println!(
        "{:>8} {:>11} {:>7} {:>12.1} {:>15.1} {:>19.1} {:>22.1}",
        shape.experts,
        shape.vocabulary,
        tokens,
        mib(whole),
        mib(gradients),
        mib(largest),
        mib(logits),
    );
}

fn main() {
    println!(
        "{:>8} {:>11} {:>7} {:>12} {:>15} {:>19} {:>22}",
        "experts",
        "vocabulary",
        "tokens",
        "peak (MiB)",
        "gradients (MiB)",
        "largest layer (MiB)",
        "logits if whole (MiB)"
    );
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).stack_size(64 << 20).build().expect("pool");
    pool.install(|| {
        let base = Shape { hidden: 256, ..TINY };
        for experts in [8, 32, 128] {
            measure(Shape { experts, ..base }, 2048);
        }
        for vocabulary in [1_000, 50_000, 201_088] {
            measure(Shape { vocabulary, ..TINY }, 1024);
        }
        for tokens in [1024, 2048, 4096, 8192] {
            measure(TINY, tokens);
        }
    });
}
