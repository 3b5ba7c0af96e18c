//! Muon: momentum whose singular values are all moved close to 1, for the matrices of hidden layers.

use super::cpu::{change, edit, host_values};
use super::cuda;
use super::optimizer::check_same_shape;
use super::product::{GemmThreads, StridedMatrix, product};
use candle_core::{Result, Tensor, bail};
use std::time::Instant;

/// The constants of one Muon update.
#[derive(Debug, Clone, Copy)]
pub struct Muon {
    /// `1 − lr · λ`.
    pub shrink: f32,
    /// The learning rate, before the factor for the shape of the matrix.
    pub rate: f32,
    /// μ, the decay of the momentum.
    pub momentum: f32,
    /// `1 − μ`, computed in f64.
    pub one_minus_momentum: f32,
}

/// Coefficients of the Newton–Schulz iteration, from the author's reference.
pub(super) const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
pub(super) const ITERATIONS: usize = 5;
/// Added to the norm of a matrix, so that a matrix of zeros stays zero.
const NORM_EPSILON: f64 = 1e-7;
/// Number of f32 matrices of the size of the largest one that an update needs besides its tensors.
const SCRATCH_MATRICES: usize = 4;

/// Returns the bytes that an update of a tensor with these dimensions needs temporarily.
pub fn scratch_bytes(dims: &[usize]) -> u64 {
    let [.., rows, columns] = *dims else { return 0 };
    (SCRATCH_MATRICES * rows * columns * size_of::<f32>()) as u64
}

/// Returns the floating-point operations of the iteration for a matrix.
pub fn iteration_flop((rows, columns): (usize, usize)) -> f64 {
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    ITERATIONS as f64 * (4.0 * short * short * long + 2.0 * short.powi(3))
}

/// Measures the floating-point operations per second of the iteration on this machine, in a few
/// hundredths of a second.
pub fn measure_flop_rate() -> f64 {
    const SHAPE: (usize, usize) = (256, 512);
    let matrix: Vec<f32> = (0..SHAPE.0 * SHAPE.1).map(|i| (i * 7919 % 1009) as f32 - 504.0).collect();
    // The first call allocates and wakes the threads.
    let mut rate = 0.0f64;
    for _ in 0..3 {
        let (x, start) = (matrix.clone(), Instant::now());
        orthogonalize(x, SHAPE);
        rate = rate.max(iteration_flop(SHAPE) / start.elapsed().as_secs_f64().max(1e-9));
    }
    rate
}

/// Updates matrices by Muon (Jordan 2024, github.com/KellerJordan/Muon at 857d1ad). With the learning rate η,
/// the weight decay λ and the gradient g:
///
/// ```text
/// m ← μ·m + (1 − μ)·g,   u = (1 − μ)·g + μ·m            (Nesterov)
/// X = u / (|u| + 1e-7), then 5 times:  X ← a·X + (b·A + c·A²)·X,   A = X·Xᵀ
/// w ← (1 − η·λ)·w − η·0.2·√max(rows, columns)·X
/// ```
///
/// |u| is the Frobenius norm. (a, b, c) = (3.4445, −4.7750, 2.0315). The factor of the last line is that of
/// Moonlight (Liu et al. 2025, arXiv 2502.16982): it gives the update the size of AdamW's, so that both have
/// one learning rate and one weight decay. The reference has the factor √max(1, rows/columns) instead.
///
/// On a CPU the iteration runs in f32. On a GPU it rounds X, A and the polynomial of A to bf16, as the
/// reference does, with sums in f32. A tall matrix is transposed for the iteration.
///
/// All tensors have the shape `[rows, columns]`, or `[E, rows, columns]` for the matrices of E experts, each
/// of which is updated by itself. The bits do not depend on the number of threads.
///
/// # Errors
/// When shapes differ, or a tensor is no matrix.
pub fn muon(weights: &Tensor, momentum: &Tensor, gradient: &Tensor, step: &Muon) -> Result<()> {
    if weights.device().is_cuda() {
        return cuda::muon(weights, momentum, gradient, step);
    }
    check_same_shape(weights, &[momentum, gradient])?;
    let (_, shape) = matrix_shape(weights.dims())?;
    let gradient = host_values(gradient)?;
    edit(weights, |weights| {
        change(momentum, |momentum| {
            let size = (shape.0 * shape.1).max(1);
            let matrices = weights.chunks_exact_mut(size).zip(momentum.chunks_exact_mut(size));
            for ((w, m), g) in matrices.zip(gradient.chunks_exact(size)) {
                step.apply(w, &orthogonalize(step.direction(m, g), shape), shape);
            }
        })
    })
}

