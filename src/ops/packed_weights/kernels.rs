//! The inner loops of products by packed weights, compiled for each vector width.
//!
//! Every element is one chain of fused multiply-adds over a chunk of k, as in the `gemm` crate. Decoding is
//! exact. So the product by packed weights is bit for bit the product by the decoded matrix.

mod lanes;
mod transpose;

pub use transpose::transpose;

use super::blocks::GROUP;
use super::blocks::decode::BlockColumns;
use super::{PANEL_COLUMNS, PackedFormat};
use crate::ops::mxfp4::{BLOCK, MAGNITUDES, scale};
use crate::ops::prefetch::prefetch;
use crate::ops::product::K_CHUNK;
use lanes::SimdLanes;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::ops::Range;

/// Number of vectors of neighbouring columns that are computed in one pass over a panel.
const VECTORS: usize = 4;

/// Prefetch distance in a panel, in bytes.
const PREFETCH_DISTANCE: usize = 2048;

/// Bytes per cache line.
const LINE: usize = 64;

/// One panel of a packed matrix.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub format: PackedFormat,
    /// `in` rows of [`PANEL_COLUMNS`] weights, in the packed format.
    pub bytes: &'a [u8],
    /// Number of columns of the matrix in this panel. The last panel may have fewer than [`PANEL_COLUMNS`].
    pub columns: usize,
}

/// The output of a panel: some columns of a matrix. Other threads write the other columns.
#[derive(Clone, Copy)]
pub(super) struct OutputColumns {
    first: *mut f32,
    len: usize,
    stride: usize,
}

// SAFETY: threads write through copies, but never to the same element, because
// `PackedMatrix::forward_grouped` gives each element of the output to one task.
unsafe impl Send for OutputColumns {}
// SAFETY: as above.
unsafe impl Sync for OutputColumns {}

impl OutputColumns {
    /// Returns all columns of `out`, which has rows of `stride` values. The caller must keep `out` borrowed
    /// until the product is finished.
    pub fn new(out: &mut [f32], stride: usize) -> Self {
        Self { first: out.as_mut_ptr(), len: out.len(), stride }
    }

    /// Returns the address of (`row`, `column`). From there, `columns` values may be written.
    fn address(&self, row: usize, column: usize, columns: usize) -> *mut f32 {
        let start = row * self.stride + column;
        assert!(column + columns <= self.stride && start + columns <= self.len, "packed product: output");
        // SAFETY: the assertion checked the index.
        unsafe { self.first.add(start) }
    }

    /// Returns the same columns without the rows before `row`.
    pub fn skip_rows(&self, row: usize) -> Self {
        let start = row * self.stride;
        assert!(start <= self.len, "packed product: output");
        // SAFETY: just checked.
        Self { first: unsafe { self.first.add(start) }, len: self.len - start, stride: self.stride }
    }

    /// Copies values of the first row to `to`, starting at `column`.
    pub fn read(&self, column: usize, to: &mut [f32]) {
        let address = self.address(0, column, to.len());
        for (i, value) in to.iter_mut().enumerate() {
            // SAFETY: `address` checked all these values, and no other thread uses these columns.
            *value = unsafe { *address.add(i) };
        }
    }

    /// Writes `sums` to the columns of `row`, starting at `column`. If `add` is true, adds them instead.
    pub fn write(&self, row: usize, column: usize, sums: &[f32], add: bool) {
        let address = self.address(row, column, sums.len());
        for (i, &sum) in sums.iter().enumerate() {
            // SAFETY: `address` checked all these values, and no other thread uses these columns.
            unsafe {
                let out = address.add(i);
                *out = if add { *out + sum } else { sum };
            }
        }
    }

