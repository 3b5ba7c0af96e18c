//! Top-k routing: the experts with the `K` largest of the `E` logits of a token, and a softmax over these
//! logits.
//!
//! `w_k = e^{z_{r_k}} / Σ_j e^{z_{r_j}}`. Backward pass: `dz_{r_k} = w_k (dw_k − Σ_j w_j dw_j)`, and 0 for
//! experts that are not selected.

use super::buffer::zeros;
use super::cpu::{host_ids, host_values};
use super::cuda::{self, top_k_softmax_backward, top_k_softmax_forward};
use super::graph::{apply, apply_without_gradient, contiguous};
use super::math::exp;
use super::operation::{DeviceArgument, HostArgument, InputGradients, Operation};
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use multiversion::multiversion;

/// Returns the `K` experts of every token, u32 `[T, K]`, in descending order of logits. Ties go to the lowest
/// index. Not differentiable.
///
/// # Errors
/// When `logits` has fewer than `top_k` columns.
pub fn route(logits: &Tensor, top_k: usize) -> Result<Tensor> {
    let experts = logits.dim(1)?;
    if top_k > experts || experts > u16::MAX as usize {
        bail!("route: {top_k} of {experts} experts");
    }
    apply_without_gradient(&logits.contiguous()?, Route { top_k })
}

struct Route {
    top_k: usize,
}

impl Operation<1> for Route {
    const NAME: &'static str = "route";

    fn cpu(&self, [logits]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let (tokens, experts) = logits.shape().dims2()?;
        let mut routed_experts = Vec::with_capacity(tokens * self.top_k);
        for row in logits.values()?.chunks_exact(experts) {
            let first = routed_experts.len();
            for _ in 0..self.top_k {
                let mut best: Option<usize> = None;
                for (e, &z) in row.iter().enumerate() {
                    let taken = routed_experts[first..].contains(&(e as u32));
                    if !taken && best.is_none_or(|b| z > row[b]) {
                        best = Some(e);
                    }
                }
                routed_experts.push(best.unwrap_or(0) as u32);
            }
        }
        Ok((CpuStorage::U32(routed_experts), Shape::from((tokens, self.top_k))))
    }

    fn cuda(&self, [logits]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        cuda::route(logits, self.top_k)
    }
}

/// Returns the weights of the routed experts, `[T, K]`, for `logits [T, E]` and `routed_experts [T, K]`.
/// Differentiable in the logits.
///
/// # Errors
/// When `logits` and `routed_experts` have different numbers of tokens, or an expert is not below `E`. On a
/// GPU the experts are not checked: the weights of a token with such an expert are NaN.
pub fn top_k_softmax(logits: &Tensor, routed_experts: &Tensor) -> Result<Tensor> {
    if routed_experts.dim(0)? != logits.dim(0)? {
        bail!("top_k_softmax: routed experts {:?} for logits {:?}", routed_experts.dims(), logits.dims());
    }
    apply([&contiguous(logits)?], TopKSoftmax { routed_experts: routed_experts.contiguous()? })
}

struct TopKSoftmax {
    routed_experts: Tensor,
}

/// Appends the weights of one token's experts to `out`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn append_weights(row: &[f32], routed_experts: &[u32], out: &mut Vec<f32>) {
    let highest = routed_experts.iter().fold(f32::NEG_INFINITY, |m, &e| m.max(row[e as usize]));
    let first = out.len();
    out.extend(routed_experts.iter().map(|&e| exp(row[e as usize] - highest)));
    let total: f32 = out[first..].iter().sum();
    out[first..].iter_mut().for_each(|w| *w /= total);
}

impl Operation<1> for TopKSoftmax {
    const NAME: &'static str = "top_k_softmax";

    fn cpu(&self, [logits]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let (tokens, experts) = logits.shape().dims2()?;
        let (logits, routed_experts, top_k) =
            (logits.values()?, host_ids(&self.routed_experts)?, self.routed_experts.dim(1)?);
        if let Some(expert) = routed_experts.iter().find(|&&e| e as usize >= experts) {
            bail!("top_k_softmax: expert {expert} of {experts}");
        }
        let mut out = Vec::with_capacity(tokens * top_k);
        for (row, routed_experts) in logits.chunks_exact(experts).zip(routed_experts.chunks_exact(top_k)) {
            append_weights(row, routed_experts, &mut out);
        }
        Ok((CpuStorage::F32(out), Shape::from((tokens, top_k))))
    }

    fn cuda(&self, [logits]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        top_k_softmax_forward(logits, &self.routed_experts)
    }

    fn backward(&self, [logits]: [&Tensor; 1], weights: &Tensor, grad: &Tensor) -> InputGradients<1> {
        let (tokens, experts) = logits.dims2()?;
        if logits.device().is_cuda() {
            return Ok([Some(top_k_softmax_backward(weights, &self.routed_experts, grad, experts)?)]);
        }
        let (w, g) = (host_values(weights)?, host_values(grad)?);
        let (routed_experts, top_k) = (host_ids(&self.routed_experts)?, self.routed_experts.dim(1)?);
        let mut dz = zeros(tokens * experts);
        for (t, routed_experts) in routed_experts.chunks_exact(top_k).enumerate() {
            let at = t * top_k..(t + 1) * top_k;
            let (w, g) = (&w[at.clone()], &g[at]);
            let mean: f32 = w.iter().zip(g).map(|(w, g)| w * g).sum();
            for ((&e, w), g) in routed_experts.iter().zip(w).zip(g) {
                dz[t * experts + e as usize] += w * (g - mean);
            }
        }
        Ok([Some(Tensor::from_vec(dz, (tokens, experts), logits.device())?)])
    }
}
