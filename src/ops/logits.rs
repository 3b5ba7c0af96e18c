//! Sampling from the head: logits of rows, tokens drawn from them, and log-probabilities of tokens.
//!
//! `z = (h · W) / τ` and its [`RowStats`](super::log_prob::RowStats) are computed as in the head of a
//! training pass, so `z_t − LSE(z)` has the same bits in sampling and in training. Logits stay on the model's
//! device; only tokens and their log-probabilities are copied to the host.

use super::buffer::buffer;
use super::cpu::{host_values, should_parallelize};
use super::cuda::{draw_tokens, head_logits, token_log_probs};
use super::head_adapter::RowAdapter;
use super::log_prob::{BLOCK, chunk_rows, inverse_temperature, row_stats_and_blocks};
use super::math::{LANES, exp};
use super::token_set::TokenSet;
use super::truncation::KeptRow;
use super::weight::Weight;
use candle_core::{Context, Device, Result, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;
use std::borrow::Cow;

/// Sampling parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParameters {
    /// 0 takes the most likely token (ties: the lowest id), with log-probability 0.
    pub temperature: f64,
    /// Keeps the most likely tokens until their total probability reaches this value; 1 keeps all.
    pub top_p: f64,
    /// Keeps the k most likely tokens (ties: the lowest ids); 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with at least this share of the highest probability; 0 keeps all.
    pub min_p: f64,
}

/// A token and its log-probability under the distribution it was drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledToken {
    pub token: u32,
    pub log_prob: f32,
}

/// Logits of some rows, divided by the temperature, on any device.
pub struct Logits {
    /// `[R, V]`.
    pub(super) z: Tensor,
    /// `log Σ_j e^{z_j}`, `[R]`.
    pub(super) log_sum_exp: Tensor,
    /// Cumulative weights per block, if the head computed them.
    pub(super) blocks: Option<BlockSums>,
}

/// Cumulative weights of rows of logits, block by block.
pub(super) struct BlockSums {
    /// The highest logit of each row, `[R]`. Weights are `e^{z_j − highest}`.
    highest: Vec<f32>,
    /// The cumulative weight at the end of each block, `[R, ⌈V / BLOCK⌉]`.
    ends: Vec<f64>,
}

/// Returns the maximum number of rows whose logits are computed at a time. It bounds the memory of logits.
pub fn logits_rows_max(vocabulary: usize) -> usize {
    chunk_rows(vocabulary)
}

/// Maximum number of logits that the head on a GPU holds at a time: half a gigabyte, which is enough rows to
/// keep the GPU busy. Tests use fewer, so that they have several chunks.
const DEVICE_LOGITS_MAX: usize = if cfg!(test) { 1 << 14 } else { 1 << 27 };
/// Number of rows per tile of the head's product. A chunk consists of whole tiles.
const DEVICE_TILE_ROWS: usize = 128;

/// Returns the number of rows whose logits the head on a GPU computes at a time.
pub fn device_logits_rows(vocabulary: usize) -> usize {
    (DEVICE_LOGITS_MAX / vocabulary.max(1) / DEVICE_TILE_ROWS).max(1) * DEVICE_TILE_ROWS
}

/// Returns the maximum number of rows whose logits a sampler computes at a time on `device`. Each head
/// product reads the whole head, so a GPU takes many rows.
pub fn sampled_rows_max(vocabulary: usize, device: &Device) -> usize {
    if device.is_cuda() { device_logits_rows(vocabulary) } else { logits_rows_max(vocabulary) }
}

/// Computes logits of rows `h [R, H]` by the head `weight [H, V]`, divided by the sampling temperature.
///
/// # Errors
/// When shapes disagree.
pub fn logits(h: &Tensor, weight: &Weight, sampling: &SamplingParameters) -> Result<Logits> {
    adapted_logits(h, weight, &[], sampling)
}

