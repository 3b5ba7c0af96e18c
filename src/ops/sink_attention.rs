//! Causal attention with a learnable sink a query head, optional sliding window, grouped key-value heads.
//!
//! With scores `S_ij = q_i · k_j / √D` for the keys that query `i` sees, and the head's sink `s`:
//!
//! ```text
//! LSE_i = log(Σ_j e^{S_ij} + e^s)      P_ij = e^{S_ij − LSE_i}      O_i = Σ_j P_ij v_j      D_i = dO_i · O_i
//! dS_ij = P_ij (dO_i · v_j − D_i)      dv_j = Σ_i P_ij dO_i         ds  = −Σ_i e^{s − LSE_i} D_i
//! ```
//!
//! The softmax is online over key blocks at absolute positions and starts at the sink, so its maximum is always
//! finite and a masked key adds exactly 0. Training, prefill and decode run [`attend`] on the same blocks:
//! that is why their rows are equal to the last bit.

use super::cpu::{buffer, host_values, in_parallel, values};
use super::kv_cache::{BLOCK, KvSequence};
use super::math::{exp, sum_lanes};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

/// Stands for "no sink": finite, and its exponential is exactly 0 beside any real score.
pub const NO_SINK: f32 = -1e9;

/// Sizes and options of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// `N`, a multiple of `kv_heads`.
    pub heads: usize,
    /// `M`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Keys a query sees, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// False leaves the sink out of the softmax (an arm: training without sinks).
    pub sinks: bool,
    /// False computes with sinks but gives them no gradient (an arm).
    pub sink_gradient: bool,
}

impl Attention {
    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// First key position that the query at `position` sees.
    fn first_key(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    fn sink(&self, sinks: &[f32], head: usize) -> f32 {
        if self.sinks { sinks[head] } else { NO_SINK }
    }
}

/// Attention of packed sequences: `q [T, N, D]`, `kv [T, 2, M, D]`, `sinks [N]` → `[T, N·D]`, differentiable in all three.
///
/// `cu_seqlens` holds the start of each sequence and `T` at the end; positions count from each start.
///
/// # Errors
/// When shapes disagree with `attention` or `cu_seqlens`.
pub fn sink_attention(
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    cu_seqlens: &Arc<Vec<usize>>,
    attention: Attention,
) -> Result<Tensor> {
    let tokens = q.dim(0)?;
    let Attention { heads, kv_heads, head_dim, .. } = attention;
    if q.dims() != [tokens, heads, head_dim]
        || kv.dims() != [tokens, 2, kv_heads, head_dim]
        || sinks.dims() != [heads]
        || kv_heads == 0
        || heads % kv_heads != 0
        || cu_seqlens.last() != Some(&tokens)
    {
        bail!(
            "sink_attention: q {:?}, kv {:?}, sinks {:?}, sequences end at {:?} do not fit {attention:?}",
            q.dims(),
            kv.dims(),
            sinks.dims(),
            cu_seqlens.last()
        );
    }
    let op = Packed { attention, cu_seqlens: cu_seqlens.clone(), lse: OnceLock::new() };
    q.contiguous()?.apply_op3(&kv.contiguous()?, &sinks.contiguous()?, op)
}

/// The same attention for new tokens of cached sequences: `counts[i]` rows of `q` and `kv` belong to `caches[i]`,
/// whose keys they extend. Not differentiable. Returns `[T, N·D]`.
///
/// # Errors
/// When shapes disagree with `attention` or `counts`.
pub fn sink_attention_cached(
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    caches: &mut [&mut KvSequence],
    counts: &[usize],
    attention: Attention,
) -> Result<Tensor> {
    let tokens = q.dim(0)?;
    let Attention { heads, kv_heads, head_dim, .. } = attention;
    if kv.dims() != [tokens, 2, kv_heads, head_dim]
        || counts.iter().sum::<usize>() != tokens
        || counts.len() != caches.len()
    {
        bail!("sink_attention_cached: q {:?}, kv {:?}, counts {counts:?}", q.dims(), kv.dims());
    }
    let (width, kv_width) = (heads * head_dim, 2 * kv_heads * head_dim);
    let mut out = buffer(tokens * width);
    let mut lse = buffer(tokens * heads);
    let (q_values, kv_values, sinks) = (host_values(q)?, host_values(kv)?, host_values(sinks)?);
    let mut start = 0;
    for (cache, &count) in caches.iter_mut().zip(counts) {
        let end = start + count;
        let first = cache.len();
        cache.append(&kv_values[start * kv_width..end * kv_width]);
        let out = Rows::new(&mut out[start * width..end * width]);
        let lse = Rows::new(&mut lse[start * heads..end * heads]);
        let q_rows = &q_values[start * width..end * width];
        for kv_head in 0..kv_heads {
            attend(&attention, kv_head, cache, first, q_rows, &sinks, &out, &lse);
        }
        start = end;
    }
    Tensor::from_vec(out, (tokens, width), q.device())
}

/// A buffer that tasks of different key-value heads write at disjoint places.
struct Rows<'a> {
    start: *mut f32,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: tasks write only the columns of their own heads, which no other task touches.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    fn new(values: &'a mut [f32]) -> Self {
        Self { start: values.as_mut_ptr(), len: values.len(), lifetime: std::marker::PhantomData }
    }

