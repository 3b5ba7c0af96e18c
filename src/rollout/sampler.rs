//! Drawing a token from a row of logits.
//!
//! The row is `z = logits / τ` and its [`RowStats`](crate::ops::log_prob::RowStats), both as the training forward
//! computes them, so a drawn token's log-probability `z_t − LSE(z)` has the same bits there.

use crate::ops::log_prob::inverse;
use crate::ops::math::exp;
use anyhow::{Result, bail};
use multiversion::multiversion;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// A row of logits, divided by the temperature.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// `[V]`.
    pub z: &'a [f32],
    /// `log Σ_j e^{z_j}`.
    pub log_sum_exp: f32,
}

impl Row<'_> {
    /// Log-probability of token `token`, which must be below `V`.
    pub fn log_prob(&self, token: u32) -> f32 {
        self.z[token as usize] - self.log_sum_exp
    }
}

/// Where in a rollout a token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub prompt: u64,
    pub sample: u64,
    pub turn: u64,
    /// Index within the turn.
    pub token: usize,
}

/// A token and its log-probability under the distribution it was drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    pub token: u32,
    pub log_prob: f32,
}

/// Where tokens come from: [`Sampling`], or a script.
pub trait TokenSource: Sync {
    /// What logits are multiplied with before they are drawn from: `1/τ`.
    fn inverse_temperature(&self) -> f32;

    /// The next token. `rng` is the turn's own stream: what it gives depends on the place alone, as long as every
    /// token of a turn takes equally much from it.
    ///
    /// # Errors
    /// When the row holds no distribution.
    fn draw(&self, place: Place, row: Row, rng: &mut ChaCha8Rng) -> Result<Drawn>;
}

/// How tokens are drawn. Training uses the whole distribution; greedy and truncated sampling are for evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token, the lowest id of equals; its log-probability is then 0.
    pub temperature: f64,
    /// Keep the likeliest tokens up to this probability, the one that reaches it included; 1 keeps all.
    pub top_p: f64,
    /// Keep the k likeliest tokens, the lowest ids of equals; 0 keeps all.
    pub top_k: usize,
    /// Keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
    pub min_p: f64,
}

impl Sampling {
    /// The policy itself, at `temperature`.
    pub fn whole(temperature: f64) -> Self {
        Self { temperature, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }

    fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// Log-probability of `token`, which must be below `V`, under what is kept of `row`; −∞ where it is not kept.
    pub fn log_prob(&self, row: Row, token: u32) -> f32 {
        let (weights, total) = self.kept(row);
        self.log_prob_of(row, (&weights, total), token)
    }

    fn log_prob_of(&self, row: Row, (weights, total): (&[f32], f64), token: u32) -> f32 {
        if self.truncates() {
            (f64::from(weights[token as usize]) / total).ln() as f32
        } else {
            row.log_prob(token)
        }
    }

    /// Weights of all tokens, 0 where they are not kept, and their sum.
    fn kept(&self, row: Row) -> (Vec<f32>, f64) {
        let mut weights = probabilities(row);
        if self.truncates() {
            self.truncate(&mut weights);
        }
        let total = weights.iter().map(|&w| f64::from(w)).sum();
        (weights, total)
    }

    /// Sets the weight of every token that is not kept to 0: `min_p`, then `top_k`, then `top_p` of what they left.
    fn truncate(&self, weights: &mut [f32]) {
        let highest = weights.iter().copied().fold(0.0, f32::max);
        let lowest = (f64::from(highest) * self.min_p) as f32;
        let mut order: Vec<usize> = (0..weights.len()).filter(|&i| weights[i] >= lowest).collect();
        let falling = |&a: &usize, &b: &usize| weights[b].total_cmp(&weights[a]).then(a.cmp(&b));
        if self.top_k > 0 && self.top_k < order.len() {
            order.select_nth_unstable_by(self.top_k - 1, falling);
            order.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            order.sort_unstable_by(falling);
            let reached = self.top_p * order.iter().map(|&i| f64::from(weights[i])).sum::<f64>();
            let mut sum = 0.0;
            let before = order.iter().take_while(|&&i| {
                let below = sum < reached;
                sum += f64::from(weights[i]);
                below
            });
            let kept = before.count().max(1);
            order.truncate(kept);
        }
        let mut kept = vec![0.0; weights.len()];
        order.into_iter().for_each(|i| kept[i] = weights[i]);
        weights.copy_from_slice(&kept);
    }
}

impl TokenSource for Sampling {
    fn inverse_temperature(&self) -> f32 {
        if self.temperature == 0.0 { 1.0 } else { inverse(self.temperature) }
    }

