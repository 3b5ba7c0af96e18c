//! Pairs of computations that must be bitwise equal: rollout and training, decode split over blocks and
//! serial decode, two runs of a backward.

use super::Verdicts;
use super::oracle::bits;
use super::problem::{AttentionProblem, Shape};
use crate::ops::cuda::{DeviceLaunchPlan, Inputs, KvPages, KvPool, paged_sink_attention};
use crate::ops::sink_attention::kernels::{KERNEL_SETS, KernelSet};
use crate::ops::sink_attention::plan::LaunchSequences;
use crate::random::{Purpose, stream};
use anyhow::Result;
use candle_core::{Device, Tensor};
use half::bf16;
use rand::Rng;
use std::sync::Arc;

/// New tokens per sequence and call.
#[derive(Clone, Copy)]
enum Pace {
    Fixed(usize),
    /// A random number up to this one, 0 included, as in a batch that changes between calls.
    Random(usize),
}

pub(super) fn run(device: &Device, small: bool, verdicts: &mut Verdicts) {
    for (shape, kernels) in
        long_shapes(small).iter().flat_map(|shape| KERNEL_SETS.iter().map(move |set| (shape, set)))
    {
        let problem = AttentionProblem::new(shape, 19);
        let what = format!("links: decode spread over blocks = serial, {}, {}", shape.name, kernels.name);
        verdicts.check(&what, || spread_against_serial(&problem, device, kernels));
    }
    for (shape, kernels) in
        shapes(small).iter().flat_map(|shape| KERNEL_SETS.iter().map(move |set| (shape, set)))
    {
        let problem = AttentionProblem::new(shape, 11);
        let of = format!("{}, {}", shape.name, kernels.name);
        let paces = [
            ("decode", Pace::Fixed(1)),
            ("prefill in chunks of 7", Pace::Fixed(7)),
            ("prefill in chunks of 64", Pace::Fixed(64)),
            ("prefill in chunks of 100", Pace::Fixed(100)),
            ("whole prefill", Pace::Fixed(1 << 20)),
            ("a batch that changes", Pace::Random(90)),
        ];
        for (name, pace) in paces.into_iter().take(if small { 2 } else { 6 }) {
            let what = format!("links: {name} = training, {of}");
            verdicts.check(&what, || rollout_against_training(&problem, device, kernels, pace));
        }
        verdicts.check(&format!("links: backward from run to run, {of}"), || {
            backward_again(&problem, device, kernels, if small { 2 } else { 20 })
        });
        verdicts.check(&format!("links: alone = in a batch, backward too, {of}"), || {
            alone_against_batch(&problem, device, kernels)
        });
    }
}

fn shapes(small: bool) -> Vec<Shape> {
    let shape = Shape::new;
    if small {
        return vec![shape("small", (16, 2), Some(20), &[70, 1, 9])];
    }
    vec![
        shape("64 heads of 8", (64, 8), None, &[257, 1, 130, 64, 400]),
        shape("64 heads of 8, window 128", (64, 8), Some(128), &[257, 1, 130, 64, 400]),
        shape("3 heads of 1, window 20", (3, 1), Some(20), &[65, 200, 2]),
    ]
}

/// Shapes with several chunks of keys per sequence, and a window that begins inside a chunk.
fn long_shapes(small: bool) -> Vec<Shape> {
    let shape = Shape::new;
    if small {
        return vec![shape("small", (6, 2), Some(600), &[1030, 515, 4])];
    }
    vec![
        shape("64 heads of 8", (64, 8), None, &[9000, 513, 1, 1500]),
        shape("3 heads of 1, window 600", (3, 1), Some(600), &[1030, 600]),
    ]
}

/// All outputs of a pass, as bits.
#[derive(Default, PartialEq)]
pub(super) struct Bits {
    pub out: Vec<u16>,
    pub lse: Vec<u32>,
    pub dq: Vec<u16>,
    pub dkv: Vec<u16>,
    pub dsinks: Vec<u32>,
}

fn halves(values: Vec<bf16>) -> Vec<u16> {
    values.into_iter().map(bf16::to_bits).collect()
}