    /// The stretch `offset..offset + len`, without claiming it.
    fn part(&self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len, "attention output out of bounds");
        // SAFETY: in bounds by the assertion.
        Self { start: unsafe { self.start.add(offset) }, len, lifetime: self.lifetime }
    }

    /// The `width` values from `offset`.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    fn at(&self, offset: usize, width: usize) -> &mut [f32] {
        assert!(offset + width <= self.len, "attention output out of bounds");
        // SAFETY: in bounds by the assertion; disjoint between tasks as said on the type.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), width) }
    }
}

/// Scores of one query against one block, masked to −∞ outside `low..high` (places in the block).
#[inline(always)]
fn block_scores(q: &[f32], keys: &[f32], scale: f32, low: usize, high: usize) -> [f32; BLOCK] {
    let mut scores = [0f32; BLOCK];
    for (c, &x) in q.iter().enumerate() {
        let row: &[f32; BLOCK] = keys[c * BLOCK..(c + 1) * BLOCK].try_into().unwrap_or(&[0.0; BLOCK]);
        for j in 0..BLOCK {
            scores[j] = x.mul_add(row[j], scores[j]);
        }
    }
    for (j, s) in scores.iter_mut().enumerate() {
        *s = if j >= low && j < high { *s * scale } else { f32::NEG_INFINITY };
    }
    scores
}

/// The places of block `b` that the query at `position` sees.
#[inline(always)]
fn visible(attention: &Attention, position: usize, b: usize) -> (usize, usize) {
    let low = attention.first_key(position).saturating_sub(b * BLOCK);
    (low, (position + 1 - b * BLOCK).min(BLOCK))
}

/// Output and log-sum-exp of the queries of one key-value head's group, for rows at positions `first..`.
///
/// `q` and `out` are `[rows][N][D]`, `lse` is `[rows][N]`.
#[allow(clippy::too_many_arguments)]
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn attend(
    attention: &Attention,
    kv_head: usize,
    cache: &KvSequence,
    first: usize,
    q: &[f32],
    sinks: &[f32],
    out: &Rows,
    lse: &Rows,
) {
    let Attention { heads, kv_heads, head_dim: d, .. } = *attention;
    let group = heads / kv_heads;
    let scale = attention.scale();
    for row in 0..q.len() / (heads * d) {
        let position = first + row;
        for head in kv_head * group..(kv_head + 1) * group {
            let place = row * heads + head;
            let query = &q[place * d..(place + 1) * d];
            let o = out.at(place * d, d);
            o.fill(0.0);
            let mut maximum = attention.sink(sinks, head);
            let mut total = 1f32;
            for b in attention.first_key(position) / BLOCK..=position / BLOCK {
                let block = cache.block(b);
                let (low, high) = visible(attention, position, b);
                let keys = &block.keys[kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK];
                let mut p = block_scores(query, keys, scale, low, high);
                let mut highest = maximum;
                for &s in &p {
                    highest = if s > highest { s } else { highest };
                }
                for x in &mut p {
                    *x = exp(*x - highest);
                }
                let shrink = exp(maximum - highest);
                maximum = highest;
                total = total * shrink + sum_lanes(BLOCK, |j| p[j]);
                let block_values = &block.values[kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK];
                for x in o.iter_mut() {
                    *x *= shrink;
                }
                for j in low..high {
                    let value = &block_values[j * d..(j + 1) * d];
                    for (x, &v) in o.iter_mut().zip(value) {
                        *x = p[j].mul_add(v, *x);
                    }
                }
            }
            for x in o.iter_mut() {
                *x /= total;
            }
            lse.at(place, 1)[0] = maximum + total.ln();
        }
    }
}

