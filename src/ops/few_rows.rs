//! The product of few rows, as decoding makes them, without packing the weights: each is read once, in the order in memory.
//! The crate reads them in strips of 64 columns, a few rows of `x` at a time, and again for the next few.
//!
//! The bits are those of the `gemm` crate's kernels on these shapes, which the tests of [`super::product`] compare: over a
//! chunk of k one chain of fused multiply-adds an element, from 0, and then one addition to what was there.

use super::prefetch::prefetch_second;
use super::product::K_CHUNK;
use multiversion::{multiversion, target::target_cfg_f};
use rayon::prelude::*;

/// Above so many rows the crate's packing pays.
const ROWS_MAX: usize = 48;

/// Smaller matrices stay in the caches, where the crate is faster.
const WEIGHTS_MIN: usize = 1 << 17;

/// Columns that a thread takes at least, and that the crate is slower with.
const COLUMNS_MIN: usize = 256;

/// Columns whose sums stay in a register.
const LANES: usize = 16;

/// Whether [`few_rows`] takes a product of this shape: where it is faster, and has the bits of the crate. That takes another
/// path for chunks of k of one or two, and on a processor without the fused multiply-add.
pub(super) fn fits((m, k, n): (usize, usize, usize)) -> bool {
    m <= ROWS_MAX && n >= COLUMNS_MIN && k * n >= WEIGHTS_MIN && !matches!(k % K_CHUNK, 1 | 2) && is_fused()
}

#[cfg(target_arch = "x86_64")]
fn is_fused() -> bool {
    std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_fused() -> bool {
    false
}

/// A product's operands: `x [m, k]` and `w [k, n]`, contiguous.
struct Operands<'a> {
    x: &'a [f32],
    w: &'a [f32],
    k: usize,
    n: usize,
    /// Whether the product is added to what is there.
    accumulate: bool,
}

/// `out[m, n] (+)= x[m, k] · w[k, n]`, contiguous, by up to `threads` threads.
pub(super) fn few_rows(
    threads: usize,
    out: &mut [f32],
    x: &[f32],
    w: &[f32],
    (k, n): (usize, usize),
    accumulate: bool,
) {
    let operands = Operands { x, w, k, n, accumulate };
    let width = n.div_ceil(threads).max(COLUMNS_MIN).next_multiple_of(LANES);
    let mut parts: Vec<Vec<&mut [f32]>> = (0..n.div_ceil(width)).map(|_| vec![]).collect();
    for row in out.chunks_exact_mut(n) {
        parts.iter_mut().zip(row.chunks_mut(width)).for_each(|(part, columns)| part.push(columns));
    }
    let add = |(index, mut part): (usize, Vec<&mut [f32]>)| add_columns(&operands, index * width, &mut part);
    if parts.len() > 1 {
        parts.into_par_iter().enumerate().for_each(add);
    } else {
        parts.into_iter().enumerate().for_each(add);
    }
}