    /// Multiplies `x [m, k]` by the decoded weights `w [k, width]` with the `gemm` crate. The result goes to
    /// the columns from `column` on.
    pub fn library_product(
        &self,
        column: usize,
        (x, x_stride): (&[f32], usize),
        (w, w_stride): (&[f32], usize),
        (m, k, width): (usize, usize, usize),
        add: bool,
    ) {
        assert!(
            width <= w_stride && w.len() >= k * w_stride && x.len() >= (m - 1) * x_stride + k,
            "packed product: operands"
        );
        let first = self.address(0, column, width);
        self.address(m - 1, column, width);
        // SAFETY: all addresses were checked, and no other thread uses these columns.
        unsafe {
            gemm::gemm(
                m,
                width,
                k,
                first,
                1,
                self.stride as isize,
                add,
                x.as_ptr(),
                1,
                x_stride as isize,
                w.as_ptr(),
                1,
                w_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Calls `on_weights(k, weights)` for every k in `rows`, in ascending order. `weights` are the weights of the
/// columns from `column` on.
///
/// # Safety
/// As for [`SimdLanes`]. `rows` and the columns must be in the panel, and `rows` must consist of whole MXFP4
/// blocks.
#[inline(always)]
unsafe fn for_each_weight_row<L: SimdLanes>(
    panel: Panel,
    rows: Range<usize>,
    column: usize,
    mut on_weights: impl FnMut(usize, [L; VECTORS]),
) {
    let base = panel.bytes.as_ptr();
    match panel.format {
        PackedFormat::Bf16 | PackedFormat::Bf16Rows => {
            for k in rows {
                // SAFETY: row k, with PANEL_COLUMNS bf16 values, is inside the panel.
                unsafe {
                    let row = base.add((k * PANEL_COLUMNS + column) * 2);
                    prefetch(row.wrapping_add(PREFETCH_DISTANCE));
                    prefetch(row.wrapping_add(PREFETCH_DISTANCE + LINE));
                    let mut weights = [L::zero(); VECTORS];
                    for (v, w) in weights.iter_mut().enumerate() {
                        *w = L::bf16(row.add(v * L::LANES * 2));
                    }
                    on_weights(k, weights);
                }
            }
        }
        PackedFormat::Mxfp4 => {
            for block in rows.start / BLOCK..rows.end / BLOCK {
                // SAFETY: the block, with PANEL_COLUMNS scales and BLOCK / 2 rows of PANEL_COLUMNS bytes, is
                // inside the panel.
                unsafe {
                    let start = base.add(block * PackedFormat::MXFP4_BLOCK_BYTES + column);
                    let mut scales = [L::zero(); VECTORS];
                    for (v, s) in scales.iter_mut().enumerate() {
                        *s = L::scales(start.add(v * L::LANES));
                    }
                    for pair in 0..BLOCK / 2 {
                        let row = start.add((1 + pair) * PANEL_COLUMNS);
                        prefetch(row.wrapping_add(PREFETCH_DISTANCE));
                        let (mut low, mut high) = (scales, scales);
                        for v in 0..VECTORS {
                            let [l, h] = L::nibbles(row.add(v * L::LANES));
                            low[v] = l.mul(scales[v]);
                            high[v] = h.mul(scales[v]);
                        }
                        on_weights(block * BLOCK + 2 * pair, low);
                        on_weights(block * BLOCK + 2 * pair + 1, high);
                    }
                }
            }
        }
        PackedFormat::Blocks(_) | PackedFormat::BlockRows(_) => unreachable!("blocks have their own kernels"),
    }
}

/// Multiplies `R` rows of `x`, from `row` on, by the weights of the panel for every k in `rows`.
///
/// # Safety
/// As for [`for_each_weight_row`]. The rows of `x`, which are `stride` values apart, must be valid.
#[inline(always)]
unsafe fn multiply_row_block<L: SimdLanes, const R: usize>(
    panel: Panel,
    rows: Range<usize>,
    (x, stride): (&[f32], usize),
    row: usize,
    (out, first): (OutputColumns, usize),
    add: bool,
) {
    for column in (0..panel.columns).step_by(VECTORS * L::LANES) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sums = [[L::zero(); VECTORS]; R];
            let x = x.as_ptr().add(row * stride);
            for_each_weight_row::<L>(
                panel,
                rows.clone(),
                column,
                #[inline(always)]
                |k, weights| {
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let x = L::splat((*x.add(r * stride + k)).to_bits());
                        for v in 0..VECTORS {
                            sums[v] = x.fma(weights[v], sums[v]);
                        }
                    }
                },
            );
            let mut values = [0f32; PANEL_COLUMNS];
            let columns = (panel.columns - column).min(VECTORS * L::LANES);
            for (r, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    sum.store(values.as_mut_ptr().add(v * L::LANES).cast());
                }
                out.write(row + r, first + column, &values[..columns], add);
            }
        }
    }
}

