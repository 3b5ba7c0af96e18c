//! Attention in a forward pass: over packed sequences, or of new tokens over cached sequences.

use super::cache::SequenceCache;
use crate::ops::cuda::PagedPass;
use crate::ops::{self, SequenceRows, rope::Rotation, sink_attention::Attention};
use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The attention of a forward pass. Implementations differ in where they store keys and values.
pub trait AttentionMode {
    /// Returns the attention output `[T, N·D]` of layer `layer`.
    fn attend(&mut self, layer: usize, inputs: AttentionInputs) -> Result<Tensor>;
}

/// The inputs of attention in one layer.
pub struct AttentionInputs<'a> {
    /// Queries `[T, N·D]`, keys `[T, M·D]` and values `[T, M·D]`, before the rotation.
    pub qkv: [&'a Tensor; 3],
    pub rotation: &'a Rotation,
    /// `[N]`; `None` in a family without sinks.
    pub sinks: Option<Tensor>,
    pub attention: Attention,
}

impl AttentionInputs<'_> {
    /// Returns rotated queries `[T, N, D]`, and rotated keys with values `[T, 2, M, D]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn rotate(&self) -> Result<[Tensor; 2]> {
        let ([q, k, v], Attention { heads, kv_heads, .. }) = (self.qkv, self.attention);
        let q = ops::rope(q, heads, self.rotation)?;
        Ok([q, ops::rope_keys_with_values(k, v, kv_heads, self.rotation)?])
    }

    /// Returns the sinks. They are zeros in a family without sinks, and ops ignore them.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn sinks_or_zeros(&self) -> Result<Tensor> {
        Ok(match &self.sinks {
            Some(sinks) => sinks.clone(),
            None => Tensor::zeros(self.attention.heads, DType::F32, self.qkv[0].device())?,
        })
    }
}

/// Differentiable attention over whole packed sequences, for training and for every forward pass without a
/// cache.
pub struct PackedAttention {
    pub sequence_rows: Arc<SequenceRows>,
}

impl AttentionMode for PackedAttention {
    fn attend(&mut self, _: usize, inputs: AttentionInputs) -> Result<Tensor> {
        let ([q, kv], sinks) = (inputs.rotate()?, inputs.sinks_or_zeros()?);
        Ok(ops::sink_attention(&q, &kv, &sinks, &self.sequence_rows, inputs.attention)?)
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
    fn attend(&mut self, layer: usize, inputs: AttentionInputs) -> Result<Tensor> {
        let ([q, kv], sinks, attention) = (inputs.rotate()?, inputs.sinks_or_zeros()?, inputs.attention);
        if let Some((pool, index)) = self.caches.first().and_then(|cache| cache.place(layer)) {
            return Ok(self.pass(pool, &attention)?.attend(index, &q, &kv, &sinks)?.0);
        }
        let layers = self.caches.iter_mut().map(|cache| cache.blocks(layer).context(ELSEWHERE));
        let mut layers = layers.collect::<Result<Vec<_>>>()?;
        let out = ops::cached_sink_attention(&q, &kv, &sinks, &mut layers, self.counts, attention)?;
        if let Some(window) = attention.window {
            layers.iter_mut().for_each(|cache| cache.forget_before(cache.len(), window));
        }
        Ok(out)
    }
}
