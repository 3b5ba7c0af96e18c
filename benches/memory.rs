//! Peak memory of one training pass with recomputed layers, by experts, vocabulary and tokens. Peak memory
//! of loading and saving a model, relative to its largest tensor.
//!
//! A counting allocator measures the peak above the memory in use before. For a pass that excludes weights
//! and gradient buffers; for loading it excludes the loaded model. `cargo bench --bench memory`.

mod models;

use models::{Shape, TINY, model, sequences};
use rand::Rng;
use rloss::actor::forward_backward::{ColumnLoss, Pass, PassSettings};
use rloss::actor::gradients::GradientSum;
use rloss::actor::micro_batch::MicroBatch;
use rloss::actor::optimizer::Optimizer;
use rloss::actor::{Columns, OptimizerSettings, PolicyColumns};
use rloss::checkpoint::load::ModelFolder;
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save};
use rloss::model::config::WeightFormat;
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::names::{ParameterSpec, parameter_specs};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::storage::StoredFormat;
use rloss::model::storage::TensorStorage;
use rloss::random::{Purpose, stream};
use rloss::recipe::Recipe;
use rloss::run::memory::{
    self, MemoryChoices, MemoryPlan, MemoryPlanInput, ToolInput, TrainableInput, WeightPlacement,
};
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

/// Runs forward and backward of `batch`; calls `begin` when everything but the pass itself is allocated.
fn run_pass(
    model: &Model,
    parameters: &Parameters,
    batch: &MicroBatch,
    recompute_layers: bool,
    begin: impl FnOnce(),
) {
    let settings = PassSettings {
        temperature: 1.0,
        load_balance_coefficient: 0.0,
        keeps_routed_experts: true,
        forward: ForwardOptions::default(),
    };
    let sum = GradientSum::new(parameters);
    let weights = &parameters.pass_weights(Some(&sum.pass_sink(0, None))).expect("weights");
    let pass = Pass { model, weights, batch, settings, recompute_layers, teacher: None };
    begin();
    let loss = |columns: &PolicyColumns| {
        Ok(PolicyColumns { log_probs: vec![-1.0; columns.log_probs.len()], ..columns.zeros() })
    };
    pass.forward_backward(&ColumnLoss { gradient: &loss, skips_zeros: false }, &|| ()).expect("pass");
}

fn measure(shape: Shape, tokens: usize) {
    let (model, parameters) = model(shape);
    let batch = &MicroBatch::split(&sequences(shape.vocabulary, tokens / 64, 65), usize::MAX)[0];
    let mut before = 0;
    run_pass(&model, &parameters, batch, true, || {
        before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
    });
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    let whole = PEAK.load(Ordering::Relaxed) - before;
    let logits = 4 * tokens * shape.vocabulary;
    println!(
        "{:>8} {:>11} {:>7} {:>12.1} {:>22.1}",
        shape.experts,
        shape.vocabulary,
        tokens,
        mib(whole),
        mib(logits),
    );
}

/// Compares planned and measured peak of a random model's update: weights, gradients, optimizer, one pass.
fn planned(seed: u64, recompute_layers: bool) {
    let mut rng = stream(seed, Purpose::Problem, &[]);
    let heads = 2 * rng.random_range(1..6usize);
    let shape = Shape {
        hidden: 64 * rng.random_range(2..7usize),
        layers: rng.random_range(2..7),
        heads,
        experts: rng.random_range(4..24),
        vocabulary: rng.random_range(500..30_000),
    };
    let tokens = 64 * rng.random_range(8..40usize);
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let (model, mut parameters) = model(shape);
    // Drawing the weights in parallel uses more memory than the rest.
    PEAK.store(NOW.load(Ordering::Relaxed), Ordering::Relaxed);
    let optimizer = Optimizer::new(&OptimizerSettings::default(), &mut parameters, false).expect("optimizer");
    let batch = &MicroBatch::split(&sequences(shape.vocabulary, tokens / 64, 65), usize::MAX)[0];
    run_pass(&model, &parameters, batch, recompute_layers, || ());
    let measured = PEAK.load(Ordering::Relaxed) - before;
    assert_eq!(optimizer.updates, 0);

    let mut recipe = Recipe::default();
    recipe.cold_start.steps = 0;
    recipe.train.recompute_layers = Some(recompute_layers);
    recipe.train.micro_batch_tokens = tokens;
    // One sequence, so that sampling uses less memory than the update.
    (recipe.rollout.prompt_tokens_max, recipe.rollout.response_tokens_max) = (8, tokens - 8);
    (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt) = (1, 1);
    let formats = vec![StoredFormat::F32; parameters.len()];
    let subject = MemoryPlanInput {
        command: memory::ModelCommand::Train,
        recipe: &recipe,
        config: &model.config,
        formats: &formats,
        trainable: TrainableInput { policy: vec![true; parameters.len()], critic: None, adapter: None },
        tokenizer_bytes: 0,
        tools: ToolInput { python_workers: 0, reply_chars_max: None },
        threads: 1,
        placement: WeightPlacement::whole(1),
        choices: MemoryChoices::default(),
        sft_row_tokens_max: None,
        teacher: None,
    };
    let plan = MemoryPlan::new(&subject);
    // Without the program, its threads, and what the allocator keeps.
    let of_pass = ["weights", "gradients", "optimizer"];
    let others = plan.resident.iter().filter(|part| !of_pass.contains(&part.name));
    let planned = plan.peak_bytes() - others.map(|part| part.bytes).sum::<u64>();
    let Shape { hidden, layers, heads, experts, vocabulary } = shape;
    println!(
        "{:<52} {:>9} {:>14.1} {:>14.1} {:>7.3}",
        format!(
            "{hidden} wide, {layers} layers, {heads} heads, {experts} experts, {vocabulary} words, {tokens} tokens"
        ),
        if recompute_layers { "again" } else { "kept" },
        planned as f64 / (1 << 20) as f64,
        measured as f64 / (1 << 20) as f64,
        measured as f64 / planned as f64
    );
}

