//! Compares the GPU's outputs and gradients of attention with the CPU's. The GPU's errors may be at most
//! twice those of "plain bf16", which is attention that rounds every intermediate value to bf16.

use super::Verdicts;
use super::bitwise_equality::{AttentionBits, training_bits};
use super::problem::{AttentionOutputs, AttentionProblem, AttentionShape, reference_attention};
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use half::bf16;
use rloss::ops::cuda::kernel_set;
use rloss::ops::graph::differentiate;
use rloss::ops::{SequenceRows, sink_attention};
use std::sync::Arc;

/// Maximum error, as a multiple of the error of plain bf16.
const REFERENCE_ERROR_FACTOR: f64 = 2.0;
/// Error that is always allowed, as a fraction of the tensor's largest value: the rounding error of f32. It
/// is needed where plain bf16 is exact by chance.
const FLOOR: f64 = 1e-6;
/// Maximum error of the CPU's op in f32, as a fraction of the tensor's largest value.
const CPU_ERROR: f64 = 1e-4;

pub(super) fn run(device: &Device, small: bool, verdicts: &mut Verdicts) {
    for shape in shapes(small) {
        let problem = AttentionProblem::new(&shape, 7);
        let (exact, plain) = (reference_attention(&problem, false), reference_attention(&problem, true));
        for kernels in shape.kernel_sets() {
            verdicts.check(&format!("oracle: {}, {}", shape.name, kernels.name), || {
                let outputs = decode_bits(training_bits(&problem, device, kernels)?);
                let reference = cpu_reference(&problem, &exact)?;
                Ok(reference.and_then(|reference| compare_with_plain_bf16(&outputs, &reference, &plain)))
            });
        }
        verdicts.check(&format!("oracle: {}, the op in a graph has its kernels' bits", shape.name), || {
            let kernels = kernel_set(device.as_cuda_device()?, shape.head_dim)?;
            let kernel_outputs = decode_bits(training_bits(&problem, device, kernels)?);
            let op_outputs = run_op(&problem, device)?;
            let same =
                TENSORS.iter().all(|(name, get)| *name == "LSE" || get(&op_outputs) == get(&kernel_outputs));
            Ok(if same { Ok("to the bit".into()) } else { Err("outputs or gradients differ".into()) })
        });
    }
}

/// Runs the CPU's op and compares it with `exact`, the results of the formulas. The op does not return
/// log-sum-exps, so the log-sum-exps of `exact` are used.
fn cpu_reference(
    problem: &AttentionProblem,
    exact: &AttentionOutputs,
) -> Result<Result<AttentionOutputs, String>> {
    let mut reference = run_op(problem, &Device::Cpu)?;
    reference.lse = exact.lse.clone();
    let bound = |_: fn(&AttentionOutputs) -> &[f64], size: f64| Distance {
        largest: CPU_ERROR * size,
        rms: CPU_ERROR * size,
    };
    Ok(match compare(&reference, exact, bound) {
        Ok(_) => Ok(reference),
        Err(error) => Err(format!("the CPU's op: {error}")),
    })
}

pub(super) fn decode_bits(bits: AttentionBits) -> AttentionOutputs {
    let from_bf16_bits = |bits: Vec<u16>| bits.into_iter().map(|x| bf16::from_bits(x).to_f64()).collect();
    let from_f32_bits = |bits: Vec<u32>| bits.into_iter().map(|x| f32::from_bits(x).into()).collect();
    AttentionOutputs {
        out: from_bf16_bits(bits.out),
        lse: from_f32_bits(bits.lse),
        dq: from_bf16_bits(bits.dq),
        dkv: from_bf16_bits(bits.dkv),
        dsinks: from_f32_bits(bits.dsinks),
    }
}

