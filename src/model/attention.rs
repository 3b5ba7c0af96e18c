//! Attention in a forward pass: over packed sequences, or of new tokens over cached sequences.

use super::cache::SequenceCache;
use crate::ops::cuda::PagedPass;
use crate::ops::{self, SequenceRows, sink_attention::Attention};
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The attention of a forward pass. Implementations differ in where they store keys and values.
pub trait AttentionMode {
    /// Returns the attention output `[T, N·D]` of layer `layer` for queries `q [T, N, D]`, keys and values
    /// `kv [T, 2, M, D]`, and `sinks [N]`.
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor>;
}

/// Differentiable attention over whole packed sequences, for training and for every forward pass without a
/// cache.
pub struct PackedAttention {
    pub sequence_rows: Arc<SequenceRows>,
}

impl AttentionMode for PackedAttention {
    fn attend(
        &mut self,
        _: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor> {
        Ok(ops::sink_attention(q, kv, sinks, &self.sequence_rows, attention)?)
    }
}

/// Attention of new tokens over cached sequences, for prefill and decode.
pub struct CachedAttention<'a, 'b> {
    caches: &'a mut [&'b mut SequenceCache],
    /// Number of new tokens of each sequence.
    counts: &'a [usize],
    /// On a GPU: the passes over the pools of the caches that have begun, by pool.
    passes: HashMap<usize, PagedPass>,
}

impl<'a, 'b> CachedAttention<'a, 'b> {
    /// Returns the attention of `counts[i]` new tokens after those of `caches[i]`.
    pub fn new(caches: &'a mut [&'b mut SequenceCache], counts: &'a [usize]) -> Self {
        Self { caches, counts, passes: HashMap::new() }
    }

    /// Returns the pass over a pool of the caches, in which all layers have the same `attention`.
    fn pass(&mut self, pool: usize, attention: &Attention) -> Result<&PagedPass> {
        Ok(match self.passes.entry(pool) {
            Entry::Occupied(begun) => begun.into_mut(),
            Entry::Vacant(new) => {
                let pages = self.caches.iter_mut().map(|cache| cache.pages(pool).context(ELSEWHERE));
                new.insert(PagedPass::new(&mut pages.collect::<Result<Vec<_>>>()?, self.counts, attention)?)
            }
        })
    }
}

const ELSEWHERE: &str = "the caches of a pass are on different devices";

impl AttentionMode for CachedAttention<'_, '_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor> {
        if let Some((pool, index)) = self.caches.first().and_then(|cache| cache.place(layer)) {
            return Ok(self.pass(pool, &attention)?.attend(index, q, kv, sinks)?);
        }
        let layers = self.caches.iter_mut().map(|cache| cache.blocks(layer).context(ELSEWHERE));
        let mut layers = layers.collect::<Result<Vec<_>>>()?;
        let out = ops::cached_sink_attention(q, kv, sinks, &mut layers, self.counts, attention)?;
        if let Some(window) = attention.window {
            layers.iter_mut().for_each(|cache| cache.forget_before(cache.len(), window));
        }
        Ok(out)
    }
}