    fn draw(&self, _: Place, row: Row, rng: &mut ChaCha8Rng) -> Result<Drawn> {
        let (weights, total) = self.kept(row);
        if !(total.is_finite() && total > 0.0) {
            bail!("the model's logits are not finite; its weights are broken or training has diverged");
        }
        if self.temperature == 0.0 {
            return Ok(Drawn { token: highest(row.z) as u32, log_prob: 0.0 });
        }
        let Some(token) = pick(&weights, rng.random::<f64>() * total) else {
            bail!("no token has a probability above 0");
        };
        let log_prob = self.log_prob_of(row, (&weights, total), token as u32);
        Ok(Drawn { token: token as u32, log_prob })
    }
}

/// `e^{z − LSE(z)}` of every token.
fn probabilities(row: Row) -> Vec<f32> {
    let mut weights = row.z.to_vec();
    exponentials(&mut weights, row.log_sum_exp);
    weights
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn exponentials(row: &mut [f32], log_sum_exp: f32) {
    for z in row.iter_mut() {
        *z = exp(*z - log_sum_exp);
    }
}

/// The first token whose cumulative weight exceeds `target`, in id order; when rounding leaves none, the last one that
/// has any weight. Never a token of weight 0.
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

/// The place of the highest value, the first of equals.
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

    const PLACE: Place = Place { prompt: 0, sample: 0, turn: 0, token: 0 };

    fn draws(sampling: Sampling, logits: &[f32], n: u64) -> Vec<Drawn> {
        let mut z = logits.to_vec();
        let stats = row_stats(&mut z, sampling.inverse_temperature());
        let row = Row { z: &z, log_sum_exp: stats.log_sum_exp };
        let draw = |i| sampling.draw(PLACE, row, &mut stream(1, Purpose::Sampling, &[i])).unwrap();
        (0..n).map(draw).collect()
    }

    fn shares(draws: &[Drawn], tokens: usize) -> Vec<f64> {
        let count = |t| draws.iter().filter(|d| d.token as usize == t).count();
        (0..tokens).map(|t| count(t) as f64 / draws.len() as f64).collect()
    }

    #[test]
    fn shares_are_the_probabilities_at_the_temperature() {
        let logits = [0.5f32, -1.0, 2.0, 0.0, -200.0];
        for temperature in [1.0, 0.5, 2.0] {
            let drawn = draws(Sampling::whole(temperature), &logits, 40_000);
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
    fn greedy_takes_the_lowest_id_of_equals() {
        let drawn = draws(Sampling::whole(0.0), &[1.0, 3.0, 3.0, -1.0], 3);
        assert!(drawn.iter().all(|&d| d == Drawn { token: 1, log_prob: 0.0 }));
    }

    #[test]
    fn truncation_keeps_the_likeliest_and_renormalises() {
        // Probabilities .4 .3 .2 .1
        let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let all = Sampling::whole(1.0);
        let cases = [
            (Sampling { top_k: 2, ..all }, vec![0.4, 0.3]),
            (Sampling { top_p: 0.75, ..all }, vec![0.4, 0.3, 0.2]),
            (Sampling { top_p: 0.001, ..all }, vec![0.4]),
            (Sampling { min_p: 0.6, ..all }, vec![0.4, 0.3]),
            (Sampling { top_k: 3, top_p: 0.7, ..all }, vec![0.4, 0.3]),
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
        let ties = draws(Sampling { top_k: 2, ..all }, &[1.0; 4], 1000);
        assert!(ties.iter().all(|d| d.token < 2), "the lowest ids of equals are kept");
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        for bad in [f32::NAN, f32::INFINITY] {
            for temperature in [0.0, 1.0] {
                let mut z = [0.0, bad, 1.0];
                let sampling = Sampling::whole(temperature);
                let stats = row_stats(&mut z, sampling.inverse_temperature());
                let row = Row { z: &z, log_sum_exp: stats.log_sum_exp };
                let error = sampling.draw(PLACE, row, &mut stream(1, Purpose::Sampling, &[])).unwrap_err();
                assert!(error.to_string().contains("not finite"), "{error}");
            }
        }
    }
}
