//! The routine that training, prefill and decode share.

use super::Attention;
use super::rows::Rows;
use crate::ops::kv_cache::{BLOCK, KvSequence};
use crate::ops::math::{LANES, exp, max_lanes, sum_lanes};
use multiversion::multiversion;

/// Scores of one query against one block, masked to −∞ outside `low..high` (places in the block).
#[inline(always)]
pub(super) fn block_scores(q: &[f32], keys: &[f32], scale: f32, low: usize, high: usize) -> [f32; BLOCK] {
    let mut scores = [0f32; BLOCK];
    // A vector's width at a time, so that sums stay in a register.
    for (part, scores) in scores.chunks_exact_mut(LANES).enumerate() {
        let mut sums = [0f32; LANES];
        for (&x, row) in q.iter().zip(keys.chunks_exact(BLOCK)) {
            let row = &row[part * LANES..(part + 1) * LANES];
            for j in 0..LANES {
                sums[j] = x.mul_add(row[j], sums[j]);
            }
        }
        scores.copy_from_slice(&sums);
    }
    for (j, s) in scores.iter_mut().enumerate() {
        *s = if j >= low && j < high { *s * scale } else { f32::NEG_INFINITY };
    }
    scores
}

/// `o ← o · shrink + Σ_j p_j v_j`, in the order of the keys.
#[inline(always)]
pub(super) fn add_values(o: &mut [f32], p: &[f32], values: &[f32], shrink: f32) {
    let d = o.len();
    let mut start = 0;
    // A vector's width at a time, so that sums stay in a register.
    while start + LANES <= d {
        let mut sums = [0f32; LANES];
        sums.copy_from_slice(&o[start..start + LANES]);
        for x in &mut sums {
            *x *= shrink;
        }
        for (&p, value) in p.iter().zip(values.chunks_exact(d)) {
            let value = &value[start..start + LANES];
            for c in 0..LANES {
                sums[c] = p.mul_add(value[c], sums[c]);
            }
        }
        o[start..start + LANES].copy_from_slice(&sums);
        start += LANES;
    }
    for (c, x) in o.iter_mut().enumerate().skip(start) {
        let shrunk = *x * shrink;
        *x = p.iter().zip(values.chunks_exact(d)).fold(shrunk, |sum, (&p, value)| p.mul_add(value[c], sum));
    }
}

/// The places of block `b` that the query at `position` sees.
#[inline(always)]
pub(super) fn visible(attention: &Attention, position: usize, b: usize) -> (usize, usize) {
    let low = attention.first_key(position).saturating_sub(b * BLOCK);
    (low, (position + 1 - b * BLOCK).min(BLOCK))
}

/// Output and log-sum-exp of the queries of one key-value head's group, for rows at positions `first..`.
///
/// `q` and `out` are `[rows][N][D]`, `lse` is `[rows][N]`.
#[allow(clippy::too_many_arguments)]
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn attend(
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
                let of_block = max_lanes(&p);
                let highest = if of_block > maximum { of_block } else { maximum };
                for x in &mut p {
                    *x = exp(*x - highest);
                }
                let shrink = exp(maximum - highest);
                maximum = highest;
                total = total * shrink + sum_lanes(BLOCK, |j| p[j]);
                let block_values = &block.values[kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK];
                add_values(o, &p[low..high], &block_values[low * d..high * d], shrink);
            }
            for x in o.iter_mut() {
                *x /= total;
            }
            lse.at(place, 1)[0] = maximum + total.ln();
        }
    }
}
