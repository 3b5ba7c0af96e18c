//! Milliseconds, TFLOP/s and GB/s of all ops except attention, at gpt-oss-20b's shapes, compared with the
//! limits of `scripts/roofline.py`.
//!
//! A multiply-add counts as two operations. The bytes of each tensor count once. A backward pass is timed on
//! a graph of one op.

use super::timing::{median_milliseconds, random_values};
use crate::model_ops::trainable_parameter;
use anyhow::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Tensor};
use rloss::ops::graph::differentiate;
use rloss::ops::muon::{Muon, iteration_flop, muon};
use rloss::ops::optimizer::{AdamW, adamw};
use rloss::ops::{self, Dispatch, Parameter};

/// A model's sizes.
struct Sizes {
    hidden: usize,
    queries: usize,
    experts: usize,
    intermediate: usize,
    vocabulary: usize,
    tokens: &'static [usize],
}

const TOP_K: usize = 4;
/// Peak operations per second of dense bf16 products (H100 SXM and H200), from the data sheet.
const PEAK_FLOPS: f64 = 989e12;
/// Memory bandwidths in bytes per second, from the data sheets.
const H100_BYTES_PER_S: f64 = 3.35e12;
const H200_BYTES_PER_S: f64 = 4.8e12;
const GPT_OSS: Sizes = Sizes {
    hidden: 2880,
    queries: 4096,
    experts: 32,
    intermediate: 2880,
    vocabulary: 201_088,
    tokens: &[64, 1024, 16_384],
};
const SMALL: Sizes =
    Sizes { hidden: 16, queries: 32, experts: 4, intermediate: 16, vocabulary: 40, tokens: &[3] };
/// Maximum number of rows of the head per call. It bounds the memory of the logits.
const HEAD_ROWS_MAX: usize = 1024;

fn random_bf16(device: &Device, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_vec(random_values(shape.iter().product(), 5), shape, &Device::Cpu)?.to_device(device)?)
}

fn ones_f32(device: &Device, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::ones(shape, DType::F32, &Device::Cpu)?.to_device(device)?)
}

pub fn run(device: &Device, small: bool) -> Result<()> {
    let sizes = if small { SMALL } else { GPT_OSS };
    println!(
        "\n| op | tokens or values | ms | TFLOP/s | GB/s | of the peak |\n| --- | --- | --- | --- | --- | --- |"
    );
    for &tokens in sizes.tokens {
        measure_matmuls(device, &sizes, tokens)?;
        measure_row_ops(device, &sizes, tokens)?;
    }
    let count = sizes.experts * sizes.hidden * sizes.intermediate;
    let [w, m, v, g] = [(); 4].map(|()| ones_f32(device, &[count]));
    let (w, m, v, g) = (w?, m?, v?, g?);
    let step = AdamW {
        shrink: 1.0,
        one_minus_beta1: 0.1,
        beta2: 0.95,
        one_minus_beta2: 0.05,
        rate: 1e-3,
        root_correction: 1.0,
        eps: 1e-8,
    };
    measure_and_print(device, "adamw", count, 0.0, 28.0 * count as f64, || {
        Ok(adamw(&w, [&m, &v], &g, &step)?)
    })?;
    let shape = (sizes.experts, sizes.hidden, sizes.intermediate);
    let (w, m, g) = (w.reshape(shape)?, m.reshape(shape)?, g.reshape(shape)?);
    let step = Muon { shrink: 1.0, rate: 1e-3, momentum: 0.95, one_minus_momentum: 0.05 };
    let operations = sizes.experts as f64 * iteration_flop((sizes.hidden, sizes.intermediate));
    measure_and_print(device, "muon", count, operations, 20.0 * count as f64, || Ok(muon(&w, &m, &g, &step)?))
}

/// Measures `pass` and prints its row. The last column is the shortest possible time, divided by the measured
/// time. The shortest possible time is the longer of two times: the time of the operations and the time of
/// the bytes.
fn measure_and_print(
    device: &Device,
    op: &str,
    count: usize,
    operations: f64,
    bytes: f64,
    mut pass: impl FnMut() -> Result<()>,
) -> Result<()> {
    let seconds = median_milliseconds(device.as_cuda_device()?, &mut pass)? as f64 / 1e3;
    let rate = |amount: f64, unit: f64| match amount > 0.0 {
        true => format!("{:.1}", amount / seconds / unit),
        false => String::new(),
    };
    let name = device.as_cuda_device()?.cuda_stream().context().name().w()?;
    let bytes_per_s = if name.contains("H200") { H200_BYTES_PER_S } else { H100_BYTES_PER_S };
    let seconds_min = (operations / PEAK_FLOPS).max(bytes / bytes_per_s);
    println!(
        "| {op} | {count} | {:.4} | {} | {} | {:.0}% |",
        seconds * 1e3,
        rate(operations, 1e12),
        rate(bytes, 1e9),
        100.0 * seconds_min / seconds
    );
    Ok(())
}

