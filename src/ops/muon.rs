//! Muon: momentum whose singular values are all moved close to 1, for the matrices of hidden layers.

use super::cpu::{edit, host_values};
use super::optimizer::check_same_shape;
use super::product::{GemmThreads, StridedMatrix, product};
use candle_core::{Result, Tensor, bail};

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
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;
/// Added to the norm of a matrix, so that a matrix of zeros stays zero.
const NORM_EPSILON: f64 = 1e-7;
/// Number of f32 matrices of the size of the largest one that an update needs besides its tensors.
const SCRATCH_MATRICES: usize = 4;

/// Returns the bytes that an update of a tensor with these dimensions needs temporarily.
pub fn scratch_bytes(dims: &[usize]) -> u64 {
    let [.., rows, columns] = *dims else { return 0 };
    (SCRATCH_MATRICES * rows * columns * size_of::<f32>()) as u64
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
/// The iteration runs in f32; the reference rounds X to bf16. A tall matrix is transposed for the iteration.
/// All tensors have the shape `[rows, columns]`, or `[E, rows, columns]` for the matrices of E experts, each
/// of which is updated by itself. The bits do not depend on the number of threads.
///
/// # Errors
/// When shapes differ, or a tensor is no matrix.
pub fn muon(weights: &Tensor, momentum: &Tensor, gradient: &Tensor, step: &Muon) -> Result<()> {
    check_same_shape(weights, &[momentum, gradient])?;
    let (rows, columns) = match *weights.dims() {
        [rows, columns] | [_, rows, columns] => (rows, columns),
        _ => bail!("muon: {:?} is the shape of no matrix", weights.dims()),
    };
    let gradient = host_values(gradient)?;
    edit(weights, |weights| {
        edit(momentum, |momentum| {
            let size = (rows * columns).max(1);
            let matrices = weights.chunks_exact_mut(size).zip(momentum.chunks_exact_mut(size));
            for ((w, m), g) in matrices.zip(gradient.chunks_exact(size)) {
                step.update(w, m, g, (rows, columns));
            }
            Ok(())
        })
    })
}

impl Muon {
    /// Performs one update of a matrix `w` and its momentum `m`, given the gradient `g`.
    fn update(&self, w: &mut [f32], m: &mut [f32], g: &[f32], (rows, columns): (usize, usize)) {
        let mut direction = Vec::with_capacity(w.len());
        for (m, &g) in m.iter_mut().zip(g) {
            *m += (g - *m) * self.one_minus_momentum;
            direction.push(g + (*m - g) * self.momentum);
        }
        let direction = orthogonalize(direction, (rows, columns));
        let rate = (f64::from(self.rate) * 0.2 * (rows.max(columns) as f64).sqrt()) as f32;
        for (w, x) in w.iter_mut().zip(direction) {
            *w = *w * self.shrink - rate * x;
        }
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
