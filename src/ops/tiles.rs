//! Matrix products of many rows, computed in register tiles.
//!
//! Both operands are packed into panels, one chunk of k at a time. For each k, a panel has the values of the
//! rows (or columns) of a tile side by side. So the innermost loop reads two contiguous streams for any
//! strides of the operands. A panel of columns stays in the L2 cache while all rows are multiplied. Meanwhile
//! the data of the next panel and the outputs of the tile are prefetched.
//!
//! The unit of panels is a word of 32 bits: one f32 value, or the bf16 values of two neighbouring k
//! ([`vectors`]).
//!
//! In f32 the bits are those of the `gemm` crate, as the tests below check. For each chunk of k, an element
//! is one chain of fused multiply-adds, which starts from 0 and is then added to the previous value.

mod packed_tiles;
pub(super) mod panels;
pub(super) mod vectors;

use super::prefetch::{prefetch, prefetch_second};
use super::product::{K_CHUNK, Precision, StridedMatrix};
use packed_tiles::PackedTiles;
use rayon::prelude::*;
use std::ops::Range;
#[cfg(target_arch = "x86_64")]
use vectors::x86;
use vectors::{SimdVector, SimdWords};

/// Number of vectors of columns per tile.
pub(super) const VECTORS: usize = 2;

/// Number of words per cache line.
pub(super) const LINE_WORDS: usize = 16;

/// A cache line of words. Panels are allocated in cache lines, so that no vector lies in two cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct CacheLine([u32; LINE_WORDS]);

/// Returns whether this processor has bf16 dot-product instructions.
pub(super) fn has_bf16_dot() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Computes `out[m, n] (+)= a[m, k] · b[k, n]` on at most `threads` threads. The result has the same bits on
/// any number of threads. Returns false without doing anything if the processor has no vector instructions or
/// an operand has no contiguous dimension.
pub(super) fn product(
    precision: Precision,
    threads: usize,
    out: &mut [f32],
    a: StridedMatrix,
    b: StridedMatrix,
    shape: (usize, usize, usize),
    accumulate: bool,
) -> bool {
    let (Some(a), Some(b)) = (UnpackedOperand::rows(a), UnpackedOperand::columns(b)) else { return false };
    #[cfg(target_arch = "x86_64")]
    {
        let job = TiledProduct { threads, a, b, shape, accumulate };
        match precision {
            Precision::Bf16Dot if has_bf16_dot() => job.run::<x86::Bf16x32>(out),
            Precision::F32 if is_x86_feature_detected!("avx512f") => job.run::<x86::F32x16>(out),
            Precision::F32 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => {
                job.run::<x86::F32x8>(out);
            }
            _ => return false,
        }
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// An operand before packing. In this file, a line of an operand is a row of `a` or a column of `b`. Panels
/// have lines side by side.
#[derive(Clone, Copy)]
pub(super) struct UnpackedOperand<'a> {
    values: &'a [f32],
    /// The stride between neighbouring lines if `is_k_contiguous`, otherwise the stride between neighbouring
    /// k. The other stride is 1.
    stride: usize,
    /// Whether the values of neighbouring k are neighbours in memory.
    is_k_contiguous: bool,
}

impl<'a> UnpackedOperand<'a> {
    fn rows(a: StridedMatrix<'a>) -> Option<Self> {
        Self::new(a.values, a.row_stride, a.column_stride)
    }

    fn columns(b: StridedMatrix<'a>) -> Option<Self> {
        Self::new(b.values, b.column_stride, b.row_stride)
    }

    fn new(values: &'a [f32], line_stride: usize, k_stride: usize) -> Option<Self> {
        match (line_stride, k_stride) {
            (stride, 1) => Some(Self { values, stride, is_k_contiguous: true }),
            (1, stride) => Some(Self { values, stride, is_k_contiguous: false }),
            _ => None,
        }
    }

    /// Returns the address of value `k` of `line`.
    fn at(&self, line: usize, k: usize) -> *const f32 {
        let index = if self.is_k_contiguous { line * self.stride + k } else { k * self.stride + line };
        self.values.as_ptr().wrapping_add(index)
    }
}

/// The output of tiles: some columns of a matrix. Other threads write the other columns.
#[derive(Clone, Copy)]
pub(super) struct TileOutput {
    first: *mut f32,
    stride: usize,
}

// SAFETY: threads write through copies, but never to the same columns. `TiledProduct::run` ensures this.
unsafe impl Send for TileOutput {}
// SAFETY: as above.
unsafe impl Sync for TileOutput {}

struct TiledProduct<'a> {
    threads: usize,
    a: UnpackedOperand<'a>,
    b: UnpackedOperand<'a>,
    /// `(m, k, n)`.
    shape: (usize, usize, usize),
    accumulate: bool,
}

