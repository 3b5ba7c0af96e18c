//! The product of few rows, as decoding makes them, without packing the weights: each is read once, in the order in memory.
//!
//! The bits are those of the `gemm` crate's kernels on these shapes, which the tests of [`super::product`] compare: over a
//! chunk of k one chain of fused multiply-adds an element, from 0, and then one addition to what was there.

use super::product::K_CHUNK;
use multiversion::multiversion;
use rayon::prelude::*;

/// Above so many rows the crate's packing pays.
const ROWS_MAX: usize = 8;

/// Columns that a thread takes at least.
const COLUMNS_MIN: usize = 64;

/// Rows of the weights that go into the sums between a load of them and a store.
const DEPTH: usize = 8;

/// Columns whose sums stay in a register.
const LANES: usize = 16;

/// Whether [`few_rows`] takes `m` rows of `k` values: where it is faster, and has the bits of the crate. That takes another
/// path for chunks of one or two, and on a processor without the fused multiply-add.
pub(super) fn fits(m: usize, k: usize) -> bool {
    m <= ROWS_MAX && !matches!(k % K_CHUNK, 1 | 2) && is_fused()
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
    if width >= n {
        return add_columns(&operands, 0, out, n);
    }
    let starts: Vec<usize> = (0..n).step_by(width).collect();
    let seen: &[f32] = out;
    let parts: Vec<Vec<f32>> = starts
        .par_iter()
        .map(|&start| {
            let width = width.min(n - start);
            let rows = seen.chunks_exact(n);
            let mut part: Vec<f32> = rows.flat_map(|row| &row[start..start + width]).copied().collect();
            add_columns(&operands, start, &mut part, width);
            part
        })
        .collect();
    for (start, part) in starts.into_iter().zip(parts) {
        let width = width.min(n - start);
        for (out, part) in out.chunks_exact_mut(n).zip(part.chunks_exact(width)) {
            out[start..start + width].copy_from_slice(part);
        }
    }
}

/// The `width` columns from `start`: `out` holds these alone.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn add_columns(operands: &Operands, start: usize, out: &mut [f32], width: usize) {
    let &Operands { x, w, k, n, accumulate } = operands;
    let mut sums = vec![0f32; out.len()];
    for chunk in (0..k).step_by(K_CHUNK) {
        let end = k.min(chunk + K_CHUNK);
        sums.fill(0.0);
        let mut at = chunk;
        while at < end {
            let w = &w[at * n + start..];
            if at + DEPTH <= end {
                add_rows::<DEPTH>(&mut sums, width, &x[at..], k, w, n);
                at += DEPTH;
            } else {
                add_rows::<1>(&mut sums, width, &x[at..], k, w, n);
                at += 1;
            }
        }
        if accumulate || chunk > 0 {
            out.iter_mut().zip(&sums).for_each(|(o, s)| *o += s);
        } else {
            out.copy_from_slice(&sums);
        }
    }
}

/// Adds to `sums [m, width]` the products of `R` values of each row of `x`, `k` apart, with `R` rows of `w`, `n` apart.
#[inline(always)]
fn add_rows<const R: usize>(sums: &mut [f32], width: usize, x: &[f32], k: usize, w: &[f32], n: usize) {
    let whole = width / LANES * LANES;
    for column in (0..whole).step_by(LANES) {
        let mut weights = [[0f32; LANES]; R];
        for (i, weights) in weights.iter_mut().enumerate() {
            weights.copy_from_slice(&w[i * n + column..i * n + column + LANES]);
        }
        for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
            let sums = &mut sums[column..column + LANES];
            let mut sum = [0f32; LANES];
            sum.copy_from_slice(sums);
            for (&x, weights) in x[row * k..row * k + R].iter().zip(&weights) {
                for (sum, &weight) in sum.iter_mut().zip(weights) {
                    *sum = x.mul_add(weight, *sum);
                }
            }
            sums.copy_from_slice(&sum);
        }
    }
    for column in whole..width {
        for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
            let x = x[row * k..row * k + R].iter().enumerate();
            sums[column] = x.fold(sums[column], |sum, (i, &x)| x.mul_add(w[i * n + column], sum));
        }
    }
}
