//! Launch plans of attention on a GPU, computed on the host: the tiles of a launch, and the checks of sizes.
//!
//! The functions only compute with numbers, and are tested without a GPU.

use super::Attention;
use super::kernels::{BLOCK_KEYS, CHUNK_KEYS, ChunkTile, HEAD_DIMS, PART_SUMS, TILE_ROWS, Tile};
use candle_core::{Result, bail};
use std::cmp::Reverse;
use std::ops::Range;

/// Number of blocks of the forward pass that a supported GPU runs concurrently: two on each of 132
/// multiprocessors.
const BLOCKS_AT_ONCE: usize = 264;
/// Maximum memory for the parts of a split forward pass, in bytes.
pub const PARTS_BYTES_MAX: usize = 256 << 20;

/// Least number of chunk tiles of a decode launch.
const PADDED_CHUNKS_MIN: usize = 32;

/// Returns the number of chunk tiles, or of parts, of a decode launch that needs `count` of them: 32, and
/// powers of 4 times that. Sequences then outgrow a launch only when they are several times longer.
pub fn padded_chunks(count: usize) -> usize {
    let mut padded = PADDED_CHUNKS_MIN;
    while padded < count {
        padded *= 4;
    }
    padded
}

/// Returns the bytes of `parts` parts of a split forward pass with `heads` query heads.
pub fn part_bytes(parts: usize, heads: usize, head_dim: usize) -> usize {
    parts.saturating_mul(heads * (head_dim + PART_SUMS) * size_of::<f32>())
}

/// Checks that the kernels run on a device. They are compiled as `sm_90a` code, which runs only on devices of
/// compute capability 9.0.
///
/// # Errors
/// When `capability` (major, minor) is not 9.0.
pub fn check_device(name: &str, capability: (i32, i32)) -> Result<()> {
    if capability != (9, 0) {
        let (major, minor) = capability;
        bail!(
            "sink_attention: {name} has compute capability {major}.{minor}; the kernels support only 9.0 (H100, H200); \
             put the tensors on Device::Cpu"
        );
    }
    Ok(())
}

/// Checks that the kernels support the sizes of an attention call.
///
/// # Errors
/// When the head size is not in [`HEAD_DIMS`], `kv_heads` does not divide `heads`, or the window is 0.
pub fn check_attention(attention: &Attention) -> Result<()> {
    let Attention { heads, kv_heads, head_dim, window, .. } = *attention;
    if !HEAD_DIMS.contains(&head_dim) {
        bail!(
            "sink_attention: head_dim is {head_dim}; the CUDA kernels support only {HEAD_DIMS:?}; put the tensors on \
             Device::Cpu"
        );
    }
    if kv_heads == 0 || heads == 0 || heads % kv_heads != 0 {
        bail!(
            "sink_attention: {heads} query heads are not a multiple of {kv_heads} key-value heads; change one of the numbers"
        );
    }
    if window == Some(0) {
        bail!("sink_attention: a window of 0 keys masks every key; give 1 or more, or no window");
    }
    Ok(())
}

/// The sequences of a launch. Sequence s has `keys[s]` positions, of which the last `queries[s]` are new
/// tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSequences {
    queries: Vec<usize>,
    keys: Vec<usize>,
}

impl LaunchSequences {
    /// Returns packed sequences, in which every position is a query and a key, as in training and prefill.
    /// `cu_seqlens` has the start of each sequence, then the number of rows.
    ///
    /// # Errors
    /// When `cu_seqlens` does not start at 0, or decreases.
    pub fn for_packed_sequences(cu_seqlens: &[usize]) -> Result<Self> {
        if cu_seqlens.first() != Some(&0) || cu_seqlens.windows(2).any(|w| w[0] > w[1]) {
            bail!("sink_attention: the sequences' bounds {cu_seqlens:?} must start at 0 and not decrease");
        }
        let lengths: Vec<usize> = cu_seqlens.windows(2).map(|w| w[1] - w[0]).collect();
        Self { queries: lengths.clone(), keys: lengths }.validate()
    }

