//! Skinny matrix products, which have few rows as in decode. The weights are not packed first.
//!
//! Each weight is read once, in memory order. The `gemm` crate reads strips of 64 columns for a few rows of
//! `x`, and reads the strips again for the next rows.
//!
//! A row has the same bits as in a product of many rows. For each chunk of k, an element is one chain of
//! fused multiply-adds or of bf16 dot products, which starts from 0 and is then added to the previous value.
//! In f32 the result is bit for bit that of the `gemm` crate, as the tests of [`super::product`] check. In
//! bf16 it is that of [`super::tiles`].

use super::prefetch::prefetch_second;
use super::product::{K_CHUNK, Precision};
use super::tiles::{LINE_WORDS, vectors::SimdVector, vectors::SimdWords};
#[cfg(target_arch = "x86_64")]
use super::tiles::{has_bf16_dot, vectors::x86};
use rayon::prelude::*;

/// Maximum number of rows. For more rows, packing is faster.
const ROWS_MAX: usize = 48;

/// Minimum number of weights. Smaller matrices stay in the caches, and the crate is faster.
const WEIGHTS_MIN: usize = 1 << 17;

/// Minimum number of columns per thread. If the whole matrix has fewer columns, the crate is faster.
const COLUMNS_MIN: usize = 256;

/// The columns of a thread and of a strip are a multiple of this number: two wide vectors, or four short
/// vectors.
const COLUMNS: usize = 32;

/// Minimum prefetch distance, in rows of the weights.
const ROWS_AHEAD_MIN: usize = 12;

/// Maximum number of vectors in [`COLUMNS`].
const VECTORS_MAX: usize = 4;

/// Operands of a product: `x [m, k]` and `w [k, n]`, contiguous.
struct Operands<'a> {
    x: &'a [f32],
    w: &'a [f32],
    k: usize,
    n: usize,
    /// Whether the product is added to the output.
    accumulate: bool,
}

/// [`add_columns`], compiled for one instruction set.
///
/// # Safety
/// The processor must have this instruction set.
type Kernel = unsafe fn(&Operands, usize, &mut [&mut [f32]]);

#[cfg(target_arch = "x86_64")]
mod kernels {
    use super::{Operands, add_columns, x86};

    /// # Safety
    /// The processor must have AVX-512.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512(operands: &Operands, start: usize, out: &mut [&mut [f32]]) {
        // SAFETY: guaranteed by the caller.
        unsafe { add_columns::<x86::F32x16>(operands, start, out) }
    }

    /// # Safety
    /// The processor must have AVX2 and fused multiply-adds.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn avx2(operands: &Operands, start: usize, out: &mut [&mut [f32]]) {
        // SAFETY: guaranteed by the caller.
        unsafe { add_columns::<x86::F32x8>(operands, start, out) }
    }

    /// # Safety
    /// The processor must have AVX-512 with dot products of bf16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub unsafe fn avx512_bf16(operands: &Operands, start: usize, out: &mut [&mut [f32]]) {
        // SAFETY: guaranteed by the caller.
        unsafe { add_columns::<x86::Bf16x32>(operands, start, out) }
    }
}

/// A skinny product kernel that this processor supports.
pub(super) struct SkinnyGemm(Kernel);

impl SkinnyGemm {
    /// Returns the kernel for a product of shape `(m, k, n)`. Returns `None` if the kernel would be slower
    /// than the alternatives, or would give other bits than the crate. The bits differ in f32 if the last
    /// chunk has one or two values of k, for which the crate uses another code path.
    pub(super) fn for_shape(precision: Precision, (m, k, n): (usize, usize, usize)) -> Option<Self> {
        let same_bits = precision != Precision::F32 || !matches!(k % K_CHUNK, 1 | 2);
        let is_faster = m <= ROWS_MAX && n >= COLUMNS_MIN && k * n >= WEIGHTS_MIN;
        if same_bits && is_faster { Self::detect(precision) } else { None }
    }

