//! The forward pass of attention, which training, prefill and decode share.

use super::Attention;
use super::chunks::{Softmax, blocks, chunks};
use super::rows::Rows;
use crate::ops::buffer::buffer;
use crate::ops::kv_cache::{BLOCK, KvBlocks};
use crate::ops::math::{LANES, exp, max_lanes, sum_lanes};
use multiversion::multiversion;

/// Returns the scores of `G` queries for one block of keys. For each query, scores outside `low..high`
/// (indices in the block) are −∞.
#[inline(always)]
pub(super) fn block_scores<const G: usize>(
    queries: [&[f32]; G],
    keys: &[f32],
    scale: f32,
    seen: [(usize, usize); G],
) -> [[f32; BLOCK]; G] {
    let mut scores = query_key_products(queries, keys, seen.map(|(_, high)| high));
    for (scores, (low, high)) in scores.iter_mut().zip(seen) {
        for (j, s) in scores.iter_mut().enumerate() {
            *s = if j >= low && j < high { *s * scale } else { f32::NEG_INFINITY };
        }
    }
    scores
}

/// Returns the products of `G` queries with the keys of a block, `[D][BLOCK]`. All keys before `high` are
/// multiplied. Products of other keys may be 0.
///
/// `G` queries together read each key once, and their chains of additions overlap. In a single chain, each
/// addition would wait for the previous addition.
#[inline(always)]
pub(super) fn query_key_products<const G: usize>(
    queries: [&[f32]; G],
    keys: &[f32],
    high: [usize; G],
) -> [[f32; BLOCK]; G] {
    // Queries in the first half of the block do not see its second half.
    if high.iter().all(|&high| high <= LANES) {
        products_of_vectors::<G, 1>(queries, keys)
    } else {
        products_of_vectors::<G, 2>(queries, keys)
    }
}

/// Returns the products of [`query_key_products`] for the first `V` vectors of keys. It uses indices instead
/// of iterators, so that the compiler keeps the sums in registers.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn products_of_vectors<const G: usize, const V: usize>(
    queries: [&[f32]; G],
    keys: &[f32],
) -> [[f32; BLOCK]; G] {
    let keys = keys.as_chunks::<BLOCK>().0;
    let queries = queries.map(|query| &query[..keys.len()]);
    let mut sums = [[[0f32; LANES]; V]; G];
    for (c, row) in keys.iter().enumerate() {
        let row = row.as_chunks::<LANES>().0;
        for g in 0..G {
            let x = queries[g][c];
            for v in 0..V {
                for l in 0..LANES {
                    sums[g][v][l] = x.mul_add(row[v][l], sums[g][v][l]);
                }
            }
        }
    }
    let mut products = [[0f32; BLOCK]; G];
    for (products, sums) in products.iter_mut().zip(&sums) {
        products.as_chunks_mut().0.iter_mut().zip(sums).for_each(|(products, sums)| *products = *sums);
    }
    products
}

/// Computes `o ← o · shrink + Σ_j p_j v_j` for `G` heads, over the keys `low..high` of the block in order.
/// `o` is `[G][D]`.
#[inline(always)]
fn add_values<const G: usize>(
    o: &mut [f32],
    p: &[[f32; BLOCK]; G],
    values: &[f32],
    (low, high): (usize, usize),
    shrink: &[f32; G],
) {
    let d = o.len() / G;
    let mut start = 0;
    // Each iteration computes one vector, whose sums stay in registers. The chains of additions of the heads
    // overlap.
    while start + LANES <= d {
        let mut sums = [[0f32; LANES]; G];
        for (g, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&o[g * d + start..g * d + start + LANES]);
            sums.iter_mut().for_each(|x| *x *= shrink[g]);
        }
        for j in low..high {
            let value = &values[j * d + start..j * d + start + LANES];
            for (sums, p) in sums.iter_mut().zip(p) {
                for (sum, &value) in sums.iter_mut().zip(value) {
                    *sum = p[j].mul_add(value, *sum);
                }
            }
        }
        for (g, sums) in sums.iter().enumerate() {
            o[g * d + start..g * d + start + LANES].copy_from_slice(sums);
        }
        start += LANES;
    }
    for (g, p) in p.iter().enumerate() {
        for c in start..d {
            let x = &mut o[g * d + c];
            *x = (low..high).fold(*x * shrink[g], |sum, j| p[j].mul_add(values[j * d + c], sum));
        }
    }
}

/// Returns the range of indices in block `b` that are visible to the query at `position`.
#[inline(always)]
pub(super) fn visible_keys(attention: &Attention, position: usize, b: usize) -> (usize, usize) {
    let low = attention.first_key(position).saturating_sub(b * BLOCK);
    (low, (position + 1 - b * BLOCK).min(BLOCK))
}

/// The queries of `G` heads of one group at one position, and the keys and values of the sequence.
#[derive(Clone, Copy)]
struct Queries<'a, const G: usize> {
    attention: &'a Attention,
    cache: &'a KvBlocks,
    kv_head: usize,
    position: usize,
    /// `[G][D]`.
    q: &'a [f32],
    sinks: [f32; G],
}

