//! Batch-invariant matrix products.
//!
//! The `gemm` crate adds over k in one chain per element under three conditions: the weights are contiguous
//! K×N; k is processed in chunks that fit into the blocks of the crate; and the product has more than one
//! row, because a single row takes the matrix-vector path of the crate.
//!
//! So k is split into chunks of [`K_CHUNK`], one row is padded to two, and one column uses [`dot_column`].
//! [`SkinnyGemm`] multiplies few rows, and adds in the same chains. [`tiles`] also adds in these chains. It
//! computes products by a large transposed matrix, and bf16 products of many rows. So the result of a row
//! depends only on the row and the weights.

use super::math::dot;
use super::skinny_gemm::SkinnyGemm;
use super::tiles::{self, panels::Bf16Copies};
use gemm::Parallelism;

/// Size of a chunk along k. The blocks of the `gemm` crate are at least as large, so the crate adds each
/// chunk in one chain.
pub(super) const K_CHUNK: usize = 512;

/// Minimum number of values of a transposed matrix for which tiles are faster than the crate, which reads the
/// matrix by columns.
const TRANSPOSED_MIN: usize = 1 << 17;

/// A matrix operand: values with a row stride and a column stride, in elements.
#[derive(Clone, Copy)]
pub struct StridedMatrix<'a> {
    pub values: &'a [f32],
    pub row_stride: usize,
    pub column_stride: usize,
}

impl<'a> StridedMatrix<'a> {
    /// Returns a matrix of contiguous rows with `width` values.
    pub fn row_major(values: &'a [f32], width: usize) -> Self {
        Self { values, row_stride: width, column_stride: 1 }
    }

    /// Returns the transpose of a matrix of contiguous rows with `width` values.
    pub fn column_major(values: &'a [f32], width: usize) -> Self {
        Self { values, row_stride: 1, column_stride: width }
    }
}

/// The precision of a product. All products by one matrix, in forward and backward passes, use the same
/// precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32. Each step is a fused multiply-add.
    #[default]
    F32,
    /// Operands are rounded to bf16. Dot-product instructions of the processor add the products of two
    /// neighbouring k per step, in f32.
    Bf16Dot,
}

impl Precision {
    /// Returns whether this processor supports the precision.
    pub fn is_supported(self) -> bool {
        self == Precision::F32 || tiles::has_bf16_dot()
    }
}

/// The configuration of a product: its threads and its precision.
#[derive(Clone, Copy)]
pub struct GemmConfig {
    threads: GemmThreads,
    precision: Precision,
}

impl From<GemmThreads> for GemmConfig {
    /// Returns the configuration with `threads` and precision f32.
    fn from(threads: GemmThreads) -> Self {
        Self { threads, precision: Precision::F32 }
    }
}

/// The threads that a product may use. They change no bit of the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum GemmThreads {
    /// All threads of the current pool, if the product is large enough.
    Pool,
    /// Only the calling thread, because other threads compute other products.
    CallingThread,
}

impl GemmThreads {
    /// Returns the configuration with these threads and `precision`.
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

/// Computes `out[m, n] (+)= x[m, k] · w[k, n]` for the forward pass. Rows are contiguous. The bits of a row
/// do not depend on `m`.
///
/// If `accumulate` is true, the product is added to the values of `out`, for example to a bias.
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
    } else if n == 1 && precision == Precision::F32 {
        dot_column(out, x, w, k, accumulate);
    } else if m == 1 && precision == Precision::F32 {
        let mut padded_x = vec![0f32; 2 * k];
        padded_x[..k].copy_from_slice(x);
        let mut padded_out = vec![0f32; 2 * n];
        padded_out[..n].copy_from_slice(out);
        let (x, w) = (StridedMatrix::row_major(&padded_x, k), StridedMatrix::row_major(w, n));
        product(config, &mut padded_out, x, w, (2, k, n), accumulate);
        out.copy_from_slice(&padded_out[..n]);
    } else {
        let (x, w) = (StridedMatrix::row_major(x, k), StridedMatrix::row_major(w, n));
        product(config, out, x, w, (m, k, n), accumulate);
    }
}

/// Computes the product as [`forward_product`] does, to the same bits. Reads the bf16 copy of matrix `index`
/// in `copies` instead of `w`, if there is one or if the rows are few enough to make one.
pub fn forward_product_by_copy(
    config: GemmConfig,
    out: &mut [f32],
    x: &[f32],
    (w, copies, index): (&[f32], Option<&Bf16Copies>, usize),
    shape @ (m, k, n): (usize, usize, usize),
    accumulate: bool,
) {
    let copies = copies.filter(|_| config.precision == Precision::Bf16Dot && m > 0 && n > 0);
    let threads = config.threads.threads(m * n * k);
    match copies.and_then(|copies| copies.get(index, m, threads, w, (k, n))) {
        Some(copy) => copy.product(threads, out, x, accumulate),
        None => forward_product(config, out, x, w, shape, accumulate),
    }
}

/// Computes `out[m, n] (+)= a[m, k] · b[k, n]` with any strides, for backward passes. Rows are not
/// batch-invariant, because backward passes do not need this. The bits are equal in every run and for every
/// number of threads.
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
        // The bits of tiles differ from those of the crate for a single row or column, and for chunks with
        // one or two values of k.
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
        // SAFETY: the last elements of the operands were checked above against their slices, `out` has
        // exactly m × n values, and every offset below is within these bounds.
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

/// Computes `out[m, k] = dy[m, n] · wᵀ` for contiguous `w [k, n]`. This is the input gradient of a forward
/// product by `w`.
pub fn backward_product(
    config: impl Into<GemmConfig>,
    out: &mut [f32],
    dy: &[f32],
    w: &[f32],
    (m, n, k): (usize, usize, usize),
) {
    let (dy, w) = (StridedMatrix::row_major(dy, n), StridedMatrix::column_major(w, n));
    product(config, out, dy, w, (m, n, k), false);
}

/// The default product of the `gemm` crate, to measure the cost of batch invariance. It is compiled for
/// benchmarks only.
#[cfg(feature = "bench")]
pub mod library_default {
    use super::Parallelism;
    use std::sync::atomic::AtomicBool;

    /// Whether forward products use [`product`] of this module.
    pub static USE_LIBRARY_PRODUCT: AtomicBool = AtomicBool::new(false);

    /// Computes the whole product in one call of the `gemm` crate.
    pub fn product(
        out: &mut [f32],
        x: &[f32],
        w: &[f32],
        (m, k, n): (usize, usize, usize),
        accumulate: bool,
    ) {
        assert!(
            out.len() == m * n && x.len() == m * k && w.len() == k * n,
            "library_default::product: shapes"
        );
        let threads = rayon::current_num_threads();
        let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
        let (n_stride, k_stride) = (n as isize, k as isize);
        // SAFETY: all three slices are contiguous rows with exactly these shapes.
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

/// Computes a product with one output column. The dot product of each row is added in lane order.
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
        // This matrix has few rows and many columns, so it is multiplied in strips of columns.
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
