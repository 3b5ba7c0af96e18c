//! Pairs of computations that must be bitwise equal: rollout and training, split and serial decode, two runs
//! of the same backward pass.

use super::cpu_reference::round_to_bf16;
use super::problem::{AttentionProblem, AttentionShape};
use super::{CheckResult, Verdicts};
use anyhow::Result;
use candle_core::{Device, Tensor};
use half::bf16;
use rand::Rng;
use rloss::ops::cuda::{DeviceLaunchPlan, Inputs, KvPages, KvPool, PagedPass};
use rloss::ops::sink_attention::kernels::KernelSet;
use rloss::ops::sink_attention::plan::LaunchSequences;
use rloss::random::{Purpose, stream};
use std::sync::Arc;

/// Number of new tokens per sequence in each call.
#[derive(Clone, Copy)]
enum ChunkSize {
    Fixed(usize),
    /// A random number from 0 to this value, so that the batch changes from call to call.
    RandomUpTo(usize),
}

pub(super) fn run(device: &Device, small: bool, verdicts: &mut Verdicts) {
    for (shape, kernels) in
        long_shapes(small).iter().flat_map(|shape| shape.kernel_sets().iter().map(move |set| (shape, set)))
    {
        let problem = AttentionProblem::new(shape, 19);
        let name = format!("links: decode split over blocks = serial, {}, {}", shape.name, kernels.name);
        verdicts.check(&name, || compare_split_with_serial(&problem, device, kernels));
    }
    for (shape, kernels) in
        shapes(small).iter().flat_map(|shape| shape.kernel_sets().iter().map(move |set| (shape, set)))
    {
        let problem = AttentionProblem::new(shape, 11);
        let case = format!("{}, {}", shape.name, kernels.name);
        let chunk_sizes = [
            ("decode", ChunkSize::Fixed(1)),
            ("prefill in chunks of 7", ChunkSize::Fixed(7)),
            ("prefill in chunks of 64", ChunkSize::Fixed(64)),
            ("prefill in chunks of 100", ChunkSize::Fixed(100)),
            ("whole prefill", ChunkSize::Fixed(1 << 20)),
            ("a batch that changes", ChunkSize::RandomUpTo(90)),
        ];
        for (name, chunk_size) in chunk_sizes.into_iter().take(if small { 2 } else { 6 }) {
            let name = format!("links: {name} = training, {case}");
            verdicts.check(&name, || compare_rollout_with_training(&problem, device, kernels, chunk_size));
        }
        verdicts.check(&format!("links: backward from run to run, {case}"), || {
            repeat_backward(&problem, device, kernels, if small { 2 } else { 20 })
        });
        verdicts.check(&format!("links: alone = in a batch, backward too, {case}"), || {
            compare_alone_with_batch(&problem, device, kernels)
        });
    }
}

fn shapes(small: bool) -> Vec<AttentionShape> {
    let shape = AttentionShape::new;
    if small {
        return vec![
            shape("small", (16, 2), Some(20), &[70, 1, 9]),
            shape("small, heads of 128", (4, 2), Some(20), &[33, 1, 9]).with_head_dim(128),
        ];
    }
    vec![
        shape("64 heads of 8", (64, 8), None, &[257, 1, 130, 64, 400]),
        shape("64 heads of 8, window 128", (64, 8), Some(128), &[257, 1, 130, 64, 400]),
        shape("3 heads of 1, window 20", (3, 1), Some(20), &[65, 200, 2]),
        shape("32 heads of 8, heads of 128", (32, 8), None, &[257, 1, 130, 64, 400]).with_head_dim(128),
    ]
}

/// Returns shapes with several chunks of keys per sequence, and with a window that begins inside a chunk.
fn long_shapes(small: bool) -> Vec<AttentionShape> {
    let shape = AttentionShape::new;
    if small {
        return vec![
            shape("small", (6, 2), Some(600), &[1030, 515, 4]),
            shape("small, heads of 128", (4, 2), Some(600), &[1030, 4]).with_head_dim(128),
        ];
    }
    vec![
        shape("64 heads of 8", (64, 8), None, &[9000, 513, 1, 1500]),
        shape("3 heads of 1, window 600", (3, 1), Some(600), &[1030, 600]),
        shape("32 heads of 8, heads of 128", (32, 8), None, &[9000, 513, 1, 1500]).with_head_dim(128),
    ]
}

