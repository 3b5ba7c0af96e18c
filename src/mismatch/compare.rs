//! Statistics of a log-prob mismatch between training and rollout on the same tokens.

use crate::policy::Sequences;
use crate::policy::correction::{ImportanceSettings, RatioLevel, WeightBound, importance_weights};
use crate::policy::off_policy::{agreement_metrics, off_policy_metrics};
use anyhow::{Result, ensure};

/// Maximum importance weight, so that no single token dominates `IS std` and `ESS`.
const WEIGHT_MAX: f64 = 1e6;

/// Columns of the table: metric and short name.
pub const COLUMNS: [(&str, &str); 12] = [
    ("mismatch/logprob_abs_diff_max", "|Δlogp| max"),
    ("mismatch/logprob_abs_diff_mean", "|Δlogp| mean"),
    ("mismatch/bit_equal_fraction", "bit-equal"),
    ("rollout_corr/log_ppl_abs_diff", "|Δlog-ppl| mean"),
    ("mismatch/log_ppl_abs_diff_max", "|Δlog-ppl| max"),
    ("rollout_corr/kl", "KL k1"),
    ("rollout_corr/k3_kl", "KL k3"),
    ("mismatch/clip_fraction", "clipped"),
    ("rollout_corr/rollout_is_std", "IS std"),
    ("rollout_corr/rollout_is_eff_sample_size", "ESS"),
    ("mismatch/routing_agreement", "routing"),
    ("mismatch/first_divergent_layer", "first layer"),
];

/// Log-probabilities of the same targets from training and rollout.
pub struct LogProbPair<'a> {
    /// Start of each sequence among the targets, followed by the number of targets.
    pub cu_seqlens: &'a [usize],
    pub training: &'a [f32],
    pub rollout: &'a [f32],
    /// The old log-probs of the importance ratio: those of the rollout, or of a second forward pass.
    pub old: &'a [f32],
    /// Ratios outside `1 − low ..= 1 + high` are clipped.
    pub clip: (f64, f64),
}

impl LogProbPair<'_> {
    /// Returns the statistics, with the metric names of [`COLUMNS`].
    ///
    /// # Errors
    /// When a log-probability is NaN, or there are no targets.
    pub fn metrics(&self) -> Result<Vec<(String, f64)>> {
        let tokens = self.training.len();
        ensure!(self.rollout.len() == tokens && self.old.len() == tokens, "lengths differ");
        let mask = vec![true; tokens];
        let sequences = Sequences::new(self.cu_seqlens, &mask)?;
        let mut metrics: Vec<(String, f64)> =
            agreement_metrics(&sequences, self.training, self.rollout)?.into_iter().collect();
        for (name, value) in off_policy_metrics(&sequences, self.training, Some(self.rollout))? {
            metrics.push((format!("rollout_corr/{name}"), value));
        }
        let log_ratio: Vec<f32> = self.training.iter().zip(self.rollout).map(|(t, r)| t - r).collect();
        let settings = ImportanceSettings {
            level: RatioLevel::Token,
            bound: WeightBound::Truncate { max: WEIGHT_MAX },
            batch_normalize: false,
        };
        let (_, of_weights) = importance_weights(&sequences, &log_ratio, &settings)?;
        for (name, value) in of_weights {
            metrics.push((format!("rollout_corr/{name}"), value));
        }
        let difference_sum = log_ratio.iter().map(|difference| f64::from(difference.abs())).sum::<f64>();
        metrics.push(("mismatch/logprob_abs_diff_mean".to_owned(), difference_sum / tokens as f64));
        let is_clipped = |(t, o): (&f32, &f32)| {
            let ratio = (f64::from(*t) - f64::from(*o)).exp();
            ratio < 1.0 - self.clip.0 || ratio > 1.0 + self.clip.1
        };
        let clipped = self.training.iter().zip(self.old).filter(|pair| is_clipped(*pair)).count();
        metrics.push(("mismatch/clip_fraction".to_owned(), clipped as f64 / tokens as f64));
        metrics.retain(|(name, _)| COLUMNS.iter().any(|(column, _)| column == name));
        Ok(metrics)
    }
}
