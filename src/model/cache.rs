//! The KV cache of one sequence: its keys and values at every layer.

use super::config::Config;
use crate::ops::kv_cache::KvSequence;

/// One sequence's cache. Cloning shares full blocks, so the samples of a group share their prompt's.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<KvSequence>,
}

impl SequenceCache {
    /// An empty cache.
    pub fn new(config: &Config) -> Self {
        let layer = KvSequence::new(config.num_key_value_heads, config.head_dim);
        Self { layers: vec![layer; config.num_hidden_layers] }
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
