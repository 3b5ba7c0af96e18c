//! Causal attention with one learnable sink per query head, an optional sliding window, and grouped key-value
//! heads.
//!
//! `S_ij = q_i · k_j / √D` are the scores of the keys `j` that are visible to query `i`, and `s` is the sink
//! of the head:
//!
//! ```text
//! LSE_i = log(Σ_j e^{S_ij} + e^s)      P_ij = e^{S_ij − LSE_i}      O_i = Σ_j P_ij v_j      D_i = dO_i · O_i
//! dS_ij = P_ij (dO_i · v_j − D_i)      dv_j = Σ_i P_ij dO_i         ds  = −Σ_i e^{s − LSE_i} D_i
//! ```
//!
//! Keys are processed in chunks of 512 at absolute positions. In each chunk an online softmax over blocks of
//! 32 keys starts with the sink as its maximum. So the maximum is always finite, and a masked key adds
//! exactly 0. Chunks are merged in ascending order, and the sink is added at the end. Training, prefill and
//! decode use the same chunks, one after the other or in parallel, so their rows have the same bits.

mod backward;
mod cached_attention;
mod chunks;
mod forward;
mod key_sharing;
// Compiled in every build for its tests. In the program only GPU code uses it.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub mod kernels;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub mod plan;
mod rows;

use super::buffer::{buffer, zeros};
use super::cpu::{host_values, should_parallelize};
use super::cuda::{DeviceLse, sink_attention_backward, sink_attention_forward};
use super::graph::{apply, contiguous};
use super::kv_cache::KvBlocks;
use super::operation::{DeviceArgument, HostArgument, InputGradients, Operation};
use super::sequence_rows::SequenceRows;
use backward::{BackwardInputs, attend_backward};
pub use cached_attention::cached_sink_attention;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use forward::attend;
pub use key_sharing::KeySharing;
use rayon::prelude::*;
use rows::Rows;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The value that means "no sink". It is finite, and its exponential relative to any real score is exactly 0.
pub const NO_SINK: f32 = -1e9;

/// The sizes and options of an attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// `N`, a multiple of `kv_heads`.
    pub heads: usize,
    /// `M`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Number of keys that are visible to a query, its own key included; `None` means all keys up to its own.
    pub window: Option<usize>,
    /// False leaves the sink out of the softmax, for the ablation `no_train_sinks` and for families without
    /// sinks.
    pub sinks: bool,
    /// False gives the sinks no gradient, for the ablation `no_sink_gradient`.
    pub sink_gradient: bool,
}

impl Attention {
    /// Returns the factor of the scores.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Returns the first key position that is visible to the query at `position`.
    fn first_key(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    fn sink(&self, sinks: &[f32], head: usize) -> f32 {
        if self.sinks { sinks[head] } else { NO_SINK }
    }
}

/// Computes attention over packed sequences: `q [T, N, D]`, `kv [T, 2, M, D]`, `sinks [N]` → `[T, N·D]`.
/// Differentiable in all three inputs.
///
/// `sequence_rows` is the layout of the sequences. On the CPU all tensors are f32, and sequences may share
/// prefixes. On a GPU `q` and `kv` are bf16, `sinks` is f32, `D` is 64 or 128, and all tensors are
/// contiguous.
///
/// # Errors
/// When shapes disagree with `attention` or `sequence_rows`. On a GPU also when [`plan`] does not support the
/// sizes, or rows are shared.
pub fn sink_attention(
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    sequence_rows: &Arc<SequenceRows>,
    attention: Attention,
) -> Result<Tensor> {
    sink_attention_with_shared_keys(q, kv, sinks, sequence_rows, attention, None)
}

/// Computes attention as [`sink_attention`] does. `sharing` is for a GPU with one key-value head, which other
/// GPUs have too. It makes the gradient of `kv` a share of the gradient from all query heads of these GPUs.
/// Each value is 0 in all shares but one, so the sum has the bits of one GPU with all query heads.
///
/// # Errors
/// Errors of [`sink_attention`].
pub fn sink_attention_with_shared_keys(
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    sequence_rows: &Arc<SequenceRows>,
    attention: Attention,
    sharing: Option<Arc<dyn KeySharing>>,
) -> Result<Tensor> {
    let tokens = q.dim(0)?;
    let Attention { heads, kv_heads, head_dim, .. } = attention;
    if q.dims() != [tokens, heads, head_dim]
        || kv.dims() != [tokens, 2, kv_heads, head_dim]
        || sinks.dims() != [heads]
        || kv_heads == 0
        || heads % kv_heads != 0
        || sequence_rows.rows() != tokens
    {
        bail!(
            "sink_attention: q {:?}, kv {:?}, sinks {:?}, sequences of {} rows do not fit {attention:?}",
            q.dims(),
            kv.dims(),
            sinks.dims(),
            sequence_rows.rows()
        );
    }
    let sequence_rows = sequence_rows.clone();
    let op = PackedSinkAttention { attention, sequence_rows, sharing, lse: OnceLock::new() };
    if q.device().is_cuda() {
        // On a GPU no hidden copies are made, so tensors must be contiguous.
        return apply([q, kv, sinks], op);
    }
    apply([&contiguous(q)?, &contiguous(kv)?, &contiguous(sinks)?], op)
}

struct PackedSinkAttention {
    attention: Attention,
    sequence_rows: Arc<SequenceRows>,
    /// The GPUs that share the key-value head, if there are several.
    sharing: Option<Arc<dyn KeySharing>>,
    /// The log-sum-exp of the forward pass, which the backward pass uses.
    lse: OnceLock<Lse>,
}

/// Log-sum-exps `[T][N]`, on the device of the forward pass.
enum Lse {
    Host(Vec<f32>),
    Device(DeviceLse),
}

impl PackedSinkAttention {
    /// Returns the tasks of both passes: one per (sequence, key-value head).
    fn tasks(&self) -> Vec<(usize, usize)> {
        let sequences = self.sequence_rows.sequences();
        (0..sequences).flat_map(|s| (0..self.attention.kv_heads).map(move |h| (s, h))).collect()
    }