impl Muon {
    /// Updates the momentum `m` by the gradient `g`. Returns the direction u.
    fn direction(&self, m: &mut [f32], g: &[f32]) -> Vec<f32> {
        let direction = m.iter_mut().zip(g).map(|(m, &g)| {
            *m += (g - *m) * self.one_minus_momentum;
            g + (*m - g) * self.momentum
        });
        direction.collect()
    }

    /// Updates weights `w` by the values `x` of their matrix, whose singular values are close to 1.
    fn apply(&self, w: &mut [f32], x: &[f32], (rows, columns): (usize, usize)) {
        let rate = self.rate_of((rows, columns)) as f32;
        for (w, x) in w.iter_mut().zip(x) {
            *w = *w * self.shrink - rate * x;
        }
    }

    /// Returns the learning rate of matrices of this shape: η·0.2·√max(rows, columns).
    pub(super) fn rate_of(&self, (rows, columns): (usize, usize)) -> f64 {
        f64::from(self.rate) * 0.2 * (rows.max(columns) as f64).sqrt()
    }
}

/// Moves the singular values of `matrix` close to 1: between 0.7 and 1.2, unless they are below a few
/// thousandths of its norm.
fn orthogonalize(matrix: Vec<f32>, (rows, columns): (usize, usize)) -> Vec<f32> {
    if rows > columns {
        let wide = transpose(&matrix, (rows, columns));
        drop(matrix);
        return transpose(&orthogonalize(wide, (columns, rows)), (columns, rows));
    }
    let mut x = matrix;
    let norm = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    x.iter_mut().for_each(|x| *x = (f64::from(*x) / (norm + NORM_EPSILON)) as f32);
    let [a, b, c] = COEFFICIENTS;
    let threads = GemmThreads::Pool;
    let (mut gram, mut polynomial) = (vec![0.0; rows * rows], vec![0.0; rows * rows]);
    let mut next = vec![0.0; x.len()];
    for _ in 0..ITERATIONS {
        let (by_rows, by_columns) =
            (StridedMatrix::row_major(&x, columns), StridedMatrix::column_major(&x, columns));
        product(threads, &mut gram, by_rows, by_columns, (rows, columns, rows), false);
        let square = StridedMatrix::row_major(&gram, rows);
        product(threads, &mut polynomial, square, square, (rows, rows, rows), false);
        polynomial.iter_mut().zip(&gram).for_each(|(p, &gram)| *p = b * gram + c * *p);
        next.iter_mut().zip(&x).for_each(|(next, &x)| *next = a * x);
        let polynomial = StridedMatrix::row_major(&polynomial, rows);
        product(threads, &mut next, polynomial, by_rows, (rows, rows, columns), true);
        std::mem::swap(&mut x, &mut next);
    }
    x
}

fn transpose(matrix: &[f32], (rows, columns): (usize, usize)) -> Vec<f32> {
    let value = |index: usize| matrix[index % rows * columns + index / rows];
    (0..rows * columns).map(value).collect()
}

/// Returns the number of matrices of a tensor, and the rows and columns of each.
pub(super) fn matrix_shape(dims: &[usize]) -> Result<(usize, (usize, usize))> {
    match *dims {
        [rows, columns] => Ok((1, (rows, columns))),
        [matrices, rows, columns] => Ok((matrices, (rows, columns))),
        _ => bail!("muon: {dims:?} is the shape of no matrix"),
    }
}

/// Number of values of the matrices that a GPU updates at a time. It updates one matrix if that is larger.
const DEVICE_VALUES: usize = 1 << 24;
/// Number of values of a matrix whose squares one thread block of a GPU adds.
pub(super) const SQUARES_CHUNK: usize = 8192;

/// Returns the number of matrices that a GPU updates at a time.
pub(super) fn matrices_at_once(dims: &[usize]) -> usize {
    match *dims {
        [matrices, rows, columns] => (DEVICE_VALUES / (rows * columns).max(1)).clamp(1, matrices.max(1)),
        _ => 1,
    }
}

/// Returns the bytes of GPU memory that an update of a tensor with these dimensions needs temporarily.
pub fn device_scratch_bytes(dims: &[usize]) -> u64 {
    let [.., rows, columns] = *dims else { return 0 };
    let (size, short) = (rows * columns, rows.min(columns));
    let (f32_bytes, bf16_bytes) = (size_of::<f32>(), size_of::<half::bf16>());
    let norm = size.div_ceil(SQUARES_CHUNK) * size_of::<f64>() + f32_bytes;
    // First u and X. Then X and the polynomial of A, and either A or the next X.
    let direction = size * (f32_bytes + bf16_bytes) + norm;
    let products = (2 * size + short * short) * bf16_bytes;
    let starts = size_of::<u32>();
    (matrices_at_once(dims) * (direction.max(products) + starts) + starts) as u64
}
