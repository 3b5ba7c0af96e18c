//! RMS normalisation: `y = x / √(mean(x²) + ε) · w` for each row of `x [T, H]`, `w [H]`.
//!
//! Backward pass, with `r = 1/√(mean(x²) + ε)` and `g = dy ∘ w`: `dx = r·g − x · r³ · (g·x)/H`, `dw = Σ_t
//! dy_t ∘ x_t · r_t`.

use super::buffer::{buffer, zeros};
use super::cpu::{for_each_row, host_values};
use super::cuda::{rms_norm_backward, rms_norm_forward};
use super::graph::{apply, contiguous, is_tracked};
use super::math::sum_lanes;
use super::operation::{DeviceArgument, HostArgument, Operation};
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use multiversion::multiversion;

/// Computes RMS normalisation. Differentiable in both inputs. On a GPU `x` is bf16 and contiguous, `w` is
/// f32, and `H` is a multiple of 8.
///
/// # Errors
/// When shapes disagree. On a GPU also when a type, a layout or a size is not supported.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if weight.dims() != [x.dim(1)?] {
        bail!("rms_norm: x {:?}, weight {:?}", x.dims(), weight.dims());
    }
    let op = RmsNorm { eps: eps as f32 };
    if x.device().is_cuda() { apply([x, weight], op) } else { apply([&contiguous(x)?, weight], op) }
}

struct RmsNorm {
    eps: f32,
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn normalise(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let r = inverse_rms(x, eps);
    for ((o, &x), &w) in out.iter_mut().zip(x).zip(w) {
        *o = x * r * w;
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_lanes([x], |[x]| x * x) / x.len() as f32 + eps).sqrt()
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn backward_row(x: &[f32], w: &[f32], dy: &[f32], eps: f32, dx: &mut [f32], dw: Option<&mut [f32]>) {
    let h = x.len();
    let r = inverse_rms(x, eps);
    let dot = sum_lanes([dy, w, x], |[dy, w, x]| dy * w * x);
    let along = r * r * r * dot / h as f32;
    for (((dx, &dy), &w), &x) in dx.iter_mut().zip(dy).zip(w).zip(x) {
        *dx = r * dy * w - x * along;
    }
    if let Some(dw) = dw {
        for ((dw, &dy), &x) in dw.iter_mut().zip(dy).zip(x) {
            *dw += dy * x * r;
        }
    }
}

impl Operation<2> for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn cpu(&self, [x, w]: [HostArgument; 2]) -> Result<(CpuStorage, Shape)> {
        let (shape, x, w) = (x.shape().clone(), x.values()?, w.values()?);
        let h = w.len();
        let mut out = buffer(x.len());
        for_each_row(&mut out, h, h, |row, out| normalise(&x[row * h..(row + 1) * h], w, self.eps, out));
        Ok((CpuStorage::F32(out), shape))
    }

    fn cuda(&self, [x, w]: [DeviceArgument; 2]) -> Result<(CudaStorage, Shape)> {
        rms_norm_forward(x, w, self.eps)
    }

    fn backward(&self, [x, w]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (tokens, h) = x.dims2()?;
        if x.device().is_cuda() {
            let (dx, dw) = rms_norm_backward([x, w, grad], self.eps, is_tracked(w))?;
            return Ok([Some(dx), dw]);
        }
        let (xs, ws, dys) = (host_values(x)?, host_values(w)?, host_values(grad)?);
        let mut dx = buffer(tokens * h);
        let mut dw = is_tracked(w).then(|| zeros(h));
        for row in 0..tokens {
            let at = row * h..(row + 1) * h;
            backward_row(&xs[at.clone()], &ws, &dys[at.clone()], self.eps, &mut dx[at], dw.as_deref_mut());
        }
        let dw = dw.map(|dw| Tensor::from_vec(dw, h, w.device())).transpose()?;
        Ok([Some(Tensor::from_vec(dx, (tokens, h), x.device())?), dw])
    }
}
