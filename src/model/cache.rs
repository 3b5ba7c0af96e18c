//! The KV cache of one sequence: its keys and values at every layer.

use super::config::{Config, LayerType};
use crate::ops::cuda::kv_pages;
use crate::ops::kv_cache::{BLOCK, KvBlocks, KvSequence};
use crate::ops::pages::PAGE;
use anyhow::Result;
use candle_core::Device;

/// Where sequences' keys and values go: host memory as it is needed, or a GPU's pages, of which each layer has so many.
#[derive(Debug, Clone)]
pub struct Caches {
    /// One without positions.
    empty: SequenceCache,
}

impl Caches {
    /// `room` on `device`. On the host there is always room.
    ///
    /// # Errors
    /// When the device's memory does not suffice.
    pub fn new(config: &Config, device: &Device, room: CacheRoom) -> Result<Self> {
        let Device::Cuda(device) = device else { return Ok(Self { empty: SequenceCache::new(config) }) };
        let layer = |layer: &LayerType| {
            let pages = room.pages(config, layer);
            Ok(KvSequence::Device(kv_pages(device, config.num_key_value_heads, pages)?))
        };
        let layers = config.layer_types.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { empty: SequenceCache { layers } })
    }

    /// The cache of a new sequence.
    pub fn sequence(&self) -> SequenceCache {
        self.empty.clone()
    }
}

/// Room that caches on a GPU need at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheRoom {
    /// Sequences, where those of a group share the pages of their prompt.
    pub sequences: usize,
    /// Of the longest, in tokens.
    pub tokens: usize,
    /// New tokens that all of them together take in one forward.
    pub fed_tokens_max: usize,
}

impl CacheRoom {
    /// Pages that a layer needs.
    pub fn pages(&self, config: &Config, layer: &LayerType) -> usize {
        let whole = self.tokens.div_ceil(PAGE);
        let held = match layer {
            // The window lies over up to two pages more than it fills. What of their prompt some samples have forgotten others of
            // the group, which wait, still hold.
            LayerType::Sliding => 2 * whole.min(config.sliding_window.div_ceil(PAGE) + 2),
            // The page in which a prompt ends is copied by each that goes on from there.
            LayerType::Full => whole + 1,
        };
        // New tokens come before old ones are forgotten: a page for each sequence that takes any, and those that they fill.
        self.sequences * (held + 1) + self.fed_tokens_max.div_ceil(PAGE)
    }

    /// Bytes that they take on a GPU.
    pub fn device_bytes(&self, config: &Config) -> u64 {
        let page = (2 * config.num_key_value_heads * config.head_dim * PAGE * size_of::<half::bf16>()) as u64;
        config.layer_types.iter().map(|layer| self.pages(config, layer) as u64 * page).sum()
    }
}

/// One sequence's cache. Cloning shares full blocks, so the samples of a group share their prompt's.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<KvSequence>,
}

impl SequenceCache {
    /// An empty cache on the host.
    pub fn new(config: &Config) -> Self {
        let layer = KvSequence::Host(KvBlocks::new(config.num_key_value_heads, config.head_dim));
        Self { layers: vec![layer; config.num_hidden_layers] }
    }

    /// Bytes that the cache of a sequence of `tokens` tokens takes on the host; sliding layers forget what no query sees.
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

    /// Makes it hold `tokens` positions of whatever lies in a GPU's pages: for timings.
    ///
    /// # Errors
    /// When the pages do not suffice, or it is on the host.
    #[cfg(feature = "cuda")]
    pub fn reserve(&mut self, config: &Config, tokens: usize) -> Result<()> {
        for (layer, of) in self.layers.iter_mut().zip(&config.layer_types) {
            let KvSequence::Device(pages) = layer else { anyhow::bail!("a cache on the host") };
            let window = (*of == LayerType::Sliding).then_some(config.sliding_window);
            *layer = KvSequence::Device(pages.reserved(tokens, window)?);
        }
        Ok(())
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
