//! Attention of new tokens over cached sequences, on several threads if the work is large.

use super::Attention;
use super::chunks::chunks;
use super::forward::{ChunkState, attend, attend_chunk, merge_chunks};
use super::rows::Rows;
use crate::ops::buffer::buffer;
use crate::ops::cpu::{host_values, should_parallelize};
use crate::ops::kv_cache::KvBlocks;
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

/// Number of rows per task.
const TILE: usize = 32;

/// Computes attention of new tokens over cached sequences in host memory, and appends the keys and values of
/// these tokens to the caches. `counts[i]` rows of `q` and `kv` belong to `caches[i]`. Not differentiable.
/// Returns `[T, N·D]`.
///
/// # Errors
/// When shapes disagree with `attention` or `counts`, or a tensor is not in host memory.
pub fn cached_sink_attention(
    q: &Tensor,
    kv: &Tensor,
    sinks: &Tensor,
    caches: &mut [&mut KvBlocks],
    counts: &[usize],
    attention: Attention,
) -> Result<Tensor> {
    let tokens = q.dim(0)?;
    let Attention { heads, kv_heads, head_dim, .. } = attention;
    if kv.dims() != [tokens, 2, kv_heads, head_dim]
        || counts.iter().sum::<usize>() != tokens
        || counts.len() != caches.len()
    {
        bail!("cached_sink_attention: q {:?}, kv {:?}, counts {counts:?}", q.dims(), kv.dims());
    }
    let (width, kv_width) = (heads * head_dim, 2 * kv_heads * head_dim);
    let mut out = buffer(tokens * width);
    let mut lse = buffer(tokens * heads);
    let (q_values, kv_values, sinks) = (host_values(q)?, host_values(kv)?, host_values(sinks)?);
    let (out_rows, lse_rows) = (Rows::new(&mut out), Rows::new(&mut lse));
    let mut sequences = Vec::with_capacity(counts.len());
    let (mut start, mut work) = (0, 0);
    for (cache, &count) in caches.iter_mut().zip(counts) {
        let first = cache.len();
        cache.append(&kv_values[start * kv_width..(start + count) * kv_width]);
        sequences.push(NewRows {
            attention,
            cache,
            first,
            q: &q_values[start * width..(start + count) * width],
            sinks: &sinks,
            out: out_rows.slice(start * width, count * width),
            lse: lse_rows.slice(start * heads, count * heads),
        });
        start += count;
        work += count * attention.window.unwrap_or(cache.len()).min(cache.len()) * width;
    }
    if should_parallelize(work) {
        let heads: Vec<_> = sequences.iter().flat_map(|rows| (0..kv_heads).map(move |h| (rows, h))).collect();
        heads.into_par_iter().with_max_len(1).for_each(|(rows, kv_head)| rows.attend_in_parallel(kv_head));
    } else {
        for rows in &sequences {
            (0..kv_heads).for_each(|kv_head| rows.attend(kv_head, 0, rows.count()));
        }
    }
    Tensor::from_vec(out, (tokens, width), q.device())
}

/// The new rows of one sequence.
struct NewRows<'a> {
    attention: Attention,
    cache: &'a KvBlocks,
    /// The position of the first new row.
    first: usize,
    q: &'a [f32],
    sinks: &'a [f32],
    out: Rows<'a>,
    lse: Rows<'a>,
}

impl NewRows<'_> {
    fn count(&self) -> usize {
        self.q.len() / (self.attention.heads * self.attention.head_dim)
    }

    /// Computes rows `start..start + count` for the query heads of one key-value head.
    fn attend(&self, kv_head: usize, start: usize, count: usize) {
        let Attention { heads, head_dim, .. } = self.attention;
        let width = heads * head_dim;
        attend(
            &self.attention,
            kv_head,
            self.cache,
            self.first + start,
            &self.q[start * width..(start + count) * width],
            self.sinks,
            &self.out.slice(start * width, count * width),
            &self.lse.slice(start * heads, count * heads),
        );
    }

    /// Computes all rows for the query heads of one key-value head. If there are several rows, tasks are
    /// ranges of rows. If there is a single row, tasks are chunks of its keys.
    fn attend_in_parallel(&self, kv_head: usize) {
        let Self { attention, cache, first, q, sinks, out, lse } = self;
        let count = self.count();
        let chunks = chunks(attention, *first);
        if count != 1 || chunks.start() == chunks.end() {
            let tiles = (0..count).into_par_iter().step_by(TILE);
            tiles.for_each(|start| self.attend(kv_head, start, TILE.min(count - start)));
        } else {
            let walk = |chunk| attend_chunk(attention, kv_head, cache, *first, q, sinks, chunk);
            let states: Vec<ChunkState> = chunks.into_par_iter().map(walk).collect();
            merge_chunks(attention, kv_head, &states, sinks, out, lse);
        }
    }
}