impl<const G: usize> Queries<'_, G> {
    /// Processes the keys of one chunk in ascending order. Writes the sums `O` of the chunk to `o [G][D]`,
    /// and returns the softmax states.
    #[inline(always)]
    fn process_chunk(&self, chunk: usize, o: &mut [f32]) -> [Softmax; G] {
        let Self { attention, cache, kv_head, position, q, sinks } = *self;
        let d = attention.head_dim;
        let part = kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK;
        let scale = attention.scale();
        let mut softmaxes = sinks.map(Softmax::new);
        o.fill(0.0);
        let blocks = blocks(attention, position, chunk);
        let first = *blocks.start();
        for b in blocks {
            let block = cache.block(b);
            let (low, high) = visible_keys(attention, position, b);
            let (mut p, mut shrink) = ([[0f32; BLOCK]; G], [0f32; G]);
            let (keys, query) = (&block.keys[part.clone()], |g: usize| &q[g * d..(g + 1) * d]);
            let mut g = 0;
            while g + 2 <= G {
                let two = block_scores([query(g), query(g + 1)], keys, scale, [(low, high); 2]);
                p[g..g + 2].copy_from_slice(&two);
                g += 2;
            }
            if g < G {
                [p[g]] = block_scores([query(g)], keys, scale, [(low, high)]);
            }
            for (g, p) in p.iter_mut().enumerate() {
                let Softmax { maximum, total } = &mut softmaxes[g];
                let of_block = max_lanes(p);
                let highest = if of_block > *maximum { of_block } else { *maximum };
                for x in p.iter_mut() {
                    *x = exp(*x - highest);
                }
                // Before the first block `o` is all zeros, so the factor 0 changes nothing.
                shrink[g] = if b == first { 0.0 } else { exp(*maximum - highest) };
                *maximum = highest;
                *total = *total * shrink[g] + sum_lanes([&p[..]], |[p]| p);
            }
            add_values(o, &p, &block.values[part.clone()], (low, high), &shrink);
        }
        softmaxes
    }

    /// Processes all keys. Writes the output to `o` and the log-sum-exps to `lse`. `chunk_o` is scratch
    /// memory.
    #[inline(always)]
    fn attend(&self, o: &mut [f32], lse: &mut [f32], chunk_o: &mut Vec<f32>) {
        let d = self.attention.head_dim;
        let mut chunks = chunks(self.attention, self.position);
        // The first chunk is the initial state, because merging it into an empty softmax would change
        // nothing.
        let mut softmaxes = match chunks.next() {
            Some(chunk) => self.process_chunk(chunk, o),
            None => {
                o.fill(0.0);
                self.sinks.map(Softmax::new)
            }
        };
        for chunk in chunks {
            chunk_o.resize(G * d, 0.0);
            let of_chunk = self.process_chunk(chunk, chunk_o);
            for (g, softmax) in softmaxes.iter_mut().enumerate() {
                softmax.merge(&mut o[g * d..(g + 1) * d], of_chunk[g], &chunk_o[g * d..(g + 1) * d]);
            }
        }
        for (g, softmax) in softmaxes.into_iter().enumerate() {
            lse[g] = softmax.finish(&mut o[g * d..(g + 1) * d], self.sinks[g]);
        }
    }
}

/// Runs the body once per set of heads that are processed together. `G` is the number of heads of the set: 4,
/// 2 or 1. The body also gets the first head of the set.
macro_rules! each_set_of_heads {
    ($heads:expr, |$G:ident, $head:ident| $body:block) => {{
        let std::ops::Range { start: mut $head, end } = $heads;
        while $head < end {
            match end - $head {
                4.. => {
                    const $G: usize = 4;
                    $body
                    $head += $G;
                }
                2.. => {
                    const $G: usize = 2;
                    $body
                    $head += $G;
                }
                _ => {
                    const $G: usize = 1;
                    $body
                    $head += $G;
                }
            }
        }
    }};
}

/// Computes the outputs and the log-sum-exps of one group: the query heads of key-value head `kv_head`. The
/// rows are at positions from `first` on.
///
/// `q` and `out` are `[rows][N][D]`, and `lse` is `[rows][N]`.
#[allow(clippy::too_many_arguments)]
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn attend(
    attention: &Attention,
    kv_head: usize,
    cache: &KvBlocks,
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
        each_set_of_heads!(kv_head * group..(kv_head + 1) * group, |G, head| {
            let place = row * heads + head;
            let sinks: [f32; G] = std::array::from_fn(|g| attention.sink(sinks, head + g));
            let q = &q[place * d..(place + G) * d];
            let queries = Queries { attention, cache, kv_head, position, q, sinks };
            queries.attend(out.at(place * d, G * d), lse.at(place, G), &mut chunk_o);
        });
    }
}

/// The result of [`attend_chunk`]: a softmax state and a sum `O [D]` per head of the group.
pub(super) struct ChunkState {
    softmaxes: Vec<Softmax>,
    o: Vec<f32>,
}

/// Computes one chunk of [`attend`] for a single row. [`merge_chunks`] merges the chunks.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn attend_chunk(
    attention: &Attention,
    kv_head: usize,
    cache: &KvBlocks,
    position: usize,
    q: &[f32],
    sinks: &[f32],
    chunk: usize,
) -> ChunkState {
    let Attention { heads, kv_heads, head_dim: d, .. } = *attention;
    let group = heads / kv_heads;
    let mut o = buffer(group * d);
    let mut softmaxes = Vec::with_capacity(group);
    each_set_of_heads!(kv_head * group..(kv_head + 1) * group, |G, head| {
        let sinks: [f32; G] = std::array::from_fn(|g| attention.sink(sinks, head + g));
        let q = &q[head * d..(head + G) * d];
        let own = softmaxes.len() * d;
        let queries = Queries { attention, cache, kv_head, position, q, sinks };
        softmaxes.extend(queries.process_chunk(chunk, &mut o[own..own + G * d]));
    });
    ChunkState { softmaxes, o }
}

/// Merges the visible chunks of a single row, in order, for the query heads of one key-value head. Writes the
/// outputs and the log-sum-exps.
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
        o.fill(0.0);
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
