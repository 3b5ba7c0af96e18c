//! The SwiGLU of GPT-OSS on interleaved columns `x = [g0, u0, g1, u1, …]`, `[R, 2I]` → `[R, I]`:
//!
//! `g' = min(g, c)`, `u' = clamp(u, −c, c)`, `y = (u' + 1) · g' · σ(α g')`. In GPT-OSS `α` is 1.702.
//!
//! Backward pass: `dg = dy (u' + 1) (σ + α g' σ (1 − σ))` where `g ≤ c`, `du = dy g' σ` where `|u| ≤ c`, and
//! 0 for clamped values.

use super::buffer::buffer;
use super::cpu::{for_each_row, host_values};
use super::cuda::{swiglu_backward, swiglu_forward};
use super::graph::{apply, contiguous};
use super::math::sigmoid;
use super::operation::{DeviceArgument, HostArgument, Operation};
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor};
use multiversion::multiversion;

/// Computes SwiGLU with clamp `limit` and gain `alpha`. On a GPU `x` is bf16 and contiguous.
///
/// # Errors
/// When `x` is not two-dimensional. On a GPU also when its type or its layout is not supported.
pub fn swiglu(x: &Tensor, limit: f64, alpha: f64) -> Result<Tensor> {
    let op = Swiglu { limit: limit as f32, alpha: alpha as f32 };
    if x.device().is_cuda() { apply([x], op) } else { apply([&contiguous(x)?], op) }
}

struct Swiglu {
    limit: f32,
    alpha: f32,
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn forward_row(x: &[f32], limit: f32, alpha: f32, out: &mut [f32]) {
    for (o, pair) in out.iter_mut().zip(x.chunks_exact(2)) {
        let (gate, up) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
        *o = (up + 1.0) * (gate * sigmoid(alpha * gate));
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn backward_row(x: &[f32], dy: &[f32], limit: f32, alpha: f32, dx: &mut [f32]) {
    for ((pair, &dy), dx) in x.chunks_exact(2).zip(dy).zip(dx.chunks_exact_mut(2)) {
        let (gate, up) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
        let s = sigmoid(alpha * gate);
        let dgate = dy * (up + 1.0) * (s + alpha * gate * s * (1.0 - s));
        let dup = dy * gate * s;
        dx[0] = if pair[0] <= limit { dgate } else { 0.0 };
        dx[1] = if pair[1].abs() <= limit { dup } else { 0.0 };
    }
}

impl Operation<1> for Swiglu {
    const NAME: &'static str = "swiglu";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = x.shape().dims2()?;
        let x = x.values()?;
        let half = width / 2;
        let mut out = buffer(rows * half);
        for_each_row(&mut out, half, 8 * half, |row, out| {
            forward_row(&x[row * width..(row + 1) * width], self.limit, self.alpha, out);
        });
        Ok((CpuStorage::F32(out), Shape::from((rows, half))))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        swiglu_forward(x, self.limit, self.alpha)
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (rows, width) = x.dims2()?;
        let half = width / 2;
        if x.device().is_cuda() {
            return Ok([Some(swiglu_backward(x, grad, self.limit, self.alpha)?)]);
        }
        let (xs, dy) = (host_values(x)?, host_values(grad)?);
        let mut dx = buffer(rows * width);
        for_each_row(&mut dx, width, 8 * half, |row, dx| {
            let (x, dy) = (&xs[row * width..(row + 1) * width], &dy[row * half..(row + 1) * half]);
            backward_row(x, dy, self.limit, self.alpha, dx);
        });
        Ok([Some(Tensor::from_vec(dx, (rows, width), x.device())?)])
    }
}
