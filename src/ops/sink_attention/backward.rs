//! The backward pass of attention. The contributions of queries are added in ascending order, several queries
//! per step in registers.

use super::Attention;
use super::forward::{block_scores, query_key_products, visible_keys};
use super::rows::Rows;
use crate::ops::buffer::buffer;
use crate::ops::kv_cache::{BLOCK, KvBlocks};
use crate::ops::math::{exp, sum_lanes};
use multiversion::multiversion;

/// Inputs of [`attend_backward`] for the rows that one sequence does not share with the previous sequence.
/// These rows are the last positions of its cache.
pub(super) struct BackwardInputs<'a> {
    pub q: &'a [f32],
    pub out: &'a [f32],
    pub lse: &'a [f32],
    pub grad: &'a [f32],
    pub sinks: &'a [f32],
}

/// `P` and `dS` of at most `R` queries for one block of keys. Their contributions to the gradients of the
/// block are added together.
struct Tile<const R: usize> {
    rows: usize,
    /// The indices of the rows in `[T][N]`.
    row_range: [usize; R],
    p: [[f32; BLOCK]; R],
    ds: [[f32; BLOCK]; R],
    /// Upper bound of the keys in the block that are visible to any of the queries.
    high: usize,
}

/// Computes the gradients of one group, the query heads of key-value head `kv_head`, from the rows of
/// one sequence that it does not share. Writes `dq` `[rows][N][D]`, `dkv` `[rows][2][M][D]` and `dkv_shared`
/// `[positions before][2][M][D]` at the indices of this group. `dkv` and `dkv_shared` must be zero before the
/// call. Returns the gradient of the sinks, `[group]`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn attend_backward(
    attention: &Attention,
    kv_head: usize,
    cache: &KvBlocks,
    up: &BackwardInputs,
    dq: &Rows,
    dkv: &Rows,
    dkv_shared: &Rows,
) -> Vec<f32> {
    // Tiles of these sizes fill the vector registers. The order of the additions does not depend on the
    // sizes.
    if multiversion::target::target_cfg_f!(target_feature = "avx512f") {
        attend_backward_by::<8, 16>(attention, kv_head, cache, up, dq, dkv, dkv_shared)
    } else {
        attend_backward_by::<4, 8>(attention, kv_head, cache, up, dq, dkv, dkv_shared)
    }
}

/// Computes the gradients of [`attend_backward`] in tiles of `R` queries and `W` columns.
#[inline(always)]
fn attend_backward_by<const R: usize, const W: usize>(
    attention: &Attention,
    kv_head: usize,
    cache: &KvBlocks,
    up: &BackwardInputs,
    dq: &Rows,
    dkv: &Rows,
    dkv_shared: &Rows,
) -> Vec<f32> {
    let Attention { heads, kv_heads, head_dim: d, .. } = *attention;
    let group = heads / kv_heads;
    let length = cache.len();
    let own = up.lse.len() / heads;
    let first = length - own;
    let mut deltas = buffer(own * group);
    let mut dsinks = vec![0f32; group];
    for row in 0..own {
        for head in 0..group {
            let place = row * heads + kv_head * group + head;
            let (grad, output) = (&up.grad[place * d..(place + 1) * d], &up.out[place * d..(place + 1) * d]);
            let delta = sum_lanes([grad, output], |[grad, output]| grad * output);
            deltas[row * group + head] = delta;
            let sink = attention.sink(up.sinks, kv_head * group + head);
            dsinks[head] -= exp(sink - up.lse[place]) * delta;
        }
    }
    let [mut keys, mut values_t, mut dk, mut dv] = [(); 4].map(|()| buffer(BLOCK * d));
    for b in 0..length.div_ceil(BLOCK) {
        let last_key = ((b + 1) * BLOCK).min(length) - 1;
        // With a window, later queries do not see the block.
        let end = attention.window.map_or(length, |w| length.min(last_key + w));
        let begin = first.max(b * BLOCK);
        if begin >= end {
            continue;
        }
        let block = cache.block(b);
        let keys_t = &block.keys[kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK];
        let values = &block.values[kv_head * d * BLOCK..(kv_head + 1) * d * BLOCK];
        for j in 0..BLOCK {
            for c in 0..d {
                keys[j * d + c] = keys_t[c * BLOCK + j];
                values_t[c * BLOCK + j] = values[j * d + c];
            }
        }
        dk.fill(0.0);
        dv.fill(0.0);
        let first_row = (begin - first) * group;
        let rows = (end - begin) * group;
        for start in (0..rows).step_by(R) {
            let mut tile = Tile {
                rows: R.min(rows - start),
                row_range: [0; R],
                p: [[0.0; BLOCK]; R],
                ds: [[0.0; BLOCK]; R],
                high: 0,
            };
            let (mut seen, mut of_row) = ([(0, 0); R], [0; R]);
            for r in 0..tile.rows {
                let row = first_row + start + r;
                let (own, head) = (row / group, row % group);
                tile.row_range[r] = own * heads + kv_head * group + head;
                of_row[r] = row;
                seen[r] = visible_keys(attention, first + own, b);
                tile.high = tile.high.max(seen[r].1);
            }
            let mut r = 0;
            while r < tile.rows {
                // If the number of rows is odd, the last row is paired with itself.
                let pair = [r, (r + 1).min(tile.rows - 1)];
                let row_range = pair.map(|r| tile.row_range[r] * d..(tile.row_range[r] + 1) * d);
                let seen = pair.map(|r| seen[r]);
                let scores =
                    block_scores(row_range.clone().map(|at| &up.q[at]), keys_t, attention.scale(), seen);
                let grad = row_range.map(|at| &up.grad[at]);
                let dp = query_key_products(grad, &values_t, seen.map(|(_, high)| high));
                for (i, r) in pair.into_iter().enumerate() {
                    let (lse, delta) = (up.lse[tile.row_range[r]], deltas[of_row[r]]);
                    for j in 0..BLOCK {
                        let p = exp(scores[i][j] - lse);
                        tile.p[r][j] = p;
                        tile.ds[r][j] = p * (dp[i][j] - delta) * attention.scale();
                    }
                }
                r += 2;
            }
            // The width is a constant, so that the compiler keeps the sums in registers.
            match d {
                16 => tile.add::<W>(16, up, &keys, &mut dk, &mut dv, dq),
                64 => tile.add::<W>(64, up, &keys, &mut dk, &mut dv, dq),
                _ => tile.add::<W>(d, up, &keys, &mut dk, &mut dv, dq),
            }
        }
        for position in b * BLOCK..=last_key {
            let (dkv, row) = match position.checked_sub(first) {
                Some(own) => (dkv, own * 2 * kv_heads * d),
                None => (dkv_shared, position * 2 * kv_heads * d),
            };
            let at = (position - b * BLOCK) * d..(position - b * BLOCK + 1) * d;
            dkv.at(row + kv_head * d, d).copy_from_slice(&dk[at.clone()]);
            dkv.at(row + (kv_heads + kv_head) * d, d).copy_from_slice(&dv[at]);
        }
    }
    dsinks
}