    /// Runs `f` for every task, on several threads if the work is large. Returns the results in task order.
    fn run<R: Send>(&self, caches: &[KvBlocks], f: impl Fn(usize, usize) -> R + Sync + Send) -> Vec<R> {
        let longest = caches.iter().map(KvBlocks::len).max().unwrap_or(0);
        let visible_keys = self.attention.window.unwrap_or(longest).min(longest);
        let tasks = self.tasks();
        if should_parallelize(
            self.sequence_rows.rows() * visible_keys * self.attention.heads * self.attention.head_dim,
        ) {
            tasks.into_par_iter().with_max_len(1).map(|(s, h)| f(s, h)).collect()
        } else {
            tasks.into_iter().map(|(s, h)| f(s, h)).collect()
        }
    }

    /// Returns the keys and values of each sequence. Sequences share the blocks that lie completely in their
    /// common prefix.
    fn caches(&self, kv: &[f32]) -> Vec<KvBlocks> {
        let Attention { kv_heads, head_dim, .. } = self.attention;
        let width = 2 * kv_heads * head_dim;
        let mut caches: Vec<KvBlocks> = Vec::with_capacity(self.sequence_rows.sequences());
        for s in 0..self.sequence_rows.sequences() {
            let sequence = self.sequence_rows.own_rows(s);
            let mut cache = match (caches.last(), self.sequence_rows.first_own_position(s)) {
                (Some(before), shared @ 1..) => before.prefix(shared),
                _ => KvBlocks::new(kv_heads, head_dim),
            };
            cache.append(&kv[sequence.start * width..sequence.end * width]);
            caches.push(cache);
        }
        caches
    }

    fn cu_seqlens(&self) -> Result<Vec<usize>> {
        self.sequence_rows.cu_seqlens().ok_or_else(|| {
            candle_core::Error::Msg("sink_attention: the GPU kernels do not support shared rows".into())
        })
    }
}

impl Operation<3> for PackedSinkAttention {
    const NAME: &'static str = "sink_attention";

    fn cpu(&self, [q, kv, sinks]: [HostArgument; 3]) -> Result<(CpuStorage, Shape)> {
        let (q, kv, sinks) = (q.values()?, kv.values()?, sinks.values()?);
        let Attention { heads, head_dim: d, .. } = self.attention;
        let caches = self.caches(kv);
        let mut out = buffer(q.len());
        let mut lse = buffer(q.len() / d);
        let (out_rows, lse_rows) = (Rows::new(&mut out), Rows::new(&mut lse));
        self.run(&caches, |s, kv_head| {
            let Range { start, end } = self.sequence_rows.own_rows(s);
            let (rows, width) = (end - start, heads * d);
            let out = out_rows.slice(start * width, rows * width);
            let lse = lse_rows.slice(start * heads, rows * heads);
            attend(
                &self.attention,
                kv_head,
                &caches[s],
                self.sequence_rows.first_own_position(s),
                &q[start * width..end * width],
                sinks,
                &out,
                &lse,
            );
        });
        let tokens = q.len() / (heads * d);
        let _ = self.lse.set(Lse::Host(lse));
        Ok((CpuStorage::F32(out), Shape::from((tokens, heads * d))))
    }

