//! Rollout correction for tokens whose training and rollout log-probs differ.
//!
//! Importance sampling weights tokens by ρ = π_train/π_rollout. Rejection drops tokens whose ρ is outside the
//! bounds. The gradient flows through neither the weights nor the rejection. Semantics and metric names
//! follow verl. The off-policy sequence mask gives weight 0 to bad responses that have become unlikely.

mod importance;
mod off_policy_mask;
mod rejection;
mod rule;

pub use importance::{ImportanceSampling, ImportanceSettings, RatioLevel, WeightBound, importance_weights};
pub use off_policy_mask::off_policy_mask;
pub use rejection::reject;
pub use rule::{RejectOption, RejectionRule};

use anyhow::Result;

use super::MetricMap;
use super::off_policy::off_policy_metrics;
use super::sequences::Sequences;

/// The rules of a correction: importance sampling, rejection, or both. Without either, only metrics are
/// computed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CorrectionRules {
    pub importance: Option<ImportanceSettings>,
    pub reject: Vec<RejectionRule>,
}

/// The result of [`correct`] for one batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Correction {
    /// One weight per token; `None` without importance sampling.
    pub weights: Option<Vec<f32>>,
    /// The mask without the rejected tokens. A rejected token counts neither in the loss nor in its
    /// denominators.
    pub mask: Vec<bool>,
    /// Metrics `rollout_corr/…`. All of them are computed over the tokens of the mask before rejection.
    pub metrics: MetricMap,
}

/// Computes the weights, the mask after rejection, and the mismatch metrics of a whole batch.
///
/// `log_prob` holds the log-probs of training, or the old log-probs. `rollout_log_prob` holds those of the
/// rollout.
/// Statistics run over `sequences`, which must be the whole batch.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when no token is valid.
pub fn correct(
    sequences: &Sequences,
    log_prob: &[f32],
    rollout_log_prob: &[f32],
    config: &CorrectionRules,
) -> Result<Correction> {
    let mut metrics = off_policy_metrics(sequences, log_prob, Some(rollout_log_prob))?;
    let log_ratio: Vec<f32> = log_prob.iter().zip(rollout_log_prob).map(|(t, r)| t - r).collect();
    let weights = match &config.importance {
        Some(importance) => {
            let (weights, of_weights) = importance_weights(sequences, &log_ratio, importance)?;
            metrics.extend(of_weights);
            Some(weights)
        }
        None => None,
    };
    let mask = if config.reject.is_empty() {
        sequences.mask.to_vec()
    } else {
        let (mask, of_rejection) = reject(sequences, &log_ratio, &config.reject)?;
        metrics.extend(of_rejection);
        mask
    };
    let metrics = metrics.into_iter().map(|(name, value)| (format!("rollout_corr/{name}"), value)).collect();
    Ok(Correction { weights, mask, metrics })
}

/// Returns the fraction of `values` for which `holds` returns true; 0 without values.
fn fraction<T>(values: impl Iterator<Item = T>, holds: impl Fn(T) -> bool) -> f64 {
    super::sequences::mean(values.map(|v| f64::from(holds(v))))
}

fn max(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::NEG_INFINITY, f64::max)
}

fn min(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::INFINITY, f64::min)
}
