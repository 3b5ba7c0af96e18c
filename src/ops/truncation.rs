//! Truncated distributions: the tokens that `min_p`, `top_k` and `top_p` keep, and log-probabilities over
//! them.
//!
//! Over the kept set `S`: `log p_t = z_t − LSE_S(z)` with `LSE_S(z) = log Σ_{j∈S} e^{z_j}`, and
//! `H = LSE_S(z) − Σ_{j∈S} p_j z_j`. The kept logits are gathered in ascending order of their ids and then
//! summed as a whole row. The sampler and the head of a training pass both use [`KeptRow`], so `log p_t` has
//! the same bits in sampling and in training. If all tokens are kept, it has the bits of the untruncated
//! distribution.

use super::log_prob::{RowStats, backward_row, row_stats};
use super::logits::{SamplingParameters, exponentials};
use super::math::max_lanes;

/// The kept tokens of a row, with their distribution.
pub(super) struct KeptRow {
    /// Ascending.
    pub ids: Vec<u32>,
    /// The logits of `ids`, divided by the temperature.
    z: Vec<f32>,
    stats: RowStats,
}

impl KeptRow {
    /// Gathers `ids`, ascending, from a row of `logits`, which are still to be multiplied by
    /// `inverse_temperature`.
    pub fn new(ids: Vec<u32>, logits: &[f32], inverse_temperature: f32) -> Self {
        let mut z: Vec<f32> = ids.iter().map(|&id| logits[id as usize]).collect();
        let stats = row_stats(&mut z, inverse_temperature);
        Self { ids, z, stats }
    }

    /// Returns the log-probability of `token`; −∞ if the token is not kept.
    pub fn log_prob(&self, token: u32) -> f32 {
        let index = self.ids.binary_search(&token).ok();
        index.map_or(f32::NEG_INFINITY, |index| self.z[index] - self.stats.log_sum_exp)
    }

    /// Returns the entropy of the kept distribution in nats.
    pub fn entropy(&self) -> f32 {
        self.stats.entropy
    }

    /// Replaces a row of logits by its gradient. The gradient of a token that is not kept is 0.
    pub fn write_gradient(
        mut self,
        row: &mut [f32],
        target: u32,
        (d_log_prob, d_entropy): (f32, f32),
        inverse_temperature: f32,
    ) {
        backward_row(&mut self.z, self.stats, d_log_prob, d_entropy, inverse_temperature);
        row.fill(0.0);
        self.ids.iter().zip(&self.z).for_each(|(&id, &gradient)| row[id as usize] = gradient);
        row[target as usize] += d_log_prob * inverse_temperature;
    }
}

impl SamplingParameters {
    /// Returns the kept tokens of a row of `z`, ascending, and their weights `e^{z − LSE(z)}`. First `min_p`
    /// removes tokens, then `top_k`, then `top_p` of the rest.
    pub(super) fn keep(&self, z: &[f32], log_sum_exp: f32) -> (Vec<u32>, Vec<f32>) {
        let mut weights = z.to_vec();
        exponentials(&mut weights, log_sum_exp);
        let weight = |id: &u32| weights[*id as usize];
        let lowest = (f64::from(max_lanes(&weights).max(0.0)) * self.min_p) as f32;
        let mut ids: Vec<u32> = (0..z.len() as u32).filter(|id| weight(id) >= lowest).collect();
        let falling = |a: &u32, b: &u32| weight(b).total_cmp(&weight(a)).then(a.cmp(b));
        if self.top_k > 0 && self.top_k < ids.len() {
            ids.select_nth_unstable_by(self.top_k - 1, falling);
            ids.truncate(self.top_k);
            ids.sort_unstable();
        }
        if self.top_p < 1.0 {
            let total: f64 = ids.iter().map(|id| f64::from(weight(id))).sum();
            // A kept token and all tokens after it have more than `1 − top_p` of the total weight, and none
            // of them weighs more than that token. So most tokens need no sorting. The factor allows for
            // rounding.
            let least = 0.999 * (1.0 - self.top_p) * total / ids.len().max(1) as f64;
            ids.retain(|id| f64::from(weight(id)) >= least);
            ids.sort_unstable_by(falling);
            let (target, mut sum) = (self.top_p * total, 0.0);
            let needed = ids.iter().take_while(|id| {
                let is_needed = sum < target;
                sum += f64::from(weight(id));
                is_needed
            });
            let count = needed.count().max(1);
            ids.truncate(count);
            ids.sort_unstable();
        }
        let kept_weights = ids.iter().map(weight).collect();
        (ids, kept_weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, stream};
    use rand::Rng;

    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut random = stream(seed, Purpose::Sampling, &[]);
        (0..count).map(|_| random.random_range(-6.0..6.0)).collect()
    }

