//! Causes in the head: log-probs at another temperature, after a filter, or from rounded logits.

use super::causes::{Cause, Change};
use super::engine_log_probs::EngineBatch;
use crate::actor::micro_batch::MicroBatch;
use crate::model::policy_view::PolicyView;
use crate::ops::logits::{SamplingParameters, logits_rows_max};
use anyhow::Result;
use candle_core::Tensor;
use half::bf16;

/// A filter of the sampler, applied before the log-probability is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Filter {
    TopP(f64),
    TopK(usize),
    MinP(f64),
}

/// The experiment that decides between causes in the head: the user requests these data from the engine.
pub const TOP_LOG_PROBS: &str = "the log-probs of several tokens at one position (top_logprobs)";

/// Declares a cause: the engine computes its log-probs after `filter`.
fn filter_cause(filter: Filter) -> Cause {
    let (name, setting) = match filter {
        Filter::TopP(p) => ("log-probs after top-p", format!("top_p = {p:.3}")),
        Filter::TopK(k) => ("log-probs after top-k", format!("top_k = {k}")),
        Filter::MinP(p) => ("log-probs after min-p", format!("min_p = {p:.3}")),
    };
    let settings = HeadSettings { filter: Some(filter), ..HeadSettings::default() };
    let detail = format!("renormalised over the tokens that {setting} keeps");
    Cause::new(name, detail, TOP_LOG_PROBS, Change::Head(settings))
}

/// The computation of log-probabilities from logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadSettings {
    /// Factor by which the temperature that the file states is multiplied.
    pub temperature_factor: f64,
    pub filter: Option<Filter>,
    pub bf16_logits: bool,
}

impl Default for HeadSettings {
    fn default() -> Self {
        Self { temperature_factor: 1.0, filter: None, bf16_logits: false }
    }
}

impl HeadSettings {
    /// Returns the log-probabilities of `batch`'s targets from the head's input `normed [R, H]`; −∞ if the
    /// filter removes the target. For targets that were not sampled, temperature is 1 and no filter is
    /// applied.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn log_probs(&self, policy: &PolicyView, normed: &Tensor, batch: &EngineBatch) -> Result<Vec<f32>> {
        let temperature = batch.temperature * self.temperature_factor;
        let mut log_probs = self.log_probs_as_sampled(policy, normed, batch, temperature)?;
        if (temperature != 1.0 || self.filter.is_some()) && batch.sampled.contains(&false) {
            let raw = Self { filter: None, ..*self }.log_probs_as_sampled(policy, normed, batch, 1.0)?;
            for ((log_prob, raw), sampled) in log_probs.iter_mut().zip(raw).zip(&batch.sampled) {
                if !sampled {
                    *log_prob = raw;
                }
            }
        }
        Ok(log_probs)
    }

    /// Returns the log-probabilities as if all targets had been sampled.
    fn log_probs_as_sampled(
        &self,
        policy: &PolicyView,
        normed: &Tensor,
        batch: &EngineBatch,
        temperature: f64,
    ) -> Result<Vec<f32>> {
        if self.filter.is_none() && !self.bf16_logits {
            return policy.log_probs(normed, &batch.micro_batch, temperature);
        }
        let targets = &batch.micro_batch.targets;
        let mut log_probs = Vec::with_capacity(targets.len());
        each_row(policy, normed, 0..targets.len(), &mut |row, z| {
            let (mut z, target) = kept_logits(&batch.micro_batch, row, z);
            if self.bf16_logits {
                z.iter_mut().for_each(|z| *z = bf16::from_f32(*z).to_f32());
            }
            log_probs.push(log_prob(&z, target, temperature, self.filter) as f32);
        })?;
        Ok(log_probs)
    }
}

/// Calls `use_row` with the index and the raw logits `[V]` of each requested row.
fn each_row(
    policy: &PolicyView,
    normed: &Tensor,
    rows: std::ops::Range<usize>,
    use_row: &mut dyn FnMut(usize, &[f32]),
) -> Result<()> {
    let vocabulary = policy.model.config.vocab_size;
    let chunk = logits_rows_max(vocabulary);
    let (start, end) = (rows.start, rows.end);
    for start in (start..end).step_by(chunk) {
        let count = chunk.min(end - start);
        let raw = SamplingParameters::with_temperature(1.0);
        let logits = policy.weights.logits(&normed.narrow(0, start, count)?, &raw)?;
        let z = logits.scaled_logits().flatten_all()?.to_vec1::<f32>()?;
        z.chunks_exact(vocabulary).enumerate().for_each(|(i, z)| use_row(start + i, z));
    }
    Ok(())
}

/// Returns the logits of the tokens that the target of `row` was drawn from, and the index of the target
/// among them. `z` has the logits of all tokens.
fn kept_logits(batch: &MicroBatch, row: usize, z: &[f32]) -> (Vec<f32>, usize) {
    let target = batch.targets[row];
    let Some(kept) = batch.kept_tokens.as_ref().and_then(|kept| kept[row].as_ref()) else {
        return (z.to_vec(), target as usize);
    };
    let ids = kept.ids();
    (ids.iter().map(|&id| z[id as usize]).collect(), ids.binary_search(&target).unwrap_or_default())
}

