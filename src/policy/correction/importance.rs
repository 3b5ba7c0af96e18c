//! Importance weights of the rollout correction.

use anyhow::Result;

use super::{fraction, max, min};
use crate::bad_input;
use crate::policy::MetricMap;
use crate::policy::off_policy::check_any_valid;
use crate::policy::ratio::{LOG_RATIO_MAX, clamped_ratio};
use crate::policy::sequences::{Sequences, mean, sample_std};
use crate::settings::choice;

/// Added to the mean weight to avoid division by zero. If the mean weight is at most this, the weights are
/// not normalised.
const MEAN_EPSILON: f64 = 1e-8;

choice! {
    /// How importance weights are computed from ρ = π_train/π_rollout.
    pub enum ImportanceSampling {
        /// No importance weights.
        None = "none",
        /// Each token has its own ratio ρ as weight: low variance, biased.
        Token = "token",
        /// Each token has the ratio ρ of the whole response as weight: unbiased, high variance.
        Sequence = "sequence",
    }
}

impl ImportanceSampling {
    /// Returns whether the weights are ratios of tokens or of sequences; `None` without weights.
    pub fn level(self) -> Option<RatioLevel> {
        match self {
            ImportanceSampling::None => None,
            ImportanceSampling::Token => Some(RatioLevel::Token),
            ImportanceSampling::Sequence => Some(RatioLevel::Sequence),
        }
    }
}

/// Whether a weight is the ratio of one token or of a whole sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RatioLevel {
    /// The ratio of the token, ρ = exp(clamp(log ratio, ±20)): low variance, biased.
    Token,
    /// The ratio of the whole response, ρ = exp(clamp(Σ log ratio, ±20)), on each of its tokens: unbiased,
    /// high variance.
    Sequence,
}

/// How a weight is bounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightBound {
    /// min(ρ, c): truncated importance sampling.
    Truncate { max: f64 },
    /// 0 outside [low, high], else ρ (IcePop). Both bounds are inclusive.
    Mask { low: f64, high: f64 },
}

impl WeightBound {
    /// Returns what is wrong with the bounds of a weight, and the remedy; `None` if the bounds are valid.
    pub fn bounds_error(bounds: &[f64]) -> Option<String> {
        match *bounds {
            [max] if max > 0.0 && max.is_finite() => None,
            [low, high] if low >= 0.0 && high > 0.0 && low <= high && high.is_finite() => None,
            [low, high] if low > high => {
                Some(format!("the lower bound {low} is above the upper bound {high}; swap them"))
            }
            [_] | [_, _] => Some("the ratio is positive; give a positive bound".to_owned()),
            _ => Some("give one number, or a lower and an upper bound".to_owned()),
        }
    }

    /// Reads bounds. One number truncates larger weights to it. Two numbers are a lower and an upper bound;
    /// weights outside become 0.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for bounds with a [`Self::bounds_error`].
    pub fn new(bounds: &[f64]) -> Result<Self> {
        match (Self::bounds_error(bounds), bounds) {
            (None, &[max]) => Ok(WeightBound::Truncate { max }),
            (None, &[low, high]) => Ok(WeightBound::Mask { low, high }),
            (wrong, _) => {
                Err(bad_input!("the bounds {bounds:?} of the weight: {}", wrong.unwrap_or_default()))
            }
        }
    }

    fn apply(&self, ratio: f64) -> f64 {
        match *self {
            WeightBound::Truncate { max } => ratio.min(max),
            WeightBound::Mask { .. } if self.rejects(ratio) => 0.0,
            WeightBound::Mask { .. } => ratio,
        }
    }

    fn rejects(&self, ratio: f64) -> bool {
        matches!(*self, WeightBound::Mask { low, high } if ratio < low || ratio > high)
    }

    /// Returns the limits beyond which the metrics `…_fraction_low` and `…_fraction_high` count a ratio.
    fn limits(&self) -> (f64, f64) {
        match *self {
            WeightBound::Truncate { max } => (1.0 / max, max),
            WeightBound::Mask { low, high } => (low, high),
        }
    }
}

/// Settings of the importance weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImportanceSettings {
    pub level: RatioLevel,
    pub bound: WeightBound,
    /// Whether the weights are divided by their mean over the batch.
    pub batch_normalize: bool,
}

