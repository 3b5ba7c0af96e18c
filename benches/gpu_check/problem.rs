//! Random inputs of attention, rounded to bf16, and attention computed directly from its formulas.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use rand::Rng;
use rloss::ops::sink_attention::kernels::{HEAD_DIMS, KernelSet, kernel_sets};
use rloss::ops::sink_attention::{Attention, NO_SINK};
use rloss::random::{Purpose, stream};

/// The shape of an attention problem.
#[derive(Debug, Clone)]
pub(super) struct AttentionShape {
    pub name: &'static str,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
    pub lengths: Vec<usize>,
    /// Approximate standard deviation of the scores.
    pub score_size: f32,
    /// Values of the sinks. Head `h` uses the value at index `h` modulo the number of values.
    pub sinks: Vec<f32>,
}

impl AttentionShape {
    pub fn new(
        name: &'static str,
        (heads, kv_heads): (usize, usize),
        window: Option<usize>,
        lengths: &[usize],
    ) -> Self {
        let lengths = lengths.to_vec();
        let head_dim = HEAD_DIMS[0];
        Self { name, heads, kv_heads, head_dim, window, lengths, score_size: 1.0, sinks: vec![0.5, -1.0] }
    }

    /// Replaces the head size, which is 64.
    pub fn with_head_dim(self, head_dim: usize) -> Self {
        Self { head_dim, ..self }
    }

    pub fn with_extremes(self, score_size: f32, sinks: &[f32]) -> Self {
        Self { score_size, sinks: sinks.to_vec(), ..self }
    }

    pub fn attention(&self) -> Attention {
        Attention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: self.window,
            sinks: true,
            sink_gradient: true,
        }
    }

    /// Returns the kernel sets for this head size.
    pub fn kernel_sets(&self) -> &'static [KernelSet] {
        kernel_sets(self.head_dim).map_or(&[], |sets| sets)
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub fn cu_seqlens(&self) -> Vec<usize> {
        let mut bounds = vec![0];
        for length in &self.lengths {
            bounds.push(bounds[bounds.len() - 1] + length);
        }
        bounds
    }
}

/// The inputs of attention, and the gradient of its output. bf16 represents all values exactly. The rows are
/// laid out as in [`rloss::ops::sink_attention()`].
#[derive(Debug, Clone)]
pub(super) struct AttentionProblem {
    pub shape: AttentionShape,
    pub q: Vec<f32>,
    pub kv: Vec<f32>,
    pub sinks: Vec<f32>,
    pub dout: Vec<f32>,
}

/// Rounds to the nearest bf16 number.
pub(super) fn to_bf16(x: f64) -> f64 {
    bf16::from_f32(x as f32).to_f64()
}