    /// Returns the fastest kernel of this processor.
    #[cfg(target_arch = "x86_64")]
    fn detect(precision: Precision) -> Option<Self> {
        match precision {
            Precision::Bf16Dot => has_bf16_dot().then_some(Self(kernels::avx512_bf16)),
            Precision::F32 if is_x86_feature_detected!("avx512f") => Some(Self(kernels::avx512)),
            Precision::F32 => Self::avx2(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect(_: Precision) -> Option<Self> {
        None
    }

    #[cfg(target_arch = "x86_64")]
    fn avx2() -> Option<Self> {
        let is_supported = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        is_supported.then_some(Self(kernels::avx2))
    }

    /// Computes `out[m, n] (+)= x[m, k] · w[k, n]` for contiguous matrices, on at most `threads` threads.
    pub(super) fn product(
        &self,
        threads: usize,
        out: &mut [f32],
        x: &[f32],
        w: &[f32],
        (k, n): (usize, usize),
        accumulate: bool,
    ) {
        assert!(x.len() * n == out.len() * k && w.len() == k * n, "skinny_gemm: shapes");
        let operands = Operands { x, w, k, n, accumulate };
        let width = n.div_ceil(threads).max(COLUMNS_MIN).next_multiple_of(COLUMNS);
        let mut parts: Vec<Vec<&mut [f32]>> = (0..n.div_ceil(width)).map(|_| vec![]).collect();
        for row in out.chunks_exact_mut(n) {
            parts.iter_mut().zip(row.chunks_mut(width)).for_each(|(part, columns)| part.push(columns));
        }
        let add = |(index, mut part): (usize, Vec<&mut [f32]>)| {
            // SAFETY: a value of this type exists only if the processor has the instructions.
            unsafe { self.0(&operands, index * width, &mut part) }
        };
        if parts.len() > 1 {
            parts.into_par_iter().enumerate().for_each(add);
        } else {
            parts.into_iter().enumerate().for_each(add);
        }
    }
}

/// Computes the columns from `start` on of every row. `out` has one slice of columns per row.
///
/// # Safety
/// The processor must have the instructions of `W`.
#[inline(always)]
unsafe fn add_columns<W: SimdWords>(operands: &Operands, start: usize, out: &mut [&mut [f32]]) {
    let &Operands { x, w, k, n, accumulate } = operands;
    let (rows, width) = (out.len(), out[0].len());
    let block_sizes = BlockSizes::for_rows::<W>(rows);
    let strip_max = block_sizes.strip(rows, width);
    // If rows of sums were a power of two apart, they would map to the same cache sets.
    let stride = strip_max + LINE_WORDS;
    let mut sums = vec![0f32; rows * stride];
    // SAFETY: guaranteed by the caller.
    let x = unsafe { rows_to_words::<W>(x, k) };
    let words = k.div_ceil(W::PER_WORD);
    for first in (0..width).step_by(strip_max) {
        let strip = strip_max.min(width - first);
        for chunk in (0..k).step_by(K_CHUNK) {
            let depth = K_CHUNK.min(k - chunk);
            sums.fill(0.0);
            let weights = Weights { values: &w[chunk * n + start + first..], n, columns: strip };
            let x = Rows { words: &x[chunk / W::PER_WORD..], stride: words };
            // SAFETY: guaranteed by the caller.
            unsafe {
                match block_sizes.depth {
                    1 => add_rows::<W, 1>(&mut sums, stride, x, weights, depth),
                    2 => add_rows::<W, 2>(&mut sums, stride, x, weights, depth),
                    3 => add_rows::<W, 3>(&mut sums, stride, x, weights, depth),
                    4 => add_rows::<W, 4>(&mut sums, stride, x, weights, depth),
                    _ => add_rows::<W, 8>(&mut sums, stride, x, weights, depth),
                }
            }
            for (out, sums) in out.iter_mut().zip(sums.chunks_exact(stride)) {
                let (out, sums) = (&mut out[first..first + strip], &sums[..strip]);
                if accumulate || chunk > 0 {
                    out.iter_mut().zip(sums).for_each(|(o, s)| *o += s);
                } else {
                    out.copy_from_slice(sums);
                }
            }
        }
    }
}

/// Sizes of the loops that read the weights.
struct BlockSizes {
    /// Number of words that are multiplied, in each column of the weights, before the sums are stored.
    depth: usize,
    /// Maximum number of sums in a strip of columns, for all rows together.
    sums_max: usize,
}

impl BlockSizes {
    /// Returns the sizes for `rows` rows that were fastest in measurements. With a small depth, memory is
    /// read nearly in order, as the hardware prefetcher expects. With a large depth, sums are loaded from and
    /// stored to the L1 cache less often.
    fn for_rows<W: SimdWords>(rows: usize) -> Self {
        let (depth, sums_max) = match (rows, W::LANES, W::PER_WORD) {
            (..=4, 16, _) | (..=2, _, _) => (1, 6 << 10),
            (_, _, 2) => (2, 16 << 10),
            (..=6, _, _) => (2, 6 << 10),
            (..=10, _, _) => (3, 8 << 10),
            (..=14, 16, _) => (4, 4 << 10),
            (_, 16, _) => (8, 48 << 10),
            _ => (3, 4 << 10),
        };
        Self { depth, sums_max }
    }

    /// Returns the number of columns of a strip if there are `width` columns in total.
    fn strip(&self, rows: usize, width: usize) -> usize {
        let strip_count = width.div_ceil((self.sums_max / rows).max(LINE_WORDS));
        width.div_ceil(strip_count).next_multiple_of(COLUMNS)
    }
}

/// Rows of the weights, which are `n` values apart. The first `columns` values of each row are used.
#[derive(Clone, Copy)]
struct Weights<'a> {
    values: &'a [f32],
    n: usize,
    columns: usize,
}

impl Weights<'_> {
    /// Returns the rows from `row` on.
    #[inline(always)]
    fn skip(self, row: usize) -> Self {
        Self { values: &self.values[row * self.n..], ..self }
    }
}

/// The rows of `x` in words. A word is one f32 value, or the bf16 values of two neighbouring k. Rows are
/// `stride` words apart.
#[derive(Clone, Copy)]
struct Rows<'a> {
    words: &'a [u32],
    stride: usize,
}