fn shapes(small: bool) -> Vec<AttentionShape> {
    let shape = AttentionShape::new;
    if small {
        return vec![
            shape("small", (6, 2), None, &[1, 40, 0, 65]),
            shape("small, window 20", (2, 1), Some(20), &[90, 7]),
            shape("small, extreme", (4, 1), None, &[70]).with_extremes(20.0, &[50.0, -50.0, -1e9, 0.0]),
            shape("small, heads of 128", (6, 2), None, &[1, 40, 0, 33]).with_head_dim(128),
            shape("small, heads of 128, window 20", (6, 1), Some(20), &[40, 7]).with_head_dim(128),
        ];
    }
    vec![
        shape("odd lengths", (16, 2), None, &[1, 2, 15, 17, 63, 64, 65, 0, 127, 129, 1]),
        shape("long", (8, 1), None, &[400, 257]),
        shape("window 1", (8, 1), Some(1), &[1, 70, 130]),
        shape("window 5", (8, 1), Some(5), &[200, 3]),
        shape("window 64", (8, 1), Some(64), &[193, 65]),
        shape("window 65", (8, 1), Some(65), &[193, 64]),
        shape("window 128, 64 heads", (64, 8), Some(128), &[300, 129, 128]),
        shape("window 200", (8, 1), Some(200), &[321]),
        shape("1 query head a kv head", (3, 3), None, &[1, 150, 260]),
        shape("3 query heads a kv head, window 50", (3, 1), Some(50), &[43, 130]),
        shape("5 query heads a kv head", (10, 2), None, &[26, 103]),
        shape("16 query heads a kv head", (16, 1), None, &[9, 77]),
        shape("extreme scores", (8, 1), None, &[100, 70]).with_extremes(20.0, &[50.0, -50.0, -1e9, 0.0]),
        shape("extreme sinks", (8, 1), None, &[130, 1]).with_extremes(1.0, &[50.0, -50.0, -1e9, 0.0]),
        shape("thousands of tokens", (8, 1), None, &[1500, 700]),
        shape("heads of 128, odd lengths", (16, 2), None, &[1, 2, 15, 17, 63, 64, 65, 0, 127, 129, 1])
            .with_head_dim(128),
        shape("heads of 128, window 65", (5, 1), Some(65), &[193, 64]).with_head_dim(128),
        shape("heads of 128, extreme scores", (8, 1), None, &[100, 70])
            .with_extremes(20.0, &[50.0, -50.0, -1e9, 0.0])
            .with_head_dim(128),
        shape("heads of 128, thousands of tokens", (8, 1), None, &[1500, 700]).with_head_dim(128),
    ]
}

/// Checks that errors are at most [`REFERENCE_ERROR_FACTOR`] times those of plain bf16.
fn compare_with_plain_bf16(
    outputs: &AttentionOutputs,
    reference: &AttentionOutputs,
    plain: &AttentionOutputs,
) -> Result<String, String> {
    let bound = |get: fn(&AttentionOutputs) -> &[f64], size: f64| {
        let plain = distance(get(plain), get(reference));
        let floor = FLOOR * size;
        Distance {
            largest: REFERENCE_ERROR_FACTOR * plain.largest.max(floor),
            rms: REFERENCE_ERROR_FACTOR * plain.rms.max(floor),
        }
    };
    compare(outputs, reference, bound)
}

/// Returns the maximum allowed error of a tensor's elements, computed from the distance between plain bf16
/// and `exact`. In a small tensor, plain bf16 may be exact by chance, so at least one rounding step of bf16
/// is allowed.
pub(super) fn error_bound(plain: &[f64], exact: &[f64]) -> f64 {
    let floor = if exact.len() < 32 { 2f64.powi(-7) } else { FLOOR };
    REFERENCE_ERROR_FACTOR * distance(plain, exact).largest.max(floor * largest(exact))
}

