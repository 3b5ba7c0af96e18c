//! Matrices that stay packed in memory, as bf16, as MXFP4 ([`super::mxfp4`]), or as blocks of a GGUF file
//! ([`BlockType`]). They need as many bytes as on disk, Q6_K a fifth more.
//!
//! A product decodes weights while it multiplies, and adds in the order of [`super::product`]. **The result
//! is bit for bit the product by the decoded matrix**, in the forward pass and in the gradient of the input.
//! Packed matrices are not trainable.
//!
//! A matrix is stored in panels of [`PANEL_COLUMNS`] columns. A panel has one row of weights per k, in
//! ascending order. So a product reads memory sequentially, and a vector holds neighbouring columns. An MXFP4
//! panel is stored block by block. A block has [`PANEL_COLUMNS`] scales, then, for each pair of k, one byte
//! per column.
//!
//! A GPU stores an MXFP4 matrix in the same panels (`kernels/product_mxfp4.cuh`). Only products support a
//! matrix on a GPU. Functions that need the bytes on the host return an error.

mod blocks;
mod kernels;
mod linear;
mod storage;
mod table;

pub use blocks::BlockType;
pub use linear::{packed_grouped_linear, packed_linear};
pub use table::{packed_columns, packed_rows};

use super::buffer::byte_buffer;
use super::cpu::should_parallelize;
use super::mxfp4::{self, BLOCK};
use super::product::{GemmThreads, K_CHUNK, Precision, StridedMatrix, product};
use kernels::{OutputColumns, Panel, VectorInstructions, transpose};
use rayon::prelude::*;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use storage::PackedStorage;

/// Columns per panel.
pub const PANEL_COLUMNS: usize = 64;
/// Number of panels that are decoded together if there are many rows.
const TILE_PANELS: usize = 8;
/// Maximum number of rows for which weights are decoded in registers. For more rows, weights are decoded to a
/// tile in memory that all rows share.
const FEW_ROWS_MAX: usize = 16;

/// The packed format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedFormat {
    Bf16,
    /// bf16 rows in stored order, for an embedding table. Rows can be looked up; products are not supported.
    Bf16Rows,
    Mxfp4,
    /// Blocks of a GGUF file. Products are in f32 or bf16, as [`PackedMatrix::with_precision`] sets.
    Blocks(BlockType),
    /// Blocks of an embedding table. Rows can be looked up; products are not supported.
    BlockRows(BlockType),
}

impl PackedFormat {
    /// Size of a block of a panel, in bytes. A block covers [`BLOCK`] values of k, with one scale per column
    /// and two k per byte.
    const MXFP4_BLOCK_BYTES: usize = PANEL_COLUMNS * (1 + BLOCK / 2);

    /// Returns the size of `rows` rows of a panel, in bytes.
    const fn panel_bytes(self, rows: usize) -> usize {
        match self {
            PackedFormat::Bf16 | PackedFormat::Bf16Rows => rows * PANEL_COLUMNS * 2,
            PackedFormat::Mxfp4 => rows.div_ceil(BLOCK) * Self::MXFP4_BLOCK_BYTES,
            PackedFormat::Blocks(kind) | PackedFormat::BlockRows(kind) => {
                rows.div_ceil(kind.values()) * kind.layout().panel_block_bytes()
            }
        }
    }

    /// Returns the type of blocks, if the format has any.
    pub const fn block_type(self) -> Option<BlockType> {
        if let PackedFormat::Blocks(kind) | PackedFormat::BlockRows(kind) = self { Some(kind) } else { None }
    }

    /// Returns `[experts, in, out]` of the panels for a matrix with the shape `shape`. The panels of a table
    /// of blocks hold its rows as columns.
    const fn panel_shape(self, shape: [usize; 3]) -> [usize; 3] {
        match (self, shape) {
            (PackedFormat::BlockRows(_), [experts, rows, width]) => [experts, width, rows],
            _ => shape,
        }
    }

