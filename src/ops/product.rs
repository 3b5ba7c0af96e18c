//! The matrix product on which every row's bits rest.
//!
//! The `gemm` crate adds over k in one chain an element when the weights are contiguous K×N, when k is
//! walked in chunks that fit its own blocking, and when a single row does not fall into its
//! matrix-vector path. So: k in chunks of [`K_CHUNK`], one row padded to two, one column by [`dot_column`], and few
//! rows by [`FewRows`], which adds in the same chains, as [`tiles`] do: they make products by a large matrix that lies transposed,
//! and those of bf16 that are not of few rows.
//! A row's result then depends on nothing but the row and the weights.

use super::few_rows::FewRows;
use super::math::dot;
use super::tiles;
use gemm::Parallelism;

/// The crate's own blocking over k never goes below this, so a chunk is always one chain.
pub(super) const K_CHUNK: usize = 512;

/// From so many values on the crate, which reads a transposed matrix down its columns, is slower than tiles.
const TRANSPOSED_MIN: usize = 1 << 17;

/// A matrix operand: values with a row and a column stride, in elements.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub values: &'a [f32],
    pub row_stride: usize,
    pub column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Contiguous rows of `width` values.
    pub fn rows(values: &'a [f32], width: usize) -> Self {
        Self { values, row_stride: width, column_stride: 1 }
    }

    /// The transpose of contiguous rows of `width` values.
    pub fn transposed(values: &'a [f32], width: usize) -> Self {
        Self { values, row_stride: 1, column_stride: width }
    }
}

/// What a product multiplies and adds. Every product by one matrix is made by one precision, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32, each product rounded once with its sum.
    #[default]
    F32,
    /// Both operands rounded to bf16, and the processor's dot product of two neighbouring k at a time, whose sums are f32.
    Bf16Dot,
}

impl Precision {
    /// Whether this processor can.
    pub fn is_here(self) -> bool {
        self == Precision::F32 || tiles::multiplies_bf16()
    }
}

/// How a product is made.
#[derive(Clone, Copy)]
pub struct Means {
    spread: Spread,
    precision: Precision,
}

impl From<Spread> for Means {
    /// In f32.
    fn from(spread: Spread) -> Self {
        Self { spread, precision: Precision::F32 }
    }
}

/// Which threads a product may take. The choice changes no bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// All of the current pool, when the work is worth it.
    Pool,
    /// The calling one: its neighbours have products of their own.
    Alone,
}

impl Spread {
    /// The same, and by which precision.
    pub fn by(self, precision: Precision) -> Means {
        Means { spread: self, precision }
    }

    /// Their number for `work` multiply-adds.
    pub(super) fn threads(self, work: usize) -> usize {
        if self == Spread::Pool && super::cpu::in_parallel(work) { rayon::current_num_threads() } else { 1 }
    }
}

