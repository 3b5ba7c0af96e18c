//! The KV cache of a sequence: its keys and values at every layer.

use super::config::{Config, LayerType};
use crate::ops::cuda::{KvPages, kv_pages};
use crate::ops::kv_cache::{BLOCK, KvBlock, KvBlocks};
use crate::ops::page_allocator::PAGE_POSITIONS;
use anyhow::Result;
use candle_core::Device;
use std::sync::Arc;

/// Creates the KV caches of sequences, in host memory or in pages of a GPU. On a GPU each layer has a fixed
/// number of pages.
#[derive(Debug, Clone)]
pub struct CacheFactory {
    /// An empty cache. Each new sequence clones it.
    empty: SequenceCache,
}

impl CacheFactory {
    /// Makes a factory for caches on `device`. On a GPU, allocates the pages for `capacity`. Host memory is
    /// allocated as sequences grow.
    ///
    /// # Errors
    /// When the GPU has too little memory.
    pub fn new(config: &Config, device: &Device, capacity: CacheCapacity) -> Result<Self> {
        let Device::Cuda(device) = device else { return Ok(Self { empty: SequenceCache::new(config) }) };
        let layout = Arc::new(CacheLayout::new(config));
        let pools = layout.pools.iter().map(|(layer_type, layers)| {
            let pages = capacity.pages(config, layer_type);
            kv_pages(device, layers.len(), config.num_key_value_heads, config.head_dim, pages)
        });
        let pools = pools.collect::<candle_core::Result<_>>()?;
        Ok(Self { empty: SequenceCache(Storage::Device(pools, layout)) })
    }

    /// Returns the cache of a new sequence.
    pub fn sequence(&self) -> SequenceCache {
        self.empty.clone()
    }
}

/// The capacity of the KV caches on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheCapacity {
    /// Maximum number of concurrent sequences. The samples of a group share the pages of their prompt.
    pub sequences: usize,
    /// Number of tokens of the longest sequence.
    pub tokens: usize,
    /// Maximum number of new tokens in one forward pass, over all sequences.
    pub fed_tokens_max: usize,
}

impl CacheCapacity {
    /// Returns the number of pages that a layer needs.
    pub fn pages(&self, config: &Config, layer: &LayerType) -> usize {
        let sequence_pages = self.tokens.div_ceil(PAGE_POSITIONS);
        let resident_pages = match layer {
            // A window may begin and end in the middle of a page, so it touches up to two pages more than its
            // length fills. The samples of a group free the pages of their prompt at different times. Hence
            // the factor 2.
            LayerType::Sliding => 2 * sequence_pages.min(config.sliding_window.div_ceil(PAGE_POSITIONS) + 2),
            // Each sample has its own copy of the page in which the prompt ends.
            LayerType::Full => sequence_pages + 1,
        };
        // A pass appends new tokens before it frees old pages. So it needs one more page per sequence, and
        // the pages that the new tokens fill. The padding of decode has a page of its own.
        self.sequences * (resident_pages + 1) + self.fed_tokens_max.div_ceil(PAGE_POSITIONS) + 1
    }

    /// Returns the GPU memory of the caches, in bytes.
    pub fn device_bytes(&self, config: &Config) -> u64 {
        let page =
            (2 * config.num_key_value_heads * config.head_dim * PAGE_POSITIONS * size_of::<half::bf16>())
                as u64;
        config.layer_types.iter().map(|layer| self.pages(config, layer) as u64 * page).sum()
    }
}

/// Keys and values of [`BLOCK`] tokens at every layer, in host memory.
pub type CacheBlock = Vec<Arc<KvBlock>>;

/// The pools of a cache on a GPU. Layers of one type share the pages of their sequences.
#[derive(Debug)]
pub struct CacheLayout {
    /// The type and the layers of each pool.
    pub pools: Vec<(LayerType, Vec<usize>)>,
    /// The pool of each layer, and the index of the layer in it.
    pub places: Vec<(usize, usize)>,
}

impl CacheLayout {
    /// Returns the layout for the layers of `config`.
    pub fn new(config: &Config) -> Self {
        let (mut pools, mut places): (Vec<(LayerType, Vec<usize>)>, _) = (vec![], vec![]);
        for (layer, layer_type) in config.layer_types.iter().enumerate() {
            let known = pools.iter().position(|(of_pool, _)| of_pool == layer_type);
            let pool = known.unwrap_or_else(|| {
                pools.push((*layer_type, vec![]));
                pools.len() - 1
            });
            places.push((pool, pools[pool].1.len()));
            pools[pool].1.push(layer);
        }
        Self { pools, places }
    }
}

/// The KV cache of one sequence. Clones share full blocks or pages, so the samples of a group share those of
/// their prompt.
#[derive(Debug, Clone)]
pub struct SequenceCache(Storage);

