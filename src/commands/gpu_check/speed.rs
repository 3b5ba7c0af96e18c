//! TFLOP/s of attention, forward and backward, next to other implementations that were measured in the same
//! run.
//!
//! Operations are counted as in publications, not as a kernel computes them. The forward pass has 4 · D
//! operations per head and visible pair of query and key, the backward pass 2.5 times as many. A batch has
//! 16,384 tokens, in sequences of equal length.

use super::Extent;
use super::cpu_reference::round_to_bf16;
use super::peers::{AttentionTimings, TimingCase};
use super::problem::{AttentionProblem, AttentionShape};
use crate::ops::cuda::{DeviceLaunchPlan, Inputs, Timer, kernel_set};
use crate::ops::sink_attention::kernels::{HEAD_DIMS, KernelSet, kernel_sets};
use crate::ops::sink_attention::plan::LaunchSequences;
use anyhow::Result;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;

const TOKENS: usize = 16_384;
const WARM_UPS: usize = 3;
/// Number of measurements. Their median is printed.
const MEASUREMENTS: usize = 21;
/// Number of consecutive passes per measurement. Several passes hide the host's time.
const PASSES: usize = 5;

/// ((heads, key-value heads), window) of published benchmarks, of GPT-OSS's layers with full attention, and
/// of its layers with a sliding window.
const LAYERS: [((usize, usize), Option<usize>); 3] =
    [((32, 32), None), ((64, 8), None), ((64, 8), Some(128))];

/// Returns the lengths of the sequences, in tokens.
fn lengths(extent: Extent) -> &'static [usize] {
    match extent {
        Extent::Small => &[1024],
        Extent::Short => &[4096, 16_384],
        Extent::Full => &[1024, 2048, 4096, 8192, 16_384],
    }
}

pub(super) fn run(gpu: &CudaDevice, extent: Extent, peers: Option<&AttentionTimings>) -> Result<()> {
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
    for ((heads, kv_heads), window) in LAYERS {
        for &length in lengths(extent) {
            let mut rows = vec![];
            for kernels in kernel_sets(HEAD_DIMS[0]).map_or(&[][..], |sets| sets) {
                let times = measure(gpu, kernels, (heads, kv_heads), window, length, median_milliseconds)?;
                rows.extend([(false, kernels, times[0]), (true, kernels, times[1])]);
            }
            rows.sort_by_key(|&(backward, ..)| backward);
            for (backward, kernels, ms) in rows {
                let case = TimingCase { heads, kv_heads, window, length, backward };
                print_row(case, kernels, ms, &names, peers);
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
    kernels: &KernelSet,
    ms: f32,
    names: &[&str],
    peers: Option<&AttentionTimings>,
) {
    let TimingCase { heads, kv_heads, window, length, backward } = case;
    let operations = operations(case);
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

/// Returns the number of floating-point operations of a pass over [`TOKENS`] tokens.
fn operations(case: TimingCase) -> f64 {
    let TimingCase { heads, window, length, backward, .. } = case;
    let keys_max = window.unwrap_or(length).min(length);
    // The first `keys_max` queries see 1, 2, ... keys. All others see `keys_max` keys.
    let pairs = keys_max * (keys_max + 1) / 2 + (length - keys_max) * keys_max;
    let forward = (4 * 64 * heads * pairs * (TOKENS / length)) as f64;
    if backward { 2.5 * forward } else { forward }
}

/// Returns `count` random values. About a million values are drawn, then repeated. Zeros are not used,
/// because kernels run faster on zeros than on real data.
pub(super) fn random_values(count: usize, seed: u64) -> Vec<bf16> {
    let problem = AttentionProblem::new(&AttentionShape::new("values", (128, 128), None, &[128]), seed);
    round_to_bf16(&problem.q).into_iter().cycle().take(count).collect()
}

/// Launches the forward and the backward pass of GPT-OSS's full attention once, with the device's kernels.
pub(super) fn launch_once(gpu: &CudaDevice, small: bool) -> Result<()> {
    let (heads, length) = if small { ((2, 1), TOKENS / 16) } else { (LAYERS[1].0, 4096) };
    let once: Stopwatch = |_, pass| pass().map(|()| 0.0);
    measure(gpu, kernel_set(gpu, HEAD_DIMS[0])?, heads, None, length, once).map(drop)
}

/// Runs a pass and returns its time in milliseconds.
type Stopwatch = fn(&CudaDevice, &mut dyn FnMut() -> Result<()>) -> Result<f32>;

/// Returns the milliseconds of the forward pass and of the backward pass, as `stopwatch` measures them.
fn measure(
    gpu: &CudaDevice,
    kernels: &'static KernelSet,
    heads: (usize, usize),
    window: Option<usize>,
    length: usize,
    stopwatch: Stopwatch,
) -> Result<[f32; 2]> {
    let shape = AttentionShape::new("speed", heads, window, &vec![length; TOKENS / length]);
    let sequences = LaunchSequences::for_packed_sequences(&shape.cu_seqlens())?;
    let plan = DeviceLaunchPlan::new(gpu, kernels, &shape.attention(), &sequences, None)?;
    let upload = |heads: usize, seed: u64| gpu.clone_htod(&random_values(TOKENS * heads * 64, seed));
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

/// Returns the median time of `pass`, in milliseconds.
pub(super) fn median_milliseconds(gpu: &CudaDevice, pass: &mut dyn FnMut() -> Result<()>) -> Result<f32> {
    for _ in 0..WARM_UPS {
        pass()?;
    }
    let mut times = vec![];
    for _ in 0..MEASUREMENTS {
        let timer = Timer::start(gpu)?;
        for _ in 0..PASSES {
            pass()?;
        }
        times.push(timer.milliseconds()? / PASSES as f32);
    }
    times.sort_by(f32::total_cmp);
    Ok(times[MEASUREMENTS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_as_publishers_do() {
        let case =
            |window, length, backward| TimingCase { heads: 32, kv_heads: 32, window, length, backward };
        // About 4 · 64 · 32 · 16384² / 2. The exact number also includes half of the diagonal.
        let whole = operations(case(None, 16_384, false));
        assert!((whole / (4.0 * 64.0 * 32.0 * 16_384f64.powi(2) / 2.0) - 1.0).abs() < 1e-4);
        assert_eq!(operations(case(None, 16_384, true)), 2.5 * whole);
        assert_eq!(operations(case(Some(1), 1024, false)), (4 * 64 * 32 * TOKENS) as f64);
        assert_eq!(operations(case(Some(5000), 1024, false)), operations(case(None, 1024, false)));
    }
}