/// The outputs and gradients of attention, as bits of bf16 and f32.
#[derive(Default, PartialEq)]
pub(super) struct AttentionBits {
    pub out: Vec<u16>,
    pub lse: Vec<u32>,
    pub dq: Vec<u16>,
    pub dkv: Vec<u16>,
    pub dsinks: Vec<u32>,
}

fn bf16_bits(values: Vec<bf16>) -> Vec<u16> {
    values.into_iter().map(bf16::to_bits).collect()
}

fn f32_bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// Runs the forward and the backward pass as in training.
pub(super) fn training_bits(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> Result<AttentionBits> {
    let gpu = device.as_cuda_device()?;
    let sequences = LaunchSequences::for_packed_sequences(&problem.shape.cu_seqlens())?;
    let plan = DeviceLaunchPlan::new(gpu, kernels, &problem.shape.attention(), &sequences, None)?;
    let upload = |values: &[f32]| gpu.clone_htod(&round_to_bf16(values));
    let (q, kv, dout) = (upload(&problem.q)?, upload(&problem.kv)?, upload(&problem.dout)?);
    let sinks = gpu.clone_htod(&problem.sinks)?;
    let (q, kv, dout, sinks) = (q.as_view(), kv.as_view(), dout.as_view(), sinks.as_view());
    let inputs = Inputs { q: &q, kv: &kv, sinks: &sinks };
    let (mut outputs, mut gradients) = (plan.outputs()?, plan.gradients()?);
    plan.forward(&inputs, &mut outputs)?;
    plan.backward(&inputs, &outputs.out.as_view(), &outputs.lse, &dout, &mut gradients)?;
    Ok(AttentionBits {
        out: bf16_bits(gpu.clone_dtoh(&outputs.out)?),
        lse: f32_bits(gpu.clone_dtoh(&outputs.lse)?),
        dq: bf16_bits(gpu.clone_dtoh(&gradients.dq)?),
        dkv: bf16_bits(gpu.clone_dtoh(&gradients.dkv)?),
        dsinks: f32_bits(gpu.clone_dtoh(&gradients.dsinks)?),
    })
}

/// Creates a cache whose free pages contain NaN, as if from an earlier sequence. A read of such a page then
/// fails the check.
fn cache_with_stale_pages(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> Result<Arc<KvPool>> {
    let AttentionShape { heads, kv_heads, head_dim: d, .. } = problem.shape;
    let pages: usize = problem.shape.lengths.iter().map(|length| length.div_ceil(64)).sum();
    let cache = KvPool::new(device.as_cuda_device()?, kv_heads, d, pages)?;
    let rows = pages * 64;
    let nan = |shape: (usize, usize)| -> Result<Tensor> {
        let values = vec![bf16::NAN; shape.0 * shape.1];
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_device(device)?)
    };
    let q = nan((rows, heads * d))?.reshape((rows, heads, d))?;
    let kv = nan((rows, 2 * kv_heads * d))?.reshape((rows, 2, kv_heads, d))?;
    let sinks = Tensor::from_slice(&problem.sinks, heads, device)?;
    let mut earlier = cache.new_sequence();
    let attention = problem.shape.attention();
    let pass = PagedPass::with_kernels(kernels, &mut [&mut earlier], &[rows], &attention)?;
    pass.attend(0, &q, &kv, &sinks)?;
    Ok(cache)
}

/// Runs the sequences through a paged cache, chunk by chunk. Compares each row with training's row.
fn compare_rollout_with_training(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
    chunk_size: ChunkSize,
) -> CheckResult {
    let expected = training_bits(problem, device, kernels)?;
    let shape = &problem.shape;
    let (heads, kv_heads, d) = (shape.heads, shape.kv_heads, shape.head_dim);
    let starts = shape.cu_seqlens();
    let cache = cache_with_stale_pages(problem, device, kernels)?;
    let mut sequences: Vec<KvPages> = shape.lengths.iter().map(|_| cache.new_sequence()).collect();
    let sinks = Tensor::from_slice(&problem.sinks, heads, device)?;
    let mut rng = stream(13, Purpose::Evaluation, &[]);
    let (mut rows, mut differing, mut calls) = (0, 0, 0);
    while sequences.iter().zip(&shape.lengths).any(|(s, &length)| s.len() < length) {
        let counts: Vec<usize> = sequences
            .iter()
            .zip(&shape.lengths)
            .map(|(s, &length)| match chunk_size {
                ChunkSize::Fixed(chunk) => chunk.min(length - s.len()),
                ChunkSize::RandomUpTo(max) => rng.random_range(0..=max).min(length - s.len()),
            })
            .collect();
        if counts.iter().sum::<usize>() == 0 {
            continue;
        }
        // The indices of these tokens' rows in the whole problem.
        let problem_rows: Vec<usize> = (0..counts.len())
            .flat_map(|s| (0..counts[s]).map(move |i| (s, i)))
            .map(|(s, i)| starts[s] + sequences[s].len() + i)
            .collect();
        let gather = |values: &[f32], width: usize| -> Vec<bf16> {
            problem_rows
                .iter()
                .flat_map(|&row| round_to_bf16(&values[row * width..(row + 1) * width]))
                .collect()
        };
        let tokens = problem_rows.len();
        let q = Tensor::from_vec(gather(&problem.q, heads * d), (tokens, heads, d), &Device::Cpu)?;
        let kv =
            Tensor::from_vec(gather(&problem.kv, 2 * kv_heads * d), (tokens, 2, kv_heads, d), &Device::Cpu)?;
        let (q, kv) = (q.to_device(device)?, kv.to_device(device)?);
        let mut pages: Vec<&mut KvPages> = sequences.iter_mut().collect();
        let pass = PagedPass::with_kernels(kernels, &mut pages, &counts, &shape.attention())?;
        let (out, lse) = pass.attend(0, &q, &kv, &sinks)?;
        // As in a rollout, pages before the window are freed. Other sequences may use them.
        if let Some(window) = shape.attention().window {
            sequences.iter_mut().for_each(|sequence| sequence.forget_before(sequence.len(), window));
        }
        let out = bf16_bits(out.flatten_all()?.to_vec1()?);
        let lse = f32_bits(lse.flatten_all()?.to_vec1()?);
        for (row, &problem_row) in problem_rows.iter().enumerate() {
            for head in 0..heads {
                let (a, b) = (row * heads + head, problem_row * heads + head);
                let same =
                    lse[a] == expected.lse[b] && out[a * d..(a + 1) * d] == expected.out[b * d..(b + 1) * d];
                rows += 1;
                differing += usize::from(!same);
            }
        }
        calls += 1;
    }
    Ok(if differing == 0 && rows == shape.tokens() * heads {
        Ok(format!("{rows} of {rows} rows in {calls} calls"))
    } else {
        Err(format!("{differing} of {rows} rows differ in {calls} calls"))
    })
}

/// Maximum number of new tokens per sequence in [`compare_split_with_serial`].
const NEW_TOKENS_MAX: usize = 3;

/// Compares two decodes with paged caches. The split decode has one block per chunk of keys, and merges the
/// blocks' results. The serial decode has one block for all chunks.
fn compare_split_with_serial(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> CheckResult {
    let gpu = device.as_cuda_device()?;
    let AttentionShape { heads, kv_heads, head_dim, ref lengths, .. } = problem.shape;
    let (attention, starts) = (problem.shape.attention(), problem.shape.cu_seqlens());
    let (q_row, kv_row) = (heads * head_dim, 2 * kv_heads * head_dim);
    let counts: Vec<usize> = lengths.iter().map(|&length| length.min(NEW_TOKENS_MAX)).collect();
    let before: Vec<usize> = lengths.iter().zip(&counts).map(|(length, count)| length - count).collect();
    let batch = LaunchSequences::for_cached_sequences(&counts, &before)?;

    let pages_max = lengths.iter().map(|length| length.div_ceil(64)).max().unwrap_or(0);
    // The pages of a sequence are in reverse order. They contain NaN after the end of the sequence.
    let mut pool = vec![bf16::NAN; lengths.len() * pages_max * 64 * kv_row];
    let mut table = vec![];
    let mut q = vec![];
    for (s, (&length, &count)) in lengths.iter().zip(&counts).enumerate() {
        let pages = (0..pages_max).rev().map(|page| s * pages_max + page);
        table.extend(pages.clone().map(|page| page as i32));
        let rows = round_to_bf16(&problem.kv[starts[s] * kv_row..(starts[s] + length) * kv_row]);
        for (rows, page) in rows.chunks(64 * kv_row).zip(pages) {
            pool[page * 64 * kv_row..][..rows.len()].copy_from_slice(rows);
        }
        let end = starts[s] + length;
        q.extend(round_to_bf16(&problem.q[(end - count) * q_row..end * q_row]));
    }
    let (q, kv, sinks) = (gpu.clone_htod(&q)?, gpu.clone_htod(&pool)?, gpu.clone_htod(&problem.sinks)?);
    let (q, kv, sinks) = (q.as_view(), kv.as_view(), sinks.as_view());
    let forward = |is_split| -> Result<AttentionBits> {
        let pages = Some((&table[..], pages_max));
        let plan = DeviceLaunchPlan::with_split(gpu, kernels, &attention, &batch, pages, is_split)?;
        let mut outputs = plan.outputs()?;
        plan.forward(&Inputs { q: &q, kv: &kv, sinks: &sinks }, &mut outputs)?;
        let (out, lse) = (gpu.clone_dtoh(&outputs.out)?, gpu.clone_dtoh(&outputs.lse)?);
        Ok(AttentionBits { out: bf16_bits(out), lse: f32_bits(lse), ..AttentionBits::default() })
    };
    let (blocks, chunks) = (batch.query_tiles(&attention).len(), batch.chunk_tiles(&attention).len());
    Ok(if chunks < 2 * blocks {
        Err(format!(
            "only {chunks} chunks of keys for {blocks} tiles, so no query is split over chunks; use longer sequences"
        ))
    } else if forward(true)? == forward(false)? {
        Ok(format!("{} rows over {chunks} chunks of keys", batch.tokens() * heads))
    } else {
        Err("they differ".into())
    })
}

fn repeat_backward(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
    times: usize,
) -> CheckResult {
    let first = training_bits(problem, device, kernels)?;
    let mut differing = 0;
    for _ in 0..times {
        differing += usize::from(training_bits(problem, device, kernels)? != first);
    }
    Ok(if differing == 0 {
        Ok(format!("{times} of {times} runs"))
    } else {
        Err(format!("{differing} of {times} runs differ"))
    })
}

/// Checks that the outputs, dQ, dK and dV of a sequence do not depend on the other sequences of the batch.
/// The gradient of the sinks is a sum over the batch, so it is not compared.
fn compare_alone_with_batch(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> CheckResult {
    let batch = training_bits(problem, device, kernels)?;
    let AttentionShape { heads, kv_heads, head_dim, .. } = problem.shape;
    let (q_row, kv_row) = (heads * head_dim, 2 * kv_heads * head_dim);
    for bounds in problem.shape.cu_seqlens().windows(2) {
        let (start, end) = (bounds[0], bounds[1]);
        let shape = AttentionShape { lengths: vec![end - start], ..problem.shape.clone() };
        let alone = AttentionProblem {
            shape,
            q: problem.q[start * q_row..end * q_row].to_vec(),
            kv: problem.kv[start * kv_row..end * kv_row].to_vec(),
            sinks: problem.sinks.clone(),
            dout: problem.dout[start * q_row..end * q_row].to_vec(),
        };
        let alone = training_bits(&alone, device, kernels)?;
        let same = alone.out == batch.out[start * q_row..end * q_row]
            && alone.lse == batch.lse[start * heads..end * heads]
            && alone.dq == batch.dq[start * q_row..end * q_row]
            && alone.dkv == batch.dkv[start * kv_row..end * kv_row];
        if !same {
            return Ok(Err(format!("tokens {start} to {end} differ")));
        }
    }
    let sequences = problem.shape.lengths.len();
    Ok(Ok(format!("{sequences} of {sequences} sequences")))
}
