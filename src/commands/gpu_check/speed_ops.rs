//! Milliseconds, TFLOP/s and GB/s of the other ops at gpt-oss-20b's shapes, relative to the limits of
//! docs/ROOFLINE.md.
//!
//! A multiply-add counts as two operations, and each tensor's bytes count once. Backward passes are
//! timed on a graph of one op.

use super::model_ops::trainable_parameter;
use super::speed::{median, random_values};
use crate::ops::graph::differentiate;
use crate::ops::optimizer::{AdamW, adamw};
use crate::ops::{self, Dispatch};
use anyhow::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Tensor};

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
/// Peaks from data sheets: dense bf16 products of an H100 SXM and an H200, and their memory bandwidths.
const PEAK_FLOPS: f64 = 989e12;
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
/// Rows of the head per call; memory limits them.
const HEAD_ROWS_MAX: usize = 1024;

fn random(device: &Device, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_vec(random_values(shape.iter().product(), 5), shape, &Device::Cpu)?.to_device(device)?)
}

fn ones_f32(device: &Device, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::ones(shape, DType::F32, &Device::Cpu)?.to_device(device)?)
}

pub(super) fn run(device: &Device, small: bool) -> Result<()> {
    let sizes = if small { SMALL } else { GPT_OSS };
    println!(
        "\n| op | tokens or values | ms | TFLOP/s | GB/s | of the peak |\n| --- | --- | --- | --- | --- | --- |"
    );
    for &tokens in sizes.tokens {
        time_matmuls(device, &sizes, tokens)?;
        time_row_ops(device, &sizes, tokens)?;
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
    print_timing(device, "adamw", count, 0.0, 28.0 * count as f64, || Ok(adamw(&w, [&m, &v], &g, &step)?))
}

/// Prints one row of the table. The last column is the minimal time, set by the slower of operations and
/// bytes, as a fraction of the measured time.
fn print_timing(
    device: &Device,
    op: &str,
    count: usize,
    operations: f64,
    bytes: f64,
    pass: impl FnMut() -> Result<()>,
) -> Result<()> {
    let seconds = median(device.as_cuda_device()?, pass)? as f64 / 1e3;
    let rate = |of: f64, unit: f64| if of > 0.0 { format!("{:.1}", of / seconds / unit) } else { "".into() };
    let name = device.as_cuda_device()?.cuda_stream().context().name().w()?;
    let bytes_a_second = if name.contains("H200") { H200_BYTES_PER_S } else { H100_BYTES_PER_S };
    let least = (operations / PEAK_FLOPS).max(bytes / bytes_a_second);
    println!(
        "| {op} | {count} | {:.4} | {} | {} | {:.0}% |",
        seconds * 1e3,
        rate(operations, 1e12),
        rate(bytes, 1e9),
        100.0 * least / seconds
    );
    Ok(())
}

fn time_matmuls(device: &Device, s: &Sizes, tokens: usize) -> Result<()> {
    let routes = (0..tokens * TOP_K).map(|i| ((i / TOP_K + i % TOP_K * 7) % s.experts) as u32);
    let routes = Tensor::from_iter(routes, &Device::Cpu)?.reshape((tokens, TOP_K))?.to_device(device)?;
    let plan = Dispatch::new(&routes, s.experts)?;
    let (k, up) = (s.hidden, 2 * s.intermediate);
    let (dense, _) = trainable_parameter(&random(device, &[k, s.queries])?)?;
    let (grouped, _) = trainable_parameter(&random(device, &[s.experts, k, up])?)?;
    let (bias, _) = trainable_parameter(&ones_f32(device, &[s.experts, up])?)?;
    type Op<'a> = &'a dyn Fn(&Tensor) -> candle_core::Result<Tensor>;
    let linear: Op = &|x| ops::linear(x, &dense, None);
    let of_experts: Op = &|x| ops::grouped_linear(x, &grouped, Some(&bias), &plan);
    for (name, op, time_row_ops, n, matrices) in [
        ("linear", linear, tokens, s.queries, 1),
        ("experts' product", of_experts, tokens * TOP_K, up, s.experts),
    ] {
        let (x, dy) = (random(device, &[time_row_ops, k])?, random(device, &[time_row_ops, n])?);
        let (operations, of_rows) = ((2 * time_row_ops * k * n) as f64, (2 * time_row_ops * (k + n)) as f64);
        let values = (matrices * k * n) as f64;
        let forward = format!("{name} to {n}");
        print_timing(device, &forward, tokens, operations, 2.0 * values + of_rows, || Ok(op(&x).map(drop)?))?;
        let both = format!("{name} to {n}, with its backward");
        // The weight's gradient is read and written in f32.
        print_timing(device, &both, tokens, 3.0 * operations, 12.0 * values + 3.0 * of_rows, || {
            differentiate(&[&x], || candle_core::Result::Ok(vec![(op(&x)?, dy.clone())]))?;
            Ok(())
        })?;
    }
    if tokens <= HEAD_ROWS_MAX {
        let (h, head) = (random(device, &[tokens, k])?, random(device, &[k, s.vocabulary])?);
        let head = ops::Parameter::constant(&head);
        let bytes = 2 * k * s.vocabulary + tokens * (2 * k + 4 * s.vocabulary);
        let operations = (2 * tokens * k * s.vocabulary) as f64;
        print_timing(device, "head's logits", tokens, operations, bytes as f64, || {
            Ok(ops::linear_f32(&h, &head, None).map(drop)?)
        })?;
    }
    Ok(())
}

fn time_row_ops(device: &Device, s: &Sizes, tokens: usize) -> Result<()> {
    let (x, weight) = (random(device, &[tokens, s.hidden])?, ones_f32(device, &[s.hidden])?);
    let bytes = |values: usize| 2.0 * values as f64;
    print_timing(device, "rms_norm", tokens, 0.0, bytes(2 * tokens * s.hidden), || {
        Ok(ops::rms_norm(&x, &weight, 1e-5).map(drop)?)
    })?;
    let time_row_ops = tokens * TOP_K;
    let gated = random(device, &[time_row_ops, 2 * s.intermediate])?;
    print_timing(device, "swiglu", tokens, 0.0, bytes(3 * time_row_ops * s.intermediate), || {
        Ok(ops::swiglu(&gated, 7.0, 1.702).map(drop)?)
    })?;
    let logits = ones_f32(device, &[tokens, s.experts])?;
    let routes = ops::route(&logits, TOP_K)?;
    let plan = Dispatch::new(&routes, s.experts)?;
    print_timing(device, "dispatch", tokens, 0.0, bytes((tokens + time_row_ops) * s.hidden), || {
        Ok(ops::dispatch(&x, &plan).map(drop)?)
    })?;
    let (sorted, shares) = (random(device, &[time_row_ops, s.hidden])?, ones_f32(device, &[tokens, TOP_K])?);
    print_timing(device, "combine", tokens, 0.0, bytes((tokens + time_row_ops) * s.hidden), || {
        Ok(ops::combine(&sorted, &shares, &plan).map(drop)?)
    })
}