/// Routes every token to [`TOP_K`] experts, all experts alike.
fn dispatch_plan(device: &Device, s: &Sizes, tokens: usize) -> Result<Dispatch> {
    let routed_experts = (0..tokens * TOP_K).map(|i| ((i / TOP_K + i % TOP_K * 7) % s.experts) as u32);
    let routed_experts = Tensor::from_iter(routed_experts, &Device::Cpu)?.reshape((tokens, TOP_K))?;
    Ok(Dispatch::new(&routed_experts.to_device(device)?, s.experts)?)
}

/// Launches the dense product and the experts' product once, with the most tokens.
pub fn launch_once(device: &Device, small: bool) -> Result<()> {
    let s = if small { SMALL } else { GPT_OSS };
    let tokens = s.tokens[s.tokens.len() - 1];
    let dense = Parameter::constant(&random_bf16(device, &[s.hidden, s.queries])?);
    let grouped = Parameter::constant(&random_bf16(device, &[s.experts, s.hidden, 2 * s.intermediate])?);
    let plan = dispatch_plan(device, &s, tokens)?;
    ops::linear(&random_bf16(device, &[tokens, s.hidden])?, &dense, None)?;
    ops::grouped_linear(&random_bf16(device, &[tokens * TOP_K, s.hidden])?, &grouped, None, &plan)?;
    Ok(device.synchronize()?)
}

fn measure_matmuls(device: &Device, s: &Sizes, tokens: usize) -> Result<()> {
    let plan = dispatch_plan(device, s, tokens)?;
    let (k, up) = (s.hidden, 2 * s.intermediate);
    let dense = trainable_parameter(&random_bf16(device, &[k, s.queries])?)?.0;
    let grouped = trainable_parameter(&random_bf16(device, &[s.experts, k, up])?)?.0;
    let bias = trainable_parameter(&ones_f32(device, &[s.experts, up])?)?.0;
    type Op<'a> = &'a dyn Fn(&Tensor) -> candle_core::Result<Tensor>;
    let linear: Op = &|x| ops::linear(x, &dense, None);
    let expert_product: Op = &|x| ops::grouped_linear(x, &grouped, Some(&bias), &plan);
    for (name, op, rows, n, matrices) in [
        ("linear", linear, tokens, s.queries, 1),
        ("experts' product", expert_product, tokens * TOP_K, up, s.experts),
    ] {
        let (x, dy) = (random_bf16(device, &[rows, k])?, random_bf16(device, &[rows, n])?);
        let (operations, row_bytes) = ((2 * rows * k * n) as f64, (2 * rows * (k + n)) as f64);
        let values = (matrices * k * n) as f64;
        let forward = format!("{name} to {n}");
        measure_and_print(device, &forward, tokens, operations, 2.0 * values + row_bytes, || {
            Ok(op(&x).map(drop)?)
        })?;
        let both = format!("{name} to {n}, with its backward pass");
        // The gradient of the weight is read and written in f32.
        measure_and_print(device, &both, tokens, 3.0 * operations, 12.0 * values + 3.0 * row_bytes, || {
            differentiate(&[&x], || candle_core::Result::Ok(vec![(op(&x)?, dy.clone())]))?;
            Ok(())
        })?;
    }
    if tokens <= HEAD_ROWS_MAX {
        let (h, head) = (random_bf16(device, &[tokens, k])?, random_bf16(device, &[k, s.vocabulary])?);
        let head = Parameter::constant(&head);
        let bytes = 2 * k * s.vocabulary + tokens * (2 * k + 4 * s.vocabulary);
        let operations = (2 * tokens * k * s.vocabulary) as f64;
        measure_and_print(device, "head's logits", tokens, operations, bytes as f64, || {
            Ok(ops::linear_f32(&h, &head, None).map(drop)?)
        })?;
    }
    Ok(())
}

fn measure_row_ops(device: &Device, s: &Sizes, tokens: usize) -> Result<()> {
    let (x, weight) = (random_bf16(device, &[tokens, s.hidden])?, ones_f32(device, &[s.hidden])?);
    let bytes = |values: usize| 2.0 * values as f64;
    measure_and_print(device, "rms_norm", tokens, 0.0, bytes(2 * tokens * s.hidden), || {
        Ok(ops::rms_norm(&x, &weight, 1e-5).map(drop)?)
    })?;
    let expert_rows = tokens * TOP_K;
    let gated = random_bf16(device, &[expert_rows, 2 * s.intermediate])?;
    measure_and_print(device, "swiglu", tokens, 0.0, bytes(3 * expert_rows * s.intermediate), || {
        Ok(ops::swiglu(&gated, 7.0, 1.702).map(drop)?)
    })?;
    let logits = ones_f32(device, &[tokens, s.experts])?;
    let plan = Dispatch::new(&ops::route(&logits, TOP_K)?, s.experts)?;
    measure_and_print(device, "dispatch", tokens, 0.0, bytes((tokens + expert_rows) * s.hidden), || {
        Ok(ops::dispatch(&x, &plan).map(drop)?)
    })?;
    let (sorted, shares) =
        (random_bf16(device, &[expert_rows, s.hidden])?, ones_f32(device, &[tokens, TOP_K])?);
    measure_and_print(device, "combine", tokens, 0.0, bytes((tokens + expert_rows) * s.hidden), || {
        Ok(ops::combine(&sorted, &shares, &plan).map(drop)?)
    })
}