    /// Returns the size of a packed matrix `[experts, input, output]`, in bytes.
    pub const fn bytes(self, shape: [usize; 3]) -> usize {
        let [experts, input, output] = self.panel_shape(shape);
        match self {
            PackedFormat::Bf16Rows => 2 * experts * input * output,
            _ => experts * output.div_ceil(PANEL_COLUMNS) * self.panel_bytes(input),
        }
    }
}

/// A packed matrix `[in, out]`, or one packed matrix per expert, `[E, in, out]`.
pub struct PackedMatrix {
    format: PackedFormat,
    experts: usize,
    /// Number of rows of the panels.
    input: usize,
    /// Number of columns of all panels.
    output: usize,
    /// The precision of products by blocks. Other formats have f32 products.
    precision: Precision,
    bytes: PackedStorage,
}

/// Buffers for the stored weights of one panel. A reader must fill them. They hold the rows `columns` of the
/// stored matrix `[out, in]`.
pub struct StoredRows<'a> {
    pub expert: usize,
    pub columns: Range<usize>,
    /// Little-endian bf16 `[columns][in]`, MXFP4 blocks `[columns][in / 32][16]`, or blocks as in a GGUF
    /// file.
    pub values: &'a mut [u8],
    /// The scales of MXFP4, `[columns][in / 32]`; otherwise empty.
    pub scales: &'a mut [u8],
}

impl PackedMatrix {
    /// Packs stored weights on several threads. Each call of `read` reads the weights of one panel. Besides
    /// the matrix, memory holds one panel per thread.
    ///
    /// # Errors
    /// Errors of `read`.
    pub fn read<E: Send>(
        format: PackedFormat,
        shape: [usize; 3],
        read: impl Fn(StoredRows) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        assert!(format != PackedFormat::Bf16Rows, "a table is not read in panels");
        let [_, input, output] = format.panel_shape(shape);
        let block = match format {
            PackedFormat::Mxfp4 => BLOCK,
            _ => format.block_type().map_or(1, BlockType::values),
        };
        assert!(input.is_multiple_of(block), "{input} inputs in blocks of {block}");
        // Each thread writes first to its panels, so the system clears their memory in parallel.
        let mut bytes = byte_buffer(format.bytes(shape));
        let panels = output.div_ceil(PANEL_COLUMNS);
        let (width, scales) = match format {
            PackedFormat::Bf16 | PackedFormat::Bf16Rows => (2 * input, 0),
            PackedFormat::Mxfp4 => (input / 2, input / BLOCK),
            PackedFormat::Blocks(kind) | PackedFormat::BlockRows(kind) => (kind.stored_bytes(input), 0),
        };
        bytes.par_chunks_exact_mut(format.panel_bytes(input).max(1)).enumerate().try_for_each_init(
            || (byte_buffer(PANEL_COLUMNS * width), byte_buffer(PANEL_COLUMNS * scales)),
            |(values, of_scales), (index, panel)| {
                let (expert, first) = (index / panels, index % panels * PANEL_COLUMNS);
                let columns = first..(first + PANEL_COLUMNS).min(output);
                let (values, of_scales) =
                    (&mut values[..columns.len() * width], &mut of_scales[..columns.len() * scales]);
                if columns.len() < PANEL_COLUMNS {
                    panel.fill(0);
                }
                read(StoredRows { expert, columns, values, scales: of_scales })?;
                match format {
                    PackedFormat::Bf16 | PackedFormat::Bf16Rows => transpose(panel, values, width),
                    PackedFormat::Mxfp4 => arrange_blocks(panel, values, of_scales),
                    PackedFormat::Blocks(kind) | PackedFormat::BlockRows(kind) => {
                        blocks::arrange(kind, panel, values);
                    }
                }
                Ok(())
            },
        )?;
        Ok(Self::from_bytes(format, shape, bytes))
    }