/// What [`attend_backward`] reads: one sequence's rows.
struct Upstream<'a> {
    q: &'a [f32],
    out: &'a [f32],
    lse: &'a [f32],
    grad: &'a [f32],
    sinks: &'a [f32],
}

/// Gradients of one key-value head's group in one sequence: writes `dq` `[rows][N][D]` and `dkv` `[rows][2][M][D]`
/// at this group's places, returns the sinks' gradient `[group]`. Queries are added in ascending order.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn attend_backward(
    attention: &Attention,
    kv_head: usize,
    cache: &KvSequence,
    up: &Upstream,
    dq: &Rows,
    dkv: &Rows,
) -> Vec<f32> {
    let Attention { heads, kv_heads, head_dim: d, .. } = *attention;
    let group = heads / kv_heads;
    let scale = attention.scale();
    let blocks = cache.len().div_ceil(BLOCK);
    // Keys and values the other way round, and their gradients in the layout that adds fastest.
    let (mut keys, mut values_t) = (buffer(blocks * BLOCK * d), buffer(blocks * BLOCK * d));
    for b in 0..blocks {
        let (kt, v) =
            (&cache.block(b).keys[kv_head * d * BLOCK..], &cache.block(b).values[kv_head * d * BLOCK..]);
        for j in 0..BLOCK {
            for c in 0..d {
                keys[(b * BLOCK + j) * d + c] = kt[c * BLOCK + j];
                values_t[(b * d + c) * BLOCK + j] = v[j * d + c];
            }
        }
    }
    let mut dk = buffer(blocks * BLOCK * d);
    let mut dv = buffer(blocks * BLOCK * d);
    let mut dsinks = vec![0f32; group];
    for position in 0..cache.len() {
        for head in kv_head * group..(kv_head + 1) * group {
            let place = position * heads + head;
            let range = place * d..(place + 1) * d;
            let (query, grad) = (&up.q[range.clone()], &up.grad[range.clone()]);
            let output = &up.out[range.clone()];
            let lse = up.lse[place];
            let delta = sum_lanes(d, |c| grad[c] * output[c]);
            dsinks[head - kv_head * group] -= exp(attention.sink(up.sinks, head) - lse) * delta;
            let dq_row = dq.at(place * d, d);
            for b in attention.first_key(position) / BLOCK..=position / BLOCK {
                let (low, high) = visible(attention, position, b);
                let kt = &cache.block(b).keys[kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK];
                let mut p = block_scores(query, kt, scale, low, high);
                for x in &mut p {
                    *x = exp(*x - lse);
                }
                let dp = block_scores(grad, &values_t[b * d * BLOCK..(b + 1) * d * BLOCK], 1.0, 0, BLOCK);
                let mut ds = [0f32; BLOCK];
                for j in 0..BLOCK {
                    ds[j] = p[j] * (dp[j] - delta) * scale;
                }
                for j in low..high {
                    let at = (b * BLOCK + j) * d;
                    for c in 0..d {
                        dq_row[c] = ds[j].mul_add(keys[at + c], dq_row[c]);
                        dk[at + c] = ds[j].mul_add(query[c], dk[at + c]);
                        dv[at + c] = p[j].mul_add(grad[c], dv[at + c]);
                    }
                }
            }
        }
    }
    for position in 0..cache.len() {
        let row = position * 2 * kv_heads * d;
        let at = position * d..(position + 1) * d;
        dkv.at(row + kv_head * d, d).copy_from_slice(&dk[at.clone()]);
        dkv.at(row + (kv_heads + kv_head) * d, d).copy_from_slice(&dv[at]);
    }
    dsinks
}

struct Packed {
    attention: Attention,
    cu_seqlens: Arc<Vec<usize>>,
    /// `[T][N]`, kept by the forward for the backward.
    lse: OnceLock<Vec<f32>>,
}

impl Packed {
    /// Every (sequence, key-value head), the unit of work of both passes.
    fn tasks(&self) -> Vec<(usize, usize)> {
        let sequences = self.cu_seqlens.len().saturating_sub(1);
        (0..sequences).flat_map(|s| (0..self.attention.kv_heads).map(move |h| (s, h))).collect()
    }

