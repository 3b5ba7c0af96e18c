//! The load-balancing auxiliary loss of experts (Switch Transformer, Fedus et al. 2021, as in the
//! configuration of GPT-OSS):
//!
//! `L = E · Σ_e f_e · P_e`. `f_e` is the number of (token, slot) pairs that are routed to `e`, divided by the
//! number of tokens. `P_e` is the mean probability of `e` in a softmax over all experts. The loss of balanced
//! routing is `K`. The backward pass treats `f` as a constant: `dz_te = (E/T) p_te (f_e − Σ_j f_j p_tj)`.
//!
//! A row that several sequences share counts once per sequence in `f`, `P` and `T`.

use super::buffer::buffer;
use super::cpu::host_values;
use super::cuda::{load_balance_backward, load_balance_forward};
use super::device_copies::DeviceCopies;
use super::experts::Dispatch;
use super::graph::{apply, contiguous};
use super::math::exp;
use super::operation::{DeviceArgument, HostArgument, Operation};
use candle_core::{CpuStorage, CudaStorage, Device, Result, Shape, Tensor, bail};
use multiversion::multiversion;
use std::sync::Arc;

/// Returns the loss of one layer, a scalar. `logits [T, E]` are the router logits, and `plan` dispatches the
/// tokens. `sequences_per_row [T]` is the number of sequences that share each row; `None` means one sequence
/// per row.
///
/// # Errors
/// When the sizes of `logits`, `plan` and `sequences_per_row` differ.
pub fn load_balance(
    logits: &Tensor,
    plan: &Dispatch,
    sequences_per_row: Option<&Arc<Vec<u32>>>,
) -> Result<Tensor> {
    if sequences_per_row
        .is_some_and(|sequences_per_row| Ok(sequences_per_row.len()) != logits.dim(0).map_err(drop))
    {
        bail!("load_balance: router logits {:?} do not match the rows of `sequences_per_row`", logits.dims());
    }
    let op = LoadBalance {
        plan: plan.clone(),
        sequences_per_row: sequences_per_row.cloned(),
        uploaded: DeviceCopies::default(),
    };
    apply([&contiguous(logits)?], op)
}

pub(super) struct LoadBalance {
    pub plan: Dispatch,
    sequences_per_row: Option<Arc<Vec<u32>>>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    uploaded: DeviceCopies,
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn softmax(row: &[f32], p: &mut [f32]) {
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    p.iter_mut().zip(row).for_each(|(p, &z)| *p = exp(z - highest));
    let total: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= total);
}

impl LoadBalance {
    /// Returns `f`, `[E]`.
    fn fractions(&self, (rows, experts): (usize, usize)) -> Result<Vec<f32>> {
        let counts = self
            .plan
            .counts(self.sequences_per_row.as_ref().map(|sequences_per_row| &sequences_per_row[..]))?;
        if counts.len() != experts {
            bail!("load_balance: {experts} router logits for {} experts", counts.len());
        }
        Ok(counts.iter().map(|&c| c as f32 / self.tokens(rows).max(1) as f32).collect())
    }

    /// Returns `sequences_per_row` as a tensor on `device`; `None` if no row is shared.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) fn sequences_per_row_on(&self, device: &Device) -> Result<Option<Tensor>> {
        let Some(sequences_per_row) = &self.sequences_per_row else { return Ok(None) };
        self.uploaded
            .get_or_copy(device, || Tensor::from_slice(sequences_per_row, sequences_per_row.len(), device))
            .map(Some)
    }

    /// Returns `T`.
    pub(super) fn tokens(&self, rows: usize) -> usize {
        self.sequences_per_row
            .as_ref()
            .map_or(rows, |sequences_per_row| sequences_per_row.iter().map(|&h| h as usize).sum())
    }

    /// Returns the weight of `row` in the sums: the number of sequences that share it.
    fn weight(&self, row: usize) -> f32 {
        self.sequences_per_row.as_ref().map_or(1.0, |sequences_per_row| sequences_per_row[row] as f32)
    }
}

/// Returns `Σ_e f_e p_e` of one token.
fn dot_fractions(p: &[f32], fractions: &[f32]) -> f32 {
    p.iter().zip(fractions).map(|(p, f)| p * f).sum()
}

impl Operation<1> for LoadBalance {
    const NAME: &'static str = "load_balance";

    fn cpu(&self, [logits]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let (rows, experts) = logits.shape().dims2()?;
        let fractions = self.fractions((rows, experts))?;
        let mut p = buffer(experts);
        let of_rows = logits.values()?.chunks_exact(experts).enumerate().map(|(i, row)| {
            softmax(row, &mut p);
            (self.weight(i) * dot_fractions(&p, &fractions)) as f64
        });
        let loss = of_rows.sum::<f64>() * experts as f64 / self.tokens(rows).max(1) as f64;
        Ok((CpuStorage::F32(vec![loss as f32]), Shape::from(())))
    }

    fn cuda(&self, [logits]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        load_balance_forward(self, logits)
    }

    fn backward(&self, [logits]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        if logits.device().is_cuda() {
            return Ok([Some(load_balance_backward(self, logits, grad)?)]);
        }
        let (rows, experts) = logits.dims2()?;
        let scale = grad.to_scalar::<f32>()? * experts as f32 / self.tokens(rows).max(1) as f32;
        let fractions = self.fractions((rows, experts))?;
        let logits_values = host_values(logits)?;
        let (mut dz, mut p) = (buffer(rows * experts), buffer(experts));
        let of_rows = logits_values.chunks_exact(experts).zip(dz.chunks_exact_mut(experts));
        for (i, (row, dz)) in of_rows.enumerate() {
            let scale = scale * self.weight(i);
            softmax(row, &mut p);
            let mean = dot_fractions(&p, &fractions);
            for ((dz, p), f) in dz.iter_mut().zip(&p).zip(&fractions) {
                *dz = scale * p * (f - mean);
            }
        }
        Ok([Some(Tensor::from_vec(dz, (rows, experts), logits.device())?)])
    }
}
