//! The off-policy sequence mask: a bad response has no gradient if the policy has moved away from it.

use anyhow::Result;

use super::fraction;
use crate::policy::MetricMap;
use crate::policy::off_policy::check_any_valid;
use crate::policy::sequences::Sequences;

/// Computes the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1), as in TRL at
/// f2cd577 and slime's `compute_opsm_mask`.
///
/// R are the log-probs of the rollout, T those of training, and A are the advantages. `bound` is δ. Means run
/// over the valid tokens of a response. Usually all of them have the same advantage.
///
/// ```text
/// masked = mean_t A < 0  and  mean_t (R − T) > δ
/// ```
///
/// The loss weight of a masked response is 0. It still counts in the denominators of the loss, as in both
/// sources. `geo_mean` keeps 1e-10 of its loss.
///
/// Returns whether each response is masked, one flag per sequence, and the metrics without prefix:
/// - `off_policy_mask_fraction`: fraction of valid tokens that are masked.
/// - `off_policy_mask_seq_fraction`: fraction of all responses that are masked.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when no token is valid.
pub fn off_policy_mask(
    sequences: &Sequences,
    log_prob: &[f32],
    rollout_log_prob: &[f32],
    advantages: &[f32],
    bound: f64,
) -> Result<(Vec<bool>, MetricMap)> {
    sequences.check("log_prob", log_prob)?;
    sequences.check("rollout_log_prob", rollout_log_prob)?;
    sequences.check("advantages", advantages)?;
    check_any_valid(sequences)?;
    let distances = sequences.sequence_means(|t| f64::from(rollout_log_prob[t]) - f64::from(log_prob[t]));
    let advantages = sequences.sequence_means(|t| f64::from(advantages[t]));
    let masked: Vec<bool> =
        distances.iter().zip(&advantages).map(|(&distance, &a)| a < 0.0 && distance > bound).collect();
    let rows = sequences.token_ranges().zip(&masked);
    let tokens = rows.flat_map(|(range, &masked)| sequences.valid_indices(range).map(move |_| masked));
    let metrics = MetricMap::from([
        ("off_policy_mask_fraction".into(), fraction(tokens, |masked| masked)),
        ("off_policy_mask_seq_fraction".into(), fraction(masked.iter(), |&masked| masked)),
    ]);
    Ok((masked, metrics))
}