/// Computes [`logits`] with adapters of the head, each for its own rows. A row has the same bits beside any
/// other rows.
///
/// # Errors
/// When shapes disagree, or there is an adapter on a GPU.
pub fn adapted_logits(
    h: &Tensor,
    weight: &Weight,
    adapters: &[RowAdapter],
    sampling: &SamplingParameters,
) -> Result<Logits> {
    let ((rows, k), (w_k, n)) = (h.dims2()?, weight.head_shape()?);
    if k != w_k {
        bail!("logits: h {:?}, weight [{w_k}, {n}]", h.dims());
    }
    for RowAdapter { rows: own, adapter } in adapters {
        adapter.check((k, n))?;
        if own.end > rows {
            bail!("logits: an adapter of rows {own:?} of {rows}");
        }
    }
    if h.device().is_cuda() {
        let [z, log_sum_exp] = head_logits(h, weight.device_tensor()?, sampling.inverse_temperature())?;
        return Ok(Logits { z, log_sum_exp, blocks: None });
    }
    let mut z = buffer(rows * n);
    let contiguous = h.contiguous()?;
    let values = host_values(&contiguous)?;
    weight.product(&mut z, &values)?;
    for RowAdapter { rows: own, adapter } in adapters {
        adapter.add_to(&mut z[own.start * n..own.end * n], &values[own.start * k..own.end * k])?;
    }
    let inverse_temperature = sampling.inverse_temperature();
    let mut stats = vec![(0.0, 0.0); rows];
    let blocks = n.div_ceil(BLOCK);
    let mut ends = vec![0.0; rows * blocks];
    let compute_row = |z: &mut [f32], ends: &mut [f64], stats: &mut (f32, f32)| {
        let (row_stats, highest) = row_stats_and_blocks(z, inverse_temperature, ends);
        *stats = (row_stats.log_sum_exp, highest);
    };
    if should_parallelize(rows * 4 * n) {
        let rows = z.par_chunks_exact_mut(n).zip(ends.par_chunks_exact_mut(blocks));
        rows.zip(&mut stats).for_each(|((z, ends), stats)| compute_row(z, ends, stats));
    } else {
        let rows = z.chunks_exact_mut(n).zip(ends.chunks_exact_mut(blocks));
        rows.zip(&mut stats).for_each(|((z, ends), stats)| compute_row(z, ends, stats));
    }
    let (log_sum_exp, highest): (Vec<f32>, Vec<f32>) = stats.into_iter().unzip();
    let device = h.device();
    Ok(Logits {
        z: Tensor::from_vec(z, (rows, n), device)?,
        log_sum_exp: Tensor::from_vec(log_sum_exp, rows, device)?,
        blocks: Some(BlockSums { highest, ends }),
    })
}

impl Logits {
    /// Returns the logits divided by the temperature, `[R, V]`.
    pub fn scaled_logits(&self) -> &Tensor {
        &self.z
    }

    /// Draws one token for each of `draws`: a row, and a uniform number in [0, 1).
    ///
    /// # Errors
    /// When a row does not exist, or its logits are not finite.
    pub fn draw(&self, sampling: &SamplingParameters, draws: &[(usize, f64)]) -> Result<Vec<SampledToken>> {
        let greedy = sampling.temperature == 0.0;
        if self.z.device().is_cuda() && (greedy || !sampling.truncates()) {
            let tokens: Vec<Option<SampledToken>> = draw_tokens(&self.z, &self.log_sum_exp, draws, greedy)?;
            return tokens.into_iter().map(|token| token.map_or_else(not_finite_error, Ok)).collect();
        }
        self.map_rows(draws, |row, &uniform| sampling.draw(row, uniform))
    }

    /// Draws tokens as [`Self::draw`] does. Also returns the tokens that each one was drawn from; `None` if
    /// `sampling` removes no token.
    ///
    /// # Errors
    /// The errors of [`Self::draw`].
    pub fn draw_with_kept(
        &self,
        sampling: &SamplingParameters,
        draws: &[(usize, f64)],
    ) -> Result<Vec<(SampledToken, Option<TokenSet>)>> {
        if !sampling.draws_truncated() {
            return Ok(self.draw(sampling, draws)?.into_iter().map(|token| (token, None)).collect());
        }
        self.map_rows(draws, |row, &uniform| {
            let (token, kept) = sampling.draw_truncated(row, uniform)?;
            Ok((token, Some(TokenSet::from_ids(&kept.ids))))
        })
    }

    /// Returns the log-probability of each (row, token) under the truncated distribution; −∞ for a token
    /// that `sampling` removes.
    ///
    /// # Errors
    /// When a row or a token does not exist.
    pub fn log_probs(&self, sampling: &SamplingParameters, tokens: &[(usize, u32)]) -> Result<Vec<f32>> {
        if self.z.device().is_cuda() && !sampling.truncates() {
            return token_log_probs(&self.z, &self.log_sum_exp, tokens);
        }
        self.map_rows(tokens, |row, &token| {
            if token as usize >= row.z.len() {
                bail!("logits: token {token} in a vocabulary of {}", row.z.len());
            }
            Ok(sampling.log_prob(row, token))
        })
    }