/// The columns from `start` that `out` holds of each row.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn add_columns(operands: &Operands, start: usize, out: &mut [&mut [f32]]) {
    let &Operands { x, w, k, n, accumulate } = operands;
    let (rows, width) = (out.len(), out[0].len());
    let walk = Walk::of(rows, target_cfg_f!(target_feature = "avx512f"));
    let strip_max = walk.strip(rows, width);
    // Rows of sums a power of two apart would fall on the same places of the cache.
    let stride = strip_max + LANES;
    let mut sums = vec![0f32; rows * stride];
    for first in (0..width).step_by(strip_max) {
        let strip = strip_max.min(width - first);
        for chunk in (0..k).step_by(K_CHUNK) {
            let end = k.min(chunk + K_CHUNK);
            sums.fill(0.0);
            let weights = Weights { rows: &w[chunk * n + start + first..], n, columns: strip };
            let (sums, x, depth) = (&mut sums[..], &x[chunk..], end - chunk);
            match walk.depth {
                1 => add_rows::<1>(sums, stride, x, k, weights, depth),
                2 => add_rows::<2>(sums, stride, x, k, weights, depth),
                3 => add_rows::<3>(sums, stride, x, k, weights, depth),
                4 => add_rows::<4>(sums, stride, x, k, weights, depth),
                _ => add_rows::<8>(sums, stride, x, k, weights, depth),
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

/// How the weights are walked.
struct Walk {
    /// Rows of the weights that go into the sums between a load of them and a store.
    depth: usize,
    /// Sums of all rows together that a strip of columns may have.
    sums_max: usize,
}

impl Walk {
    /// As measured for `rows` rows. The fewer rows of the weights at a time, the nearer memory is read in its order, in which the
    /// processor looks ahead best; the more, the fewer loads and stores of sums, which otherwise stay in the first cache.
    fn of(rows: usize, registers_are_many: bool) -> Self {
        let (depth, sums_max) = match (rows, registers_are_many) {
            (..=4, true) | (..=2, false) => (1, 6 << 10),
            (..=6, _) => (2, 6 << 10),
            (..=10, _) => (3, 8 << 10),
            (..=14, true) => (4, 4 << 10),
            (_, true) => (8, 48 << 10),
            (_, false) => (3, 4 << 10),
        };
        Self { depth, sums_max }
    }

    /// Columns of a strip of `width` columns in all.
    fn strip(&self, rows: usize, width: usize) -> usize {
        let strips = width.div_ceil((self.sums_max / rows).max(LANES));
        width.div_ceil(strips).next_multiple_of(2 * LANES)
    }
}

/// Some rows of the weights, `n` apart, of which the first `columns` values are taken.
#[derive(Clone, Copy)]
struct Weights<'a> {
    rows: &'a [f32],
    n: usize,
    columns: usize,
}

impl Weights<'_> {
    /// Those from `row` on.
    #[inline(always)]
    fn from(self, row: usize) -> Self {
        Self { rows: &self.rows[row * self.n..], ..self }
    }
}

/// Adds to each row of `sums`, `stride` apart, the products of `depth` values of its row of `x`, `k` apart, with as many rows of
/// weights, `R` at a time.
#[inline(always)]
fn add_rows<const R: usize>(
    sums: &mut [f32],
    stride: usize,
    x: &[f32],
    k: usize,
    weights: Weights,
    depth: usize,
) {
    let whole = depth / R * R;
    for at in (0..whole).step_by(R) {
        add_block::<R>(sums, stride, &x[at..], k, weights.from(at));
    }
    for at in whole..depth {
        add_block::<1>(sums, stride, &x[at..], k, weights.from(at));
    }
}

/// The same of `R` values and rows.
#[inline(always)]
fn add_block<const R: usize>(sums: &mut [f32], stride: usize, x: &[f32], k: usize, weights: Weights) {
    let Weights { rows, n, columns } = weights;
    let mut column = 0;
    while column + 2 * LANES <= columns {
        add_vectors::<R, 2>(sums, stride, x, k, weights, column);
        column += 2 * LANES;
    }
    if column + LANES <= columns {
        add_vectors::<R, 1>(sums, stride, x, k, weights, column);
        column += LANES;
    }
    for column in column..columns {
        for (row, sums) in sums.chunks_exact_mut(stride).enumerate() {
            let x = x[row * k..row * k + R].iter().enumerate();
            sums[column] = x.fold(sums[column], |sum, (i, &x)| x.mul_add(rows[i * n + column], sum));
        }
    }
}

/// [`add_block`] for `V` vectors of columns from `column`: their weights are loaded once for all rows of `sums`.
#[inline(always)]
fn add_vectors<const R: usize, const V: usize>(
    sums: &mut [f32],
    stride: usize,
    x: &[f32],
    k: usize,
    Weights { rows, n, .. }: Weights,
    column: usize,
) {
    let mut weights = [[[0f32; LANES]; V]; R];
    for (i, weights) in weights.iter_mut().enumerate() {
        let row = &rows[i * n + column..i * n + column + V * LANES];
        weights.iter_mut().zip(row.chunks_exact(LANES)).for_each(|(w, row)| w.copy_from_slice(row));
        // The same columns of the rows that come after these.
        let next = rows.as_ptr().wrapping_add((i + R) * n + column);
        (0..V).for_each(|vector| prefetch_second(next.wrapping_add(vector * LANES)));
    }
    for (row, sums) in sums.chunks_exact_mut(stride).enumerate() {
        let sums = &mut sums[column..column + V * LANES];
        let mut sum = [[0f32; LANES]; V];
        sum.iter_mut().zip(sums.chunks_exact(LANES)).for_each(|(sum, row)| sum.copy_from_slice(row));
        let x = &x[row * k..row * k + R];
        for (&x, weights) in x.iter().zip(&weights) {
            for (sum, weights) in sum.iter_mut().zip(weights) {
                for (sum, &weight) in sum.iter_mut().zip(weights) {
                    *sum = x.mul_add(weight, *sum);
                }
            }
        }
        sums.chunks_exact_mut(LANES).zip(&sum).for_each(|(row, sum)| row.copy_from_slice(sum));
    }
}
