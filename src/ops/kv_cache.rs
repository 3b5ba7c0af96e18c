//! A key-value cache in blocks at absolute positions. Attention reads this format in training and in decode.

use std::sync::Arc;

/// Number of keys per block. Blocks start at multiples of this number, so a row reads the same blocks in
/// training, prefill and decode.
pub const BLOCK: usize = 32;

/// Keys and values of one layer for [`BLOCK`] positions and all key-value heads. Unused positions are 0.
#[derive(Debug, Clone)]
pub struct KvBlock {
    /// `[M][D][BLOCK]`. Keys are transposed, so the scores of a block are sums over `D` of whole vectors.
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

/// Keys and values of one sequence at one layer, in host memory. Clones share blocks, so the samples of a
/// group share the blocks of their prompt. A shared block is copied before it is written.
#[derive(Debug, Clone)]
pub struct KvBlocks {
    heads: usize,
    head_dim: usize,
    len: usize,
    blocks: Vec<Arc<KvBlock>>,
    /// Blocks filled since the last [`Self::take_filled`], forgotten ones included; `None` if they are not
    /// recorded.
    filled: Option<Vec<Arc<KvBlock>>>,
}

impl KvBlocks {
    /// Returns an empty sequence with `heads` key-value heads of size `head_dim`.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        Self { heads, head_dim, len: 0, blocks: Vec::new(), filled: None }
    }

    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the block whose first position is `index · BLOCK`.
    pub fn block(&self, index: usize) -> &KvBlock {
        &self.blocks[index]
    }

    /// Appends the rows of `kv`. A row is `[2][M][D]`: keys, which are already rotated, then values.
    pub fn append(&mut self, kv: &[f32]) {
        let (heads, d) = (self.heads, self.head_dim);
        let width = heads * d;
        let (mut rest, row) = (kv, 2 * width);
        while !rest.is_empty() {
            let offset = self.len % BLOCK;
            if offset == 0 {
                self.blocks.push(Arc::new(KvBlock::new(heads, d)));
            }
            let (rows, others) = rest.split_at(rest.len().min((BLOCK - offset) * row));
            let last = self.blocks.len() - 1;
            // A block that another sequence shares is copied before it is written.
            let block = Arc::make_mut(&mut self.blocks[last]);
            for (c, keys) in block.keys.chunks_exact_mut(BLOCK).enumerate() {
                let of_rows = rows.chunks_exact(row).map(|row| row[c]);
                keys[offset..].iter_mut().zip(of_rows).for_each(|(key, k)| *key = k);
            }
            for (h, values) in block.values.chunks_exact_mut(BLOCK * d).enumerate() {
                let of_rows = rows.chunks_exact(row).map(|row| &row[width + h * d..width + (h + 1) * d]);
                let value_rows = values[offset * d..].chunks_exact_mut(d);
                value_rows.zip(of_rows).for_each(|(target, value)| target.copy_from_slice(value));
            }
            self.len += rows.len() / row;
            rest = others;
            if let (Some(filled), 0) = (&mut self.filled, self.len % BLOCK) {
                filled.push(self.blocks[last].clone());
            }
        }
    }

    /// Returns a sequence with the first `len` positions. It shares all blocks except a last, partial block.
    pub fn prefix(&self, len: usize) -> Self {
        let mut blocks = self.blocks[..len.div_ceil(BLOCK)].to_vec();
        if let (Some(last), cut @ 1..) = (blocks.last_mut(), len % BLOCK) {
            let block = Arc::make_mut(last);
            block.keys.chunks_exact_mut(BLOCK).for_each(|keys| keys[cut..].fill(0.0));
            let d = self.head_dim;
            block.values.chunks_exact_mut(BLOCK * d).for_each(|values| values[cut * d..].fill(0.0));
        }
        Self { heads: self.heads, head_dim: self.head_dim, len, blocks, filled: None }
    }

    /// Records the blocks that are filled from now on.
    pub fn record_filled(&mut self) {
        self.filled = Some(Vec::new());
    }

    /// Returns the blocks that were filled since the last call.
    pub fn take_filled(&mut self) -> Vec<Arc<KvBlock>> {
        self.filled.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Appends a whole block. The sequence must end at a block's end.
    pub fn append_block(&mut self, block: Arc<KvBlock>) {
        debug_assert!(self.len.is_multiple_of(BLOCK), "a block within another");
        self.blocks.push(block);
        self.len += BLOCK;
    }

    /// Frees blocks whose keys are outside the `window` of every query at or after `position`.
    pub fn forget_before(&mut self, position: usize, window: usize) {
        let first_seen = (position + 1).saturating_sub(window) / BLOCK;
        for block in self.blocks.iter_mut().take(first_seen) {
            if !block.keys.is_empty() {
                *block = Arc::new(KvBlock { keys: Vec::new(), values: Vec::new() });
            }
        }
    }
}