impl Rows<'_> {
    /// Returns the words of each row, starting at `word`.
    #[inline(always)]
    fn skip(self, word: usize) -> Self {
        Self { words: &self.words[word..], ..self }
    }
}

/// Returns the words of `x [m, k]`, row by row.
///
/// # Safety
/// The processor must have the instructions of `W`.
#[inline(always)]
unsafe fn rows_to_words<W: SimdWords>(x: &[f32], k: usize) -> Vec<u32> {
    let words = k.div_ceil(W::PER_WORD);
    // The last vector of a row may extend into the next row, which is written later, or past the end of the
    // last row.
    let mut rows = vec![0; x.len() / k * words + W::LANES];
    for (row, x) in x.chunks_exact(k).enumerate() {
        for word in (0..words).step_by(W::LANES) {
            let at = word * W::PER_WORD;
            let to = &mut rows[row * words + word..][..W::LANES];
            // SAFETY: guaranteed by the caller. `x` has `k - at` values from `at` on in this row.
            unsafe { W::load_contiguous(x[at..].as_ptr(), k - at).store(to.as_mut_ptr()) };
        }
    }
    rows
}

/// Multiplies each row of `x` by the first `depth` rows of the weights, `R` words per step. Adds the products
/// to the row of `sums`. Rows of `sums` are `stride` values apart.
///
/// # Safety
/// The processor must have the instructions of `W`.
#[inline(always)]
unsafe fn add_rows<W: SimdWords, const R: usize>(
    sums: &mut [f32],
    stride: usize,
    x: Rows,
    weights: Weights,
    depth: usize,
) {
    let words = depth / W::PER_WORD;
    let whole = words / R * R;
    // SAFETY: guaranteed by the caller.
    unsafe {
        for at in (0..whole).step_by(R) {
            add_block::<W, R>(sums, stride, x.skip(at), weights.skip(at * W::PER_WORD), W::PER_WORD);
        }
        for at in whole..words {
            add_block::<W, 1>(sums, stride, x.skip(at), weights.skip(at * W::PER_WORD), W::PER_WORD);
        }
        if words * W::PER_WORD < depth {
            add_block::<W, 1>(sums, stride, x.skip(words), weights.skip(words * W::PER_WORD), 1);
        }
    }
}

/// Adds the products of `R` words of each row of `x`. Each word covers `per_word` rows of the weights.
///
/// # Safety
/// The processor must have the instructions of `W`.
#[inline(always)]
unsafe fn add_block<W: SimdWords, const R: usize>(
    sums: &mut [f32],
    stride: usize,
    x: Rows,
    weights: Weights,
    per_word: usize,
) {
    let Weights { values, n, columns } = weights;
    let end = |row: usize| (row + R * per_word - 1) * n + columns;
    assert!(values.len() >= end(0), "skinny_gemm: weights");
    // The prefetch distance in rows. If the matrix has rows at this distance, the same columns of these rows
    // are prefetched.
    let distance = (R * per_word).max(ROWS_AHEAD_MIN);
    let prefetch_offset = if values.len() >= end(distance) { distance * n } else { 0 };
    let mut column = 0;
    // SAFETY: guaranteed by the caller. The weights have these columns in all rows.
    unsafe {
        while column + COLUMNS <= columns {
            let vectors = (COLUMNS / W::LANES, W::LANES);
            add_vectors::<W, R>(sums, stride, x, weights, column, vectors, (per_word, prefetch_offset));
            column += COLUMNS;
        }
        while column < columns {
            let lanes = W::LANES.min(columns - column);
            add_vectors::<W, R>(sums, stride, x, weights, column, (1, lanes), (per_word, prefetch_offset));
            column += lanes;
        }
    }
}

