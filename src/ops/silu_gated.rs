//! The plain gated unit: `y = g · σ(g) · u` for `g` and `u` of one shape, `[R, I]` each.
//!
//! Backward: `dg = dy · u · (σ + g σ (1 − σ))`, `du = dy · g σ`.

use super::buffer::buffer;
use super::cpu::{for_each_row, for_each_row_pair, host_values, values};
use super::cuda::{silu_gated_backward, silu_gated_forward};
use super::graph::{apply_2, contiguous};
use super::math::sigmoid;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use multiversion::multiversion;

/// `silu(gate) · up`. On a GPU both are bf16 and contiguous.
///
/// # Errors
/// When the two differ in shape or have not two dimensions, or what a GPU does not take.
pub fn silu_gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() || gate.rank() != 2 {
        bail!("silu_gated: gate {:?}, up {:?}", gate.dims(), up.dims());
    }
    if gate.device().is_cuda() {
        return apply_2(gate, up, SiluGated);
    }
    apply_2(&contiguous(gate)?, &contiguous(up)?, SiluGated)
}

struct SiluGated;

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

impl CustomOp2 for SiluGated {
    fn name(&self) -> &'static str {
        "silu_gated"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = gate_layout.shape().dims2()?;
        let (gate, up) = (values(gate, gate_layout)?, values(up, up_layout)?);
        let mut out = buffer(rows * width);
        for_each_row(&mut out, width, 8 * width, |row, out| {
            let span = row * width..(row + 1) * width;
            forward_row(&gate[span.clone()], &up[span], out);
        });
        Ok((CpuStorage::F32(out), Shape::from((rows, width))))
    }

    fn cuda_fwd(
        &self,
        gate: &CudaStorage,
        gate_layout: &Layout,
        up: &CudaStorage,
        up_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        silu_gated_forward((gate, gate_layout), (up, up_layout))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, width) = gate.dims2()?;
        let grad = grad.contiguous()?;
        if gate.device().is_cuda() {
            let [dgate, dup] = silu_gated_backward([gate, up, &grad])?;
            return Ok((Some(dgate), Some(dup)));
        }
        let (gates, ups, dy) = (host_values(gate)?, host_values(up)?, host_values(&grad)?);
        let (mut dgate, mut dup) = (buffer(rows * width), buffer(rows * width));
        for_each_row_pair((&mut dgate, width), (&mut dup, width), 8 * width, |row, dgate, dup| {
            let span = row * width..(row + 1) * width;
            backward_row(&gates[span.clone()], &ups[span.clone()], &dy[span], dgate, dup);
        });
        let of = |values| Tensor::from_vec(values, (rows, width), gate.device());
        Ok((Some(of(dgate)?), Some(of(dup)?)))
    }
}