/// Returns the log-probability of `target` under `softmax(z / τ)` after `filter`.
fn log_prob(z: &[f32], target: usize, temperature: f64, filter: Option<Filter>) -> f64 {
    match filter {
        None => SortedDistribution::unsorted_log_prob(z, target, temperature),
        Some(filter) => SortedDistribution::new(z, target, temperature).log_prob(filter),
    }
}

/// A removed token counts as kept if its probability is at least this fraction of the last kept token's
/// probability.
const EDGE_PROBABILITY_RATIO: f64 = 0.7;

/// The distribution of one row, most likely token first.
struct SortedDistribution {
    /// Number of tokens that are more likely than the target.
    rank: usize,
    log_prob: f64,
    probabilities: Vec<f64>,
    /// Cumulative probability up to each rank, including that rank.
    cumulative: Vec<f64>,
}

impl SortedDistribution {
    fn log_sum_exp(z: &[f32], temperature: f64) -> f64 {
        let highest = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = z.iter().map(|&z| (f64::from(z - highest) / temperature).exp()).sum();
        f64::from(highest) / temperature + sum.ln()
    }

    fn unsorted_log_prob(z: &[f32], target: usize, temperature: f64) -> f64 {
        f64::from(z[target]) / temperature - Self::log_sum_exp(z, temperature)
    }

    fn new(z: &[f32], target: usize, temperature: f64) -> Self {
        let sum = Self::log_sum_exp(z, temperature);
        let mut order: Vec<usize> = (0..z.len()).collect();
        order.sort_unstable_by(|&a, &b| z[b].total_cmp(&z[a]).then(a.cmp(&b)));
        let probabilities: Vec<f64> =
            order.iter().map(|&i| (f64::from(z[i]) / temperature - sum).exp()).collect();
        let mut total = 0.0;
        let cumulative = probabilities.iter().map(|p| {
            total += p;
            total
        });
        Self {
            rank: order.iter().position(|&i| i == target).unwrap_or(z.len()),
            log_prob: f64::from(z[target]) / temperature - sum,
            cumulative: cumulative.collect(),
            probabilities,
        }
    }

    /// Returns the number of tokens that `filter` keeps.
    fn kept_count(&self, filter: Filter) -> usize {
        let count = self.probabilities.len();
        match filter {
            Filter::TopK(k) => k.clamp(1, count),
            Filter::TopP(p) => (self.cumulative.partition_point(|&sum| sum < p) + 1).min(count),
            Filter::MinP(p) => {
                let lowest = p * self.probabilities.first().copied().unwrap_or(0.0);
                self.probabilities.partition_point(|&q| q >= lowest).max(1)
            }
        }
    }

    /// Returns the target's log-probability after `filter`; −∞ if the filter removes the target. A target at
    /// the edge of the filter counts as kept, because rounding moves the edge.
    fn log_prob(&self, filter: Filter) -> f64 {
        let kept_count = self.kept_count(filter);
        let at_edge = || {
            self.rank == kept_count
                || self.probabilities[self.rank]
                    >= EDGE_PROBABILITY_RATIO * self.probabilities[kept_count - 1]
        };
        match self.rank < kept_count || self.rank < self.probabilities.len() && at_edge() {
            true => self.log_prob - self.cumulative[kept_count - 1].ln(),
            false => f64::NEG_INFINITY,
        }
    }
}

/// Rows of logits that are kept in memory. Continuous parameters, such as a temperature, are fitted to them.
pub struct FitRows {
    /// For each row: raw logits, target, stated temperature, and the engine's log-prob.
    rows: Vec<(Vec<f32>, usize, f64, f64)>,
}

/// Relative tolerance within which a fitted temperature counts as equal to the stated temperature.
const TEMPERATURE_TOLERANCE: f64 = 0.005;
/// Maximum number of rows for the fit of a parameter.
const FIT_ROWS_MAX: usize = 384;
/// Maximum number of logit values that are kept for the fit.
const FIT_VALUES_MAX: usize = 1 << 24;