impl AttentionProblem {
    pub fn new(shape: &AttentionShape, seed: u64) -> Self {
        let mut rng = stream(seed, Purpose::Evaluation, &[shape.tokens() as u64, shape.heads as u64]);
        let mut normals = |count: usize, size: f32| -> Vec<f32> {
            let mut normal = || {
                let (u, v): (f64, f64) = (rng.random(), rng.random());
                (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
            };
            (0..count).map(|_| to_bf16(normal() * size as f64) as f32).collect()
        };
        let tokens = shape.tokens();
        // Scores are scaled by 1/√D, so a score has about the magnitude of the values of q.
        let q = normals(tokens * shape.heads * shape.head_dim, shape.score_size);
        let kv = normals(tokens * 2 * shape.kv_heads * shape.head_dim, 1.0);
        let dout = normals(q.len(), 1.0);
        let sinks = (0..shape.heads).map(|h| shape.sinks[h % shape.sinks.len()]).collect();
        Self { shape: shape.clone(), q, kv, sinks, dout }
    }

    /// Returns `q`, `kv`, `sinks` and `dout` on a device. On the CPU all are f32. On a GPU all but the sinks
    /// are bf16.
    pub fn tensors(&self, device: &Device) -> Result<[Tensor; 4]> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let tokens = self.shape.tokens();
        let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
        // The host converts the values, so that the check does not depend on the device's conversion.
        let tensor = |values: &[f32], shape: &[usize]| -> Result<Tensor> {
            Ok(Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
        };
        Ok([
            tensor(&self.q, &[tokens, heads, head_dim])?,
            tensor(&self.kv, &[tokens, 2, kv_heads, head_dim])?,
            Tensor::from_slice(&self.sinks, heads, device)?,
            tensor(&self.dout, &[tokens, heads * head_dim])?,
        ])
    }
}

/// The output, log-sum-exps and gradients of a problem.
#[derive(Debug, Clone, Default)]
pub(super) struct AttentionOutputs {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dkv: Vec<f64>,
    pub dsinks: Vec<f64>,
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum()
}

/// Computes attention from its formulas. With `plain_bf16`, it rounds as an implementation without fused
/// kernels does: scores, probabilities, their gradients and outputs are rounded to bf16. Sums are rounded to
/// f32.
pub(super) fn reference_attention(problem: &AttentionProblem, plain_bf16: bool) -> AttentionOutputs {
    let round = |x: f64| if plain_bf16 { to_bf16(x) } else { x };
    let sum = |x: f64| if plain_bf16 { x as f32 as f64 } else { x };
    let AttentionShape { heads, kv_heads, head_dim: d, window, .. } = problem.shape;
    let scale = f64::from(problem.shape.attention().scale());
    let tokens = problem.shape.tokens();
    let mut outputs = AttentionOutputs {
        out: vec![0.0; problem.q.len()],
        lse: vec![0.0; tokens * heads],
        dq: vec![0.0; problem.q.len()],
        dkv: vec![0.0; problem.kv.len()],
        dsinks: vec![0.0; heads],
    };
    for bounds in problem.shape.cu_seqlens().windows(2) {
        for (token, head) in (bounds[0]..bounds[1]).flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let row = token * heads + head;
            let kv_head = head / (heads / kv_heads);
            let first = bounds[0].max(window.map_or(0, |w| (token + 1).saturating_sub(w)));
            let key_at = |key: usize| (key * 2 * kv_heads + kv_head) * d;
            let value_at = |key: usize| (key * 2 * kv_heads + kv_heads + kv_head) * d;
            let q = &problem.q[row * d..][..d];
            let dout = &problem.dout[row * d..][..d];
            let sink = round(problem.sinks[head].max(NO_SINK) as f64);
            let score = |key: usize| round(sum(dot(q, &problem.kv[key_at(key)..][..d])) * scale);
            let scores: Vec<f64> = (first..=token).map(score).collect();
            let largest = scores.iter().fold(sink, |m, &x| m.max(x));
            let total = scores.iter().map(|x| (x - largest).exp()).sum::<f64>() + (sink - largest).exp();
            outputs.lse[row] = sum(largest + total.ln());
            let p: Vec<f64> = scores.iter().map(|x| round((x - largest).exp() / total)).collect();
            let sink_p = round((sink - largest).exp() / total);
            let dp: Vec<f64> =
                (first..=token).map(|key| round(sum(dot(dout, &problem.kv[value_at(key)..][..d])))).collect();
            // The backward pass of softmax: the sum of p dp over the keys equals dout · out.
            let delta = sum(p.iter().zip(&dp).map(|(p, dp)| p * dp).sum());
            outputs.dsinks[head] -= round(sink_p * delta);
            for (key, (&p, &dp)) in (first..=token).zip(p.iter().zip(&dp)) {
                let ds = round(round(p * (dp - delta)) * scale);
                for i in 0..d {
                    outputs.out[row * d + i] += p * problem.kv[value_at(key) + i] as f64;
                    outputs.dq[row * d + i] += ds * problem.kv[key_at(key) + i] as f64;
                    outputs.dkv[key_at(key) + i] += ds * q[i] as f64;
                    outputs.dkv[value_at(key) + i] += p * dout[i] as f64;
                }
            }
        }
    }
    for tensor in [&mut outputs.out, &mut outputs.dq, &mut outputs.dkv, &mut outputs.dsinks] {
        tensor.iter_mut().for_each(|x| *x = round(sum(*x)));
    }
    outputs
}