    /// Packs MXFP4 blocks and scales in the layout of [`mxfp4::encode`].
    pub fn from_mxfp4(blocks: &[u8], scales: &[u8], shape: [usize; 3]) -> Self {
        let [_, input, output] = shape;
        let part = |of: &[u8], rows: &StoredRows, width: usize, to: &mut [u8]| {
            let start = (rows.expert * output + rows.columns.start) * width;
            to.copy_from_slice(&of[start..start + to.len()]);
        };
        let read = |mut rows: StoredRows| {
            let (values, of_scales) = (std::mem::take(&mut rows.values), std::mem::take(&mut rows.scales));
            part(blocks, &rows, input / 2, values);
            part(scales, &rows, input / BLOCK, of_scales);
            Ok::<_, Infallible>(())
        };
        let Ok(matrix) = Self::read(PackedFormat::Mxfp4, shape, read);
        matrix
    }

    /// Packs bf16 values that are stored as `[E, in, out]`. Each call of `read` fills the bytes of one
    /// expert.
    ///
    /// # Errors
    /// Errors of `read`.
    pub fn read_columns<E>(
        [experts, input, output]: [usize; 3],
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let format = PackedFormat::Bf16;
        let mut bytes = vec![0u8; format.bytes([experts, input, output])];
        let mut stored = byte_buffer(input * output * 2);
        for (expert, packed) in bytes.chunks_exact_mut(format.bytes([1, input, output]).max(1)).enumerate() {
            read(expert, &mut stored)?;
            packed.par_chunks_exact_mut(format.panel_bytes(input)).enumerate().for_each(|(index, panel)| {
                let columns = index * PANEL_COLUMNS..((index + 1) * PANEL_COLUMNS).min(output);
                for (row, to) in
                    stored.chunks_exact(2 * output).zip(panel.chunks_exact_mut(2 * PANEL_COLUMNS))
                {
                    to[..2 * columns.len()].copy_from_slice(&row[2 * columns.start..2 * columns.end]);
                }
            });
        }
        Ok(Self::from_bytes(format, [experts, input, output], bytes))
    }

    /// Rebuilds a matrix from the bytes that [`Self::bytes`] returns.
    pub fn from_bytes(format: PackedFormat, shape: [usize; 3], bytes: Vec<u8>) -> Self {
        assert_eq!(bytes.len(), format.bytes(shape), "packed matrix: bytes");
        let [experts, input, output] = format.panel_shape(shape);
        let bytes = PackedStorage::Host(Arc::new(bytes));
        Self { format, experts, input, output, precision: Precision::default(), bytes }
    }