/// Checks that the error of every tensor of `outputs`, both maximum and RMS, is at most its bound. `bound`
/// gets a function that selects the tensor, and the largest value of the tensor in `reference`.
fn compare(
    outputs: &AttentionOutputs,
    reference: &AttentionOutputs,
    bound: impl Fn(fn(&AttentionOutputs) -> &[f64], f64) -> Distance,
) -> Result<String, String> {
    let mut worst: (f64, &str) = (0.0, "all exact");
    for (name, get) in TENSORS {
        let bound = bound(get, largest(get(reference)));
        let error = distance(get(outputs), get(reference));
        for (kind, error, bound) in [("maximum", error.largest, bound.largest), ("RMS", error.rms, bound.rms)]
        {
            // The comparison is false for NaN, so NaN fails too.
            let within = error <= bound;
            if !within {
                return Err(format!("{name}: {kind} error {error:.3e}, allowed {bound:.3e}"));
            }
            if bound > 0.0 && error / bound > worst.0 {
                worst = (error / bound, name);
            }
        }
    }
    Ok(format!("errors at most {:.2} of what is allowed ({})", worst.0, worst.1))
}

type Tensors = [(&'static str, fn(&AttentionOutputs) -> &[f64]); 5];
pub(super) const TENSORS: Tensors = [
    ("O", |v| &v.out),
    ("LSE", |v| &v.lse),
    ("dQ", |v| &v.dq),
    ("dK and dV", |v| &v.dkv),
    ("ds", |v| &v.dsinks),
];

/// Computes outputs and gradients with the op.
fn run_op(problem: &AttentionProblem, device: &Device) -> Result<AttentionOutputs> {
    let [q, kv, sinks, dout] = problem.tensors(device)?;
    let rows = Arc::new(SequenceRows::from_cu_seqlens(&problem.shape.cu_seqlens()));
    let mut output = vec![];
    let gradients = differentiate(&[&q, &kv, &sinks], || {
        let out = sink_attention(&q, &kv, &sinks, &rows, problem.shape.attention())?;
        output = to_host_f64(&out)?;
        anyhow::Ok(vec![(out, dout)])
    })?;
    let gradient = |i: usize| to_host_f64(gradients[i].as_ref().context("an input without a gradient")?);
    let [dq, dkv, dsinks] = [gradient(0)?, gradient(1)?, gradient(2)?];
    Ok(AttentionOutputs { out: output, lse: vec![], dq, dkv, dsinks })
}

pub(super) fn round_to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn to_host_f64(tensor: &Tensor) -> Result<Vec<f64>> {
    let values: Vec<f32> = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok(values.into_iter().map(f64::from).collect())
}

/// The differences between two tensors.
struct Distance {
    /// The largest difference.
    largest: f64,
    /// The root mean square of the differences.
    rms: f64,
}

fn distance(a: &[f64], b: &[f64]) -> Distance {
    let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
    if a.len() != b.len() || !differences.iter().all(|x| x.is_finite()) {
        return Distance { largest: f64::INFINITY, rms: f64::INFINITY };
    }
    let mean_square = differences.iter().map(|x| x * x).sum::<f64>() / differences.len().max(1) as f64;
    Distance { largest: largest(&differences), rms: mean_square.sqrt() }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_lets_plain_bf16_pass_and_catches_a_missing_sink() {
        let shape = &shapes(true)[1];
        let problem = AttentionProblem::new(shape, 7);
        let (exact, plain) = (reference_attention(&problem, false), reference_attention(&problem, true));
        let mut reference = run_op(&problem, &Device::Cpu).unwrap();
        reference.lse = exact.lse.clone();
        compare(&reference, &exact, |_, size| Distance { largest: CPU_ERROR * size, rms: CPU_ERROR * size })
            .unwrap();
        let text = compare_with_plain_bf16(&plain, &reference, &plain).unwrap();
        assert!(text.starts_with("errors at most 0.50"), "{text}");

        let without = AttentionProblem { sinks: vec![-1e9; shape.heads], ..problem.clone() };
        let error =
            compare_with_plain_bf16(&reference_attention(&without, true), &reference, &plain).unwrap_err();
        assert!(error.starts_with("O: "), "{error}");
        let mut nan = plain.clone();
        nan.dkv[3] = f64::NAN;
        assert!(compare_with_plain_bf16(&nan, &reference, &plain).unwrap_err().starts_with("dK and dV"));
    }
}