    fn cuda(&self, [q, kv, sinks]: [DeviceArgument; 3]) -> Result<(CudaStorage, Shape)> {
        let arguments = [q, kv, sinks];
        let (out, shape, lse) = sink_attention_forward(&self.attention, &self.cu_seqlens()?, arguments)?;
        let _ = self.lse.set(Lse::Device(lse));
        Ok((out, shape))
    }

    fn backward(&self, [q, kv, sinks]: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> InputGradients<3> {
        let [dq, dkv, dsinks] = match self.lse.get() {
            Some(Lse::Host(lse)) => self.host_backward(lse, [q, kv, sinks, out, grad])?,
            Some(Lse::Device(lse)) => {
                let tensors = [q, kv, sinks, out, grad];
                let sharing = self.sharing.as_deref();
                sink_attention_backward(&self.attention, &self.cu_seqlens()?, lse, tensors, sharing)?
            }
            None => bail!("sink_attention: backward before forward"),
        };
        Ok([Some(dq), Some(dkv), Some(dsinks)])
    }
}

impl PackedSinkAttention {
    fn host_backward(&self, lse: &[f32], [q, kv, sinks, out, grad]: [&Tensor; 5]) -> Result<[Tensor; 3]> {
        let Attention { heads, kv_heads, head_dim: d, .. } = self.attention;
        let group = heads / kv_heads;
        let mut dq = zeros(q.elem_count());
        let mut dkv = zeros(kv.elem_count());
        let (q_values, kv_values, sinks) = (host_values(q)?, host_values(kv)?, host_values(sinks)?);
        let (out, grad) = (host_values(out)?, host_values(grad)?);
        let caches = self.caches(&kv_values);
        let kv_width = 2 * kv_heads * d;
        // The own queries of a sequence also give gradients to the keys of its shared prefix. These gradients
        // are added in sequence order.
        let sequences = 0..self.sequence_rows.sequences();
        let mut shared: Vec<Vec<f32>> =
            sequences.clone().map(|s| zeros(self.sequence_rows.first_own_position(s) * kv_width)).collect();
        let (dq_rows, dkv_rows) = (Rows::new(&mut dq), Rows::new(&mut dkv));
        let shared_rows: Vec<Rows> = shared.iter_mut().map(|shared| Rows::new(shared)).collect();
        let parts = self.run(&caches, |s, kv_head| {
            let Range { start, end } = self.sequence_rows.own_rows(s);
            let (rows, width) = (end - start, heads * d);
            let up = BackwardInputs {
                q: &q_values[start * width..end * width],
                out: &out[start * width..end * width],
                lse: &lse[start * heads..end * heads],
                grad: &grad[start * width..end * width],
                sinks: &sinks,
            };
            let dq = dq_rows.slice(start * width, rows * width);
            let dkv = dkv_rows.slice(start * kv_width, rows * kv_width);
            attend_backward(&self.attention, kv_head, &caches[s], &up, &dq, &dkv, &shared_rows[s])
        });
        for s in sequences.filter(|&s| !shared[s].is_empty()) {
            for (row, gradient) in
                self.sequence_rows.row_indices(s).into_iter().zip(shared[s].chunks_exact(kv_width))
            {
                let sum = &mut dkv[row * kv_width..(row + 1) * kv_width];
                sum.iter_mut().zip(gradient).for_each(|(sum, &x)| *sum += x);
            }
        }
        let mut dsinks = vec![0f32; heads];
        for ((_, kv_head), part) in self.tasks().into_iter().zip(parts) {
            for (g, x) in part.into_iter().enumerate() {
                dsinks[kv_head * group + g] += x;
            }
        }
        let sinks_learn = self.attention.sinks && self.attention.sink_gradient;
        let dsinks = if sinks_learn { dsinks } else { vec![0.0; heads] };
        let device = q.device();
        Ok([
            Tensor::from_vec(dq, q.shape(), device)?,
            Tensor::from_vec(dkv, kv.shape(), device)?,
            Tensor::from_vec(dsinks, heads, device)?,
        ])
    }
}
