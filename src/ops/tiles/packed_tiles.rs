//! The rows of a product of many rows, packed for its tiles.

use super::vectors::SimdWords;
use super::{CacheLine, KRange, LINE_WORDS, UnpackedOperand};
use rayon::prelude::*;

/// Minimum number of words of rows that several threads pack.
const PARALLEL_MIN: usize = 1 << 16;

/// The rows of a chunk of k, packed tile by tile. Threads pack one part each.
pub(super) struct PackedTiles {
    lines: Vec<CacheLine>,
    /// Number of lines of a part.
    part_lines: usize,
    /// Number of tiles of a part. Only the last part may have fewer.
    part_tiles: usize,
}

impl PackedTiles {
    /// Returns memory for `m` rows of up to `steps` words, which at most `threads` threads pack.
    pub(super) fn new<W: SimdWords>(m: usize, steps: usize, threads: usize) -> Self {
        let tiles = m.div_ceil(W::ROWS);
        let parts = if m * steps >= PARALLEL_MIN { threads } else { 1 };
        let part_tiles = tiles.div_ceil(parts);
        // A transposed block is stored whole, so it may extend past the last word of a part.
        let part_lines = (part_tiles * W::ROWS * steps).div_ceil(LINE_WORDS) + 2;
        let parts = tiles.div_ceil(part_tiles);
        Self { lines: vec![CacheLine([0; LINE_WORDS]); parts * part_lines], part_lines, part_tiles }
    }

    /// Packs the `m` rows of `a` for a chunk of k.
    ///
    /// # Safety
    /// The processor must have the vector instructions. `a` must have these rows and values of k.
    pub(super) unsafe fn pack<W: SimdWords>(&mut self, a: UnpackedOperand, m: usize, chunk: KRange) {
        let steps = chunk.steps::<W>();
        let part_rows = self.part_tiles * W::ROWS;
        let pack_part = |(part, lines): (usize, &mut [CacheLine])| {
            let mut to: *mut u32 = lines.as_mut_ptr().cast();
            for row in (part * part_rows..m.min((part + 1) * part_rows)).step_by(W::ROWS) {
                let rows = W::ROWS.min(m - row);
                // SAFETY: guaranteed by the caller; a part has space for the words of its tiles.
                unsafe {
                    W::pack(a, row, rows, chunk, to, rows);
                    to = to.add(rows * steps);
                }
            }
        };
        match self.lines.len() > self.part_lines {
            true => self.lines.par_chunks_mut(self.part_lines).enumerate().for_each(pack_part),
            false => pack_part((0, &mut self.lines)),
        }
    }

    /// Returns tile `index`. Each tile before it has `tile_words` words.
    pub(super) fn tile(&self, index: usize, tile_words: usize) -> *const u32 {
        let part = index / self.part_tiles * self.part_lines * LINE_WORDS;
        self.lines.as_ptr().cast::<u32>().wrapping_add(part + index % self.part_tiles * tile_words)
    }
}