/// Multiplies all rows of `x` by a panel, one chunk of k after the other.
///
/// # Safety
/// As for [`multiply_row_block`].
#[inline(always)]
unsafe fn multiply_rows<L: SimdLanes>(
    panel: Panel,
    (x, k): (&[f32], usize),
    out: (OutputColumns, usize),
    accumulate: bool,
) {
    let m = x.len() / k;
    for start in (0..k).step_by(K_CHUNK) {
        let rows = start..(start + K_CHUNK).min(k);
        let add = accumulate || start > 0;
        let mut row = 0;
        // SAFETY: guaranteed by the caller.
        unsafe {
            while row < m {
                let (rows, x) = (rows.clone(), (x, k));
                match (m - row).min(L::ROWS) {
                    1 => multiply_row_block::<L, 1>(panel, rows, x, row, out, add),
                    2 => multiply_row_block::<L, 2>(panel, rows, x, row, out, add),
                    3 => multiply_row_block::<L, 3>(panel, rows, x, row, out, add),
                    4 => multiply_row_block::<L, 4>(panel, rows, x, row, out, add),
                    5 => multiply_row_block::<L, 5>(panel, rows, x, row, out, add),
                    _ => multiply_row_block::<L, 6>(panel, rows, x, row, out, add),
                }
                row += (m - row).min(L::ROWS);
            }
        }
    }
}

