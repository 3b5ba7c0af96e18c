//! A bf16 copy of a matrix, already packed into the panels of tiles.
//!
//! Decode multiplies few rows by the same matrix again and again. A product by the copy reads two bytes per
//! weight, in memory order, and packs nothing. Its bits are those of [`super::product`], because the same
//! tile multiplies the same words.

use super::vectors::SimdWords;
#[cfg(target_arch = "x86_64")]
use super::vectors::x86;
use super::{
    CacheLine, KRange, LINE_WORDS, TASKS_PER_THREAD, TileOperands, TileOutput, UnpackedOperand, VECTORS,
    alloc_cache_lines, has_bf16_dot,
};
use crate::ops::product::{K_CHUNK, StridedMatrix};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Maximum number of rows of a product that makes the copy. A product of more rows is no decode.
const ROWS_MAX: usize = 128;

/// Number of words of each column that are packed before the next panel. Their rows stay in the TLB.
const PACKED_STEPS: usize = 32;

/// Minimum number of values of `x` for which several threads pack its rows.
const PARALLEL_ROWS_MIN: usize = 1 << 16;

/// The bf16 copies of the matrices of one weight. The first product of few rows by a matrix makes its copy.
/// The weight must not change afterwards.
#[derive(Clone)]
pub struct Bf16Copies(Arc<[OnceLock<Bf16Panels>]>);

impl Bf16Copies {
    /// Returns no copies yet for `matrices` matrices. Returns `None` if the processor has no bf16 dot
    /// products.
    pub fn new(matrices: usize) -> Option<Self> {
        has_bf16_dot().then(|| Self((0..matrices).map(|_| OnceLock::new()).collect()))
    }

    /// Returns the copy of matrix `index`, whose values are `w [k, n]`. Makes it if the product has few
    /// `rows`.
    pub(in super::super) fn get(
        &self,
        index: usize,
        rows: usize,
        threads: usize,
        w: &[f32],
        shape: (usize, usize),
    ) -> Option<&Bf16Panels> {
        let cell = self.0.get(index)?;
        if cell.get().is_none() && rows <= ROWS_MAX {
            // Not `get_or_init`: a thread that waits for others here may begin another product by this
            // matrix.
            let _ = cell.set(Bf16Panels::pack(threads, w, shape));
        }
        cell.get()
    }
}

/// A matrix `[k, n]` in bf16: for each panel of columns `[steps][VECTORS · LANES]`, as [`TileOperands`] has
/// it.
pub(in super::super) struct Bf16Panels {
    lines: Vec<CacheLine>,
    k: usize,
    n: usize,
}