    /// Returns cached sequences: sequence s has `counts[s]` new tokens after `lengths[s]` cached positions.
    ///
    /// # Errors
    /// When the numbers of sequences differ.
    pub fn for_cached_sequences(counts: &[usize], lengths: &[usize]) -> Result<Self> {
        if counts.len() != lengths.len() {
            bail!(
                "sink_attention: new tokens for {} sequences, but caches of {}; give one count per cache",
                counts.len(),
                lengths.len()
            );
        }
        let keys = counts.iter().zip(lengths).map(|(a, b)| a + b).collect();
        Self { queries: counts.to_vec(), keys }.validate()
    }

    fn validate(self) -> Result<Self> {
        // Positions and tiles are 32-bit numbers on the device.
        let longest = i32::MAX as usize / 16;
        let (queries, keys) = (self.queries.iter().sum::<usize>(), self.keys.iter().sum::<usize>());
        if queries.max(keys) > longest {
            bail!(
                "sink_attention: {queries} queries and {keys} keys in a launch, but at most {longest} of each are supported; split the batch"
            );
        }
        Ok(self)
    }

    /// Returns the number of new tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.queries.iter().sum()
    }

    /// Checks that a page table covers the last key of the longest sequence.
    ///
    /// # Errors
    /// When the table does not cover this key. `entries` is the length of the table, and `pages_max` its
    /// width.
    pub fn check_page_table(&self, entries: usize, pages_max: usize) -> Result<()> {
        let longest = self.keys.iter().copied().max().unwrap_or(0);
        let needed = longest.div_ceil(BLOCK_KEYS);
        let sequences = self.keys.len();
        if pages_max < needed || entries != sequences * pages_max {
            bail!(
                "sink_attention: a page table of {entries} entries, {pages_max} for each of {sequences} sequences, does not \
                 cover {longest} keys, which need {needed} pages of {BLOCK_KEYS}; make the table wider"
            );
        }
        Ok(())
    }

    /// Returns `cu_seqlens_q` of the header.
    pub fn query_bounds(&self) -> Vec<i32> {
        bounds(&self.queries)
    }

    /// Returns `cu_seqlens_k` of the header.
    pub fn key_bounds(&self) -> Vec<i32> {
        bounds(&self.keys)
    }

    /// Returns every query tile in order, with the range of keys that are visible to at least one of its
    /// rows.
    fn rows_and_keys(&self, attention: &Attention) -> Vec<(Tile, Range<usize>)> {
        let group = attention.heads / attention.kv_heads;
        let mut tiles = vec![];
        for (s, (&queries, &keys)) in self.queries.iter().zip(&self.keys).enumerate() {
            let position = |row: usize| keys - queries + row / group;
            let rows = queries * group;
            for first in (0..rows).step_by(TILE_ROWS) {
                let last = (first + TILE_ROWS).min(rows) - 1;
                let seen = attention.first_key(position(first))..position(last) + 1;
                tiles.push((Tile { sequence: s as i32, first: first as i32 }, seen));
            }
        }
        tiles
    }

    /// Returns the tiles of the forward pass and of dQ, in descending order of the number of visible keys.
    pub fn query_tiles(&self, attention: &Attention) -> Vec<Tile> {
        let tiles = self.rows_and_keys(attention).into_iter();
        let blocks = |seen: Range<usize>| seen.end.div_ceil(BLOCK_KEYS) - seen.start / BLOCK_KEYS;
        most_work_first(tiles.map(|(tile, seen)| (blocks(seen), tile)).collect())
    }

    /// Returns the query tiles of decode, the longest sequence first. All sequences grow by one token a step,
    /// so the order stays the same.
    pub fn decode_tiles(&self, attention: &Attention) -> Vec<Tile> {
        let tiles = self.rows_and_keys(attention).into_iter();
        most_work_first(tiles.map(|(tile, _)| (self.keys[tile.sequence as usize], tile)).collect())
    }

    /// Returns the blocks of a split forward pass: every query tile, once per chunk with keys that are
    /// visible to its rows.
    pub fn chunk_tiles(&self, attention: &Attention) -> Vec<ChunkTile> {
        let chunks = |seen: Range<usize>| seen.start / CHUNK_KEYS..seen.end.div_ceil(CHUNK_KEYS);
        let tiles = self.rows_and_keys(attention).into_iter();
        let parts = |(tile, seen)| chunks(seen).map(move |chunk| ChunkTile { tile, chunk: chunk as i32 });
        tiles.flat_map(parts).collect()
    }

    /// Returns `part_starts` of the header: the first part of each sequence, then the number of parts.
    pub fn part_starts(&self) -> Vec<i32> {
        let parts = self.queries.iter().zip(&self.keys).map(|(q, k)| q * k.div_ceil(CHUNK_KEYS));
        bounds(&parts.collect::<Vec<_>>())
    }

    /// Returns whether the forward pass should run one block per chunk of keys and merge the chunks. The bits
    /// do not depend on the choice. Splitting is faster when there are too few tiles to fill the GPU and many
    /// keys per tile, as in decode of a few long sequences.
    pub fn should_split_keys(&self, attention: &Attention) -> bool {
        let tiles = self.rows_and_keys(attention).len();
        tiles * attention.kv_heads < BLOCKS_AT_ONCE
            && self.chunk_tiles(attention).len() >= 2 * tiles
            && part_bytes(self.parts(), attention.heads, attention.head_dim) <= PARTS_BYTES_MAX
    }

    /// Returns [`Self::should_split_keys`] for a decode step, with the number of parts padded. The keys of a
    /// window of at most one chunk are not split: only sometimes do they lie in two chunks.
    pub fn should_split_decode(&self, attention: &Attention) -> bool {
        let bytes = part_bytes(padded_chunks(self.parts()), attention.heads, attention.head_dim);
        attention.window.is_none_or(|window| window > CHUNK_KEYS)
            && bytes <= PARTS_BYTES_MAX
            && self.should_split_keys(attention)
    }

    /// Returns the number of parts of a split forward pass.
    fn parts(&self) -> usize {
        self.queries.iter().zip(&self.keys).map(|(q, k)| q * k.div_ceil(CHUNK_KEYS)).sum()
    }

    /// Checks that the kernels can count the rows of every sequence.
    ///
    /// # Errors
    /// When the number of queries of a sequence, times the square of the number of query heads per key-value
    /// head, reaches 2^31.
    pub fn check_rows(&self, attention: &Attention) -> Result<()> {
        let group = attention.heads / attention.kv_heads.max(1);
        let longest = self.queries.iter().copied().max().unwrap_or(0);
        // A tile may extend past the last row.
        if (longest * group + TILE_ROWS).saturating_mul(group) >= 1 << 31 {
            bail!(
                "sink_attention: a sequence of {longest} queries, with {group} query heads per key-value head, has more \
                 rows than the kernels can count; split the sequence"
            );
        }
        Ok(())
    }

    /// Returns the tiles of dK and dV, with `tile_keys` keys each, in descending order of the number of
    /// queries that see their keys.
    pub fn key_tiles(&self, attention: &Attention, tile_keys: usize) -> Vec<Tile> {
        let mut tiles = vec![];
        for (s, (&queries, &keys)) in self.queries.iter().zip(&self.keys).enumerate() {
            for first in (0..keys).step_by(tile_keys) {
                let last = (first + tile_keys).min(keys) - 1;
                let end = attention.window.map_or(keys, |w| keys.min(last + w));
                let seen = end.saturating_sub(first.max(keys - queries));
                tiles.push((seen, Tile { sequence: s as i32, first: first as i32 }));
            }
        }
        most_work_first(tiles)
    }
}

fn bounds(lengths: &[usize]) -> Vec<i32> {
    let mut total = 0;
    std::iter::once(0)
        .chain(lengths.iter().map(|&length| {
            total += length as i32;
            total
        }))
        .collect()
}

/// Sorts tiles by descending work, so that no large tile starts late. The order changes no result.
fn most_work_first(mut tiles: Vec<(usize, Tile)>) -> Vec<Tile> {
    tiles.sort_by_key(|&(work, _)| Reverse(work));
    tiles.into_iter().map(|(_, tile)| tile).collect()
}