    /// Returns the `count` most likely tokens of each (row, count), the most likely token first (ties: the
    /// lowest ids). Log-probabilities are those of the untruncated distribution.
    ///
    /// # Errors
    /// When a row does not exist.
    pub fn likeliest(&self, rows: &[(usize, usize)]) -> Result<Vec<Vec<SampledToken>>> {
        self.map_rows(rows, |row, &count| {
            let mut order: Vec<u32> = (0..row.z.len() as u32).collect();
            let falling = |a: &u32, b: &u32| row.z[*b as usize].total_cmp(&row.z[*a as usize]).then(a.cmp(b));
            let count = count.min(order.len());
            if count == 0 {
                return Ok(vec![]);
            }
            order.select_nth_unstable_by(count - 1, falling);
            order.truncate(count);
            order.sort_unstable_by(falling);
            Ok(order.into_iter().map(|token| SampledToken { token, log_prob: row.log_prob(token) }).collect())
        })
    }

    /// Calls `f` on every requested row. On the CPU several threads are used if the work is large. Rows on a
    /// GPU are copied to the host: only truncated sampling and [`Self::likeliest`] need this.
    fn map_rows<A: Sync, R: Send>(
        &self,
        pairs: &[(usize, A)],
        f: impl Fn(Row, &A) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let (rows, vocabulary) = self.z.dims2()?;
        if let Some((row, _)) = pairs.iter().find(|(row, _)| *row >= rows) {
            bail!("logits: row {row} of {rows}");
        }
        if self.z.device().is_cuda() {
            let map_row = |(row, argument): &(usize, A)| {
                // The row is copied on the GPU first: only whole storages can be transferred.
                let copy_row = |x: &Tensor| x.narrow(0, *row, 1)?.copy()?.to_device(&Device::Cpu);
                let (z, log_sum_exp) = (copy_row(&self.z)?, copy_row(&self.log_sum_exp)?);
                let (z, log_sum_exp) = (host_values(&z)?, host_values(&log_sum_exp)?[0]);
                f(Row { z: &z, log_sum_exp, blocks: None }, argument)
            };
            return pairs.iter().map(map_row).collect();
        }
        let (z, log_sum_exp) = (host_values(&self.z)?, host_values(&self.log_sum_exp)?);
        let (z, log_sum_exp): (&[f32], &[f32]) = (&z, &log_sum_exp);
        let map_row = |(row, argument): &(usize, A)| {
            let z = &z[row * vocabulary..(row + 1) * vocabulary];
            let blocks = self.blocks.as_ref().map(|sums| sums.row(*row, vocabulary));
            f(Row { z, log_sum_exp: log_sum_exp[*row], blocks }, argument)
        };
        if should_parallelize(pairs.len() * 4 * vocabulary) {
            pairs.par_iter().map(map_row).collect()
        } else {
            pairs.iter().map(map_row).collect()
        }
    }
}

/// A row of logits, divided by the temperature.
#[derive(Clone, Copy)]
struct Row<'a> {
    /// `[V]`.
    z: &'a [f32],
    log_sum_exp: f32,
    /// The highest logit and the cumulative weights per block, if the head computed them.
    blocks: Option<(f32, &'a [f64])>,
}

impl BlockSums {
    /// Returns the highest logit and the cumulative weights per block of one row.
    fn row(&self, row: usize, vocabulary: usize) -> (f32, &[f64]) {
        let blocks = vocabulary.div_ceil(BLOCK);
        (self.highest[row], &self.ends[row * blocks..(row + 1) * blocks])
    }
}

impl Row<'_> {
    fn log_prob(&self, token: u32) -> f32 {
        self.z[token as usize] - self.log_sum_exp
    }
}

