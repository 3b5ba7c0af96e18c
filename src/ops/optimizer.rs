//! Updates of weights, in place and elementwise: AdamW and SGD. Also the norm and the scaling of gradients,
//! which come before an update. [`super::adamw_8bit`] is AdamW with 8-bit moments. A GPU gives the same bits
//! as a CPU, except for the norm, whose sum has another order.

use super::cpu::{change, edit, host_values, should_parallelize};
use super::cuda;
use candle_core::{Result, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;

/// The constants of one AdamW update.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// `1 − lr · λ`.
    pub shrink: f32,
    /// `1 − β₁`, computed in f64 like `1 − β₂`. In f32, `1 − 0.999` would have a relative error of 1e-5.
    pub one_minus_beta1: f32,
    pub beta2: f32,
    /// `1 − β₂`.
    pub one_minus_beta2: f32,
    /// `lr / (1 − β₁ᵗ)`.
    pub rate: f32,
    /// `√(1 − β₂ᵗ)`.
    pub root_correction: f32,
    pub eps: f32,
}

/// Number of values of a tensor that one task updates.
pub(super) const CHUNK_VALUES: usize = 1 << 14;

/// Updates weights by AdamW (Loshchilov, Hutter 2019): `w ← w (1 − lr λ)`, `m ← β₁m + (1−β₁)g`, `v ← β₂v +
/// (1−β₂)g²`, `w ← w − lr/(1−β₁ᵗ) · m / (√v / √(1−β₂ᵗ) + ε)`. All four tensors have the same shape.
///
/// # Errors
/// When shapes differ.
pub fn adamw(weights: &Tensor, [first, second]: [&Tensor; 2], gradient: &Tensor, step: &AdamW) -> Result<()> {
    check_same_shape(weights, &[first, second, gradient])?;
    if weights.device().is_cuda() {
        return cuda::adamw(weights, [first, second], gradient, step);
    }
    let gradient = host_values(gradient)?;
    edit(weights, |w| {
        edit(first, |m| {
            change(second, |v| {
                if should_parallelize(w.len()) {
                    let parts = w
                        .par_chunks_mut(CHUNK_VALUES)
                        .zip(m.par_chunks_mut(CHUNK_VALUES))
                        .zip(v.par_chunks_mut(CHUNK_VALUES));
                    parts
                        .zip(gradient.par_chunks(CHUNK_VALUES))
                        .for_each(|(((w, m), v), g)| apply_adamw(step, w, m, v, g));
                } else {
                    apply_adamw(step, w, m, v, &gradient);
                }
            })
        })
    })
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn apply_adamw(step: &AdamW, w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
    step.apply(w, m, v, g);
}

impl AdamW {
    /// Performs one update of `w` and its moments `m` and `v`, given the gradient `g`.
    #[inline(always)]
    pub(super) fn apply(&self, w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
        for ((w, (m, v)), &g) in w.iter_mut().zip(m.iter_mut().zip(v)).zip(g) {
            *m += (g - *m) * self.one_minus_beta1;
            *v = *v * self.beta2 + g * g * self.one_minus_beta2;
            *w = *w * self.shrink - self.rate * *m / (v.sqrt() / self.root_correction + self.eps);
        }
    }
}

/// Updates weights by SGD: `w ← w · shrink − rate · g`. The last product and the subtraction are one fused
/// operation, so the result is bit for bit that of PyTorch.
///
/// # Errors
/// When shapes differ.
pub fn sgd(weights: &Tensor, gradient: &Tensor, shrink: f32, rate: f32) -> Result<()> {
    check_same_shape(weights, &[gradient])?;
    if weights.device().is_cuda() {
        return cuda::sgd(weights, gradient, shrink, rate);
    }
    let gradient = host_values(gradient)?;
    change(weights, |w| descend(w, &gradient, shrink, rate))
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn descend(weights: &mut [f32], gradient: &[f32], shrink: f32, rate: f32) {
    for (w, &g) in weights.iter_mut().zip(gradient) {
        *w = (-rate).mul_add(g, *w * shrink);
    }
}

/// Updates the momentum buffer: `b ← momentum · b + g`, as in PyTorch. [`sgd`] then uses `b` instead of the
/// gradient. If the buffer starts with zeros, its first value is `g`.
///
/// # Errors
/// When shapes differ.
pub fn update_momentum(buffer: &Tensor, gradient: &Tensor, momentum: f32) -> Result<()> {
    check_same_shape(buffer, &[gradient])?;
    if buffer.device().is_cuda() {
        return cuda::update_momentum(buffer, gradient, momentum);
    }
    let gradient = host_values(gradient)?;
    change(buffer, |buffer| {
        buffer.iter_mut().zip(gradient.iter()).for_each(|(b, &g)| *b = *b * momentum + g);
    })
}

/// Computes `sum ← sum + x` for two f32 tensors on a GPU.
///
/// # Errors
/// When shapes differ, or a tensor is not on a GPU.
pub fn add_on_device(sum: &Tensor, x: &Tensor) -> Result<()> {
    cuda::add_tensor(sum, x)
}

/// Computes `w ← bf16(x)`. `x` are the master weights in f32. `w` are the weights of the forward pass, stored
/// as f32 on a CPU and as bf16 on a GPU.
///
/// # Errors
/// When shapes differ.
pub fn round_to_bf16(weights: &Tensor, x: &Tensor) -> Result<()> {
    check_same_shape(weights, &[x])?;
    if weights.device().is_cuda() {
        return cuda::round_into(x, weights);
    }
    let x = host_values(x)?;
    change(weights, |w| {
        w.iter_mut().zip(x.iter()).for_each(|(w, &x)| *w = half::bf16::from_f32(x).to_f32());
    })
}

/// Returns `Σ x²` in f64, added in the order of the elements. On a GPU the order depends only on the number
/// of elements.
///
/// # Errors
/// When `x` cannot be read.
pub fn sum_of_squares(x: &Tensor) -> Result<f64> {
    if x.device().is_cuda() {
        return cuda::sum_of_squares(x);
    }
    Ok(host_values(x)?.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
}

/// Computes `x ← factor · x`. A factor of 0 also sets NaN and infinite values to 0.
///
/// # Errors
/// When `x` cannot be changed.
pub fn scale(x: &Tensor, factor: f32) -> Result<()> {
    if x.device().is_cuda() {
        return cuda::scale(x, factor);
    }
    let part =
        |x: &mut [f32]| if factor == 0.0 { x.fill(0.0) } else { x.iter_mut().for_each(|x| *x *= factor) };
    change(x, |x| {
        if should_parallelize(x.len()) { x.par_chunks_mut(CHUNK_VALUES).for_each(part) } else { part(x) }
    })
}

pub(super) fn check_same_shape(weights: &Tensor, others: &[&Tensor]) -> Result<()> {
    match others.iter().find(|other| other.dims() != weights.dims()) {
        Some(other) => bail!("optimizer: weights {:?}, another tensor {:?}", weights.dims(), other.dims()),
        None => Ok(()),
    }
}