impl<const R: usize> Tile<R> {
    /// Computes `dk_j += dS_ij q_i`, `dv_j += P_ij dO_i` and `dq_i += dS_ij k_j`, `W` columns per step.
    #[inline(always)]
    fn add<const W: usize>(
        &self,
        d: usize,
        up: &BackwardInputs,
        keys: &[f32],
        dk: &mut [f32],
        dv: &mut [f32],
        dq: &Rows,
    ) {
        let mut column = 0;
        while column < d {
            let width = W.min(d - column);
            let at = (d, column, width);
            if width == W {
                self.add_columns::<W>((d, column, W), up, keys, dk, dv, dq);
            } else {
                self.add_columns::<W>(at, up, keys, dk, dv, dq);
            }
            column += width;
        }
    }

    #[inline(always)]
    fn add_columns<const W: usize>(
        &self,
        (d, column, width): (usize, usize, usize),
        up: &BackwardInputs,
        keys: &[f32],
        dk: &mut [f32],
        dv: &mut [f32],
        dq: &Rows,
    ) {
        let mut q = [[0f32; W]; R];
        let mut grad = [[0f32; W]; R];
        let mut dq_sums = [[0f32; W]; R];
        for r in 0..self.rows {
            let at = self.row_range[r] * d + column;
            q[r][..width].copy_from_slice(&up.q[at..at + width]);
            grad[r][..width].copy_from_slice(&up.grad[at..at + width]);
            dq_sums[r][..width].copy_from_slice(dq.at(at, width));
        }
        for j in 0..self.high {
            let at = j * d + column..j * d + column + width;
            let (mut key, mut dk_sum, mut dv_sum) = ([0f32; W], [0f32; W], [0f32; W]);
            key[..width].copy_from_slice(&keys[at.clone()]);
            dk_sum[..width].copy_from_slice(&dk[at.clone()]);
            dv_sum[..width].copy_from_slice(&dv[at.clone()]);
            for r in 0..R {
                let (p, ds) = (self.p[r][j], self.ds[r][j]);
                for c in 0..W {
                    dk_sum[c] = ds.mul_add(q[r][c], dk_sum[c]);
                    dv_sum[c] = p.mul_add(grad[r][c], dv_sum[c]);
                    dq_sums[r][c] = ds.mul_add(key[c], dq_sums[r][c]);
                }
            }
            dk[at.clone()].copy_from_slice(&dk_sum[..width]);
            dv[at].copy_from_slice(&dv_sum[..width]);
        }
        for (sums, place) in dq_sums.iter().zip(&self.row_range).take(self.rows) {
            dq.at(place * d + column, width).copy_from_slice(&sums[..width]);
        }
    }
}