fn words(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// Runs training's forward and backward.
pub(super) fn training_bits(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> Result<Bits> {
    let gpu = device.as_cuda_device()?;
    let sequences = LaunchSequences::for_packed_sequences(&problem.shape.cu_seqlens())?;
    let prepared = DeviceLaunchPlan::new(gpu, kernels, &problem.shape.attention(), &sequences, None)?;
    let up = |values: &[f32]| gpu.clone_htod(&bits(values));
    let (q, kv, dout) = (up(&problem.q)?, up(&problem.kv)?, up(&problem.dout)?);
    let sinks = gpu.clone_htod(&problem.sinks)?;
    let (q, kv, dout, sinks) = (q.as_view(), kv.as_view(), dout.as_view(), sinks.as_view());
    let inputs = Inputs { q: &q, kv: &kv, sinks: &sinks };
    let (mut outputs, mut gradients) = (prepared.outputs()?, prepared.gradients()?);
    prepared.forward(&inputs, &mut outputs)?;
    prepared.backward(&inputs, &outputs.out.as_view(), &outputs.lse, &dout, &mut gradients)?;
    Ok(Bits {
        out: halves(gpu.clone_dtoh(&outputs.out)?),
        lse: words(gpu.clone_dtoh(&outputs.lse)?),
        dq: halves(gpu.clone_dtoh(&gradients.dq)?),
        dkv: halves(gpu.clone_dtoh(&gradients.dkv)?),
        dsinks: words(gpu.clone_dtoh(&gradients.dsinks)?),
    })
}

/// Creates a cache whose free pages hold NaN from an earlier sequence.
fn stale_cache(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> Result<Arc<KvPool>> {
    let Shape { heads, kv_heads, .. } = problem.shape;
    let pages: usize = problem.shape.lengths.iter().map(|length| length.div_ceil(64)).sum();
    let cache = KvPool::new(device.as_cuda_device()?, kv_heads, pages)?;
    let rows = pages * 64;
    let nan = |shape: (usize, usize)| -> Result<Tensor> {
        let values = vec![bf16::NAN; shape.0 * shape.1];
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_device(device)?)
    };
    let q = nan((rows, heads * 64))?.reshape((rows, heads, 64))?;
    let kv = nan((rows, 2 * kv_heads * 64))?.reshape((rows, 2, kv_heads, 64))?;
    let sinks = Tensor::from_slice(&problem.sinks, heads, device)?;
    let mut earlier = cache.new_sequence();
    let attention = problem.shape.attention();
    paged_sink_attention(kernels, &q, &kv, &sinks, &mut [&mut earlier], &[rows], &attention)?;
    Ok(cache)
}

fn rollout_against_training(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
    pace: Pace,
) -> Result<Result<String, String>> {
    let expected = training_bits(problem, device, kernels)?;
    let shape = &problem.shape;
    let (heads, kv_heads) = (shape.heads, shape.kv_heads);
    let starts = shape.cu_seqlens();
    let cache = stale_cache(problem, device, kernels)?;
    let mut sequences: Vec<KvPages> = shape.lengths.iter().map(|_| cache.new_sequence()).collect();
    let sinks = Tensor::from_slice(&problem.sinks, heads, device)?;
    let mut rng = stream(13, Purpose::Evaluation, &[]);
    let (mut rows, mut wrong, mut calls) = (0, 0, 0);
    while sequences.iter().zip(&shape.lengths).any(|(s, &length)| s.len() < length) {
        let counts: Vec<usize> = sequences
            .iter()
            .zip(&shape.lengths)
            .map(|(s, &length)| match pace {
                Pace::Fixed(chunk) => chunk.min(length - s.len()),
                Pace::Random(most) => rng.random_range(0..=most).min(length - s.len()),
            })
            .collect();
        if counts.iter().sum::<usize>() == 0 {
            continue;
        }
        let places: Vec<usize> = (0..counts.len())
            .flat_map(|s| (0..counts[s]).map(move |i| (s, i)))
            .map(|(s, i)| starts[s] + sequences[s].len() + i)
            .collect();
        let gather = |values: &[f32], width: usize| -> Vec<bf16> {
            places.iter().flat_map(|&at| bits(&values[at * width..(at + 1) * width])).collect()
        };
        let tokens = places.len();
        let q = Tensor::from_vec(gather(&problem.q, heads * 64), (tokens, heads, 64), &Device::Cpu)?;
        let kv = Tensor::from_vec(
            gather(&problem.kv, 2 * kv_heads * 64),
            (tokens, 2, kv_heads, 64),
            &Device::Cpu,
        )?;
        let (q, kv) = (q.to_device(device)?, kv.to_device(device)?);
        let mut held: Vec<&mut KvPages> = sequences.iter_mut().collect();
        let (out, lse) =
            paged_sink_attention(kernels, &q, &kv, &sinks, &mut held, &counts, &shape.attention())?;
        // A rollout frees these pages, and another sequence may fill them.
        if let Some(window) = shape.attention().window {
            sequences.iter_mut().for_each(|sequence| sequence.forget_before(sequence.len(), window));
        }
        let out = halves(out.flatten_all()?.to_vec1()?);
        let lse = words(lse.flatten_all()?.to_vec1()?);
        for (row, &place) in places.iter().enumerate() {
            for head in 0..heads {
                let (seen, should) = (row * heads + head, place * heads + head);
                let same = lse[seen] == expected.lse[should]
                    && out[seen * 64..(seen + 1) * 64] == expected.out[should * 64..(should + 1) * 64];
                rows += 1;
                wrong += usize::from(!same);
            }
        }
        calls += 1;
    }
    Ok(if wrong == 0 && rows == shape.tokens() * heads {
        Ok(format!("{rows} of {rows} rows in {calls} calls"))
    } else {
        Err(format!("{wrong} of {rows} rows differ in {calls} calls"))
    })
}

/// New tokens per sequence in `spread_against_serial`, fewer in a shorter sequence.
const DECODED: usize = 3;

/// Compares two decodes over pages: one block per chunk of keys with merged partial results, and one block
/// for all chunks.
fn spread_against_serial(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> Result<Result<String, String>> {
    let gpu = device.as_cuda_device()?;
    let Shape { heads, kv_heads, ref lengths, .. } = problem.shape;
    let (attention, starts) = (problem.shape.attention(), problem.shape.cu_seqlens());
    let (q_row, kv_row) = (heads * 64, 2 * kv_heads * 64);
    let counts: Vec<usize> = lengths.iter().map(|&length| length.min(DECODED)).collect();
    let before: Vec<usize> = lengths.iter().zip(&counts).map(|(length, count)| length - count).collect();
    let batch = LaunchSequences::for_cached_sequences(&counts, &before)?;

    let pages_max = lengths.iter().map(|length| length.div_ceil(64)).max().unwrap_or(0);
    // Pages of a sequence are in reverse order, and hold NaN past its end.
    let mut pool = vec![bf16::NAN; lengths.len() * pages_max * 64 * kv_row];
    let mut table = vec![];
    let mut q = vec![];
    for (s, (&length, &count)) in lengths.iter().zip(&counts).enumerate() {
        let pages = (0..pages_max).rev().map(|page| s * pages_max + page);
        table.extend(pages.clone().map(|page| page as i32));
        let rows = bits(&problem.kv[starts[s] * kv_row..(starts[s] + length) * kv_row]);
        for (rows, page) in rows.chunks(64 * kv_row).zip(pages) {
            pool[page * 64 * kv_row..][..rows.len()].copy_from_slice(rows);
        }
        let end = starts[s] + length;
        q.extend(bits(&problem.q[(end - count) * q_row..end * q_row]));
    }
    let (q, kv, sinks) = (gpu.clone_htod(&q)?, gpu.clone_htod(&pool)?, gpu.clone_htod(&problem.sinks)?);
    let (q, kv, sinks) = (q.as_view(), kv.as_view(), sinks.as_view());
    let forward = |spread| -> Result<Bits> {
        let pages = Some((&table[..], pages_max));
        let prepared = DeviceLaunchPlan::with_split(gpu, kernels, &attention, &batch, pages, spread)?;
        let mut outputs = prepared.outputs()?;
        prepared.forward(&Inputs { q: &q, kv: &kv, sinks: &sinks }, &mut outputs)?;
        let (out, lse) = (gpu.clone_dtoh(&outputs.out)?, gpu.clone_dtoh(&outputs.lse)?);
        Ok(Bits { out: halves(out), lse: words(lse), ..Bits::default() })
    };
    let (blocks, chunks) = (batch.query_tiles(&attention).len(), batch.chunk_tiles(&attention).len());
    Ok(if chunks < 2 * blocks {
        Err(format!("{chunks} chunks of keys for {blocks} tiles: nothing is spread"))
    } else if forward(true)? == forward(false)? {
        Ok(format!("{} rows over {chunks} chunks of keys", batch.tokens() * heads))
    } else {
        Err("they differ".into())
    })
}

fn backward_again(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
    times: usize,
) -> Result<Result<String, String>> {
    let first = training_bits(problem, device, kernels)?;
    let mut wrong = 0;
    for _ in 0..times {
        wrong += usize::from(training_bits(problem, device, kernels)? != first);
    }
    Ok(if wrong == 0 {
        Ok(format!("{times} of {times} runs"))
    } else {
        Err(format!("{wrong} of {times} runs differ"))
    })
}

/// Checks that rows of dQ, dK and dV do not depend on the rest of the batch. ds is a sum over the batch.
fn alone_against_batch(
    problem: &AttentionProblem,
    device: &Device,
    kernels: &'static KernelSet,
) -> Result<Result<String, String>> {
    let together = training_bits(problem, device, kernels)?;
    let Shape { heads, kv_heads, .. } = problem.shape;
    let (q_row, kv_row) = (heads * 64, 2 * kv_heads * 64);
    for bounds in problem.shape.cu_seqlens().windows(2) {
        let (start, end) = (bounds[0], bounds[1]);
        let shape = Shape { lengths: vec![end - start], ..problem.shape.clone() };
        let alone = AttentionProblem {
            shape,
            q: problem.q[start * q_row..end * q_row].to_vec(),
            kv: problem.kv[start * kv_row..end * kv_row].to_vec(),
            sinks: problem.sinks.clone(),
            dout: problem.dout[start * q_row..end * q_row].to_vec(),
        };
        let seen = training_bits(&alone, device, kernels)?;
        let same = seen.out == together.out[start * q_row..end * q_row]
            && seen.lse == together.lse[start * heads..end * heads]
            && seen.dq == together.dq[start * q_row..end * q_row]
            && seen.dkv == together.dkv[start * kv_row..end * kv_row];
        if !same {
            return Ok(Err(format!("tokens {start} to {end} differ")));
        }
    }
    let sequences = problem.shape.lengths.len();
    Ok(Ok(format!("{sequences} of {sequences} sequences")))
}
