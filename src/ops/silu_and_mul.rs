//! SwiGLU without clamping: `y = g · σ(g) · u` for a gate `g` and an up projection `u`, both `[R, I]`.
//!
//! Backward pass: `dg = dy · u · (σ + g σ (1 − σ))`, `du = dy · g σ`.

use super::buffer::buffer;
use super::cpu::{for_each_row, for_each_row_pair, host_values};
use super::cuda::{silu_and_mul_backward, silu_and_mul_forward};
use super::graph::{apply, contiguous};
use super::math::sigmoid;
use super::operation::{DeviceArgument, HostArgument, Operation};
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use multiversion::multiversion;

/// Computes `silu(gate) · up`. On a GPU both are bf16 and contiguous.
///
/// # Errors
/// When shapes differ or are not two-dimensional. On a GPU also when a type or a layout is not supported.
pub fn silu_and_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() || gate.rank() != 2 {
        bail!("silu_gated: gate {:?}, up {:?}", gate.dims(), up.dims());
    }
    if gate.device().is_cuda() {
        return apply([gate, up], SiluAndMul);
    }
    apply([&contiguous(gate)?, &contiguous(up)?], SiluAndMul)
}

struct SiluAndMul;

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn forward_row(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((o, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *o = gate * sigmoid(gate) * up;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn backward_row(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    for i in 0..dy.len() {
        let s = sigmoid(gate[i]);
        dgate[i] = dy[i] * up[i] * (s + gate[i] * s * (1.0 - s));
        dup[i] = dy[i] * gate[i] * s;
    }
}

impl Operation<2> for SiluAndMul {
    const NAME: &'static str = "silu_gated";

    fn cpu(&self, [gate, up]: [HostArgument; 2]) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = gate.shape().dims2()?;
        let (gate, up) = (gate.values()?, up.values()?);
        let mut out = buffer(rows * width);
        for_each_row(&mut out, width, 8 * width, |row, out| {
            let span = row * width..(row + 1) * width;
            forward_row(&gate[span.clone()], &up[span], out);
        });
        Ok((CpuStorage::F32(out), Shape::from((rows, width))))
    }

    fn cuda(&self, [gate, up]: [DeviceArgument; 2]) -> Result<(CudaStorage, Shape)> {
        silu_and_mul_forward(gate, up)
    }

    fn backward(&self, [gate, up]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (rows, width) = gate.dims2()?;
        if gate.device().is_cuda() {
            let [dgate, dup] = silu_and_mul_backward([gate, up, grad])?;
            return Ok([Some(dgate), Some(dup)]);
        }
        let (gates, ups, dy) = (host_values(gate)?, host_values(up)?, host_values(grad)?);
        let (mut dgate, mut dup) = (buffer(rows * width), buffer(rows * width));
        for_each_row_pair((&mut dgate, width), (&mut dup, width), 8 * width, |row, dgate, dup| {
            let span = row * width..(row + 1) * width;
            backward_row(&gates[span.clone()], &ups[span.clone()], &dy[span], dgate, dup);
        });
        let of = |values| Tensor::from_vec(values, (rows, width), gate.device());
        Ok([Some(of(dgate)?), Some(of(dup)?)])
    }
}