/// Returns the words of cache lines.
pub(super) fn words_of(lines: &mut [CacheLine]) -> &mut [u32] {
    // SAFETY: a cache line consists of these words.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * LINE_WORDS) }
}

/// Allocates cache lines for `words` words.
fn alloc_cache_lines(words: usize) -> Vec<CacheLine> {
    // A transposed block is stored whole, so it may extend past the last word of a narrower panel.
    vec![CacheLine([0; LINE_WORDS]); words.div_ceil(LINE_WORDS) + 2]
}

impl TiledProduct<'_> {
    #[cfg(target_arch = "x86_64")]
    fn run<W: SimdWords>(&self, out: &mut [f32]) {
        let (m, k, n) = self.shape;
        let last = |operand: &UnpackedOperand, lines: usize| operand.at(lines - 1, k - 1) as usize;
        let end = |operand: &UnpackedOperand| operand.values.as_ptr_range().end as usize;
        assert!(last(&self.a, m) < end(&self.a) && last(&self.b, n) < end(&self.b), "product: operands");
        assert_eq!(out.len(), m * n, "product: output");
        let out = TileOutput { first: out.as_mut_ptr(), stride: n };
        let width = VECTORS * W::LANES;
        let panels = n.div_ceil(width);
        let steps_max = K_CHUNK.min(k).div_ceil(W::PER_WORD);
        let mut rows = PackedTiles::new::<W>(m, steps_max, self.threads);
        for start in (0..k).step_by(K_CHUNK) {
            let chunk = KRange { start, values: K_CHUNK.min(k - start) };
            // SAFETY: `product` chose the instructions, and the operand was checked above.
            unsafe { rows.pack::<W>(self.a, m, chunk) };
            let scratch = || [alloc_cache_lines(steps_max * width), alloc_cache_lines(steps_max * width)];
            let run = |scratch: &mut [Vec<CacheLine>; 2], panels| {
                self.multiply_panels::<W>(&rows, scratch, chunk, panels, out)
            };
            if self.threads > 1 && panels > 1 {
                // The number of tasks is small, because the packing of the first panel of a task does not
                // overlap with a product.
                let each = panels.div_ceil(self.threads * TASKS_PER_THREAD);
                let tasks = (0..panels.div_ceil(each)).into_par_iter().with_max_len(1);
                tasks.for_each_init(scratch, |scratch, task| {
                    run(scratch, task * each..panels.min((task + 1) * each))
                });
            } else {
                run(&mut scratch(), 0..panels);
            }
        }
    }

    /// Multiplies all rows by the columns of `panels`. While one panel is multiplied, the next panel is
    /// packed: a part of it after each tile.
    fn multiply_panels<W: SimdWords>(
        &self,
        rows: &PackedTiles,
        scratch: &mut [Vec<CacheLine>; 2],
        chunk: KRange,
        panels: Range<usize>,
        out: TileOutput,
    ) {
        let (m, _, n) = self.shape;
        let width = VECTORS * W::LANES;
        let steps = chunk.steps::<W>();
        let add = self.accumulate || chunk.start > 0;
        // A part consists of whole blocks of steps, so the last tiles may have nothing left to pack.
        let steps_per_tile = steps.div_ceil(m.div_ceil(W::ROWS)).next_multiple_of(W::LANES);
        let [mut panel, mut next] = scratch.each_mut().map(|lines| lines.as_mut_ptr().cast::<u32>());
        self.pack_columns::<W>(panel, chunk, panels.start * width, 0..steps);
        for index in panels.clone() {
            let column = index * width;
            let has_next = index + 1 < panels.end;
            for (pass, row) in (0..m).step_by(W::ROWS).enumerate() {
                let x = rows.tile(pass, W::ROWS * steps);
                let rows = W::ROWS.min(m - row);
                let next_steps = (pass * steps_per_tile).min(steps)..((pass + 1) * steps_per_tile).min(steps);
                if has_next {
                    self.prefetch_columns::<W>(chunk, column + width, next_steps.clone());
                }
                // SAFETY: the panels have the expected layout, and the tile is inside the output.
                unsafe {
                    let to = TileOutput { first: out.first.add(row * n + column), ..out };
                    let operands = TileOperands { x, w: panel, steps, next: (std::ptr::null(), 0) };
                    W::tile(rows, operands, to, width.min(n - column), add);
                }
                if has_next {
                    self.pack_columns::<W>(next, chunk, column + width, next_steps);
                }
            }
            std::mem::swap(&mut panel, &mut next);
        }
    }

    /// Packs the steps `steps` of the panel at `column`.
    fn pack_columns<W: SimdWords>(&self, panel: *mut u32, chunk: KRange, column: usize, steps: Range<usize>) {
        let width = VECTORS * W::LANES;
        let columns = width.min(self.shape.2 - column);
        let part = chunk.subrange::<W>(&steps);
        // SAFETY: the processor has the vector instructions, the operand was checked, and the panel has
        // enough space.
        unsafe { W::pack(self.b, column, columns, part, panel.add(steps.start * width), width) };
    }

    /// Prefetches the values that [`Self::pack_columns`] will read.
    fn prefetch_columns<W: SimdWords>(&self, chunk: KRange, column: usize, steps: Range<usize>) {
        let columns = (VECTORS * W::LANES).min(self.shape.2 - column);
        let KRange { start, values } = chunk.subrange::<W>(&steps);
        let (lines, length) = if self.b.is_k_contiguous { (columns, values) } else { (values, columns) };
        for line in 0..lines {
            for at in (0..length).step_by(LINE_WORDS) {
                let (column, k) = if self.b.is_k_contiguous {
                    (column + line, start + at)
                } else {
                    (column + at, start + line)
                };
                prefetch_second(self.b.at(column, k));
            }
        }
    }
}