impl FitRows {
    /// Selects evenly spaced sampled targets of `batches`, with their rows of `normed`.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn select_rows(
        policy: &PolicyView,
        batches: &[EngineBatch],
        normed: &[Tensor],
        engine: &[f32],
    ) -> Result<Self> {
        let rows_max = FIT_ROWS_MAX.min(FIT_VALUES_MAX / policy.model.config.vocab_size).max(16);
        let sampled: usize = batches.iter().flat_map(|batch| &batch.sampled).map(|s| usize::from(*s)).sum();
        let stride = sampled.div_ceil(rows_max).max(1);
        let (mut rows, mut first, mut sampled_seen) = (vec![], 0, 0);
        for (batch, normed) in batches.iter().zip(normed) {
            for row in (0..batch.sampled.len()).filter(|&row| batch.sampled[row]) {
                sampled_seen += 1;
                if sampled_seen % stride != 0 {
                    continue;
                }
                each_row(policy, normed, row..row + 1, &mut |row, z| {
                    let (z, target) = kept_logits(&batch.micro_batch, row, z);
                    rows.push((z, target, batch.temperature, f64::from(engine[first + row])));
                })?;
            }
            first += batch.sampled.len();
        }
        Ok(Self { rows })
    }

    /// Returns the causes that fit best: one for each kind of filter, and another temperature if the best
    /// temperature differs from the stated one.
    pub fn causes(&self) -> Vec<Cause> {
        if self.rows.is_empty() {
            return vec![];
        }
        let mut causes = self.filters().map(filter_cause).to_vec();
        let factor = self.temperature_factor();
        if factor.ln().abs() > TEMPERATURE_TOLERANCE {
            let detail = format!("the log-probs have {factor:.3} times the stated temperature");
            let settings = HeadSettings { temperature_factor: factor, ..HeadSettings::default() };
            causes.push(Cause::new("another temperature", detail, TOP_LOG_PROBS, Change::Head(settings)));
        }
        causes
    }

    /// Returns the factor on the stated temperature that fits best. Searches a grid from 0.1 to 10, then runs
    /// a golden-section search.
    fn temperature_factor(&self) -> f64 {
        let objective = |log: f64| {
            mean_root_abs(self.rows.iter().map(|(z, target, temperature, engine)| {
                SortedDistribution::unsorted_log_prob(z, *target, temperature * log.exp()) - engine
            }))
        };
        let step = 10f64.ln() / 24.0;
        let nearest =
            (-24..=24).map(|i| f64::from(i) * step).min_by(|a, b| objective(*a).total_cmp(&objective(*b)));
        let (mut low, mut high) = (nearest.unwrap_or(0.0) - step, nearest.unwrap_or(0.0) + step);
        let golden = (5f64.sqrt() - 1.0) / 2.0;
        for _ in 0..30 {
            let (a, b) = (high - golden * (high - low), low + golden * (high - low));
            if objective(a) < objective(b) { high = b } else { low = a }
        }
        ((low + high) / 2.0).exp()
    }

    /// Returns the best filter of each kind.
    fn filters(&self) -> [Filter; 3] {
        let sorted: Vec<(SortedDistribution, f64)> = self
            .rows
            .iter()
            .map(|(z, target, temperature, engine)| {
                (SortedDistribution::new(z, *target, *temperature), *engine)
            })
            .collect();
        let vocabulary = self.rows.first().map_or(1, |(z, ..)| z.len());
        let best = |filters: Vec<Filter>| {
            let objective = |filter: Filter| {
                mean_root_abs(sorted.iter().map(|(row, engine)| match row.log_prob(filter) {
                    f64::NEG_INFINITY => 50.0,
                    log_prob => log_prob - engine,
                }))
            };
            let objectives: Vec<(Filter, f64)> =
                filters.into_iter().map(|filter| (filter, objective(filter))).collect();
            let least = objectives.iter().map(|(_, objective)| *objective).fold(f64::INFINITY, f64::min);
            // Filters that keep the same tokens have equal objectives. The filter in the middle is returned.
            let equal = objectives.iter().filter(|(_, objective)| *objective <= least * 1.000_001);
            let equal: Vec<Filter> = equal.map(|(filter, _)| *filter).collect();
            equal.get(equal.len() / 2).copied().unwrap_or(Filter::TopK(vocabulary))
        };
        let steps = |from: f64, count: usize| (1..count).map(move |i| from * i as f64);
        [
            best(steps(0.005, 200).chain([0.999]).map(Filter::TopP).collect()),
            best((1..=vocabulary.min(1000)).map(Filter::TopK).collect()),
            best(steps(0.0025, 240).map(Filter::MinP).collect()),
        ]
    }
}

/// Returns the mean of √|x|, on which a few large values have little effect.
fn mean_root_abs(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for value in values {
        sum += value.abs().min(50.0).sqrt();
        count += 1.0;
    }
    if count == 0.0 { 0.0 } else { sum / count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_renormalises_the_kept_tokens() {
        let z: Vec<f32> = [0.5f32, 0.25, 0.15, 0.1].iter().map(|p| p.ln()).collect();
        let probability = |target, filter| log_prob(&z, target, 1.0, Some(filter)).exp();
        assert!((probability(0, Filter::TopK(2)) - 0.5 / 0.75).abs() < 1e-6);
        assert!((probability(1, Filter::TopP(0.6)) - 0.25 / 0.75).abs() < 1e-6);
        assert!((probability(2, Filter::MinP(0.29)) - 0.15 / 0.9).abs() < 1e-6);
        assert_eq!(probability(3, Filter::TopK(2)), 0.0);
        // The first removed token is at the edge of the filter.
        assert!((probability(3, Filter::MinP(0.29)) - 0.1 / 0.9).abs() < 1e-6);
        assert!((log_prob(&z, 3, 0.5, None).exp() - 0.01 / 0.345).abs() < 1e-6);
    }
}
