//! The auxiliary loss that keeps experts in use (Switch Transformer, Fedus et al. 2021, as GPT-OSS's configuration means it):
//!
//! `L = E · Σ_e f_e · P_e`, with `f_e` the (token, slot) pairs sent to `e` over the tokens and `P_e` the mean full-softmax
//! probability of `e`. Balanced routing gives `K`. `f` is a constant: `dz_te = (E/T) p_te (f_e − Σ_j f_j p_tj)`.

use super::cpu::{buffer, host_values, values};
use super::experts::Dispatch;
use super::math::exp;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use multiversion::multiversion;

/// The loss of one layer's router logits `[T, E]` whose tokens are dispatched by `plan`; a scalar.
///
/// # Errors
/// When `logits` and `plan` have other sizes.
pub fn load_balance(logits: &Tensor, plan: &Dispatch) -> Result<Tensor> {
    logits.contiguous()?.apply_op1(LoadBalance { plan: plan.clone() })
}

struct LoadBalance {
    plan: Dispatch,
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn softmax(row: &[f32]) -> Vec<f32> {
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = row.iter().map(|&z| exp(z - highest)).collect();
    let total: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= total);
    p
}

impl LoadBalance {
    /// `f`, `[E]`.
    fn fractions(&self, (tokens, experts): (usize, usize)) -> Result<Vec<f32>> {
        let counts = self.plan.counts()?;
        if counts.len() != experts {
            bail!("load_balance: {experts} router logits for {} experts", counts.len());
        }
        Ok(counts.iter().map(|&c| c as f32 / tokens.max(1) as f32).collect())
    }
}

/// `Σ_e f_e p_e` of one token.
fn weighted(p: &[f32], fractions: &[f32]) -> f32 {
    p.iter().zip(fractions).map(|(p, f)| p * f).sum()
}

impl CustomOp1 for LoadBalance {
    fn name(&self) -> &'static str {
        "load_balance"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, experts) = layout.shape().dims2()?;
        let fractions = self.fractions((tokens, experts))?;
        let rows = values(logits, layout)?.chunks_exact(experts);
        let sum: f64 = rows.map(|row| weighted(&softmax(row), &fractions) as f64).sum();
        let loss = sum * experts as f64 / tokens.max(1) as f64;
        Ok((CpuStorage::F32(vec![loss as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let (tokens, experts) = logits.dims2()?;
        let scale = grad.to_scalar::<f32>()? * experts as f32 / tokens.max(1) as f32;
        let fractions = self.fractions((tokens, experts))?;
        let logits_values = host_values(logits)?;
        let mut dz = buffer(tokens * experts);
        for (row, dz) in logits_values.chunks_exact(experts).zip(dz.chunks_exact_mut(experts)) {
            let p = softmax(row);
            let mean = weighted(&p, &fractions);
            for ((dz, p), f) in dz.iter_mut().zip(&p).zip(&fractions) {
                *dz = scale * p * (f - mean);
            }
        }
        Ok(Some(Tensor::from_vec(dz, (tokens, experts), logits.device())?))
    }
}