/// Number of tasks per thread in a product on several threads.
const TASKS_PER_THREAD: usize = 4;

/// A range of k.
#[derive(Clone, Copy)]
pub(super) struct KRange {
    pub start: usize,
    pub values: usize,
}

impl KRange {
    /// Returns the number of steps of the range, which is its number of words per line.
    pub fn steps<W: SimdWords>(self) -> usize {
        self.values.div_ceil(W::PER_WORD)
    }

    /// Returns the subrange of k that `steps` cover.
    fn subrange<W: SimdWords>(self, steps: &Range<usize>) -> Self {
        let first = steps.start * W::PER_WORD;
        Self {
            start: self.start + first,
            values: self.values.min(steps.end * W::PER_WORD).saturating_sub(first),
        }
    }
}

/// The packed operands of a tile: `x [steps][rows]` and `w [steps][VECTORS · LANES]`.
#[derive(Clone, Copy)]
pub(super) struct TileOperands {
    x: *const u32,
    w: *const u32,
    steps: usize,
    /// The cache lines that later tiles read, and their number. One is prefetched per step.
    next: (*const CacheLine, usize),
}

/// Computes a tile with `R` rows and `columns` columns.
///
/// # Safety
/// The processor must have the vector instructions. The panels and the tile must be valid.
#[inline(always)]
unsafe fn tile<W: SimdWords, const R: usize>(
    panels: TileOperands,
    to: TileOutput,
    columns: usize,
    add: bool,
) {
    let TileOperands { x, w, steps, next: (next, next_lines) } = panels;
    // SAFETY: as below.
    let mut sums = [[unsafe { W::Vector::zero() }; VECTORS]; R];
    // SAFETY: guaranteed by the caller.
    unsafe {
        if add {
            for row in 0..R {
                (0..columns).step_by(LINE_WORDS).for_each(|c| prefetch(to.first.add(row * to.stride + c)));
            }
        }
        for step in 0..steps {
            if step < next_lines {
                prefetch_second(next.wrapping_add(step));
            }
            let at = w.add(step * VECTORS * W::LANES);
            let mut w = [W::Vector::zero(); VECTORS];
            for (v, w) in w.iter_mut().enumerate() {
                *w = W::Vector::load(at.add(v * W::LANES));
            }
            let x = x.add(step * R);
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = W::Vector::splat(*x.add(row));
                for v in 0..VECTORS {
                    sums[v] = W::add_product(sums[v], x, w[v]);
                }
            }
        }
        if columns == VECTORS * W::LANES {
            for (row, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let to = to.first.add(row * to.stride + v * W::LANES).cast();
                    let sum = if add { W::Vector::load(to).add(sum) } else { sum };
                    sum.store(to);
                }
            }
            return;
        }
        for (row, sums) in sums.into_iter().enumerate() {
            let to = to.first.add(row * to.stride);
            for (v, sum) in sums.into_iter().enumerate() {
                let columns = columns.saturating_sub(v * W::LANES).min(W::LANES);
                // The address of a vector without columns may be past the end of the output.
                W::store_columns(to.wrapping_add(v * W::LANES), sum, columns, add);
            }
        }
    }
}