    /// Returns the precision of products.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns a copy with only the experts in the range `experts`.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn experts(&self, experts: Range<usize>) -> candle_core::Result<Self> {
        let expert_bytes = self.panels() * self.format.panel_bytes(self.input);
        let bytes = self.bytes()?[experts.start * expert_bytes..experts.end * expert_bytes].to_vec();
        Ok(Self { experts: experts.len(), bytes: PackedStorage::Host(Arc::new(bytes)), ..*self })
    }

    /// Returns `[experts, in, out]`, or `[1, rows, width]` of a table.
    pub fn shape(&self) -> [usize; 3] {
        self.format.panel_shape([self.experts, self.input, self.output])
    }

    /// Returns the packed format.
    pub fn format(&self) -> PackedFormat {
        self.format
    }

    /// Returns the size in memory, in bytes.
    pub fn size_bytes(&self) -> usize {
        self.format.bytes(self.shape())
    }

    /// Returns a copy with `map` applied to each value. The matrix must be bf16, and bf16 must represent
    /// every result.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn map_values(&self, map: impl Fn(f32) -> f32) -> candle_core::Result<Self> {
        let is_bf16 = matches!(self.format, PackedFormat::Bf16 | PackedFormat::Bf16Rows);
        assert!(is_bf16, "only bf16 is mapped value by value");
        Ok(Self { bytes: PackedStorage::Host(Arc::new(table::map_bf16(self.bytes()?, map))), ..*self })
    }

    /// Decodes all weights, `[E, in, out]`, or `[rows, width]` of a table.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn decode(&self) -> candle_core::Result<Vec<f32>> {
        let bytes = self.bytes()?;
        if self.format == PackedFormat::Bf16Rows {
            return Ok(table::bf16_values(bytes).collect());
        }
        let mut values = vec![0f32; self.experts * self.input * self.output];
        if let PackedFormat::BlockRows(_) = self.format {
            values.par_chunks_exact_mut(self.input.max(1)).enumerate().for_each(|(row, to)| {
                to.iter_mut().zip(self.panel_column(bytes, row)).for_each(|(to, value)| *to = value);
            });
            return Ok(values);
        }
        for (expert, values) in values.chunks_exact_mut((self.input * self.output).max(1)).enumerate() {
            if let PackedFormat::Blocks(kind) = self.format {
                self.decode_blocks(kind, bytes, expert, values);
                continue;
            }
            values.par_chunks_exact_mut(self.output).enumerate().for_each(|(k, row)| {
                for (index, part) in row.chunks_mut(PANEL_COLUMNS).enumerate() {
                    let panel = self.panel(bytes, expert, index);
                    part.iter_mut().enumerate().for_each(|(c, value)| *value = panel.value(k, c));
                }
            });
        }
        Ok(values)
    }

    /// Decodes column `index` of the first expert, `[in]`, rounded to bf16 if products are in bf16.
    fn column(&self, index: usize) -> candle_core::Result<impl Iterator<Item = f32>> {
        let rounds = self.precision == Precision::Bf16Dot;
        let round = move |value: f32| if rounds { half::bf16::from_f32(value).to_f32() } else { value };
        Ok(self.panel_column(self.bytes()?, index).map(round))
    }

    fn panel_column<'b>(&'b self, bytes: &'b [u8], index: usize) -> impl Iterator<Item = f32> + use<'b> {
        let panel = self.panel(bytes, 0, index / PANEL_COLUMNS);
        (0..self.input).map(move |k| panel.value(k, index % PANEL_COLUMNS))
    }

    fn panels(&self) -> usize {
        self.output.div_ceil(PANEL_COLUMNS)
    }

    fn panel<'b>(&self, bytes: &'b [u8], expert: usize, index: usize) -> Panel<'b> {
        let size = self.format.panel_bytes(self.input);
        let start = (expert * self.panels() + index) * size;
        let columns = (self.output - index * PANEL_COLUMNS).min(PANEL_COLUMNS);
        Panel { format: self.format, bytes: &bytes[start..start + size], columns }
    }

    /// Computes `out (+)= x · W` for the matrix of one expert. The result is bit for bit that of
    /// [`super::product::forward_product`] by the decoded matrix.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn forward(
        &self,
        expert: usize,
        out: &mut [f32],
        x: &[f32],
        accumulate: bool,
    ) -> candle_core::Result<()> {
        self.forward_grouped(out, x, &[(expert, 0..x.len() / self.input.max(1))], accumulate)
    }

    /// Computes `out (+)= x · W` for rows of several experts, as [`Self::forward`] does for one. `groups` has
    /// each expert with its range of rows. Ranges must not overlap.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn forward_grouped(
        &self,
        out: &mut [f32],
        x: &[f32],
        groups: &[(usize, Range<usize>)],
        accumulate: bool,
    ) -> candle_core::Result<()> {
        let bytes = self.bytes()?;
        let (k, n) = (self.input, self.output);
        let is_table = matches!(self.format, PackedFormat::Bf16Rows | PackedFormat::BlockRows(_));
        assert!(k > 0 && n > 1 && !is_table, "packed product: {k} x {n}");
        let mut end = 0;
        for (expert, rows) in groups {
            assert!(
                *expert < self.experts && rows.start >= end && rows.end >= rows.start,
                "packed product: groups"
            );
            end = rows.end;
        }
        assert!(x.len() >= end * k && out.len() >= end * n, "packed product: shapes");
        if let PackedFormat::Blocks(kind) = self.format
            && self.multiply_blocks(kind, out, x, groups, accumulate)?
        {
            return Ok(());
        }
        assert!(self.precision == Precision::F32, "bf16 product: this processor has no bf16 dot products");
        let groups = groups.iter().filter(|(_, rows)| !rows.is_empty());
        // Each element of `out` belongs to exactly one task.
        let tasks: Vec<Task> = groups
            .flat_map(|(expert, rows)| {
                // The kernels of this module add in the order of the `gemm` crate, unless the last chunk has
                // one or two values of k.
                let uses_row_kernel = rows.len() <= FEW_ROWS_MAX
                    && !matches!(self.input % K_CHUNK, 1 | 2)
                    && VectorInstructions::detect() != VectorInstructions::Plain;
                let tile = if uses_row_kernel { 1 } else { TILE_PANELS };
                self.tiles(tile).map(move |panels| Task {
                    expert: *expert,
                    rows: rows.clone(),
                    panels,
                    uses_row_kernel,
                })
            })
            .collect();
        let output_columns = OutputColumns::new(out, n);
        let run =
            |tile: &mut Vec<f32>, task: &Task| self.run((bytes, task), x, output_columns, tile, accumulate);
        if should_parallelize(
            tasks.iter().map(|task| task.rows.len() * k * task.panels.len() * PANEL_COLUMNS).sum(),
        ) {
            tasks.par_iter().for_each_init(Vec::new, run);
        } else {
            let mut tile = Vec::new();
            tasks.iter().for_each(|task| run(&mut tile, task));
        }
        Ok(())
    }

    /// Returns ranges of at most `count` panels. No range has a single column, because the `gemm` crate has
    /// another code path for one column.
    fn tiles(&self, count: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let panels = self.panels();
        let has_single_last = panels > 1 && self.output % PANEL_COLUMNS == 1;
        let ends = (count..panels).step_by(count).filter(move |&end| !(has_single_last && end == panels - 1));
        let ends: Vec<usize> = ends.chain([panels]).collect();
        let starts: Vec<usize> = std::iter::once(0).chain(ends.iter().copied()).collect();
        starts.into_iter().zip(ends).map(|(start, end)| start..end)
    }

    fn run(
        &self,
        (bytes, task): (&[u8], &Task),
        x: &[f32],
        out: OutputColumns,
        tile: &mut Vec<f32>,
        accumulate: bool,
    ) {
        let Task { expert, rows, panels, uses_row_kernel } = task;
        let (k, m) = (self.input, rows.len());
        let x = &x[rows.start * k..rows.end * k];
        let out = out.skip_rows(rows.start);
        let vectors = VectorInstructions::detect();
        if *uses_row_kernel {
            for index in panels.clone() {
                let panel = self.panel(bytes, *expert, index);
                vectors.skinny_gemm(panel, (x, k), (out, index * PANEL_COLUMNS), accumulate);
            }
            return;
        }
        // A single row is computed as two rows, as in every forward product.
        let doubled = (m == 1).then(|| [x, x].concat());
        let first = panels.start * PANEL_COLUMNS;
        let columns = (panels.end * PANEL_COLUMNS).min(self.output) - first;
        let stride = panels.len() * PANEL_COLUMNS;
        tile.resize(K_CHUNK.min(k) * stride, 0.0);
        let mut both = vec![0f32; if doubled.is_some() { 2 * columns } else { 0 }];
        if doubled.is_some() && accumulate {
            out.read(first, &mut both[..columns]);
        }
        for start in (0..k).step_by(K_CHUNK) {
            let chunk = start..(start + K_CHUNK).min(k);
            for (at, index) in panels.clone().enumerate() {
                let panel = self.panel(bytes, *expert, index);
                vectors.decode(panel, chunk.clone(), tile, at * PANEL_COLUMNS, stride);
            }
            let add = accumulate || start > 0;
            let w = (&tile[..chunk.len() * stride], stride);
            match &doubled {
                Some(x) => {
                    let both = OutputColumns::new(&mut both, columns);
                    both.library_product(0, (&x[start..], k), w, (2, chunk.len(), columns), add);
                }
                None => out.library_product(first, (&x[start..], k), w, (m, chunk.len(), columns), add),
            }
        }
        if doubled.is_some() {
            out.write(0, first, &both[..columns], false);
        }
    }

    /// Computes `dx = dy · Wᵀ` for the matrix of one expert. The result is bit for bit that of [`product`] by
    /// the decoded matrix.
    ///
    /// # Errors
    /// When the matrix is on a device.
    pub fn input_gradient(&self, expert: usize, dx: &mut [f32], dy: &[f32]) -> candle_core::Result<()> {
        let bytes = self.bytes()?;
        let (k, n) = (self.input, self.output);
        let m = dy.len() / n;
        let vectors = VectorInstructions::detect();
        let panels_per_chunk = K_CHUNK / PANEL_COLUMNS;
        let mut tile = vec![0f32; k * K_CHUNK.min(self.panels() * PANEL_COLUMNS)];
        for first in (0..self.panels()).step_by(panels_per_chunk) {
            let panels = first..(first + panels_per_chunk).min(self.panels());
            let stride = panels.len() * PANEL_COLUMNS;
            let tile = &mut tile[..k * stride];
            tile.par_chunks_mut(ROWS_PER_TASK * stride).enumerate().for_each(|(part, tile)| {
                let rows = part * ROWS_PER_TASK..(part * ROWS_PER_TASK + tile.len() / stride);
                for (at, index) in panels.clone().enumerate() {
                    let panel = self.panel(bytes, expert, index);
                    vectors.decode(panel, rows.clone(), tile, at * PANEL_COLUMNS, stride);
                }
            });
            let start = first * PANEL_COLUMNS;
            let chunk = (n - start).min(K_CHUNK);
            let dy = StridedMatrix { values: &dy[start..], row_stride: n, column_stride: 1 };
            let weight = StridedMatrix { values: tile, row_stride: 1, column_stride: stride };
            let config = GemmThreads::Pool.with_precision(self.precision);
            product(config, dx, dy, weight, (m, chunk, k), first > 0);
        }
        Ok(())
    }
}