impl SamplingParameters {
    /// Returns the untruncated distribution at `temperature`.
    pub fn with_temperature(temperature: f64) -> Self {
        Self { temperature, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }

    /// Returns whether a parameter may remove tokens.
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// Returns whether tokens are drawn from a truncated distribution. Greedy sampling draws none.
    pub fn draws_truncated(&self) -> bool {
        self.temperature > 0.0 && self.truncates()
    }

    /// Returns `1/τ`, the factor of the logits before a draw.
    fn inverse_temperature(&self) -> f32 {
        if self.temperature == 0.0 { 1.0 } else { inverse_temperature(self.temperature) }
    }

    /// Returns the token of `row` that `uniform`, in [0, 1), selects.
    fn draw(&self, row: Row, uniform: f64) -> Result<SampledToken> {
        if self.draws_truncated() {
            return Ok(self.draw_truncated(row, uniform)?.0);
        }
        let blocks = Blocks::from_row(row);
        let total = check_total(blocks.total())?;
        if self.temperature == 0.0 {
            return Ok(SampledToken { token: highest(row.z) as u32, log_prob: 0.0 });
        }
        let token = blocks.pick(row, uniform * total).context("no token has a probability above 0")? as u32;
        Ok(SampledToken { token, log_prob: row.log_prob(token) })
    }

    /// Returns the kept token of `row` that `uniform` selects, and all kept tokens.
    fn draw_truncated(&self, row: Row, uniform: f64) -> Result<(SampledToken, KeptRow)> {
        let (ids, weights) = self.keep(row.z, row.log_sum_exp);
        let total = check_total(weights.iter().map(|&w| f64::from(w)).sum())?;
        let index = pick(&weights, uniform * total).context("no token has a probability above 0")?;
        let (token, kept) = (ids[index], KeptRow::new(ids, row.z, 1.0));
        Ok((SampledToken { token, log_prob: kept.log_prob(token) }, kept))
    }

    /// Returns the log-probability of `token`, below `V`, under the truncated distribution of `row`; −∞ for
    /// a removed token.
    fn log_prob(&self, row: Row, token: u32) -> f32 {
        match self.truncates() {
            true => KeptRow::new(self.keep(row.z, row.log_sum_exp).0, row.z, 1.0).log_prob(token),
            false => row.log_prob(token),
        }
    }
}

fn not_finite_error<T>() -> Result<T> {
    bail!("the model's logits are not finite; its weights are broken or training has diverged")
}

/// Returns `total`, the sum of a row's weights.
///
/// # Errors
/// When `total` is not finite or not positive, so that the weights are not a distribution.
fn check_total(total: f64) -> Result<f64> {
    if total.is_finite() && total > 0.0 { Ok(total) } else { not_finite_error() }
}

/// The untruncated distribution of a row, in blocks of tokens. A draw looks inside one block.
struct Blocks<'a> {
    /// Weights are `e^{z_j − shift}`.
    shift: f32,
    /// The cumulative weight at the end of each block.
    ends: Cow<'a, [f64]>,
}

impl<'a> Blocks<'a> {
    fn from_row(row: Row<'a>) -> Self {
        if let Some((shift, ends)) = row.blocks {
            return Self { shift, ends: Cow::Borrowed(ends) };
        }
        let mut sum = 0.0;
        let ends = row.z.chunks(BLOCK).map(|z| {
            sum += block_sum(z, row.log_sum_exp);
            sum
        });
        Self { shift: row.log_sum_exp, ends: ends.collect() }
    }

    fn total(&self) -> f64 {
        self.ends.last().copied().unwrap_or(0.0)
    }

    /// Returns the token that [`pick`] would return for the weights of all blocks.
    fn pick(&self, row: Row, target: f64) -> Option<usize> {
        let block = self.ends.iter().position(|&end| end > target);
        // If rounding leaves no such block, the last block with a nonzero weight is taken.
        let block = block.or_else(|| self.ends.iter().position(|&end| end == self.total()))?;
        let before = if block == 0 { 0.0 } else { self.ends[block - 1] };
        let start = block * BLOCK;
        let mut weights = row.z[start..].iter().take(BLOCK).copied().collect::<Vec<_>>();
        exponentials(&mut weights, self.shift);
        Some(start + pick(&weights, target - before)?)
    }
}

/// Returns the sum of `e^{z − LSE(z)}`, in lane order.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn block_sum(z: &[f32], log_sum_exp: f32) -> f64 {
    let mut lanes = [0f64; LANES];
    let chunks = z.chunks_exact(LANES);
    for (lane, &z) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(exp(z - log_sum_exp));
    }
    for chunk in chunks {
        for (lane, &z) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(exp(z - log_sum_exp));
        }
    }
    lanes.iter().sum()
}

/// Replaces `z` by `e^{z − LSE(z)}` for every token.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn exponentials(row: &mut [f32], log_sum_exp: f32) {
    for z in row.iter_mut() {
        *z = exp(*z - log_sum_exp);
    }
}

