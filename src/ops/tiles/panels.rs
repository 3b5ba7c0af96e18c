//! Products by matrices in panels of tiles: a bf16 copy of a matrix, or packed blocks that are decoded panel
//! by panel.
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
use crate::ops::product::{K_CHUNK, Precision, StridedMatrix};
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
    pub(in super::super) fn product(&self, threads: usize, out: &mut [f32], x: &[f32], accumulate: bool) {
        let rows = 0..out.len() / self.n;
        let shape = (self.k, self.n);
        assert!(product(Precision::Bf16Dot, threads, &[(self, rows)], shape, out, x, accumulate));
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
}

impl PanelWords for &Bf16Panels {
    fn words<W: SimdWords>(&self, panel: usize, chunk: KRange, _: &mut [CacheLine]) -> ChunkWords {
        let steps = self.k.div_ceil(W::PER_WORD);
        let width = VECTORS * W::LANES;
        let words = self.lines[panel * steps * width / LINE_WORDS..].as_ptr().cast::<u32>();
        let words = words.wrapping_add(chunk.start / W::PER_WORD * width);
        let next = chunk.steps::<W>() * width;
        ChunkWords { words, next: words.wrapping_add(next).cast(), next_lines: next / LINE_WORDS }
    }
}

/// A matrix whose panels of columns are in memory, or are decoded when a product needs them.
pub(in super::super) trait PanelWords: Sync {
    /// Returns the words of `chunk` of a panel, `[steps][VECTORS · LANES]`. `scratch` has space for them.
    fn words<W: SimdWords>(&self, panel: usize, chunk: KRange, scratch: &mut [CacheLine]) -> ChunkWords;

    /// Computes the sums of a tile of few rows without words in memory: for each row the columns of a panel.
    /// `x` is `[steps][rows]`. Returns the number of rows, or 0 if the matrix does not support them.
    ///
    /// # Safety
    /// `x` must be valid, and the processor must have the instructions of `W`.
    unsafe fn multiply_few<W: SimdWords>(
        &self,
        _panel: usize,
        _chunk: KRange,
        _x: *const u32,
        _rows: usize,
        _sums: &mut FewSums,
    ) -> usize {
        0
    }
}

/// Maximum number of rows of [`PanelWords::multiply_few`].
pub(in super::super) const FEW_ROWS_MAX: usize = 2;

/// The sums of few rows.
pub(in super::super) type FewSums = [[f32; VECTORS * LINE_WORDS]; FEW_ROWS_MAX];

/// The words of a chunk of a panel, and the memory that a product needs next.
pub(in super::super) struct ChunkWords {
    pub words: *const u32,
    pub next: *const CacheLine,
    pub next_lines: usize,
}

/// Number of rows that are multiplied by a panel before the next rows. This bounds the memory of packed rows.
const ROWS_TOGETHER: usize = 512;

/// Computes `out (+)= x · w` for the rows of each part by the part's matrix `[k, n]`, on at most `threads`
/// threads. A row has the bits of [`super::product`]. Parts are in ascending order of rows. Returns false
/// without doing anything if the processor has no vector instructions.
pub(in super::super) fn product<M: PanelWords>(
    precision: Precision,
    threads: usize,
    parts: &[(M, Range<usize>)],
    shape: (usize, usize),
    out: &mut [f32],
    x: &[f32],
    accumulate: bool,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let job = PanelProduct { threads, parts, shape, accumulate };
        match precision {
            Precision::Bf16Dot if has_bf16_dot() => job.run::<x86::Bf16x32>(out, x),
            Precision::F32 if is_x86_feature_detected!("avx512f") => job.run::<x86::F32x16>(out, x),
            Precision::F32 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => {
                job.run::<x86::F32x8>(out, x);
            }
            _ => return false,
        }
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

struct PanelProduct<'a, M> {
    threads: usize,
    parts: &'a [(M, Range<usize>)],
    /// `(k, n)`.
    shape: (usize, usize),
    accumulate: bool,
}