    /// Runs `f` on every task, over the thread pool when the work is worth it; results in task order.
    fn run<R: Send>(&self, f: impl Fn(usize, usize) -> R + Sync + Send) -> Vec<R> {
        let longest = self.cu_seqlens.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        let seen = self.attention.window.unwrap_or(longest).min(longest);
        let tokens = self.cu_seqlens.last().copied().unwrap_or(0);
        let tasks = self.tasks();
        if in_parallel(tokens * seen * self.attention.heads * self.attention.head_dim) {
            tasks.into_par_iter().map(|(s, h)| f(s, h)).collect()
        } else {
            tasks.into_iter().map(|(s, h)| f(s, h)).collect()
        }
    }

    fn caches(&self, kv: &[f32]) -> Vec<KvSequence> {
        let Attention { kv_heads, head_dim, .. } = self.attention;
        let width = 2 * kv_heads * head_dim;
        self.cu_seqlens
            .windows(2)
            .map(|w| {
                let mut cache = KvSequence::new(kv_heads, head_dim);
                cache.append(&kv[w[0] * width..w[1] * width]);
                cache
            })
            .collect()
    }
}

impl CustomOp3 for Packed {
    fn name(&self) -> &'static str {
        "sink_attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        kv: &CpuStorage,
        kv_layout: &Layout,
        sinks: &CpuStorage,
        sinks_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (q, kv, sinks) = (values(q, q_layout)?, values(kv, kv_layout)?, values(sinks, sinks_layout)?);
        let Attention { heads, head_dim: d, .. } = self.attention;
        let caches = self.caches(kv);
        let mut out = buffer(q.len());
        let mut lse = buffer(q.len() / d);
        let (out_rows, lse_rows) = (Rows::new(&mut out), Rows::new(&mut lse));
        self.run(|s, kv_head| {
            let (start, end) = (self.cu_seqlens[s], self.cu_seqlens[s + 1]);
            let (rows, width) = (end - start, heads * d);
            let out = out_rows.part(start * width, rows * width);
            let lse = lse_rows.part(start * heads, rows * heads);
            attend(
                &self.attention,
                kv_head,
                &caches[s],
                0,
                &q[start * width..end * width],
                sinks,
                &out,
                &lse,
            );
        });
        let tokens = q.len() / (heads * d);
        let _ = self.lse.set(lse);
        Ok((CpuStorage::F32(out), Shape::from((tokens, heads * d))))
    }

    fn bwd(
        &self,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Attention { heads, kv_heads, head_dim: d, .. } = self.attention;
        let Some(lse) = self.lse.get() else { bail!("sink_attention: backward before forward") };
        let group = heads / kv_heads;
        let mut dq = buffer(q.elem_count());
        let mut dkv = buffer(kv.elem_count());
        let grad = grad.contiguous()?;
        let (q_values, kv_values, sinks) = (host_values(q)?, host_values(kv)?, host_values(sinks)?);
        let (out, grad) = (host_values(out)?, host_values(&grad)?);
        let caches = self.caches(&kv_values);
        let (dq_rows, dkv_rows) = (Rows::new(&mut dq), Rows::new(&mut dkv));
        let parts = self.run(|s, kv_head| {
            let (start, end) = (self.cu_seqlens[s], self.cu_seqlens[s + 1]);
            let (rows, width, kv_width) = (end - start, heads * d, 2 * kv_heads * d);
            let up = Upstream {
                q: &q_values[start * width..end * width],
                out: &out[start * width..end * width],
                lse: &lse[start * heads..end * heads],
                grad: &grad[start * width..end * width],
                sinks: &sinks,
            };
            let dq = dq_rows.part(start * width, rows * width);
            let dkv = dkv_rows.part(start * kv_width, rows * kv_width);
            attend_backward(&self.attention, kv_head, &caches[s], &up, &dq, &dkv)
        });
        let mut dsinks = vec![0f32; heads];
        for ((_, kv_head), part) in self.tasks().into_iter().zip(parts) {
            for (g, x) in part.into_iter().enumerate() {
                dsinks[kv_head * group + g] += x;
            }
        }
        let sinks_learn = self.attention.sinks && self.attention.sink_gradient;
        let dsinks = if sinks_learn { dsinks } else { vec![0.0; heads] };
        let device = q.device();
        Ok((
            Some(Tensor::from_vec(dq, q.shape(), device)?),
            Some(Tensor::from_vec(dkv, kv.shape(), device)?),
            Some(Tensor::from_vec(dsinks, heads, device)?),
        ))
    }
}
