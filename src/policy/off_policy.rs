//! Distance of the trained policy from the sampling policy: verl's `rollout_corr/…` mismatch metrics.

use anyhow::Result;

use super::MetricMap;
use super::ratio::clamped_ratio;
use super::sequences::{Sequences, mean};
use crate::bad_input;

/// Returns perplexities, divergences and χ² of T = `log_prob` against R = `rollout_log_prob`. The metric
/// names have no prefix.
///
/// Over valid tokens, with ρ = exp(clamp(T − R, ±20)):
/// - `kl` = mean(R − T)
/// - `k3_kl` = mean(e^(T−R) − (T−R) − 1)
/// - `chi2_token` = mean(ρ²) − 1
///
/// Over all sequences, with the log-perplexities P = −mean T and Q = −mean R of each sequence (0 without
/// valid tokens), and with d = P − Q:
/// - `training_log_ppl` = mean(P), `training_ppl` = mean(e^P)
/// - `rollout_log_ppl` = mean(Q), `rollout_ppl` = mean(e^Q)
/// - `log_ppl_diff` = mean(d), `log_ppl_abs_diff` = mean(|d|), `ppl_ratio` = mean(e^d)
/// - `log_ppl_diff_max` = max(d), `log_ppl_diff_min` = min(d)
/// - `chi2_seq` = mean(exp(clamp(Σ(T − R), ±20))²) − 1
///
/// Without `rollout_log_prob` only the two metrics `training_…` are returned.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when no token is valid.
pub fn off_policy_metrics(
    sequences: &Sequences,
    log_prob: &[f32],
    rollout_log_prob: Option<&[f32]>,
) -> Result<MetricMap> {
    sequences.check("log_prob", log_prob)?;
    check_any_valid(sequences)?;
    let mut metrics = MetricMap::new();
    let train = sequences.sequence_means(|t| f64::from(log_prob[t]));
    metrics.insert("training_ppl".into(), mean(train.iter().map(|m| (-m).exp())));
    metrics.insert("training_log_ppl".into(), mean(train.iter().map(|m| -m)));
    let Some(rollout_log_prob) = rollout_log_prob else { return Ok(metrics) };

    sequences.check("rollout_log_prob", rollout_log_prob)?;
    let rollout = sequences.sequence_means(|t| f64::from(rollout_log_prob[t]));
    let log_ratio = |t: usize| f64::from(log_prob[t]) - f64::from(rollout_log_prob[t]);
    let difference: Vec<f64> = rollout.iter().zip(&train).map(|(r, t)| r - t).collect();
    let row_sums =
        sequences.token_ranges().map(|range| sequences.valid_indices(range).map(log_ratio).sum::<f64>());
    for (name, value) in [
        ("kl", sequences.mean(|t| -log_ratio(t))),
        ("k3_kl", sequences.mean(|t| log_ratio(t).exp_m1() - log_ratio(t))),
        ("chi2_token", sequences.mean(|t| clamped_ratio(log_ratio(t)).powi(2)) - 1.0),
        ("chi2_seq", mean(row_sums.map(|sum| clamped_ratio(sum).powi(2))) - 1.0),
        ("rollout_ppl", mean(rollout.iter().map(|m| (-m).exp()))),
        ("rollout_log_ppl", mean(rollout.iter().map(|m| -m))),
        ("log_ppl_diff", mean(difference.iter().copied())),
        ("log_ppl_abs_diff", mean(difference.iter().map(|d| d.abs()))),
        ("log_ppl_diff_max", difference.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
        ("log_ppl_diff_min", difference.iter().copied().fold(f64::INFINITY, f64::min)),
        ("ppl_ratio", mean(difference.iter().map(|d| d.exp()))),
    ] {
        metrics.insert(name.into(), value);
    }
    Ok(metrics)
}

/// Returns three mismatch metrics of this project, with full names. They are the fraction of valid tokens
/// whose two log-probs are bit-equal, the largest log-prob difference of a token, and the largest
/// log-perplexity difference of a sequence.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when no token is valid.
pub fn agreement_metrics(
    sequences: &Sequences,
    log_prob: &[f32],
    rollout_log_prob: &[f32],
) -> Result<MetricMap> {
    sequences.check("log_prob", log_prob)?;
    sequences.check("rollout_log_prob", rollout_log_prob)?;
    check_any_valid(sequences)?;
    let same = |t: usize| f64::from(log_prob[t].to_bits() == rollout_log_prob[t].to_bits());
    let log_ratio = |t: usize| f64::from(log_prob[t]) - f64::from(rollout_log_prob[t]);
    let largest = |differences: &mut dyn Iterator<Item = f64>| {
        differences.fold(0.0, |max: f64, one| max.max(one.abs()))
    };
    Ok(MetricMap::from([
        ("mismatch/bit_equal_fraction".into(), sequences.mean(same)),
        ("mismatch/logprob_abs_diff_max".into(), largest(&mut sequences.all_valid_indices().map(log_ratio))),
        (
            "mismatch/log_ppl_abs_diff_max".into(),
            largest(&mut sequences.sequence_means(log_ratio).into_iter()),
        ),
    ]))
}

/// Returns the mismatch in probabilities, with full names: |e^T − e^R| over valid tokens (mean, maximum, and
/// standard deviation with n − 1) and the Pearson correlation of e^T and e^R.
///
/// `training/rollout_probs_diff_valid` is 0 when no token is valid, else 1. A metric that is undefined,
/// because there are no valid tokens or only one, is NaN.
pub fn probs_diff_metrics(
    sequences: &Sequences,
    log_prob: &[f32],
    rollout_log_prob: &[f32],
) -> Result<MetricMap> {
    sequences.check("log_prob", log_prob)?;
    sequences.check("rollout_log_prob", rollout_log_prob)?;
    let probability = |log_prob: &[f32]| -> Vec<f64> {
        sequences.all_valid_indices().map(|t| f64::from(log_prob[t]).exp()).collect()
    };
    let (train, rollout) = (probability(log_prob), probability(rollout_log_prob));
    let differences: Vec<f64> = train.iter().zip(&rollout).map(|(t, r)| (t - r).abs()).collect();
    let valid = !differences.is_empty();
    let or_nan = |value: f64| if valid { value } else { f64::NAN };
    let variance = centred_product(&differences, &differences) / (differences.len() as f64 - 1.0);
    Ok(MetricMap::from([
        ("training/rollout_probs_diff_valid".into(), f64::from(valid)),
        ("training/rollout_probs_diff_max".into(), differences.iter().copied().fold(f64::NAN, f64::max)),
        ("training/rollout_probs_diff_mean".into(), or_nan(mean(differences.iter().copied()))),
        ("training/rollout_probs_diff_std".into(), or_nan(variance.sqrt())),
        ("training/rollout_actor_probs_pearson_corr".into(), pearson(&train, &rollout)),
    ]))
}

/// Returns the Pearson correlation; NaN when `a` or `b` is constant.
fn pearson(a: &[f64], b: &[f64]) -> f64 {
    let scale = (centred_product(a, a) * centred_product(b, b)).sqrt();
    (centred_product(a, b) / scale).clamp(-1.0, 1.0)
}

/// Returns Σ (a − mean a)(b − mean b).
fn centred_product(a: &[f64], b: &[f64]) -> f64 {
    let (centre_a, centre_b) = (mean(a.iter().copied()), mean(b.iter().copied()));
    a.iter().zip(b).map(|(x, y)| (x - centre_a) * (y - centre_b)).sum()
}

pub(super) fn check_any_valid(sequences: &Sequences) -> Result<()> {
    if sequences.valid_tokens() == 0 {
        return Err(bad_input!("the batch has no sampled token, so training and rollout cannot be compared"));
    }
    Ok(())
}