impl Bf16Panels {
    #[cfg(target_arch = "x86_64")]
    fn pack(threads: usize, w: &[f32], shape: (usize, usize)) -> Self {
        Self::pack_words::<x86::Bf16x32>(threads, w, shape)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn pack(_: usize, _: &[f32], _: (usize, usize)) -> Self {
        unreachable!("no bf16 dot products")
    }

    /// Computes `out[m, n] (+)= x[m, k] · w` on at most `threads` threads.
    #[cfg(target_arch = "x86_64")]
    pub(in super::super) fn product(&self, threads: usize, out: &mut [f32], x: &[f32], accumulate: bool) {
        self.multiply::<x86::Bf16x32>(threads, out, x, accumulate);
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(in super::super) fn product(&self, _: usize, _: &mut [f32], _: &[f32], _: bool) {
        unreachable!("no bf16 dot products")
    }

    fn pack_words<W: SimdWords>(threads: usize, w: &[f32], (k, n): (usize, usize)) -> Self {
        assert!(has_bf16_dot() && w.len() == k * n && n > 0, "bf16 copy: {} values, {k} by {n}", w.len());
        let width = VECTORS * W::LANES;
        let steps = k.div_ceil(W::PER_WORD);
        let panel_lines = steps * width / LINE_WORDS;
        let mut lines = alloc_cache_lines(0);
        lines.resize(n.div_ceil(width) * panel_lines, CacheLine([0; LINE_WORDS]));
        let Some(columns) = UnpackedOperand::columns(StridedMatrix::row_major(w, n)) else { unreachable!() };
        let each = n.div_ceil(width).div_ceil(threads * TASKS_PER_THREAD).max(1);
        let pack_panels = |(task, lines): (usize, &mut [CacheLine])| {
            for start in (0..steps).step_by(PACKED_STEPS) {
                let part =
                    KRange { start: 0, values: k }.subrange::<W>(&(start..steps.min(start + PACKED_STEPS)));
                for (panel, lines) in lines.chunks_exact_mut(panel_lines).enumerate() {
                    let column = (task * each + panel) * width;
                    let to = lines.as_mut_ptr().cast::<u32>();
                    // SAFETY: the processor has the instructions. The operand has these columns and values,
                    // and the panel has space for all steps, whose vectors are whole.
                    unsafe {
                        W::pack(columns, column, width.min(n - column), part, to.add(start * width), width);
                    }
                }
            }
        };
        match threads > 1 {
            true => lines.par_chunks_mut(each * panel_lines).enumerate().for_each(pack_panels),
            false => lines.chunks_mut(each * panel_lines).enumerate().for_each(pack_panels),
        }
        Self { lines, k, n }
    }

    fn multiply<W: SimdWords>(&self, threads: usize, out: &mut [f32], x: &[f32], accumulate: bool) {
        let &Self { k, n, .. } = self;
        let m = out.len() / n;
        assert!(x.len() == m * k && out.len() == m * n, "bf16 copy: shapes");
        let rows = PackedRows::pack::<W>(threads, x, m, k);
        let out = TileOutput { first: out.as_mut_ptr(), stride: n };
        let panels = n.div_ceil(VECTORS * W::LANES);
        let multiply = |panels: Range<usize>| {
            panels.for_each(|panel| self.multiply_panel::<W>(panel, &rows, out, accumulate));
        };
        if threads > 1 && panels > 1 {
            let each = panels.div_ceil(threads * TASKS_PER_THREAD);
            let tasks = (0..panels.div_ceil(each)).into_par_iter().with_max_len(1);
            tasks.for_each(|task| multiply(task * each..panels.min((task + 1) * each)));
        } else {
            multiply(0..panels);
        }
    }

    fn multiply_panel<W: SimdWords>(
        &self,
        panel: usize,
        rows: &PackedRows,
        out: TileOutput,
        accumulate: bool,
    ) {
        let &Self { k, n, .. } = self;
        let steps = k.div_ceil(W::PER_WORD);
        let width = VECTORS * W::LANES;
        let column = panel * width;
        let words = self.lines[panel * steps * width / LINE_WORDS..].as_ptr().cast::<u32>();
        for (index, start) in (0..k).step_by(K_CHUNK).enumerate() {
            let chunk = KRange { start, values: K_CHUNK.min(k - start) };
            let steps = chunk.steps::<W>();
            let mut x = rows.chunk(index);
            // The words of the next chunk follow. They arrive while several tiles multiply this one.
            let w = words.wrapping_add(start / W::PER_WORD * width);
            let tiles = rows.count.div_ceil(rows.per_tile);
            let lines = if tiles > 1 { (steps * width / LINE_WORDS).div_ceil(tiles) } else { 0 };
            let mut next = w.wrapping_add(steps * width).cast::<CacheLine>();
            for row in (0..rows.count).step_by(rows.per_tile) {
                let count = rows.per_tile.min(rows.count - row);
                // SAFETY: the processor has the instructions, the panel and the rows have these steps, and
                // the tile is inside the output, whose other columns other threads write.
                unsafe {
                    let to = TileOutput { first: out.first.add(row * n + column), ..out };
                    let add = accumulate || start > 0;
                    let operands = TileOperands { x, w, steps, next: (next, lines) };
                    W::tile(count, operands, to, width.min(n - column), add);
                    x = x.add(count * steps);
                }
                next = next.wrapping_add(lines);
            }
        }
    }
}

/// The rows of `x` as tiles read them, one chunk of k after another.
struct PackedRows {
    lines: Vec<CacheLine>,
    /// Number of lines of a chunk.
    stride: usize,
    count: usize,
    /// Number of rows of a tile. All tiles but the last have it, and the last has nearly as many.
    per_tile: usize,
}

impl PackedRows {
    fn pack<W: SimdWords>(threads: usize, x: &[f32], m: usize, k: usize) -> Self {
        let per_tile = m.div_ceil(m.div_ceil(W::ROWS));
        let steps_max = K_CHUNK.min(k).div_ceil(W::PER_WORD);
        // A transposed block is stored whole, so it may extend past the last word of a chunk.
        let stride = (m * steps_max).div_ceil(LINE_WORDS) + 1;
        let mut lines = alloc_cache_lines(k.div_ceil(K_CHUNK) * stride * LINE_WORDS);
        let Some(rows) = UnpackedOperand::rows(StridedMatrix::row_major(x, k)) else { unreachable!() };
        let pack_chunk = |(index, lines): (usize, &mut [CacheLine])| {
            let start = index * K_CHUNK;
            if start >= k {
                return;
            }
            let chunk = KRange { start, values: K_CHUNK.min(k - start) };
            let mut to = lines.as_mut_ptr().cast::<u32>();
            for row in (0..m).step_by(per_tile) {
                let count = per_tile.min(m - row);
                // SAFETY: the processor has the instructions, the operand has these rows, and `lines` has
                // space for the words of all rows and a vector beyond.
                unsafe {
                    W::pack(rows, row, count, chunk, to, count);
                    to = to.add(count * chunk.steps::<W>());
                }
            }
        };
        match threads > 1 && x.len() >= PARALLEL_ROWS_MIN {
            true => lines.par_chunks_mut(stride).enumerate().for_each(pack_chunk),
            false => lines.chunks_mut(stride).enumerate().for_each(pack_chunk),
        }
        Self { lines, stride, count: m, per_tile }
    }

    fn chunk(&self, index: usize) -> *const u32 {
        self.lines[index * self.stride..].as_ptr().cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::product::Precision;
    use crate::random::{Purpose, stream};
    use rand::Rng;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no bf16 dot products")]
    fn a_product_by_the_copy_has_the_bits_of_a_product_by_the_matrix() {
        let mut rng = stream(0, Purpose::Problem, &[]);
        let mut noise = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.random_range(-1f32..1.0)).collect() };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let shapes =
            [(1, 1), (3, 1), (64, 33), (511, 17), (512, 32), (515, 96), (896, 70), (1026, 271), (2100, 40)];
        for (index, (k, n)) in shapes.into_iter().enumerate() {
            let (w, x, bias) = (noise(k * n), noise(131 * k), noise(131 * n));
            let Some(copies) = Bf16Copies::new(index + 1) else {
                eprintln!("skipped: this processor has no bf16 dot products");
                return;
            };
            assert!(copies.get(index, ROWS_MAX + 1, 1, &w, (k, n)).is_none(), "a product of many rows");
            for m in [1, 2, 11, 12, 13, 24, 32, 48, 63, 128, 131] {
                for (threads, accumulate) in [(1, true), (2, true), (2, false)] {
                    let mut expected = bias[..m * n].to_vec();
                    let mut found = expected.clone();
                    let (a, b) = (StridedMatrix::row_major(&x[..m * k], k), StridedMatrix::row_major(&w, n));
                    let shape = (m, k, n);
                    assert!(super::super::product(
                        Precision::Bf16Dot,
                        1,
                        &mut expected,
                        a,
                        b,
                        shape,
                        accumulate
                    ));
                    pool.install(|| {
                        let copy = copies.get(index, m, threads, &w, (k, n)).unwrap();
                        copy.product(threads, &mut found, &x[..m * k], accumulate);
                    });
                    let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{m} rows of {k} by {n} columns, {threads} threads");
                }
            }
        }
    }
}