    /// Returns the kept tokens by their definition: sorted by weight, then by id.
    fn keep_by_definition(sampling: &SamplingParameters, z: &[f32], log_sum_exp: f32) -> Vec<u32> {
        let mut weights = z.to_vec();
        exponentials(&mut weights, log_sum_exp);
        let weight = |id: &u32| f64::from(weights[*id as usize]);
        let mut order: Vec<u32> = (0..z.len() as u32).collect();
        order.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(a.cmp(b)));
        let lowest = (weight(&order[0]) * sampling.min_p) as f32;
        order.retain(|id| weights[*id as usize] >= lowest);
        if sampling.top_k > 0 {
            order.truncate(sampling.top_k);
        }
        let total: f64 = order.iter().map(weight).sum();
        let mut kept = vec![];
        let mut sum = 0.0;
        for id in order {
            if kept.is_empty() || sampling.top_p == 1.0 || sum < sampling.top_p * total {
                kept.push(id);
            }
            sum += weight(&id);
        }
        kept.sort_unstable();
        kept
    }

    #[test]
    fn the_kept_tokens_are_those_of_the_definition() {
        let all = SamplingParameters::with_temperature(1.0);
        for (count, seed) in [(1, 1), (2, 2), (50, 3), (272, 4), (3000, 5)] {
            let mut z = noise(count, seed);
            // Ties: whole blocks of equal logits.
            z.iter_mut().skip(count / 3).take(count / 4).for_each(|z| *z = 2.5);
            let log_sum_exp = row_stats(&mut z, 1.0).log_sum_exp;
            for top_p in [1e-9, 0.1, 0.5, 0.9, 0.999_999, 1.0] {
                for top_k in [0, 1, 20, 5000] {
                    for min_p in [0.0, 0.05, 1.0] {
                        let sampling = SamplingParameters { top_p, top_k, min_p, ..all };
                        let (ids, weights) = sampling.keep(&z, log_sum_exp);
                        assert_eq!(ids, keep_by_definition(&sampling, &z, log_sum_exp), "{sampling:?}");
                        assert_eq!(ids.len(), weights.len());
                    }
                }
            }
        }
    }

    #[test]
    fn one_kept_token_has_log_prob_0_and_no_gradient() {
        for (z, inverse_temperature) in [(-3.7f32, 0.7), (0.0, 1.0), (2e4, 1.3)] {
            let mut row = vec![1.0, z, 5.0];
            let kept = KeptRow::new(vec![1], &row, inverse_temperature);
            assert_eq!((kept.log_prob(1), kept.entropy()), (0.0, 0.0));
            assert_eq!((kept.log_prob(0), kept.log_prob(2)), (f32::NEG_INFINITY, f32::NEG_INFINITY));
            kept.write_gradient(&mut row, 1, (0.3, 0.2), inverse_temperature);
            assert_eq!(row, [0.0; 3]);
        }
    }

    #[test]
    fn all_tokens_kept_give_the_bits_of_the_whole_row() {
        for (count, seed, inverse_temperature) in [(1, 1, 1.0), (37, 2, 0.7), (5000, 3, 1.0 / 0.6)] {
            let (logits, target) = (noise(count, seed), count as u32 / 2);
            let (d_log_prob, d_entropy) = (0.3, -0.02);
            let mut whole = logits.clone();
            let stats = row_stats(&mut whole, inverse_temperature);
            let log_prob = whole[target as usize] - stats.log_sum_exp;
            backward_row(&mut whole, stats, d_log_prob, d_entropy, inverse_temperature);
            whole[target as usize] += d_log_prob * inverse_temperature;
            let kept = KeptRow::new((0..count as u32).collect(), &logits, inverse_temperature);
            assert_eq!((kept.log_prob(target), kept.entropy()), (log_prob, stats.entropy));
            let mut row = logits;
            kept.write_gradient(&mut row, target, (d_log_prob, d_entropy), inverse_temperature);
            assert_eq!(row, whole);
        }
    }
}