/// Adds the products of [`add_block`] for the vectors of columns from `column` on. `lanes` is the number of
/// valid lanes of each vector. Weights are loaded once for all rows of `sums`, and weights `prefetch_offset`
/// elements ahead are prefetched.
///
/// # Safety
/// The processor must have the instructions of `W`, and the weights must have these columns and rows.
#[inline(always)]
unsafe fn add_vectors<W: SimdWords, const R: usize>(
    sums: &mut [f32],
    stride: usize,
    x: Rows,
    Weights { values, n, .. }: Weights,
    column: usize,
    (vectors, lanes): (usize, usize),
    (per_word, prefetch_offset): (usize, usize),
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut weights = [[W::Vector::zero(); VECTORS_MAX]; R];
        for (i, weights) in weights.iter_mut().enumerate() {
            for (v, weights) in weights.iter_mut().enumerate().take(vectors) {
                let at = values.as_ptr().add(i * per_word * n + column + v * W::LANES);
                *weights = W::load_strided(at, n, per_word, lanes);
                (0..per_word).for_each(|row| prefetch_second(at.wrapping_add(row * n + prefetch_offset)));
            }
        }
        for (row, sums) in sums.chunks_exact_mut(stride).enumerate() {
            let sums = &mut sums[column..column + vectors * W::LANES];
            let at = |v: usize| v * W::LANES;
            let mut sum = [W::Vector::zero(); VECTORS_MAX];
            for (v, sum) in sum.iter_mut().enumerate().take(vectors) {
                *sum = W::Vector::load(sums.as_ptr().add(at(v)).cast());
            }
            let x = &x.words[row * x.stride..row * x.stride + R];
            for (&x, weights) in x.iter().zip(&weights) {
                let x = W::Vector::splat(x);
                for (sum, &weights) in sum.iter_mut().zip(weights).take(vectors) {
                    *sum = W::add_product(*sum, x, weights);
                }
            }
            for (v, &sum) in sum.iter().enumerate().take(vectors) {
                sum.store(sums.as_mut_ptr().add(at(v)).cast());
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::product::StridedMatrix;
    use super::super::tiles;
    use super::*;
    use crate::random::{Purpose, stream};
    use rand::Rng;

    #[test]
    fn few_rows_have_the_bits_of_tiles() {
        let mut rng = stream(0, Purpose::Problem, &[]);
        let mut noise = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.random_range(-1f32..1.0)).collect() };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let kernels = [
            ("f32", Precision::F32, SkinnyGemm::detect(Precision::F32)),
            ("f32 by eights", Precision::F32, SkinnyGemm::avx2()),
            ("bf16", Precision::Bf16Dot, SkinnyGemm::detect(Precision::Bf16Dot)),
        ];
        // Miri is ten thousand times slower, so it tests fewer shapes.
        let shapes: &[_] = match cfg!(miri) {
            true => &[(5, 300), (515, 5)],
            false => &[(512, 256), (515, 300), (1025, 513), (300, 1000), (1100, 271)],
        };
        let rows_max = if cfg!(miri) { 9 } else { ROWS_MAX };
        for &(k, n) in shapes {
            let (x, w, bias) = (noise(rows_max * k), noise(k * n), noise(rows_max * n));
            for (name, precision, kernel) in &kernels {
                let Some(kernel) = kernel else {
                    eprintln!("skipped: this processor does not support {name}");
                    continue;
                };
                for rows in (1..=rows_max).filter(|rows| !cfg!(miri) || [1, rows_max].contains(rows)) {
                    for (threads, accumulate) in [(1, true), (2, true), (2, false)] {
                        let x = &x[..rows * k];
                        let mut expected = bias[..rows * n].to_vec();
                        let mut found = expected.clone();
                        let (a, b) = (StridedMatrix::row_major(x, k), StridedMatrix::row_major(&w, n));
                        assert!(tiles::product(*precision, 1, &mut expected, a, b, (rows, k, n), accumulate));
                        pool.install(|| kernel.product(threads, &mut found, x, &w, (k, n), accumulate));
                        let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{name}: {rows} rows of {k} by {n} columns, {threads} threads");
                    }
                }
            }
        }
    }
}
