//! Gradients of attention, queries added in ascending order, several at a time in registers.

use super::Attention;
use super::forward::{block_scores, visible};
use super::rows::Rows;
use crate::ops::cpu::buffer;
use crate::ops::kv_cache::{BLOCK, KvBlocks};
use crate::ops::math::{LANES, exp, sum_lanes};
use multiversion::multiversion;

/// Query rows whose share of a block is added in one go.
const TILE: usize = 8;

/// What [`attend_backward`] reads: one sequence's own rows, the last of its cache.
pub(super) struct Upstream<'a> {
    pub q: &'a [f32],
    pub out: &'a [f32],
    pub lse: &'a [f32],
    pub grad: &'a [f32],
    pub sinks: &'a [f32],
}

/// `P` and `dS` of a tile's queries against one block.
struct Tile {
    rows: usize,
    /// Places of the rows in `[T][N]`.
    places: [usize; TILE],
    p: [[f32; BLOCK]; TILE],
    ds: [[f32; BLOCK]; TILE],
}

/// Gradients of one key-value head's group from one sequence's own rows: writes `dq` `[rows][N][D]`, and into `dkv`
/// `[rows][2][M][D]` and `dkv_shared` `[positions before][2][M][D]`, which are cleared, at this group's places; returns the
/// sinks' gradient `[group]`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn attend_backward(
    attention: &Attention,
    kv_head: usize,
    cache: &KvBlocks,
    up: &Upstream,
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
            let delta = sum_lanes(d, |c| grad[c] * output[c]);
            deltas[row * group + head] = delta;
            let sink = attention.sink(up.sinks, kv_head * group + head);
            dsinks[head] -= exp(sink - up.lse[place]) * delta;
        }
    }
    let (mut keys, mut values_t) = (buffer(BLOCK * d), buffer(BLOCK * d));
    for b in 0..length.div_ceil(BLOCK) {
        let last_key = ((b + 1) * BLOCK).min(length) - 1;
        // A window hides the block from queries far behind it.
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
        let (mut dk, mut dv) = (buffer(BLOCK * d), buffer(BLOCK * d));
        let first_row = (begin - first) * group;
        let rows = (end - begin) * group;
        for start in (0..rows).step_by(TILE) {
            let mut tile = Tile {
                rows: TILE.min(rows - start),
                places: [0; TILE],
                p: [[0.0; BLOCK]; TILE],
                ds: [[0.0; BLOCK]; TILE],
            };
            for r in 0..tile.rows {
                let row = first_row + start + r;
                let (own, head) = (row / group, row % group);
                let place = own * heads + kv_head * group + head;
                tile.places[r] = place;
                let (low, high) = visible(attention, first + own, b);
                let scale = attention.scale();
                let query = &up.q[place * d..(place + 1) * d];
                let scores = block_scores(query, keys_t, scale, low, high);
                let dp = block_scores(&up.grad[place * d..(place + 1) * d], &values_t, 1.0, 0, BLOCK);
                let (lse, delta) = (up.lse[place], deltas[row]);
                for j in 0..BLOCK {
                    let p = exp(scores[j] - lse);
                    tile.p[r][j] = p;
                    tile.ds[r][j] = p * (dp[j] - delta) * scale;
                }
            }
            // Constant widths let the compiler keep the sums in registers.
            match d {
                16 => tile.add(16, up, &keys, &mut dk, &mut dv, dq),
                64 => tile.add(64, up, &keys, &mut dk, &mut dv, dq),
                _ => tile.add(d, up, &keys, &mut dk, &mut dv, dq),
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

impl Tile {
    /// `dk_j += dS_ij q_i`, `dv_j += P_ij dO_i`, `dq_i += dS_ij k_j`, a vector's width of columns at a time.
    #[inline(always)]
    fn add(&self, d: usize, up: &Upstream, keys: &[f32], dk: &mut [f32], dv: &mut [f32], dq: &Rows) {
        let mut column = 0;
        while column < d {
            let width = LANES.min(d - column);
            if width == LANES {
                self.add_columns(d, column, LANES, up, keys, dk, dv, dq);
            } else {
                self.add_columns(d, column, width, up, keys, dk, dv, dq);
            }
            column += width;
        }
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn add_columns(
        &self,
        d: usize,
        column: usize,
        width: usize,
        up: &Upstream,
        keys: &[f32],
        dk: &mut [f32],
        dv: &mut [f32],
        dq: &Rows,
    ) {
        let mut q = [[0f32; LANES]; TILE];
        let mut grad = [[0f32; LANES]; TILE];
        let mut dq_sums = [[0f32; LANES]; TILE];
        for r in 0..self.rows {
            let at = self.places[r] * d + column;
            q[r][..width].copy_from_slice(&up.q[at..at + width]);
            grad[r][..width].copy_from_slice(&up.grad[at..at + width]);
            dq_sums[r][..width].copy_from_slice(dq.at(at, width));
        }
        for j in 0..BLOCK {
            let at = j * d + column..j * d + column + width;
            let (mut key, mut dk_sum, mut dv_sum) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
            key[..width].copy_from_slice(&keys[at.clone()]);
            dk_sum[..width].copy_from_slice(&dk[at.clone()]);
            dv_sum[..width].copy_from_slice(&dv[at.clone()]);
            for r in 0..TILE {
                let (p, ds) = (self.p[r][j], self.ds[r][j]);
                for c in 0..LANES {
                    dk_sum[c] = ds.mul_add(q[r][c], dk_sum[c]);
                    dv_sum[c] = p.mul_add(grad[r][c], dv_sum[c]);
                    dq_sums[r][c] = ds.mul_add(key[c], dq_sums[r][c]);
                }
            }
            dk[at.clone()].copy_from_slice(&dk_sum[..width]);
            dv[at].copy_from_slice(&dv_sum[..width]);
        }
        for (sums, place) in dq_sums.iter().zip(&self.places).take(self.rows) {
            dq.at(place * d + column, width).copy_from_slice(&sums[..width]);
        }
    }
}
