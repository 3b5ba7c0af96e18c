//! TFLOP/s of attention, forward and backward, next to other implementations that were measured in the same
//! run.
//!
//! Operations are counted as in publications, not as a kernel computes them. The forward pass has 4 · D
//! operations per head and visible pair of query and key, the backward pass 2.5 times as many. A batch has
//! 16,384 tokens, in sequences of equal length.

use super::Extent;
use super::peers::{AttentionTimings, TimingCase};
use super::timing::{MEASUREMENTS, median_milliseconds, random_values};
use anyhow::{Result, ensure};
use candle_core::cuda_backend::CudaDevice;
use rloss::ops::cuda::{DeviceLaunchPlan, Inputs, kernel_set};
use rloss::ops::sink_attention::Attention;
use rloss::ops::sink_attention::kernels::{HEAD_DIMS, KernelSet, kernel_sets};
use rloss::ops::sink_attention::plan::LaunchSequences;

const TOKENS: usize = 16_384;
/// The head size.
const HEAD_DIM: usize = HEAD_DIMS[0];

/// ((heads, key-value heads), window) of published benchmarks, of GPT-OSS's layers with full attention, and
/// of its layers with a sliding window.
const LAYERS: [((usize, usize), Option<usize>); 3] =
    [((32, 32), None), ((64, 8), None), ((64, 8), Some(128))];

/// Number of tokens of a toy case.
const SMALL_TOKENS: usize = 256;

/// Returns the number of tokens of a batch, and the lengths of its sequences in tokens.
fn lengths(extent: Extent) -> (usize, &'static [usize]) {
    match extent {
        Extent::Small => (SMALL_TOKENS, &[128]),
        Extent::Short => (TOKENS, &[4096, 16_384]),
        Extent::Full => (TOKENS, &[1024, 2048, 4096, 8192, 16_384]),
    }
}

pub fn run(gpu: &CudaDevice, extent: Extent, peers: Option<&AttentionTimings>) -> Result<()> {
    let names = peers.map(AttentionTimings::names).unwrap_or_default();
    println!();
    match peers {
        Some(peers) => println!("Other implementations: {} on {}.", peers.library, peers.device),
        None => println!("Other implementations: not run."),
    }
    println!(
        "The columns of others give their TFLOP/s and, in brackets, this program's speed relative to theirs. Median of {MEASUREMENTS}.\n"
    );
    print!("| heads / kv heads, window | tokens | pass | kernels | ms | TFLOP/s |");
    names.iter().for_each(|name| print!(" {name} |"));
    println!("\n| --- | --- | --- | --- | --- | --- |{}", " --- |".repeat(names.len()));
    if extent == Extent::Small {
        check_operations()?;
    }
    let layers = if extent == Extent::Small { &[((2, 1), Some(20))][..] } else { &LAYERS };
    let (tokens, lengths) = lengths(extent);
    for &((heads, kv_heads), window) in layers {
        for &length in lengths {
            let mut rows = vec![];
            for kernels in kernel_sets(HEAD_DIM).map_or(&[][..], |sets| sets) {
                let heads = (heads, kv_heads);
                let times = measure(gpu, kernels, heads, window, (tokens, length), median_milliseconds)?;
                rows.extend([(false, kernels, times[0]), (true, kernels, times[1])]);
            }
            rows.sort_by_key(|&(backward, ..)| backward);
            for (backward, kernels, ms) in rows {
                let case = TimingCase { heads, kv_heads, window, length, backward };
                print_row(case, tokens, kernels, ms, &names, peers);
            }
        }
    }
    for (name, error) in peers.iter().flat_map(|peers| peers.failures()) {
        println!("\n{name} did not run everywhere: {}", error.replace('\n', " "));
    }
    Ok(())
}

fn print_row(
    case: TimingCase,
    tokens: usize,
    kernels: &KernelSet,
    ms: f32,
    names: &[&str],
    peers: Option<&AttentionTimings>,
) {
    let TimingCase { heads, kv_heads, window, length, backward } = case;
    let operations = operations(case, tokens);
    let tflops = |ms: f32| operations / (ms as f64 * 1e9);
    let window = window.map_or("all".into(), |w| w.to_string());
    let pass = if backward { "backward" } else { "forward" };
    print!(
        "| {heads} / {kv_heads}, {window} | {length} | {pass} | {} | {ms:.3} | **{:.0}** |",
        kernels.name,
        tflops(ms)
    );
    for name in names {
        match peers.and_then(|peers| peers.milliseconds(name, case)) {
            Some(theirs) => print!(" {:.0} ({:.2}×) |", tflops(theirs), theirs / ms),
            None => print!(" not run |"),
        }
    }
    println!();
}