impl<M: PanelWords> PanelProduct<'_, M> {
    fn run<W: SimdWords>(&self, out: &mut [f32], x: &[f32]) {
        let (k, n) = self.shape;
        let mut end = 0;
        for (_, rows) in self.parts {
            assert!(rows.start >= end && rows.end >= rows.start, "product by panels: rows");
            end = rows.end;
        }
        assert!(k > 0 && x.len() >= end * k && out.len() >= end * n, "product by panels: shapes");
        let out = TileOutput { first: out.as_mut_ptr(), stride: n };
        let panels = n.div_ceil(VECTORS * W::LANES);
        let blocks = self.parts.iter().flat_map(|(matrix, rows)| {
            rows.clone()
                .step_by(ROWS_TOGETHER)
                .map(move |row| (matrix, row..(row + ROWS_TOGETHER).min(rows.end)))
        });
        let blocks: Vec<(&M, Range<usize>)> = blocks.collect();
        // Few experts have many rows, or many have few: the packed rows of a wave stay small.
        let mut rest = &blocks[..];
        while !rest.is_empty() {
            let mut rows = 0;
            let fits = |(_, of): &&(&M, Range<usize>)| {
                rows += of.len();
                rows <= ROWS_TOGETHER
            };
            let (wave, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            let pack = |part: &(_, Range<usize>)| {
                let (matrix, rows): (&M, _) = (part.0, &part.1);
                let x = &x[rows.start * k..rows.end * k];
                // SAFETY: `out` has these rows.
                let first = unsafe { out.first.add(rows.start * n) };
                (matrix, PackedRows::pack::<W>(self.threads, x, rows.len(), k), TileOutput { first, ..out })
            };
            let wave: Vec<(&M, PackedRows, TileOutput)> = wave.iter().map(pack).collect();
            let each = match self.threads > 1 {
                true => (panels * wave.len()).div_ceil(self.threads * TASKS_PER_THREAD),
                false => panels * wave.len(),
            };
            let scratch = || alloc_cache_lines(K_CHUNK.min(k).div_ceil(W::PER_WORD) * VECTORS * W::LANES);
            let multiply = |scratch: &mut Vec<CacheLine>, task: usize| {
                for index in task * each..((task + 1) * each).min(panels * wave.len()) {
                    let (matrix, rows, out) = &wave[index / panels];
                    self.multiply_panel::<W>(matrix, index % panels, rows, *out, scratch);
                }
            };
            let tasks = (panels * wave.len()).div_ceil(each);
            if tasks > 1 {
                (0..tasks).into_par_iter().with_max_len(1).for_each_init(scratch, multiply);
            } else {
                multiply(&mut scratch(), 0);
            }
        }
    }

    fn multiply_panel<W: SimdWords>(
        &self,
        matrix: &M,
        panel: usize,
        rows: &PackedRows,
        out: TileOutput,
        scratch: &mut [CacheLine],
    ) {
        let (k, n) = self.shape;
        let width = VECTORS * W::LANES;
        let column = panel * width;
        for (index, start) in (0..k).step_by(K_CHUNK).enumerate() {
            let chunk = KRange { start, values: K_CHUNK.min(k - start) };
            let steps = chunk.steps::<W>();
            let mut x = rows.chunk(index);
            let mut sums = FewSums::default();
            let few = match rows.count {
                // SAFETY: the processor has the instructions, and `x` has these rows and steps.
                1..=FEW_ROWS_MAX => unsafe {
                    matrix.multiply_few::<W>(panel, chunk, x, rows.count, &mut sums)
                },
                _ => 0,
            };
            if few > 0 {
                let columns = width.min(n - column);
                for (row, sums) in sums[..few].iter().enumerate() {
                    for (at, sum) in sums[..columns].iter().enumerate() {
                        // SAFETY: the output has these rows and columns, which no other thread writes.
                        unsafe {
                            let to = out.first.add(row * n + column + at);
                            *to = if self.accumulate || start > 0 { *to + sum } else { *sum };
                        }
                    }
                }
                continue;
            }
            let ChunkWords { words, mut next, next_lines } = matrix.words::<W>(panel, chunk, scratch);
            // What the next chunk needs arrives while several tiles multiply this one.
            let tiles = rows.count.div_ceil(rows.per_tile);
            let lines = if tiles > 1 { next_lines.div_ceil(tiles) } else { 0 };
            for row in (0..rows.count).step_by(rows.per_tile) {
                let count = rows.per_tile.min(rows.count - row);
                // SAFETY: the processor has the instructions, the panel and the rows have these steps, and
                // the tile is inside the output, whose other columns other threads write.
                unsafe {
                    let to = TileOutput { first: out.first.add(row * n + column), ..out };
                    let add = self.accumulate || start > 0;
                    let operands = TileOperands { x, w: words, steps, next: (next, lines) };
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