/// Returns `f`'s result and its peak above the memory in use before and the result's `kept` bytes.
fn peak_of<T>(kept: usize, f: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = f();
    (result, (PEAK.load(Ordering::Relaxed) - before).saturating_sub(kept))
}

fn files(name: &str, shape: Shape, format: WeightFormat) {
    let (model, parameters) = model(shape);
    let config = &model.config;
    let folder = std::env::temp_dir().join(format!("rloss-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let tensor = |spec: &ParameterSpec| {
        Ok(parameters.values(parameters.index_of(&spec.name).unwrap_or_default())?.clone())
    };
    let write =
        || save(&folder, config, format, &CompanionFiles::default(), SHARD_BYTES_MAX, tensor).expect("saved");
    let (_, saving) = peak_of(0, write);
    let bytes = parameters.bytes() as usize;
    let largest = 4 * parameters.specs.iter().map(ParameterSpec::element_count).max().unwrap_or(0);
    drop(parameters);
    let read = || {
        let files = ModelFolder::open(&folder, config).expect("opened");
        let values = parameter_specs(config).into_iter().map(|spec| {
            let stored = TensorStorage::variable(&spec, files.read_values(&spec)?)?;
            Ok((spec, stored))
        });
        Parameters::load(config, &Backend::default(), values).expect("loaded")
    };
    let (_again, loading) = peak_of(bytes, read);
    std::fs::remove_dir_all(&folder).expect("removed");
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    println!(
        "{name:<22} {:>11.1} {:>20.1} {:>20.2} {:>20.2}",
        mib(bytes),
        mib(largest),
        mib(loading),
        mib(saving)
    );
}

fn main() {
    println!(
        "{:>8} {:>11} {:>7} {:>12} {:>22}",
        "experts", "vocabulary", "tokens", "peak (MiB)", "logits if whole (MiB)"
    );
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).stack_size(64 << 20).build().expect("pool");
    pool.install(|| {
        let base = Shape { hidden: 256, ..TINY };
        // 0 means the dense family: one SwiGLU MLP of four times the width, and a tied head.
        for experts in [0, 8, 32, 128] {
            measure(Shape { experts, ..base }, 2048);
        }
        for vocabulary in [1_000, 50_000, 201_088] {
            measure(Shape { vocabulary, ..TINY }, 1024);
        }
        for tokens in [1024, 2048, 4096, 8192] {
            measure(TINY, tokens);
        }
        println!(
            "{:<52} {:>9} {:>14} {:>14} {:>7}",
            "plan of an update", "layers", "planned (MiB)", "measured (MiB)", "ratio"
        );
        for seed in 0..6 {
            planned(seed, true);
            planned(seed, false);
        }
        println!(
            "{:<22} {:>11} {:>20} {:>20} {:>20}",
            "files", "model (MiB)", "largest tensor (MiB)", "loading above (MiB)", "saving above (MiB)"
        );
        let shape = Shape { hidden: 512, layers: 4, heads: 8, experts: 16, vocabulary: 50_000 };
        files("f32", shape, WeightFormat::F32);
        files("bf16", shape, WeightFormat::Bf16);
        files("mxfp4", shape, WeightFormat::Mxfp4);
    });
}