/// Returns the number of floating-point operations of a pass over `tokens` tokens.
fn operations(case: TimingCase, tokens: usize) -> f64 {
    let TimingCase { heads, window, length, backward, .. } = case;
    let keys_max = window.unwrap_or(length).min(length);
    // The first `keys_max` queries see 1, 2, ... keys. All others see `keys_max` keys.
    let pairs = keys_max * (keys_max + 1) / 2 + (length - keys_max) * keys_max;
    let forward = (4 * HEAD_DIM * heads * pairs * (tokens / length)) as f64;
    if backward { 2.5 * forward } else { forward }
}

/// Launches the forward and the backward pass of GPT-OSS's full attention once, with the device's kernels.
pub fn launch_once(gpu: &CudaDevice, small: bool) -> Result<()> {
    let (heads, lengths) =
        if small { ((2, 1), (TOKENS, TOKENS / 16)) } else { (LAYERS[1].0, (TOKENS, 4096)) };
    let once: Stopwatch = |_, pass| pass().map(|()| 0.0);
    measure(gpu, kernel_set(gpu, HEAD_DIM)?, heads, None, lengths, once).map(drop)
}

/// Runs a pass and returns its time in milliseconds.
type Stopwatch = fn(&CudaDevice, &mut dyn FnMut() -> Result<()>) -> Result<f32>;

/// Returns the milliseconds of the forward pass and of the backward pass of `tokens` tokens in sequences of
/// `length`, as `stopwatch` measures them.
fn measure(
    gpu: &CudaDevice,
    kernels: &'static KernelSet,
    heads: (usize, usize),
    window: Option<usize>,
    (tokens, length): (usize, usize),
    stopwatch: Stopwatch,
) -> Result<[f32; 2]> {
    let bounds: Vec<usize> = (0..=tokens / length).map(|i| i * length).collect();
    let sequences = LaunchSequences::for_packed_sequences(&bounds)?;
    let attention = Attention {
        heads: heads.0,
        kv_heads: heads.1,
        head_dim: HEAD_DIM,
        window,
        sinks: true,
        sink_gradient: true,
    };
    let plan = DeviceLaunchPlan::new(gpu, kernels, &attention, &sequences, None)?;
    let upload = |heads: usize, seed: u64| gpu.clone_htod(&random_values(tokens * heads * HEAD_DIM, seed));
    let (q, kv, dout) = (upload(heads.0, 1)?, upload(2 * heads.1, 2)?, upload(heads.0, 3)?);
    let sinks = gpu.clone_htod(&vec![0.5f32; heads.0])?;
    let (q, kv, dout, sinks) = (q.as_view(), kv.as_view(), dout.as_view(), sinks.as_view());
    let inputs = Inputs { q: &q, kv: &kv, sinks: &sinks };
    let (mut outputs, mut gradients) = (plan.outputs()?, plan.gradients()?);
    let forward = stopwatch(gpu, &mut || Ok(plan.forward(&inputs, &mut outputs)?))?;
    let (out, lse) = (outputs.out.as_view(), &outputs.lse);
    let backward = stopwatch(gpu, &mut || Ok(plan.backward(&inputs, &out, lse, &dout, &mut gradients)?))?;
    Ok([forward, backward])
}

/// Checks that operations are counted as in publications.
fn check_operations() -> Result<()> {
    let operations = |window, length, backward| {
        operations(TimingCase { heads: 32, kv_heads: 32, window, length, backward }, TOKENS)
    };
    // About 4 · 64 · 32 · 16384² / 2. The exact number also includes half of the diagonal.
    let whole = operations(None, 16_384, false);
    let expected = 4.0 * 64.0 * 32.0 * 16_384f64.powi(2) / 2.0;
    ensure!((whole / expected - 1.0).abs() < 1e-4, "{whole} operations, about {expected} expected");
    for (found, expected) in [
        (operations(None, 16_384, true), 2.5 * whole),
        (operations(Some(1), 1024, false), (4 * 64 * 32 * TOKENS) as f64),
        (operations(Some(5000), 1024, false), operations(None, 1024, false)),
    ] {
        ensure!(found == expected, "{found} operations, {expected} expected");
    }
    Ok(())
}