/// Packs `lines` lines from `line` on, for a chunk of k, side by side into `to [steps][width]`. Missing
/// values of a word are 0.
///
/// # Safety
/// The processor must have the vector instructions, the lines must be valid, and `to` must have space for a
/// vector beyond the last word.
#[inline(always)]
unsafe fn pack_panel<W: SimdWords>(
    operand: UnpackedOperand,
    line: usize,
    lines: usize,
    chunk: KRange,
    to: *mut u32,
    width: usize,
) {
    let steps = chunk.steps::<W>();
    let (lanes, per_word) = (W::LANES, W::PER_WORD);
    // SAFETY: guaranteed by the caller.
    unsafe {
        if !operand.is_k_contiguous {
            for step in 0..steps {
                let k = step * per_word;
                for first in (0..lines).step_by(lanes) {
                    let from = operand.at(line + first, chunk.start + k);
                    let words = W::load_strided(from, operand.stride, chunk.values - k, lines - first);
                    words.store(to.add(step * width + first));
                }
            }
            return;
        }
        for first in (0..lines).step_by(lanes) {
            for step in (0..steps).step_by(lanes) {
                let k = step * per_word;
                let mut block = [W::Vector::zero(); 16];
                for (i, words) in block.iter_mut().enumerate().take(lanes.min(lines - first)) {
                    *words =
                        W::load_contiguous(operand.at(line + first + i, chunk.start + k), chunk.values - k);
                }
                W::transpose(&mut block);
                for (i, words) in block.into_iter().enumerate().take(lanes.min(steps - step)) {
                    words.store(to.add((step + i) * width + first));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::product::GemmThreads;
    use super::*;
    use crate::random::{Purpose, stream};
    use half::bf16;
    use rand::Rng;

    fn noise(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = stream(seed, Purpose::Problem, &[]);
        (0..len).map(|_| rng.random_range(-1f32..1.0)).collect()
    }

    /// Shapes (rows, k, columns) near the sizes of tiles, transposed blocks and chunks.
    const SHAPES: [(usize, usize, usize); 15] = [
        (1, 1, 1),
        (1, 64, 33),
        (5, 3, 16),
        (6, 16, 17),
        (7, 15, 31),
        (12, 17, 32),
        (13, 33, 63),
        (24, 512, 64),
        (25, 514, 65),
        (31, 515, 96),
        (40, 1030, 70),
        (100, 77, 129),
        (131, 261, 48),
        (3, 1536, 200),
        (2, 515, 3),
    ];
    /// Number of multiply-adds of the largest shape under Miri, which is ten thousand times slower.
    const MIRI_PRODUCTS_MAX: usize = 4_000;

    /// Returns `a [m, k]` and `b [k, n]` in every memory layout.
    fn layouts<'v>(
        (m, k, n): (usize, usize, usize),
        [a, a_transposed, b, b_transposed]: [&'v [f32]; 4],
    ) -> [(StridedMatrix<'v>, StridedMatrix<'v>); 4] {
        let (a_rows, a_columns) =
            (StridedMatrix::row_major(a, k), StridedMatrix::column_major(a_transposed, m));
        let (b_rows, b_columns) =
            (StridedMatrix::row_major(b, n), StridedMatrix::column_major(b_transposed, k));
        [(a_rows, b_rows), (a_rows, b_columns), (a_columns, b_rows), (a_columns, b_columns)]
    }

    fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
    }

    /// Calls `check(shape, operands, layout)` for all shapes and layouts.
    fn for_all_layouts(
        mut check: impl FnMut((usize, usize, usize), [&[f32]; 2], (StridedMatrix, StridedMatrix)),
    ) {
        for shape @ (m, k, n) in SHAPES {
            if cfg!(miri) && m * k * n > MIRI_PRODUCTS_MAX {
                continue;
            }
            let (a, b) = (noise(m * k, (m + k) as u64), noise(k * n, (k + n) as u64));
            let (a_transposed, b_transposed) = (transpose(&a, m, k), transpose(&b, k, n));
            for layout in layouts(shape, [&a, &a_transposed, &b, &b_transposed]) {
                check(shape, [&a, &b], layout);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn run<W: SimdWords>(
        threads: usize,
        start: f32,
        (a, b): (StridedMatrix, StridedMatrix),
        shape: (usize, usize, usize),
    ) -> Vec<f32> {
        let mut out = vec![start; shape.0 * shape.2];
        let (a, b) = (UnpackedOperand::rows(a).unwrap(), UnpackedOperand::columns(b).unwrap());
        let mut multiply =
            || TiledProduct { threads, a, b, shape, accumulate: start != 0.0 }.run::<W>(&mut out);
        if threads == 1 {
            multiply();
        } else {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(multiply);
        }
        out
    }

    /// Computes the product under Miri, which cannot run the assembly in the `gemm` crate. Adds one chain of
    /// fused multiply-adds per chunk of k, as the crate does.
    fn add_chains(out: &mut [f32], a: &[f32], b: &[f32], (m, k, n): (usize, usize, usize)) {
        for start in (0..k).step_by(K_CHUNK) {
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let chunk = start..k.min(start + K_CHUNK);
                out[row * n + column] +=
                    chunk.fold(0f32, |sum, i| a[row * k + i].mul_add(b[i * n + column], sum));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn tiles_have_the_bits_of_the_crate() {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if !avx2 {
            return eprintln!("skipped: no vectors");
        }
        let avx512 = is_x86_feature_detected!("avx512f");
        for_all_layouts(|shape @ (m, k, n), [a, b], layout| {
            // The crate uses another code path for these shapes.
            if m < 2 || n < 2 || matches!(k % K_CHUNK, 1 | 2) {
                return;
            }
            for start in [0.0, 0.5] {
                let mut expected = vec![start; m * n];
                if cfg!(miri) {
                    add_chains(&mut expected, a, b, shape);
                } else {
                    let (a, b) = (StridedMatrix::row_major(a, k), StridedMatrix::row_major(b, n));
                    super::super::product::product(
                        GemmThreads::CallingThread,
                        &mut expected,
                        a,
                        b,
                        shape,
                        start != 0.0,
                    );
                }
                let same =
                    |found: Vec<f32>| found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                // Miri takes seconds for a pool, so only this shape, which has two panels, uses one.
                let threads: &[usize] = if cfg!(miri) && shape != (6, 16, 17) { &[1] } else { &[1, 2] };
                for &threads in threads {
                    assert!(same(run::<x86::F32x8>(threads, start, layout, shape)), "{shape:?} by eights");
                    assert!(
                        !avx512 || same(run::<x86::F32x16>(threads, start, layout, shape)),
                        "{shape:?} by sixteens"
                    );
                }
            }
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn dot_products_of_bf16_are_those_of_rounded_operands() {
        if !has_bf16_dot() {
            return eprintln!("skipped: this processor has no dot products of bf16");
        }
        for_all_layouts(|shape @ (m, k, n), [a, b], layout| {
            let rounded = |values: &[f32]| -> Vec<f64> {
                values.iter().map(|&v| f64::from(bf16::from_f32(v).to_f32())).collect()
            };
            let (a, b) = (rounded(a), rounded(b));
            let found = run::<x86::Bf16x32>(1, 0.25, layout, shape);
            for row in 0..m {
                for column in 0..n {
                    let products = (0..k).map(|i| a[row * k + i] * b[i * n + column]);
                    let expected = 0.25 + products.clone().sum::<f64>();
                    let scale = 0.25 + products.map(f64::abs).sum::<f64>();
                    let error = (f64::from(found[row * n + column]) - expected).abs() / scale;
                    assert!(error < 1e-6, "{shape:?}: {error} at {row}, {column}");
                }
            }
            assert_eq!(found, run::<x86::Bf16x32>(2, 0.25, layout, shape), "{shape:?}: threads");
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_row_of_bf16_alone_equals_the_row_in_any_batch() {
        if !has_bf16_dot() {
            return eprintln!("skipped: this processor has no dot products of bf16");
        }
        for (k, n) in [(3, 5), (64, 33), (513, 64), (1030, 100)] {
            let rows = 40;
            let (x, w) = (noise(rows * k, 1), noise(k * n, 2));
            let of = |x: &[f32], m: usize| {
                run::<x86::Bf16x32>(
                    1,
                    0.0,
                    (StridedMatrix::row_major(x, k), StridedMatrix::row_major(&w, n)),
                    (m, k, n),
                )
            };
            let whole = of(&x, rows);
            for m in 1..=26 {
                for first in [0, 7, rows - m] {
                    let part = of(&x[first * k..(first + m) * k], m);
                    assert_eq!(part, whole[first * n..(first + m) * n], "k {k} n {n} m {m} first {first}");
                }
            }
        }
    }
}