/// Number of rows that one task decodes. It is a multiple of every block size.
const ROWS_PER_TASK: usize = 8 * BLOCK;

/// A part of a product: some panels of one expert and the rows of this expert.
struct Task {
    expert: usize,
    rows: Range<usize>,
    panels: Range<usize>,
    uses_row_kernel: bool,
}

/// Copies stored blocks `[columns][in / 32][16]` and scales `[columns][in / 32]` into a panel.
fn arrange_blocks(panel: &mut [u8], values: &[u8], scales: &[u8]) {
    let blocks = panel.len() / PackedFormat::MXFP4_BLOCK_BYTES;
    let (values, _) = values.as_chunks::<{ BLOCK / 2 }>();
    for (block, panel) in panel.chunks_exact_mut(PackedFormat::MXFP4_BLOCK_BYTES).enumerate() {
        let (of_scales, pairs) = panel.split_at_mut(PANEL_COLUMNS);
        for column in 0..scales.len() / blocks {
            of_scales[column] = scales[column * blocks + block];
            for (pair, &byte) in values[column * blocks + block].iter().enumerate() {
                pairs[pair * PANEL_COLUMNS + column] = byte;
            }
        }
    }
}

/// Returns whether a stored bf16 value is finite.
pub fn bf16_is_finite(bytes: [u8; 2]) -> bool {
    u16::from_le_bytes(bytes) & 0x7f80 != 0x7f80
}

/// Returns whether all values of a stored block are finite.
pub fn block_is_finite(bytes: &[u8; BLOCK / 2], scale: u8) -> bool {
    // A magnitude of 4 or 6 can overflow only if the scale is at least 2^126.
    scale < 253 || mxfp4::decode_block(bytes, scale).iter().all(|v| v.is_finite())
}

#[cfg(test)]
mod tests;
