//! The KV cache of one sequence: its keys and values at every layer.

use super::config::{Config, LayerType};
use crate::ops::cuda::kv_pages;
use crate::ops::kv_cache::{BLOCK, KvBlocks, KvSequence};
use crate::ops::page_allocator::PAGE_POSITIONS;
use anyhow::Result;
use candle_core::Device;

/// Creates the KV caches of sequences, in host memory or in pages of a GPU. A GPU has a fixed number of
/// pages a layer.
#[derive(Debug, Clone)]
pub struct CacheFactory {
    /// An empty cache, which each new sequence clones.
    empty: SequenceCache,
}

impl CacheFactory {
    /// Allocates pages for `capacity` on a GPU `device`. Host memory is allocated as sequences grow.
    ///
    /// # Errors
    /// When the GPU's memory does not suffice.
    pub fn new(config: &Config, device: &Device, capacity: CacheCapacity) -> Result<Self> {
        let Device::Cuda(device) = device else { return Ok(Self { empty: SequenceCache::new(config) }) };
        let layer = |layer: &LayerType| {
            let pages = capacity.pages(config, layer);
            Ok(KvSequence::Device(kv_pages(device, config.num_key_value_heads, config.head_dim, pages)?))
        };
        let layers = config.layer_types.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { empty: SequenceCache { layers } })
    }

    /// Returns the cache of a new sequence.
    pub fn sequence(&self) -> SequenceCache {
        self.empty.clone()
    }
}

/// The capacity that KV caches on a GPU need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheCapacity {
    /// Concurrent sequences. The samples of a group share the pages of their prompt.
    pub sequences: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
    /// Most new tokens of one forward pass, over all sequences.
    pub fed_tokens_max: usize,
}

impl CacheCapacity {
    /// Returns the pages that a layer needs.
    pub fn pages(&self, config: &Config, layer: &LayerType) -> usize {
        let whole = self.tokens.div_ceil(PAGE_POSITIONS);
        let held = match layer {
            // A window covers up to two pages more than it fills. Samples of a group free their prompt's
            // pages at different times, so the factor is 2.
            LayerType::Sliding => 2 * whole.min(config.sliding_window.div_ceil(PAGE_POSITIONS) + 2),
            // Each sample copies the page in which its prompt ends.
            LayerType::Full => whole + 1,
        };
        // A pass appends new tokens before it frees old pages: one page a sequence, and the pages that new
        // tokens fill.
        self.sequences * (held + 1) + self.fed_tokens_max.div_ceil(PAGE_POSITIONS)
    }

    /// Returns the bytes of these caches on a GPU.
    pub fn device_bytes(&self, config: &Config) -> u64 {
        let page =
            (2 * config.num_key_value_heads * config.head_dim * PAGE_POSITIONS * size_of::<half::bf16>())
                as u64;
        config.layer_types.iter().map(|layer| self.pages(config, layer) as u64 * page).sum()
    }
}

/// The KV cache of one sequence. A clone shares full blocks, so the samples of a group share their
/// prompt's.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<KvSequence>,
}

impl SequenceCache {
    /// Returns an empty cache on the host.
    pub fn new(config: &Config) -> Self {
        let layer = KvSequence::Host(KvBlocks::new(config.num_key_value_heads, config.head_dim));
        Self { layers: vec![layer; config.num_hidden_layers] }
    }

    /// Returns the bytes of a cache of `tokens` tokens on the host. Sliding layers keep only blocks of the
    /// window.
    pub fn bytes(config: &Config, tokens: usize) -> u64 {
        let position = 2 * config.num_key_value_heads * config.head_dim * size_of::<f32>();
        let held = |layer: &LayerType| match layer {
            // A window covers up to two blocks more than it fills.
            LayerType::Sliding => tokens.min(config.sliding_window + 2 * BLOCK),
            LayerType::Full => tokens,
        };
        let positions = config.layer_types.iter().map(|layer| held(layer).next_multiple_of(BLOCK) as u64);
        positions.sum::<u64>() * position as u64
    }

    /// Extends a GPU cache to `tokens` positions with uninitialised keys and values, for timings.
    ///
    /// # Errors
    /// When the pages do not suffice, or the cache is on the host.
    #[cfg(feature = "cuda")]
    pub fn reserve(&mut self, config: &Config, tokens: usize) -> Result<()> {
        for (layer, of) in self.layers.iter_mut().zip(&config.layer_types) {
            let KvSequence::Device(pages) = layer else { anyhow::bail!("the cache is on the host") };
            let window = (*of == LayerType::Sliding).then_some(config.sliding_window);
            *layer = KvSequence::Device(pages.reserve(tokens, window)?);
        }
        Ok(())
    }

    /// Returns the number of cached positions. Between forward passes it is equal at every layer.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvSequence::len)
    }

    /// Returns the keys and values of layer `index`.
    pub fn layer(&mut self, index: usize) -> &mut KvSequence {
        &mut self.layers[index]
    }
}