/// `out[m, n] (+)= x[m, k] · w[k, n]` for the forward pass: contiguous rows, bits of a row independent of `m`.
///
/// With `accumulate` the product is added to what `out` holds (a bias, say).
pub fn forward_product(
    means: impl Into<Means>,
    out: &mut [f32],
    x: &[f32],
    w: &[f32],
    (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    let means @ Means { spread, precision } = means.into();
    assert!(out.len() == m * n && x.len() == m * k && w.len() == k * n, "forward_product: shapes");
    if m == 0 || n == 0 {
        return;
    }
    #[cfg(feature = "bench")]
    if stock::CHOSEN.load(std::sync::atomic::Ordering::Relaxed) {
        return stock::product(out, x, w, (m, k, n), accumulate);
    }
    if let Some(few_rows) = FewRows::of(precision, (m, k, n)) {
        few_rows.product(spread.threads(m * n * k), out, x, w, (k, n), accumulate);
    } else if precision == Precision::Bf16Dot {
        product(means, out, Matrix::rows(x, k), Matrix::rows(w, n), (m, k, n), accumulate);
    } else if n == 1 {
        dot_column(out, x, w, k, accumulate);
    } else if m == 1 {
        let mut padded_x = vec![0f32; 2 * k];
        padded_x[..k].copy_from_slice(x);
        let mut padded_out = vec![0f32; 2 * n];
        padded_out[..n].copy_from_slice(out);
        let (x, w) = (Matrix::rows(&padded_x, k), Matrix::rows(w, n));
        product(means, &mut padded_out, x, w, (2, k, n), accumulate);
        out.copy_from_slice(&padded_out[..n]);
    } else {
        product(means, out, Matrix::rows(x, k), Matrix::rows(w, n), (m, k, n), accumulate);
    }
}

/// `out[m, n] (+)= a[m, k] · b[k, n]` with any strides: for backward passes, where rows need not be invariant
/// but runs and thread counts still give equal bits.
pub fn product(
    means: impl Into<Means>,
    out: &mut [f32],
    a: Matrix,
    b: Matrix,
    (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    let Means { spread, precision } = means.into();
    assert_eq!(out.len(), m * n, "product: output");
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            out.fill(0.0);
        }
        return;
    }
    let last =
        |x: &Matrix, rows: usize, columns: usize| (rows - 1) * x.row_stride + (columns - 1) * x.column_stride;
    assert!(last(&a, m, k) < a.values.len() && last(&b, k, n) < b.values.len(), "product: operands");
    let threads = spread.threads(m * n * k);
    let tiled = match precision {
        // Of one row or column, and of chunks of one or two k, the crate has other bits.
        Precision::F32 => {
            let same_bits = m > 1 && n > 1 && !matches!(k % K_CHUNK, 1 | 2);
            b.row_stride == 1 && k * n >= TRANSPOSED_MIN && same_bits
        }
        Precision::Bf16Dot => true,
    };
    if tiled && tiles::product(precision, threads, out, a, b, (m, k, n), accumulate) {
        return;
    }
    assert!(precision == Precision::F32, "a product in bf16 that the processor cannot make");
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    for start in (0..k).step_by(K_CHUNK) {
        let chunk = K_CHUNK.min(k - start);
        // SAFETY: the operands' last elements were checked above against their slices, `out` is exactly
        // m × n, and every offset below stays within those bounds.
        unsafe {
            gemm::gemm(
                m,
                n,
                chunk,
                out.as_mut_ptr(),
                1,
                n as isize,
                accumulate || start > 0,
                a.values.as_ptr().add(start * a.column_stride),
                a.column_stride as isize,
                a.row_stride as isize,
                b.values.as_ptr().add(start * b.row_stride),
                b.column_stride as isize,
                b.row_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

/// `out[m, k] = dy[m, n] · wᵀ` for contiguous `w [k, n]`: what a forward product by `w` gives back.
pub fn backward_product(
    means: impl Into<Means>,
    out: &mut [f32],
    dy: &[f32],
    w: &[f32],
    (m, n, k): (usize, usize, usize),
) {
    product(means, out, Matrix::rows(dy, n), Matrix::transposed(w, n), (m, n, k), false);
}

/// The library's default product, to measure what invariance costs. Only benchmarks are built with it.
#[cfg(feature = "bench")]
pub mod stock {
    use super::Parallelism;
    use std::sync::atomic::AtomicBool;

    /// True makes every forward use [`product`].
    pub static CHOSEN: AtomicBool = AtomicBool::new(false);

    /// One call of the library on the whole shape.
    pub fn product(
        out: &mut [f32],
        x: &[f32],
        w: &[f32],
        (m, k, n): (usize, usize, usize),
        accumulate: bool,
    ) {
        assert!(out.len() == m * n && x.len() == m * k && w.len() == k * n, "stock product: shapes");
        let threads = rayon::current_num_threads();
        let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
        let (n_stride, k_stride) = (n as isize, k as isize);
        // SAFETY: all three are contiguous rows of exactly these shapes.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                n_stride,
                accumulate,
                x.as_ptr(),
                1,
                k_stride,
                w.as_ptr(),
                1,
                n_stride,
                1.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

/// One output column: each row's dot product in lane order.
fn dot_column(out: &mut [f32], x: &[f32], w: &[f32], k: usize, accumulate: bool) {
    for (o, row) in out.iter_mut().zip(x.chunks_exact(k.max(1))) {
        let dot = dot(row, w);
        *o = if accumulate { *o + dot } else { dot };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn a_row_alone_equals_the_row_in_any_batch_on_any_number_of_threads() {
        let pools: Vec<_> =
            [1, 2, 3].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap()).into();
        let mut shapes = vec![];
        for k in [1, 2, 3, 36, 64, 511, 512, 513, 1000, 2880] {
            for n in [1, 2, 4, 5, 8, 17, 32, 64, 100, 272, 1000] {
                shapes.push((k, n));
            }
        }
        // Strips of columns, for few rows.
        shapes.push((64, 2100));
        for (k, n) in shapes {
            let rows = 131;
            let x = noise(rows * k, (k * 31 + n) as u32);
            let w = noise(k * n, (k + n * 17) as u32);
            let bias = noise(n, 5);
            let run = |x: &[f32], m: usize, pool: &rayon::ThreadPool| {
                let mut out: Vec<f32> = bias.iter().copied().cycle().take(m * n).collect();
                pool.install(|| forward_product(Spread::Pool, &mut out, x, &w, (m, k, n), true));
                out
            };
            let whole = run(&x, rows, &pools[0]);
            for pool in &pools {
                for m in [1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 31, 33, 48, 49, 64, 65, 130, 131] {
                    for first in [0, rows - m] {
                        let part = run(&x[first * k..(first + m) * k], m, pool);
                        let expected = &whole[first * n..(first + m) * n];
                        assert!(
                            part.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                            "k {k} n {n} m {m} first {first}: rows differ"
                        );
                    }
                }
            }
        }
    }
}
