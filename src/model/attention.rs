//! Attention in a forward pass: over packed sequences, or of new tokens over cached sequences.

use super::cache::SequenceCache;
use crate::ops::{self, SequenceRows, sink_attention::Attention};
use anyhow::Result;
use candle_core::Tensor;
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
