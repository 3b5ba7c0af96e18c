//! Products by matrices of blocks.

use super::decode::BlockColumns;
#[cfg(target_arch = "x86_64")]
use super::vectors;
use super::{BlockType, GROUP, GROUPS};
use crate::ops::packed_weights::{PANEL_COLUMNS, PackedFormat, PackedMatrix, ROWS_PER_TASK};
use crate::ops::product::{GemmThreads, Precision};
use crate::ops::tiles::panels::{self, ChunkWords, FewSums, PanelWords};
use crate::ops::tiles::vectors::SimdWords;
use crate::ops::tiles::{CacheLine, KRange, VECTORS, words_of};
use rayon::prelude::*;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

impl PackedMatrix {
    /// Returns the matrix with products and lookups in `precision`, if it consists of blocks. The values are
    /// shared.
    pub fn with_precision(self: &Arc<Self>, precision: Precision) -> Arc<Self> {
        match self.format.block_type() {
            Some(_) if precision != self.precision => {
                Arc::new(Self { precision, bytes: self.bytes.clone(), ..**self })
            }
            _ => self.clone(),
        }
    }

    /// Returns the values rounded to bf16, packed.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn to_bf16(&self) -> candle_core::Result<Self> {
        let (shape, values) = (self.shape(), self.decode()?);
        let write = |values: &[f32], to: &mut [u8]| {
            for (value, to) in values.iter().zip(to.as_chunks_mut().0) {
                *to = half::bf16::from_f32(*value).to_le_bytes();
            }
        };
        if let PackedFormat::BlockRows(_) = self.format {
            let mut bytes = vec![0; PackedFormat::Bf16Rows.bytes(shape)];
            write(&values, &mut bytes);
            return Ok(Self::from_bytes(PackedFormat::Bf16Rows, shape, bytes));
        }
        let expert_values = shape[1] * shape[2];
        let Ok(packed) = Self::read_columns(shape, |expert: usize, to: &mut [u8]| {
            write(&values[expert * expert_values..][..expert_values], to);
            Ok::<_, Infallible>(())
        });
        Ok(packed)
    }

    /// Decodes the blocks of one expert to `[in, out]`.
    pub(in super::super) fn decode_blocks(
        &self,
        kind: BlockType,
        bytes: &[u8],
        expert: usize,
        values: &mut [f32],
    ) {
        values.par_chunks_mut(ROWS_PER_TASK * self.output).enumerate().for_each(|(part, values)| {
            let (k, count) = (part * ROWS_PER_TASK, values.len() / self.output);
            let mut last = vec![];
            for index in 0..self.panels() {
                let panel = self.panel(bytes, expert, index);
                let first = index * PANEL_COLUMNS;
                let columns = BlockColumns { kind, panel: panel.bytes, k, count, groups: (0, GROUPS) };
                if panel.columns == PANEL_COLUMNS {
                    columns.decode(&mut values[first..], self.output);
                    continue;
                }
                last.resize(count * PANEL_COLUMNS, 0.0);
                columns.decode(&mut last, PANEL_COLUMNS);
                for (to, from) in values.chunks_exact_mut(self.output).zip(last.chunks_exact(PANEL_COLUMNS)) {
                    to[first..].copy_from_slice(&from[..panel.columns]);
                }
            }
        });
    }

    /// Multiplies as [`Self::forward_grouped`] does. Returns false without doing anything if the processor
    /// has no vector instructions.
    pub(in super::super) fn multiply_blocks(
        &self,
        kind: BlockType,
        out: &mut [f32],
        x: &[f32],
        groups: &[(usize, Range<usize>)],
        accumulate: bool,
    ) -> candle_core::Result<bool> {
        let (bytes, panel_bytes) = (self.bytes()?, self.format.panel_bytes(self.input));
        let expert_bytes = self.panels() * panel_bytes;
        let parts: Vec<(BlockPanels, Range<usize>)> = groups
            .iter()
            .filter(|(_, rows)| !rows.is_empty())
            .map(|(expert, rows)| {
                let bytes = &bytes[expert * expert_bytes..][..expert_bytes];
                (BlockPanels { kind, bytes, panel_bytes }, rows.clone())
            })
            .collect();
        let rows: usize = parts.iter().map(|(_, rows)| rows.len()).sum();
        let shape = (self.input, self.output);
        let threads = GemmThreads::Pool.threads(rows * shape.0 * shape.1);
        Ok(panels::product(self.precision, threads, &parts, shape, out, x, accumulate))
    }
}

/// The matrix of one expert as the panels of a product.
pub(super) struct BlockPanels<'a> {
    pub kind: BlockType,
    /// All panels.
    pub bytes: &'a [u8],
    pub panel_bytes: usize,
}

impl BlockPanels<'_> {
    /// Returns the columns of a panel of a product for `chunk`.
    fn columns<W: SimdWords>(&self, panel: usize, chunk: KRange) -> BlockColumns<'_> {
        let (width, first) = (VECTORS * W::LANES, panel * VECTORS * W::LANES);
        BlockColumns {
            kind: self.kind,
            panel: &self.bytes[first / PANEL_COLUMNS * self.panel_bytes..][..self.panel_bytes],
            k: chunk.start,
            count: chunk.values,
            groups: (first % PANEL_COLUMNS / GROUP, width / GROUP),
        }
    }
}

impl PanelWords for BlockPanels<'_> {
    fn words<W: SimdWords>(&self, panel: usize, chunk: KRange, scratch: &mut [CacheLine]) -> ChunkWords {
        let (columns, width) = (self.columns::<W>(panel, chunk), VECTORS * W::LANES);
        let words = words_of(scratch);
        match W::PER_WORD {
            2 => columns.decode_to_bf16_pairs(words, width),
            _ => columns.decode(as_f32(words), width),
        }
        // Decoding itself prefetches.
        ChunkWords { words: words.as_ptr(), next: std::ptr::null(), next_lines: 0 }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn multiply_few<W: SimdWords>(
        &self,
        panel: usize,
        chunk: KRange,
        x: *const u32,
        rows: usize,
        sums: &mut FewSums,
    ) -> usize {
        if W::PER_WORD != 2 {
            return 0;
        }
        let columns = self.columns::<W>(panel, chunk);
        columns.check();
        // SAFETY: guaranteed by the caller; words of two values mean bf16 dot products.
        unsafe {
            match rows {
                1 => vectors::multiply_bf16::<1>(&columns, x, &mut sums[..1]),
                _ => vectors::multiply_bf16::<2>(&columns, x, &mut sums[..2]),
            }
        }
        rows
    }
}

fn as_f32(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: both types have 32 bits, and every bit pattern is valid.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}