/// Computes the weight of every token of a whole batch, 0 where the mask is false, and metrics without
/// prefix. `log_ratio` is T − R, where T are the log-probs of training and R those of the rollout.
///
/// The metrics describe the bounded weights before batch normalisation:
/// - `rollout_is_{mean,std,eff_sample_size}`: statistics over valid tokens.
/// - `rollout_is_{min,max}`: minimum and maximum over valid tokens. With sequence weights, they are taken
///   over the raw ratios of the sequences.
/// - `rollout_is_seq_…`: statistics of the sequences' mean weights.
/// - `…_fraction_{high,low}`: fraction of raw ratios outside the bounds. If there is only an upper bound
///   c, the lower bound counts as 1/c.
///
/// A sequence without valid tokens has ratio 1 and weight 0.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when no token is valid.
pub fn importance_weights(
    sequences: &Sequences,
    log_ratio: &[f32],
    settings: &ImportanceSettings,
) -> Result<(Vec<f32>, MetricMap)> {
    sequences.check("log_ratio", log_ratio)?;
    check_any_valid(sequences)?;
    let log_ratio = |t: usize| f64::from(log_ratio[t]);
    let sequence_logs: Vec<f64> =
        sequences.token_ranges().map(|range| sequences.valid_indices(range).map(log_ratio).sum()).collect();
    let mut raw = vec![0.0; sequences.tokens()];
    for (range, &log) in sequences.token_ranges().zip(&sequence_logs) {
        for t in sequences.valid_indices(range) {
            raw[t] = match settings.level {
                RatioLevel::Token => clamped_ratio(log_ratio(t)),
                RatioLevel::Sequence => clamped_ratio(log),
            };
        }
    }
    let mut weights = vec![0.0; sequences.tokens()];
    for t in sequences.all_valid_indices() {
        weights[t] = settings.bound.apply(raw[t]);
    }
    let context = ImportanceContext {
        sequences,
        settings,
        sequence_logs: &sequence_logs,
        raw: &raw,
        weights: &weights,
    };
    let mut metrics = context.metrics();
    if settings.batch_normalize {
        let factor = context.normalisation_factor();
        weights.iter_mut().for_each(|w| *w /= factor);
        metrics.insert("rollout_is_batch_norm_factor".into(), factor);
    }
    Ok((weights.into_iter().map(|w| w as f32).collect(), metrics))
}

struct ImportanceContext<'a> {
    sequences: &'a Sequences<'a>,
    settings: &'a ImportanceSettings,
    /// Σ log ratio of each sequence, not clamped.
    sequence_logs: &'a [f64],
    raw: &'a [f64],
    weights: &'a [f64],
}

impl ImportanceContext<'_> {
    fn metrics(&self) -> MetricMap {
        let tokens = || self.sequences.all_valid_indices();
        let weights = || tokens().map(|t| self.weights[t]);
        let average = mean(weights());
        let variance = mean(weights().map(|w| (w - average).powi(2)));
        let second_moment = mean(weights().map(|w| (w / (average + MEAN_EPSILON)).powi(2)));
        let (low, high) = self.settings.bound.limits();
        let logs = || self.sequence_logs.iter().copied();
        let (smallest, largest, below, above) = match self.settings.level {
            RatioLevel::Token => (
                min(weights()),
                max(weights()),
                fraction(tokens(), |t| self.raw[t] < low),
                fraction(tokens(), |t| self.raw[t] > high),
            ),
            RatioLevel::Sequence => (
                min(logs()).exp(),
                max(logs()).min(LOG_RATIO_MAX).exp(),
                fraction(logs(), |log| log < low.ln()),
                fraction(logs(), |log| log > high.ln()),
            ),
        };
        let means = self.sequences.sequence_means(|t| self.weights[t]);
        let raw = self.sequences.sequence_means(|t| self.raw[t]);
        let mut metrics = MetricMap::from([
            ("rollout_is_mean".into(), average),
            ("rollout_is_std".into(), variance.sqrt()),
            ("rollout_is_min".into(), smallest),
            ("rollout_is_max".into(), largest),
            // If all weights are 0, the effective sample size is 0.
            (
                "rollout_is_eff_sample_size".into(),
                if second_moment == 0.0 { 0.0 } else { 1.0 / second_moment },
            ),
            ("rollout_is_ratio_fraction_low".into(), below),
            ("rollout_is_ratio_fraction_high".into(), above),
            ("rollout_is_seq_mean".into(), mean(means.iter().copied())),
            ("rollout_is_seq_std".into(), sample_std(&means)),
            ("rollout_is_seq_max".into(), max(means.iter().copied())),
            ("rollout_is_seq_min".into(), min(means.iter().copied())),
            ("rollout_is_seq_max_deviation".into(), max(means.iter().map(|m| (m - 1.0).abs()))),
            ("rollout_is_seq_fraction_low".into(), fraction(raw.iter(), |&r| r < low)),
            ("rollout_is_seq_fraction_high".into(), fraction(raw.iter(), |&r| r > high)),
        ]);
        if matches!(self.settings.bound, WeightBound::Mask { .. }) {
            let dropped = fraction(tokens(), |t| self.settings.bound.rejects(self.raw[t]));
            metrics.insert("rollout_is_oob_ratio".into(), dropped);
        }
        metrics
    }

    /// Returns the mean weight over valid tokens, or over sequences with a valid token if the weights are
    /// ratios of sequences. Returns 1 if this mean is at most [`MEAN_EPSILON`].
    fn normalisation_factor(&self) -> f64 {
        let factor = match self.settings.level {
            RatioLevel::Token => self.sequences.mean(|t| self.weights[t]),
            RatioLevel::Sequence => {
                let first = |range| self.sequences.valid_indices(range).next();
                mean(self.sequences.token_ranges().filter_map(first).map(|t| self.weights[t]))
            }
        };
        if factor > MEAN_EPSILON { factor } else { 1.0 }
    }
}