#[derive(Debug, Clone)]
enum Storage {
    /// The blocks of each layer.
    Host(Vec<KvBlocks>),
    /// The pages of each pool.
    Device(Vec<KvPages>, Arc<CacheLayout>),
}

impl SequenceCache {
    /// Returns an empty cache on the host.
    pub fn new(config: &Config) -> Self {
        let layer = KvBlocks::new(config.num_key_value_heads, config.head_dim);
        Self(Storage::Host(vec![layer; config.num_hidden_layers]))
    }

    /// Returns the host memory, in bytes, of a cache of `tokens` tokens. Sliding layers keep only the blocks
    /// of the window.
    pub fn bytes(config: &Config, tokens: usize) -> u64 {
        let position = 2 * config.num_key_value_heads * config.head_dim * size_of::<f32>();
        let resident_positions = |layer: &LayerType| match layer {
            // A window may begin and end in the middle of a block, so it touches up to two blocks more than
            // its length fills.
            LayerType::Sliding => tokens.min(config.sliding_window + 2 * BLOCK),
            LayerType::Full => tokens,
        };
        let positions =
            config.layer_types.iter().map(|layer| resident_positions(layer).next_multiple_of(BLOCK) as u64);
        positions.sum::<u64>() * position as u64
    }

    /// Returns the host memory, in bytes, of `tokens` tokens, rounded up to whole blocks. All layers keep all
    /// tokens, sliding layers too.
    pub fn block_bytes(config: &Config, tokens: usize) -> u64 {
        let position = 2 * config.num_key_value_heads * config.head_dim * size_of::<f32>();
        (config.num_hidden_layers * position * tokens.next_multiple_of(BLOCK)) as u64
    }

    /// Returns the blocks of each layer; none on a GPU.
    fn host_layers(&mut self) -> &mut [KvBlocks] {
        if let Storage::Host(layers) = &mut self.0 { layers } else { &mut [] }
    }

    /// Records the blocks that are filled from now on. Does nothing on a GPU.
    pub fn record_filled(&mut self) {
        self.host_layers().iter_mut().for_each(KvBlocks::record_filled);
    }

    /// Returns the blocks that were filled since the last call, in order.
    pub fn take_filled(&mut self) -> Vec<CacheBlock> {
        let mut blocks: Vec<CacheBlock> = vec![];
        for layer in self.host_layers() {
            for (index, block) in layer.take_filled().into_iter().enumerate() {
                match blocks.get_mut(index) {
                    Some(layers) => layers.push(block),
                    None => blocks.push(vec![block]),
                }
            }
        }
        blocks
    }

    /// Appends a whole block. The cache must be on the host, and its last block must be full.
    pub fn append_block(&mut self, block: &CacheBlock) {
        self.host_layers().iter_mut().zip(block).for_each(|(layer, block)| layer.append_block(block.clone()));
    }

    /// Extends a GPU cache to `tokens` positions with uninitialised keys and values, for timings.
    ///
    /// # Errors
    /// When there are too few pages, or the cache is on the host.
    #[cfg(feature = "cuda")]
    pub fn reserve(&mut self, config: &Config, tokens: usize) -> Result<()> {
        let Storage::Device(pools, layout) = &mut self.0 else { anyhow::bail!("the cache is on the host") };
        for (pages, (layer_type, _)) in pools.iter_mut().zip(&layout.pools) {
            let window = (*layer_type == LayerType::Sliding).then_some(config.sliding_window);
            *pages = pages.reserve(tokens, window)?;
        }
        Ok(())
    }

    /// Returns the number of cached positions. Between forward passes every layer has the same number.
    pub fn len(&self) -> usize {
        match &self.0 {
            Storage::Host(layers) => layers.first().map_or(0, KvBlocks::len),
            Storage::Device(pools, _) => pools.first().map_or(0, KvPages::len),
        }
    }

    /// Returns the id of a cache on a GPU, which no other cache of its factory has or had; `None` on the
    /// host.
    pub fn id(&self) -> Option<u64> {
        let Storage::Device(pools, _) = &self.0 else { return None };
        pools.first().map(KvPages::id)
    }

    /// Returns the pool of layer `layer` on a GPU, and the index of the layer in it; `None` on the host.
    pub fn place(&self, layer: usize) -> Option<(usize, usize)> {
        let Storage::Device(_, layout) = &self.0 else { return None };
        layout.places.get(layer).copied()
    }

    /// Returns the keys and values of layer `index`; `None` on a GPU.
    pub fn blocks(&mut self, index: usize) -> Option<&mut KvBlocks> {
        self.host_layers().get_mut(index)
    }

    /// Returns the keys and values of the layers of pool `index`; `None` on the host.
    pub fn pages(&mut self, index: usize) -> Option<&mut KvPages> {
        let Storage::Device(pools, _) = &mut self.0 else { return None };
        pools.get_mut(index)
    }
}
