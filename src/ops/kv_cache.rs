//! Key-value cache in blocks at absolute positions: the format that attention reads in training and in
//! decode.

use super::cuda::KvPages;
use std::sync::Arc;

/// Keys per block. Blocks start at multiples of it, so a row reads the same blocks on every path.
pub const BLOCK: usize = 32;

/// Keys and values of one layer at positions `b·BLOCK ..`, for all key-value heads. Unused positions are 0.
#[derive(Debug, Clone)]
pub struct KvBlock {
    /// `[M][D][BLOCK]`: keys are transposed, so a block's scores are sums over `D` of whole vectors.
    pub keys: Vec<f32>,
    /// `[M][BLOCK][D]`.
    pub values: Vec<f32>,
}

impl KvBlock {
    fn new(heads: usize, head_dim: usize) -> Self {
        let len = heads * head_dim * BLOCK;
        Self { keys: vec![0.0; len], values: vec![0.0; len] }
    }
}

/// Keys and values of one sequence at one layer, on the model's device. Clones share blocks, as the samples
/// of a group share their prompt. A shared block is copied before it is written.
#[derive(Debug, Clone)]
pub enum KvSequence {
    Host(KvBlocks),
    // Never constructed without feature `cuda`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Device(KvPages),
}

impl KvSequence {
    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        match self {
            KvSequence::Host(blocks) => blocks.len(),
            KvSequence::Device(pages) => pages.len(),
        }
    }

    /// Frees blocks or pages that no query at or after `position` can see through `window`.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        match self {
            KvSequence::Host(blocks) => blocks.forget_before(position, window),
            KvSequence::Device(pages) => pages.forget_before(position, window),
        }
    }

    pub(super) fn blocks_mut(&mut self) -> Option<&mut KvBlocks> {
        match self {
            KvSequence::Host(blocks) => Some(blocks),
            KvSequence::Device(_) => None,
        }
    }

    /// Returns the pages, if they are on a GPU.
    pub fn pages_mut(&mut self) -> Option<&mut KvPages> {
        match self {
            KvSequence::Host(_) => None,
            KvSequence::Device(pages) => Some(pages),
        }
    }
}

/// Keys and values in host memory.
#[derive(Debug, Clone)]
pub struct KvBlocks {
    heads: usize,
    head_dim: usize,
    len: usize,
    blocks: Vec<Arc<KvBlock>>,
}

impl KvBlocks {
    /// Returns an empty sequence for `heads` key-value heads of `head_dim`.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        Self { heads, head_dim, len: 0, blocks: Vec::new() }
    }

    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the block that holds position `index · BLOCK`.
    pub fn block(&self, index: usize) -> &KvBlock {
        &self.blocks[index]
    }

    /// Appends rows of `kv`, each `[2][M][D]`: keys (already rotated), then values.
    pub fn append(&mut self, kv: &[f32]) {
        let (heads, d) = (self.heads, self.head_dim);
        let width = heads * d;
        let (mut rest, row) = (kv, 2 * width);
        while !rest.is_empty() {
            let place = self.len % BLOCK;
            if place == 0 {
                self.blocks.push(Arc::new(KvBlock::new(heads, d)));
            }
            let (rows, others) = rest.split_at(rest.len().min((BLOCK - place) * row));
            let last = self.blocks.len() - 1;
            // A block that another sequence shares is copied before it is written.
            let block = Arc::make_mut(&mut self.blocks[last]);
            for (c, keys) in block.keys.chunks_exact_mut(BLOCK).enumerate() {
                let of_rows = rows.chunks_exact(row).map(|row| row[c]);
                keys[place..].iter_mut().zip(of_rows).for_each(|(key, k)| *key = k);
            }
            for (h, values) in block.values.chunks_exact_mut(BLOCK * d).enumerate() {
                let of_rows = rows.chunks_exact(row).map(|row| &row[width + h * d..width + (h + 1) * d]);
                let places = values[place * d..].chunks_exact_mut(d);
                places.zip(of_rows).for_each(|(place, value)| place.copy_from_slice(value));
            }
            self.len += rows.len() / row;
            rest = others;
        }
    }

    /// Returns the first `len` positions. Blocks are shared, except one that is cut.
    pub fn prefix(&self, len: usize) -> Self {
        let mut blocks = self.blocks[..len.div_ceil(BLOCK)].to_vec();
        if let (Some(last), cut @ 1..) = (blocks.last_mut(), len % BLOCK) {
            let block = Arc::make_mut(last);
            block.keys.chunks_exact_mut(BLOCK).for_each(|keys| keys[cut..].fill(0.0));
            let d = self.head_dim;
            block.values.chunks_exact_mut(BLOCK * d).for_each(|values| values[cut * d..].fill(0.0));
        }
        Self { len, blocks, ..*self }
    }

    /// Frees blocks that no query at or after `position` can see through `window`.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        let first_seen = (position + 1).saturating_sub(window) / BLOCK;
        for block in self.blocks.iter_mut().take(first_seen) {
            if !block.keys.is_empty() {
                *block = Arc::new(KvBlock { keys: Vec::new(), values: Vec::new() });
            }
        }
    }
}
