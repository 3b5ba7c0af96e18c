//! The KV cache of one sequence: its keys and values at every layer.

use super::config::{Config, LayerType};
use crate::ops::kv_cache::{BLOCK, KvBlocks, KvSequence};

/// One sequence's cache. Cloning shares full blocks, so the samples of a group share their prompt's.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<KvSequence>,
}

impl SequenceCache {
    /// An empty cache.
    pub fn new(config: &Config) -> Self {
        let layer = KvSequence::Host(KvBlocks::new(config.num_key_value_heads, config.head_dim));
        Self { layers: vec![layer; config.num_hidden_layers] }
    }

    /// An empty cache in a GPU's pages, of which each layer has a pool.
    #[cfg(feature = "cuda")]
    pub fn on_device(pools: &[std::sync::Arc<crate::ops::cuda::KvPool>]) -> Self {
        Self { layers: pools.iter().map(|pool| KvSequence::Device(pool.sequence())).collect() }
    }

    /// What the cache of a sequence of `tokens` tokens takes, bytes; sliding layers forget what no query sees.
    pub fn bytes(config: &Config, tokens: usize) -> u64 {
        let position = 2 * config.num_key_value_heads * config.head_dim * size_of::<f32>();
        let held = |layer: &LayerType| match layer {
            // The window lies over up to two blocks more than it fills.
            LayerType::Sliding => tokens.min(config.sliding_window + 2 * BLOCK),
            LayerType::Full => tokens,
        };
        let positions = config.layer_types.iter().map(|layer| held(layer).next_multiple_of(BLOCK) as u64);
        positions.sum::<u64>() * position as u64
    }

    /// Positions held (by every layer, between forwards).
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvSequence::len)
    }

    /// The keys and values of layer `index`.
    pub fn layer(&mut self, index: usize) -> &mut KvSequence {
        &mut self.layers[index]
    }
}
