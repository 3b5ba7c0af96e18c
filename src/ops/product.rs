//! Batch-invariant matrix products.
//!
//! The `gemm` crate adds over k in one chain per element under three conditions. The weights are contiguous
//! K×N. k is processed in chunks that fit the crate's own blocking. A single row does not take its
//! matrix-vector path.
//!
//! So k is split into chunks of [`K_CHUNK`], one row is padded to two, and one column uses [`dot_column`].
//! [`SkinnyGemm`] multiplies few rows and adds in the same chains. [`tiles`] does so too, for products by a
//! large transposed matrix and for bf16 products of many rows. A row's result then depends on nothing but
//! the row and the weights.

use super::math::dot;
use super::skinny_gemm::SkinnyGemm;
use super::tiles;
use gemm::Parallelism;

/// Size of a chunk along k. The `gemm` crate's own chunks are at least as large, so it adds each of these
/// chunks in one chain.
pub(super) const K_CHUNK: usize = 512;

/// Number of values from which the crate, which reads a transposed matrix by columns, is slower than tiles.
const TRANSPOSED_MIN: usize = 1 << 17;

/// A matrix operand: values with a row and a column stride, in elements.
#[derive(Clone, Copy)]
pub struct StridedMatrix<'a> {
    pub values: &'a [f32],
    pub row_stride: usize,
    pub column_stride: usize,
}

impl<'a> StridedMatrix<'a> {
    /// Contiguous rows of `width` values.
    pub fn row_major(values: &'a [f32], width: usize) -> Self {
        Self { values, row_stride: width, column_stride: 1 }
    }

    /// The transpose of contiguous rows of `width` values.
    pub fn transposed(values: &'a [f32], width: usize) -> Self {
        Self { values, row_stride: 1, column_stride: width }
    }
}

/// The precision of a product. All products by one matrix use one precision, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32; each product is rounded once with its sum.
    #[default]
    F32,
    /// Operands are rounded to bf16. The processor's dot product adds two neighbouring k at a time in f32.
    Bf16Dot,
}

impl Precision {
    /// Returns true when this processor supports it.
    pub fn is_supported(self) -> bool {
        self == Precision::F32 || tiles::has_bf16_dot()
    }
}

/// How a product is computed: its threads and its precision.
#[derive(Clone, Copy)]
pub struct GemmConfig {
    threads: GemmThreads,
    precision: Precision,
}

impl From<GemmThreads> for GemmConfig {
    /// Uses f32.
    fn from(threads: GemmThreads) -> Self {
        Self { threads, precision: Precision::F32 }
    }
}

/// The threads that a product may use. The choice changes no bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum GemmThreads {
    /// All threads of the current pool, if the work is large enough.
    Pool,
    /// The calling thread only: other threads have their own products.
    CallingThread,
}

impl GemmThreads {
    /// Adds a precision.
    pub fn with_precision(self, precision: Precision) -> GemmConfig {
        GemmConfig { threads: self, precision }
    }

    /// Returns the number of threads for `work` multiply-adds.
    pub(super) fn threads(self, work: usize) -> usize {
        if self == GemmThreads::Pool && super::cpu::should_parallelize(work) {
            rayon::current_num_threads()
        } else {
            1
        }
    }
}

/// Computes `out[m, n] (+)= x[m, k] · w[k, n]` for the forward pass. Rows are contiguous; a row's bits do
/// not depend on `m`.
///
/// With `accumulate` the product is added to the value of `out` (a bias, for example).
pub fn forward_product(
    config: impl Into<GemmConfig>,
    out: &mut [f32],
    x: &[f32],
    w: &[f32],
    (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    let config @ GemmConfig { threads, precision } = config.into();
    assert!(out.len() == m * n && x.len() == m * k && w.len() == k * n, "forward_product: shapes");
    if m == 0 || n == 0 {
        return;
    }
    #[cfg(feature = "bench")]
    if library_default::USE_LIBRARY_PRODUCT.load(std::sync::atomic::Ordering::Relaxed) {
        return library_default::product(out, x, w, (m, k, n), accumulate);
    }
    if let Some(few_rows) = SkinnyGemm::for_shape(precision, (m, k, n)) {
        few_rows.product(threads.threads(m * n * k), out, x, w, (k, n), accumulate);
    } else if precision == Precision::Bf16Dot {
        product(
            config,
            out,
            StridedMatrix::row_major(x, k),
            StridedMatrix::row_major(w, n),
            (m, k, n),
            accumulate,
        );
    } else if n == 1 {
        dot_column(out, x, w, k, accumulate);
    } else if m == 1 {
        let mut padded_x = vec![0f32; 2 * k];
        padded_x[..k].copy_from_slice(x);
        let mut padded_out = vec![0f32; 2 * n];
        padded_out[..n].copy_from_slice(out);
        let (x, w) = (StridedMatrix::row_major(&padded_x, k), StridedMatrix::row_major(w, n));
        product(config, &mut padded_out, x, w, (2, k, n), accumulate);
        out.copy_from_slice(&padded_out[..n]);
    } else {
        product(
            config,
            out,
            StridedMatrix::row_major(x, k),
            StridedMatrix::row_major(w, n),
            (m, k, n),
            accumulate,
        );
    }
}

/// Computes `out[m, n] (+)= a[m, k] · b[k, n]` with any strides, for backward passes. Rows need not be
/// batch-invariant there. The bits are equal in every run and for every number of threads.
pub fn product(
    config: impl Into<GemmConfig>,
    out: &mut [f32],
    a: StridedMatrix,
    b: StridedMatrix,
    (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    let GemmConfig { threads, precision } = config.into();
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
    let last = |x: &StridedMatrix, rows: usize, columns: usize| {
        (rows - 1) * x.row_stride + (columns - 1) * x.column_stride
    };
    assert!(last(&a, m, k) < a.values.len() && last(&b, k, n) < b.values.len(), "product: operands");
    let threads = threads.threads(m * n * k);
    let tiled = match precision {
        // The crate has other bits for one row or column, and for chunks of one or two k.
        Precision::F32 => {
            let same_bits = m > 1 && n > 1 && !matches!(k % K_CHUNK, 1 | 2);
            b.row_stride == 1 && k * n >= TRANSPOSED_MIN && same_bits
        }
        Precision::Bf16Dot => true,
    };
    if tiled && tiles::product(precision, threads, out, a, b, (m, k, n), accumulate) {
        return;
    }
    assert!(precision == Precision::F32, "bf16 product: this processor has no bf16 dot products");
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

/// Computes `out[m, k] = dy[m, n] · wᵀ` for contiguous `w [k, n]`: the input gradient of a forward product
/// by `w`.
pub fn backward_product(
    config: impl Into<GemmConfig>,
    out: &mut [f32],
    dy: &[f32],
    w: &[f32],
    (m, n, k): (usize, usize, usize),
) {
    product(config, out, StridedMatrix::row_major(dy, n), StridedMatrix::transposed(w, n), (m, n, k), false);
}

/// The library's default product, to measure the cost of batch invariance. Compiled for benchmarks only.
#[cfg(feature = "bench")]
pub mod library_default {
    use super::Parallelism;
    use std::sync::atomic::AtomicBool;

    /// True makes every forward use [`product`].
    pub static USE_LIBRARY_PRODUCT: AtomicBool = AtomicBool::new(false);

    /// Multiplies the whole shape in one call of the library.
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

/// Computes one output column: each row's dot product in lane order.
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
    #[cfg_attr(miri, ignore = "the crate reads the processor's caches by assembly")]
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
                pool.install(|| forward_product(GemmThreads::Pool, &mut out, x, &w, (m, k, n), true));
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