/// Returns the first token, in id order, whose cumulative weight exceeds `target`. If rounding leaves none,
/// returns the last token with a nonzero weight. Never returns a token of weight 0.
fn pick(weights: &[f32], target: f64) -> Option<usize> {
    let mut sum = 0.0;
    for (i, &weight) in weights.iter().enumerate() {
        sum += f64::from(weight);
        if sum > target && weight > 0.0 {
            return Some(i);
        }
    }
    weights.iter().rposition(|&weight| weight > 0.0)
}

/// Returns the index of the highest value (ties: the first).
fn highest(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, &z) in row.iter().enumerate() {
        if z > row[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::log_prob::row_stats;
    use crate::random::{Purpose, stream};
    use candle_core::Device;
    use rand::Rng;

    /// Returns a row with the logits `values`. They are multiplied by a hidden state of 1, which is exact.
    fn row(values: &[f32], sampling: &SamplingParameters) -> Logits {
        let weight = Tensor::from_slice(values, (1, values.len()), &Device::Cpu).unwrap();
        let weight = Weight::dense(&weight);
        logits(&Tensor::new(&[[1f32]], &Device::Cpu).unwrap(), &weight, sampling).unwrap()
    }

    fn draws(sampling: SamplingParameters, logits: &[f32], n: u64) -> Vec<SampledToken> {
        let draws: Vec<_> = (0..n).map(|i| (0, stream(1, Purpose::Sampling, &[i]).random::<f64>())).collect();
        let drawn = row(logits, &sampling).draw(&sampling, &draws).unwrap();
        let tokens: Vec<_> = drawn.iter().map(|d| (0, d.token)).collect();
        if sampling.temperature > 0.0 {
            let log_probs = row(logits, &sampling).log_probs(&sampling, &tokens).unwrap();
            assert_eq!(drawn.iter().map(|d| d.log_prob).collect::<Vec<_>>(), log_probs);
        }
        drawn
    }

    fn shares(draws: &[SampledToken], tokens: usize) -> Vec<f64> {
        let count = |t| draws.iter().filter(|d| d.token as usize == t).count();
        (0..tokens).map(|t| count(t) as f64 / draws.len() as f64).collect()
    }

    #[test]
    fn shares_are_the_probabilities_at_the_temperature() {
        let logits = [0.5f32, -1.0, 2.0, 0.0, -200.0];
        for temperature in [1.0, 0.5, 2.0] {
            let drawn = draws(SamplingParameters::with_temperature(temperature), &logits, 40_000);
            let weights = logits.map(|z| (f64::from(z) / temperature).exp());
            let total: f64 = weights.iter().sum();
            for (share, weight) in shares(&drawn, 5).iter().zip(weights) {
                assert!((share - weight / total).abs() < 0.01, "{share} against {}", weight / total);
            }
            for d in &drawn {
                let exact = (weights[d.token as usize] / total).ln();
                assert!((f64::from(d.log_prob) - exact).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn the_ends_of_the_unit_interval_never_pick_an_impossible_token() {
        let weights = [0.0f32, 0.25, 0.0, 0.75, 0.0];
        assert_eq!(pick(&weights, 0.0), Some(1));
        assert_eq!(pick(&weights, 0.25), Some(3));
        assert_eq!(pick(&weights, 0.249_999), Some(1));
        assert_eq!(pick(&weights, 1.0), Some(3));
        assert_eq!(pick(&weights, 2.0), Some(3));
        assert_eq!(pick(&[0.0; 3], 0.0), None);
    }

    #[test]
    fn a_draw_by_blocks_is_the_draw_from_all_weights() {
        let mut random = stream(2, Purpose::Sampling, &[]);
        for vocabulary in [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK + 300] {
            let mut values: Vec<f32> = (0..vocabulary).map(|_| random.random_range(-4.0..4.0)).collect();
            // If there are many blocks, the first and the last have only weights of 0.
            let empty = if vocabulary > 4 * BLOCK { BLOCK + 7 } else { 0 };
            values[..empty].fill(-1e4);
            values[vocabulary - empty..].fill(-1e4);
            let mut z = values.clone();
            let mut ends = vec![0.0; vocabulary.div_ceil(BLOCK)];
            let (stats, highest) = row_stats_and_blocks(&mut z, 1.0, &mut ends);
            assert_eq!(stats, row_stats(&mut values.clone(), 1.0));
            // The cumulative sums are computed by the draw, then by the head.
            for (noted, precision) in [(None, 1e-12), (Some((highest, &ends[..])), 1e-6)] {
                let row = Row { z: &values, log_sum_exp: stats.log_sum_exp, blocks: noted };
                let blocks = Blocks::from_row(row);
                let mut weights = values.clone();
                exponentials(&mut weights, blocks.shift);
                let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
                assert!((blocks.total() - total).abs() < precision * total);
                for i in 0..=1000 {
                    let target = f64::from(i) * 1e-3 * total;
                    let (picked, whole) =
                        (blocks.pick(row, target).unwrap(), pick(&weights, target).unwrap());
                    let between = weights[picked.min(whole)..picked.max(whole)].iter().map(|&w| f64::from(w));
                    assert!(weights[picked] > 0.0, "{vocabulary}: {picked} has no weight");
                    assert!(
                        picked == whole || between.sum::<f64>() < 1e-6 * total,
                        "{vocabulary}: {picked} for {whole}"
                    );
                }
                assert_eq!(blocks.pick(row, 2.0 * total), pick(&weights, 2.0 * total));
            }
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        let drawn = draws(SamplingParameters::with_temperature(0.0), &[1.0, 3.0, 3.0, -1.0], 3);
        assert!(drawn.iter().all(|&d| d == SampledToken { token: 1, log_prob: 0.0 }));
    }

    #[test]
    fn the_likeliest_tokens_come_in_order_and_equals_by_their_id() {
        let sampling = SamplingParameters::with_temperature(1.0);
        let row = row(&[1.0, 3.0, 3.0, -1.0], &sampling);
        let likeliest = row.likeliest(&[(0, 3), (0, 0), (0, 9)]).unwrap();
        let tokens = |top: &Vec<SampledToken>| top.iter().map(|t| t.token).collect::<Vec<_>>();
        assert_eq!(
            likeliest.iter().map(tokens).collect::<Vec<_>>(),
            [vec![1, 2, 0], vec![], vec![1, 2, 0, 3]]
        );
        let all: Vec<_> = likeliest[2].iter().map(|t| (0, t.token)).collect();
        let log_probs: Vec<_> = likeliest[2].iter().map(|t| t.log_prob).collect();
        assert_eq!(log_probs, row.log_probs(&sampling, &all).unwrap());
    }

    #[test]
    fn truncation_keeps_the_likeliest_and_renormalises() {
        // Probabilities .4 .3 .2 .1
        let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let all = SamplingParameters::with_temperature(1.0);
        let cases = [
            (SamplingParameters { top_k: 2, ..all }, vec![0.4, 0.3]),
            (SamplingParameters { top_p: 0.75, ..all }, vec![0.4, 0.3, 0.2]),
            (SamplingParameters { top_p: 0.001, ..all }, vec![0.4]),
            (SamplingParameters { min_p: 0.6, ..all }, vec![0.4, 0.3]),
            (SamplingParameters { top_k: 3, top_p: 0.7, ..all }, vec![0.4, 0.3]),
        ];
        for (sampling, kept) in cases {
            let total: f64 = kept.iter().sum();
            let drawn = draws(sampling, &logits, 20_000);
            for (token, share) in shares(&drawn, 4).into_iter().enumerate() {
                let expected = kept.get(token).map_or(0.0, |p| p / total);
                assert!((share - expected).abs() < 0.015, "{sampling:?}: {token} {share} {expected}");
            }
            for d in &drawn {
                let exact = (kept[d.token as usize] / total).ln();
                assert!((f64::from(d.log_prob) - exact).abs() < 1e-5, "{sampling:?}");
            }
        }
        let ties = draws(SamplingParameters { top_k: 2, ..all }, &[1.0; 4], 1000);
        assert!(ties.iter().all(|d| d.token < 2), "the lowest ids of equals are kept");
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        for bad in [f32::NAN, f32::INFINITY] {
            for temperature in [0.0, 1.0] {
                let sampling = SamplingParameters::with_temperature(temperature);
                // A broken head gives values that are not finite.
                let error = row(&[0.0, bad, 1.0], &sampling).draw(&sampling, &[(0, 0.5)]).err().unwrap();
                assert!(error.to_string().contains("not finite"), "{error}");
            }
        }
    }

    #[test]
    fn rows_and_tokens_that_do_not_exist_are_errors() {
        let sampling = SamplingParameters::with_temperature(1.0);
        let row = row(&[0.0, 1.0], &sampling);
        assert!(row.draw(&sampling, &[(1, 0.5)]).err().unwrap().to_string().contains("row 1 of 1"));
        assert!(row.log_probs(&sampling, &[(0, 2)]).err().unwrap().to_string().contains("token 2"));
    }
}
