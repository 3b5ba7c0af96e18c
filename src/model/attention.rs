//! Attention over packed sequences, and of new tokens over cached sequences.

use super::cache::SequenceCache;
use crate::ops::{self, SequenceRows, sink_attention::Attention};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Attention as a forward pass computes it. Implementations differ in where the keys are.
pub trait AttentionMode {
    /// `q [T, N, D]`, `kv [T, 2, M, D]`, `sinks [N]` → `[T, N·D]`.
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor>;
}

/// Attention over whole packed sequences: for training, and for any forward pass without a cache.
/// Differentiable.
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

/// Attention of new tokens over cached sequences: prefill and decode.
pub struct CachedAttention<'a, 'b> {
    pub caches: &'a mut [&'b mut SequenceCache],
    /// Number of new tokens of each sequence.
    pub counts: &'a [usize],
}

impl AttentionMode for CachedAttention<'_, '_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor> {
        let mut layers: Vec<_> = self.caches.iter_mut().map(|cache| cache.layer(layer)).collect();
        let out = ops::cached_sink_attention(q, kv, sinks, &mut layers, self.counts, attention)?;
        if let Some(window) = attention.window {
            layers.iter_mut().for_each(|cache| cache.forget_before(cache.len(), window));
        }
        Ok(out)
    }
}