/// Decodes the weights of the panel for every k in `rows`. Writes them to `to`, `[rows][width]`.
///
/// # Safety
/// As for [`for_each_weight_row`]. Every row of `to` must have space for [`PANEL_COLUMNS`] values.
#[inline(always)]
unsafe fn decode<L: SimdLanes>(panel: Panel, rows: Range<usize>, to: *mut f32, width: usize) {
    let first = rows.start;
    for column in (0..PANEL_COLUMNS).step_by(VECTORS * L::LANES) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for_each_weight_row::<L>(
                panel,
                rows.clone(),
                column,
                #[inline(always)]
                |k, weights| {
                    let row = to.add((k - first) * width + column);
                    for (v, weights) in weights.into_iter().enumerate() {
                        weights.store(row.add(v * L::LANES).cast());
                    }
                },
            );
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn multiply_rows_avx512(
    panel: Panel,
    x: (&[f32], usize),
    out: (OutputColumns, usize),
    accumulate: bool,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { multiply_rows::<__m512>(panel, x, out, accumulate) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_rows_avx2(
    panel: Panel,
    x: (&[f32], usize),
    out: (OutputColumns, usize),
    accumulate: bool,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { multiply_rows::<__m256>(panel, x, out, accumulate) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn decode_avx512(panel: Panel, rows: Range<usize>, to: *mut f32, width: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { decode::<__m512>(panel, rows, to, width) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn decode_avx2(panel: Panel, rows: Range<usize>, to: *mut f32, width: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { decode::<__m256>(panel, rows, to, width) }
}

/// The vector instructions of a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VectorInstructions {
    Avx512,
    Avx2,
    /// No supported vector instructions. Weights are decoded one by one, and the `gemm` crate multiplies.
    Plain,
}

impl VectorInstructions {
    /// Returns the widest vector instructions of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return VectorInstructions::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return VectorInstructions::Avx2;
            }
        }
        VectorInstructions::Plain
    }

    /// Multiplies the rows of `x [m, in]` by `panel`. `x` is (values, row width), and `out` is (output, first
    /// column). Returns false without doing anything if the processor has no vector instructions.
    pub fn skinny_gemm(
        self,
        panel: Panel,
        x: (&[f32], usize),
        out: (OutputColumns, usize),
        accumulate: bool,
    ) -> bool {
        panel.check(0..x.1);
        assert!(x.1 > 0 && x.0.len().is_multiple_of(x.1), "packed product: rows");
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has the vector instructions, the panel is complete, and `x` has whole
            // rows.
            VectorInstructions::Avx512 => unsafe { multiply_rows_avx512(panel, x, out, accumulate) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            VectorInstructions::Avx2 => unsafe { multiply_rows_avx2(panel, x, out, accumulate) },
            _ => return false,
        }
        true
    }

    /// Decodes the weights for every k in `rows` into `tile`, from `column` on. Rows of `tile` have `width`
    /// values.
    ///
    /// Missing columns of a last panel are written as 0, so each row must have space for a whole panel.
    pub fn decode(self, panel: Panel, rows: Range<usize>, tile: &mut [f32], column: usize, width: usize) {
        panel.check(rows.clone());
        let last = rows.len().saturating_sub(1) * width + column + PANEL_COLUMNS;
        assert!(column + PANEL_COLUMNS <= width && last <= tile.len(), "packed product: tile");
        if let Some(kind) = panel.format.block_type() {
            let groups = (0, PANEL_COLUMNS / GROUP);
            let (k, count) = (rows.start, rows.len());
            let columns = BlockColumns { kind, panel: panel.bytes, k, count, groups };
            return columns.decode(&mut tile[column..], width);
        }
        let to = tile[column..].as_mut_ptr();
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has the vector instructions, the panel is complete, and the tile has
            // enough space.
            VectorInstructions::Avx512 => unsafe { decode_avx512(panel, rows, to, width) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            VectorInstructions::Avx2 => unsafe { decode_avx2(panel, rows, to, width) },
            _ => {
                for (at, k) in rows.enumerate() {
                    let row = &mut tile[at * width + column..][..PANEL_COLUMNS];
                    row.iter_mut().enumerate().for_each(|(c, value)| *value = panel.value(k, c));
                }
            }
        }
    }
}

impl Panel<'_> {
    /// Checks that `rows` are in the panel and consist of whole blocks. Panics otherwise.
    fn check(&self, rows: Range<usize>) {
        let whole = self.format != PackedFormat::Mxfp4
            || (rows.start.is_multiple_of(BLOCK) && rows.end.is_multiple_of(BLOCK));
        assert!(whole && self.columns <= PANEL_COLUMNS, "packed product: rows {rows:?} cut a block");
        assert!(self.format.panel_bytes(rows.end) <= self.bytes.len(), "packed product: rows {rows:?}");
    }

    /// Returns the weight for `k` and `column`.
    pub fn value(&self, k: usize, column: usize) -> f32 {
        match self.format {
            PackedFormat::Bf16 | PackedFormat::Bf16Rows => {
                let at = (k * PANEL_COLUMNS + column) * 2;
                half::bf16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32()
            }
            PackedFormat::Mxfp4 => {
                let block = &self.bytes[k / BLOCK * PackedFormat::MXFP4_BLOCK_BYTES..];
                let byte = block[(1 + k % BLOCK / 2) * PANEL_COLUMNS + column];
                let nibble = if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
                let magnitude = MAGNITUDES[usize::from(nibble & 7)];
                let value = if nibble & 8 == 0 { magnitude } else { -magnitude };
                value * scale(block[column])
            }
            PackedFormat::Blocks(kind) | PackedFormat::BlockRows(kind) => {
                let layout = kind.layout();
                let block = &self.bytes[k / layout.values * layout.panel_block_bytes()..];
                layout.value(block, k % layout.values, column)
            }
        }
    }
}
