//! Rejection: drops tokens and responses whose ratio is outside the bounds.

use anyhow::Result;

use super::rule::{RejectionRule, Scope, Statistic};
use super::{fraction, max, min};
use crate::policy::MetricMap;
use crate::policy::off_policy::check_any_valid;
use crate::policy::ratio::LOG_RATIO_MAX;
use crate::policy::sequences::{Sequences, mean, sample_std};

/// Applies `rules` to `log_ratio` = T − R, where T are the log-probs of training and R those of the rollout.
/// Every rule sees the mask before rejection. A token is kept if all rules accept it.
///
/// The log ratio of each token is clamped to ±20 before a statistic is computed.
///
/// Returns the mask, true where the token was valid and every rule accepts it, and metrics without prefix:
/// - `rollout_rs_masked_fraction`: fraction of valid tokens that are rejected.
/// - `rollout_rs_seq_masked_fraction`: fraction of all sequences that lost a token.
/// - `rollout_rs_<option>_{mean,max,min,std}`: the rule's statistic over valid tokens. `std` is computed
///   after clamping the statistic to the bounds.
/// - `rollout_rs_<option>_fraction_{high,low}`: fraction of tokens above or below the bounds. With a sequence
///   scope, fraction of sequences.
/// - `rollout_rs_<option>_seq_…`: the same statistics over sequences with valid tokens.
/// - `rollout_rs_<option>_masked_fraction`: fraction of valid tokens that this rule rejects.
/// - `rollout_rs_<option>_seq_masked_fraction`: fraction of sequences that lose a token by this rule.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when no token is valid.
pub fn reject(
    sequences: &Sequences,
    log_ratio: &[f32],
    rules: &[RejectionRule],
) -> Result<(Vec<bool>, MetricMap)> {
    sequences.check("log_ratio", log_ratio)?;
    check_any_valid(sequences)?;
    let mut mask = sequences.mask.to_vec();
    let mut metrics = MetricMap::new();
    for rule in rules {
        let statistic = per_token(sequences, log_ratio, rule);
        metrics.extend(rule_metrics(sequences, rule, &statistic));
        for t in sequences.all_valid_indices() {
            mask[t] &= rule.accepts(statistic[t]);
        }
    }
    let rejected = |t: usize| !mask[t];
    metrics.insert("rollout_rs_masked_fraction".into(), fraction(sequences.all_valid_indices(), rejected));
    let lost_any = |range| sequences.valid_indices(range).any(rejected);
    metrics.insert("rollout_rs_seq_masked_fraction".into(), fraction(sequences.token_ranges(), lost_any));
    Ok((mask, metrics))
}

/// Returns the rule's statistic of every token; 0 where the mask is false. With a sequence scope, every token
/// has the value of its sequence.
fn per_token(sequences: &Sequences, log_ratio: &[f32], rule: &RejectionRule) -> Vec<f64> {
    let of = |t: usize| {
        rule.option.statistic().evaluate(f64::from(log_ratio[t]).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))
    };
    let mut statistic = vec![0.0; sequences.tokens()];
    for range in sequences.token_ranges() {
        let valid = || sequences.valid_indices(range.clone());
        let whole = match rule.option.scope() {
            Scope::Token => None,
            Scope::SequenceSum => Some(valid().map(of).sum()),
            Scope::SequenceMean => Some(mean(valid().map(of))),
            Scope::SequenceMax => Some(max(valid().map(of))),
        };
        for t in valid() {
            statistic[t] = whole.unwrap_or_else(|| of(t));
        }
    }
    statistic
}

fn rule_metrics(sequences: &Sequences, rule: &RejectionRule, statistic: &[f64]) -> MetricMap {
    let tokens = || sequences.all_valid_indices().map(|t| statistic[t]);
    let bounded = || tokens().map(|s| s.clamp(rule.low, rule.high));
    let centre = mean(bounded());
    let variance = mean(bounded().map(|s| (s - centre).powi(2)));
    let has_tokens = |range: &std::ops::Range<usize>| sequences.valid_indices(range.clone()).next().is_some();
    let non_empty = || sequences.token_ranges().filter(has_tokens);
    let sequence_means: Vec<f64> =
        non_empty().map(|range| mean(sequences.valid_indices(range).map(|t| statistic[t]))).collect();
    let per_sequence = || sequence_means.iter().copied();
    let lost_any = |range| sequences.valid_indices(range).any(|t| !rule.accepts(statistic[t]));
    let fraction_outside = |beyond: &dyn Fn(f64) -> bool| match rule.option.scope() {
        Scope::Token => fraction(tokens(), beyond),
        _ => fraction(per_sequence(), beyond),
    };
    let mut statistics = vec![
        ("mean", mean(tokens())),
        ("max", max(tokens())),
        ("min", min(tokens())),
        ("fraction_high", fraction_outside(&|s| s > rule.high)),
        ("fraction_low", fraction_outside(&|s| s < rule.low)),
        ("std", variance.sqrt()),
        ("seq_mean", mean(per_sequence())),
        ("seq_std", sample_std(&sequence_means)),
        ("seq_max", max(per_sequence())),
        ("seq_min", min(per_sequence())),
        ("seq_max_deviation", max(per_sequence().map(f64::abs))),
        ("seq_fraction_high", fraction(per_sequence(), |s| s > rule.high)),
        ("masked_fraction", fraction(tokens(), |s| !rule.accepts(s))),
        ("seq_masked_fraction", fraction(non_empty(), lost_any)),
    ];
    if rule.option.statistic() == Statistic::K1 {
        statistics.push(("seq_fraction_low", fraction(per_sequence(), |s| s < rule.low)));
    }
    let names = statistics.into_iter();
    names.map(|(name, value)| (format!("rollout_rs_{}_{name}", rule.option), value)).collect()
}
