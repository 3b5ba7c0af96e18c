//! The routine that training, prefill and decode share.

use super::Attention;
use super::chunks::{Softmax, blocks, chunks};
use super::rows::Rows;
use crate::ops::cpu::buffer;
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

/// One query, and where its keys are.
#[derive(Clone, Copy)]
struct Query<'a> {
    attention: &'a Attention,
    cache: &'a KvSequence,
    kv_head: usize,
    position: usize,
    q: &'a [f32],
    sink: f32,
}

impl Query<'_> {
    /// Walks the keys of one chunk in ascending order; `o` becomes its `O`.
    #[inline(always)]
    fn walk(&self, chunk: usize, o: &mut [f32]) -> Softmax {
        let Self { attention, cache, kv_head, position, q, sink } = *self;
        let d = attention.head_dim;
        let part = kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK;
        let scale = attention.scale();
        let Softmax { mut maximum, mut total } = Softmax::new(sink);
        o.fill(0.0);
        let blocks = blocks(attention, position, chunk);
        let first = *blocks.start();
        for b in blocks {
            let block = cache.block(b);
            let (low, high) = visible(attention, position, b);
            let mut p = block_scores(q, &block.keys[part.clone()], scale, low, high);
            let of_block = max_lanes(&p);
            let highest = if of_block > maximum { of_block } else { maximum };
            for x in &mut p {
                *x = exp(*x - highest);
            }
            // Before the first block there are only zeros to shrink.
            let shrink = if b == first { 0.0 } else { exp(maximum - highest) };
            maximum = highest;
            total = total * shrink + sum_lanes(BLOCK, |j| p[j]);
            add_values(o, &p[low..high], &block.values[part.clone()][low * d..high * d], shrink);
        }
        Softmax { maximum, total }
    }
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
    let mut chunk_o = vec![];
    for row in 0..q.len() / (heads * d) {
        let position = first + row;
        for head in kv_head * group..(kv_head + 1) * group {
            let place = row * heads + head;
            let sink = attention.sink(sinks, head);
            let q = &q[place * d..(place + 1) * d];
            let query = Query { attention, cache, kv_head, position, q, sink };
            let o = out.at(place * d, d);
            let mut chunks = chunks(attention, position);
            // The first is taken as it is: to merge it into nothing would change nothing.
            let mut softmax = chunks.next().map_or(Softmax::new(sink), |chunk| query.walk(chunk, o));
            for chunk in chunks {
                chunk_o.resize(d, 0.0);
                let of_chunk = query.walk(chunk, &mut chunk_o);
                softmax.merge(o, of_chunk, &chunk_o);
            }
            lse.at(place, 1)[0] = softmax.finish(o, sink);
        }
    }
}

/// What [`attend_chunk`] gives: a softmax and `O` `[D]` a head of the group.
pub(super) struct ChunkState {
    softmaxes: Vec<Softmax>,
    o: Vec<f32>,
}

/// One chunk of what [`attend`] walks for a single row, to be merged by [`merge_chunks`].
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn attend_chunk(
    attention: &Attention,
    kv_head: usize,
    cache: &KvSequence,
    position: usize,
    q: &[f32],
    sinks: &[f32],
    chunk: usize,
) -> ChunkState {
    let Attention { heads, kv_heads, head_dim: d, .. } = *attention;
    let group = heads / kv_heads;
    let mut o = buffer(group * d);
    let softmaxes = (0..group).zip(o.chunks_exact_mut(d)).map(|(g, o)| {
        let head = kv_head * group + g;
        let sink = attention.sink(sinks, head);
        let q = &q[head * d..(head + 1) * d];
        Query { attention, cache, kv_head, position, q, sink }.walk(chunk, o)
    });
    let softmaxes = softmaxes.collect();
    ChunkState { softmaxes, o }
}

/// Output and log-sum-exp of a single row for one key-value head's group, from the chunks that it sees, in order.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn merge_chunks(
    attention: &Attention,
    kv_head: usize,
    chunks: &[ChunkState],
    sinks: &[f32],
    out: &Rows,
    lse: &Rows,
) {
    let Attention { heads, kv_heads, head_dim: d, .. } = *attention;
    let group = heads / kv_heads;
    for g in 0..group {
        let head = kv_head * group + g;
        let sink = attention.sink(sinks, head);
        let o = out.at(head * d, d);
        let mut states = chunks.iter().map(|c| (c.softmaxes[g], &c.o[g * d..(g + 1) * d]));
        let mut softmax = states.next().map_or(Softmax::new(sink), |(softmax, first_o)| {
            o.copy_from_slice(first_o);
            softmax
        });
        for (of_chunk, chunk_o) in states {
            softmax.merge(o, of_chunk, chunk_o);
        }
        lse.at(head, 1)[0] = softmax.finish(o, sink);
    }
}
