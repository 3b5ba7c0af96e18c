//! Elementwise updates of weights, in place: AdamW and SGD, and what comes before them, the gradient's norm and its scaling.
//! AdamW with moments of 8 bits is [`super::adamw_8bit`]. On a GPU values have the same bits; the norm, a sum, has its own order.

use super::cpu::{edit, host_values, in_parallel};
use super::cuda;
use candle_core::{Result, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;

/// The constants of one AdamW update.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// `1 − lr · λ`.
    pub shrink: f32,
    /// `1 − β₁`; from f64, for `1 − β₂` of an f32 β₂ = 0.999 is already 1e-5 off.
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

/// Values of a tensor that one thread updates at a time.
pub(super) const PART: usize = 1 << 14;

/// AdamW (Loshchilov, Hutter 2019): `w ← w (1 − lr λ)`, `m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`,
/// `w ← w − lr/(1−β₁ᵗ) · m / (√v / √(1−β₂ᵗ) + ε)`. All four have one shape.
///
/// # Errors
/// When shapes differ.
pub fn adamw(weights: &Tensor, [first, second]: [&Tensor; 2], gradient: &Tensor, step: &AdamW) -> Result<()> {
    same_shape(weights, &[first, second, gradient])?;
    if weights.device().is_cuda() {
        return cuda::adamw(weights, [first, second], gradient, step);
    }
    let gradient = host_values(gradient)?;
    edit(weights, |w| {
        edit(first, |m| {
            edit(second, |v| {
                if in_parallel(w.len()) {
                    let parts =
                        w.par_chunks_mut(PART).zip(m.par_chunks_mut(PART)).zip(v.par_chunks_mut(PART));
                    parts
                        .zip(gradient.par_chunks(PART))
                        .for_each(|(((w, m), v), g)| apply_adamw(step, w, m, v, g));
                } else {
                    apply_adamw(step, w, m, v, &gradient);
                }
                Ok(())
            })
        })
    })
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn apply_adamw(step: &AdamW, w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
    step.apply(w, m, v, g);
}

impl AdamW {
    /// One update of `w`, and of its moments `m` and `v`.
    #[inline(always)]
    pub(super) fn apply(&self, w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
        for ((w, (m, v)), &g) in w.iter_mut().zip(m.iter_mut().zip(v)).zip(g) {
            *m += (g - *m) * self.one_minus_beta1;
            *v = *v * self.beta2 + g * g * self.one_minus_beta2;
            *w = *w * self.shrink - self.rate * *m / (v.sqrt() / self.root_correction + self.eps);
        }
    }
}

/// SGD: `w ← w · shrink − rate · g`, the product fused into the sum: one rounding fewer beside a large `w`, and PyTorch's bits.
///
/// # Errors
/// When shapes differ.
pub fn sgd(weights: &Tensor, gradient: &Tensor, shrink: f32, rate: f32) -> Result<()> {
    same_shape(weights, &[gradient])?;
    if weights.device().is_cuda() {
        return cuda::sgd(weights, gradient, shrink, rate);
    }
    let gradient = host_values(gradient)?;
    edit(weights, |w| {
        descend(w, &gradient, shrink, rate);
        Ok(())
    })
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn descend(weights: &mut [f32], gradient: &[f32], shrink: f32, rate: f32) {
    for (w, &g) in weights.iter_mut().zip(gradient) {
        *w = (-rate).mul_add(g, *w * shrink);
    }
}

/// A moving sum of gradients, which [`sgd`] follows in their place: `b ← momentum · b + g`, as PyTorch has it; from 0, the first is g.
///
/// # Errors
/// When shapes differ.
pub fn accumulate(buffer: &Tensor, gradient: &Tensor, momentum: f32) -> Result<()> {
    same_shape(buffer, &[gradient])?;
    if buffer.device().is_cuda() {
        return cuda::accumulate(buffer, gradient, momentum);
    }
    let gradient = host_values(gradient)?;
    edit(buffer, |buffer| {
        buffer.iter_mut().zip(gradient.iter()).for_each(|(b, &g)| *b = *b * momentum + g);
        Ok(())
    })
}

/// `w ← bf16(x)`, held in f32, on a GPU in bf16: what a model computes with whose masters are `x`.
///
/// # Errors
/// When shapes differ.
pub fn round_to_bf16(weights: &Tensor, x: &Tensor) -> Result<()> {
    same_shape(weights, &[x])?;
    if weights.device().is_cuda() {
        return cuda::round_into(x, weights);
    }
    let x = host_values(x)?;
    edit(weights, |w| {
        w.iter_mut().zip(x.iter()).for_each(|(w, &x)| *w = half::bf16::from_f32(x).to_f32());
        Ok(())
    })
}

/// `Σ x²` in f64, in the order of the elements; on a GPU in an order that depends on their number alone.
///
/// # Errors
/// When `x` cannot be read.
pub fn sum_of_squares(x: &Tensor) -> Result<f64> {
    if x.device().is_cuda() {
        return cuda::sum_of_squares(x);
    }
    Ok(host_values(x)?.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
}

/// `x ← factor · x`; a factor of 0 clears what is no number too.
///
/// # Errors
/// When `x` cannot be changed.
pub fn scale(x: &Tensor, factor: f32) -> Result<()> {
    if x.device().is_cuda() {
        return cuda::scale(x, factor);
    }
    let part = |x: &mut [f32]| match factor {
        0.0 => x.fill(0.0),
        _ => x.iter_mut().for_each(|x| *x *= factor),
    };
    edit(x, |x| {
        if in_parallel(x.len()) {
            x.par_chunks_mut(PART).for_each(part)
        } else {
            part(x)
        }
        Ok(())
    })
}

pub(super) fn same_shape(weights: &Tensor, others: &[&Tensor]) -> Result<()> {
    match others.iter().find(|other| other.dims() != weights.dims()) {
        Some(other) => bail!("optimizer: weights {:?}, another tensor {:?}", weights.dims(), other.dims()),
        None => Ok(()),
    }
}
