//! TRL's objectives, to which ours are compared, where they differ from verl's: no ±20 clamp, a two-sided
//! clip, CISPO bounded above only.

use crate::cli::in_repository;
use anyhow::Result;
use rloss::bad_input;
use rloss::policy::advantage::gdpo;
use rloss::policy::loss::{ClipRange, LossInput, PolicyLoss, TokenMean};
use rloss::policy::{MetricMap, Normalizer, Sequences};
use serde_json::Value;

/// What becomes of the ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrlObjective {
    /// The clipped surrogate; `delta` caps the ratio of the unclipped branch too.
    OutputClipper { range: ClipRange, delta: Option<f64> },
    /// The detached weight min(r, `ratio_max`): an absolute bound, not 1 + ε.
    Cispo { ratio_max: f64 },
}

/// The settings of [`trl`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrlConfig<'a> {
    pub objective: TrlObjective,
    /// Whether r is exp of the sequence's mean log ratio instead of the token's.
    pub sequence_level: bool,
    /// β and the reference's log-probs: adds β·k3, not clamped, to every token's loss.
    pub kl: Option<(f64, &'a [f32])>,
}

/// TRL's GRPO losses (`GRPOTrainer`, 1.16), per token with r = exp(T − O):
///
/// ```text
/// Clip:   l = −min(A·min(r, delta), A·clip(r, 1 − low, 1 + high)),   l' = −A·r, or 0 where a bound binds
/// Cispo:  l = −sg(min(r, ratio_max))·A·T,                            l' = −min(r, ratio_max)·A
/// ```
///
/// At sequence level every token's r depends on all T of its sequence through their mean, so each log-prob's
/// derivative is the mean of l' over the sequence's tokens. The KL term adds β·(1 − e^(ref − T)).
///
/// TRL's `loss_type` is the normalizer: `grpo` is `SequenceMeanTokenMean` over all sequences, `bnpo` and
/// `dapo` are `TokenMean`, `dr_grpo` is `Constant`.
///
/// Metrics: `clip_ratio/{low,high,region}_mean` (or `cispo_clip_ratio`) and `kl` per token; the map holds
/// `clip_ratio/low_min` and `clip_ratio/high_max` over sequences. Refused unless `delta` exceeds 1 + high and
/// `ratio_max` is positive.
pub fn trl(
    input: &LossInput,
    config: &TrlConfig,
    normalizer: &Normalizer,
) -> Result<(PolicyLoss, MetricMap)> {
    input.check()?;
    check_objective(&config.objective)?;
    if let Some((_, reference)) = config.kl {
        input.sequences.check("reference log_prob", reference)?;
    }
    let row_means = row_means(&input.sequences, |t| log_ratio(input, t));
    let mut terms = vec![TrlTerm::default(); input.sequences.tokens()];
    for (row, &row_mean) in input.sequences.token_ranges().zip(&row_means) {
        for t in input.sequences.valid_indices(row.clone()) {
            let log_ratio = if config.sequence_level { row_mean } else { log_ratio(input, t) };
            terms[t] = config.objective.term(log_ratio.exp(), input, t);
        }
        let through_ratio = matches!(config.objective, TrlObjective::OutputClipper { .. });
        if config.sequence_level && through_ratio {
            let shared = mean(input.sequences.valid_indices(row.clone()).map(|t| terms[t].slope));
            input.sequences.valid_indices(row).for_each(|t| terms[t].slope = shared);
        }
    }
    let kl = |t: usize| {
        let gap = config.kl.map_or(0.0, |(_, r)| f64::from(r[t]) - f64::from(input.log_prob[t]));
        (gap.exp_m1() - gap, -gap.exp_m1())
    };
    let beta = config.kl.map_or(0.0, |(beta, _)| beta);
    let (loss, grad_log_prob) = normalizer.reduce(&input.sequences, |_, t| {
        let (divergence, slope) = kl(t);
        (terms[t].loss + beta * divergence, terms[t].slope + beta * slope)
    });
    let (mut metrics, extremes) = clip_metrics(input, config, &terms);
    if config.kl.is_some() {
        metrics.push(token_mean(input, "kl", |t| kl(t).0));
    }
    Ok((PolicyLoss { loss, grad_log_prob, metrics }, extremes))
}

#[derive(Clone, Default)]
struct TrlTerm {
    loss: f64,
    slope: f64,
    low: bool,
    high: bool,
}

impl TrlObjective {
    /// One token's term, importance weight included.
    fn term(&self, ratio: f64, input: &LossInput, t: usize) -> TrlTerm {
        let advantage = f64::from(input.advantages[t]);
        let weight = input.weights.map_or(1.0, |w| f64::from(w[t]));
        match *self {
            TrlObjective::OutputClipper { range, delta } => {
                let cap = delta.unwrap_or(f64::INFINITY);
                let (free, bound) = (
                    -advantage * ratio.min(cap),
                    -advantage * ratio.clamp(1.0 - range.low, 1.0 + range.high),
                );
                let flat = bound > free || ratio > cap;
                TrlTerm {
                    loss: weight * free.max(bound),
                    slope: if flat { 0.0 } else { weight * free },
                    low: ratio < 1.0 - range.low && advantage < 0.0,
                    high: ratio > 1.0 + range.high && advantage > 0.0,
                }
            }
            TrlObjective::Cispo { ratio_max } => {
                let slope = -weight * ratio.min(ratio_max) * advantage;
                TrlTerm {
                    loss: slope * f64::from(input.log_prob[t]),
                    slope,
                    low: false,
                    high: ratio > ratio_max && advantage > 0.0,
                }
            }
        }
    }
}

fn check_objective(objective: &TrlObjective) -> Result<()> {
    match *objective {
        TrlObjective::OutputClipper { range, delta: Some(delta) }
            if delta.is_nan() || delta <= 1.0 + range.high =>
        {
            Err(bad_input!("delta is {delta}: it caps the unclipped ratio, so it must exceed 1 + clip high"))
        }
        TrlObjective::Cispo { ratio_max } if ratio_max.is_nan() || ratio_max <= 0.0 => {
            Err(bad_input!("the largest cispo weight is {ratio_max}: it must be positive"))
        }
        _ => Ok(()),
    }
}

/// T − O.
fn log_ratio(input: &LossInput, t: usize) -> f64 {
    f64::from(input.log_prob[t]) - f64::from(input.old_log_prob[t])
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count == 0.0 { 0.0 } else { sum / count }
}

/// The mean of `value` over each row's valid tokens.
fn row_means(sequences: &Sequences, value: impl Fn(usize) -> f64) -> Vec<f64> {
    sequences.token_ranges().map(|row| mean(sequences.valid_indices(row).map(&value))).collect()
}

fn token_mean(input: &LossInput, name: &'static str, value: impl Fn(usize) -> f64) -> TokenMean {
    let valid = input.sequences.all_valid_indices();
    TokenMean { name, sum: valid.clone().map(value).sum(), tokens: valid.count() as f64 }
}

fn clip_metrics(input: &LossInput, config: &TrlConfig, terms: &[TrlTerm]) -> (Vec<TokenMean>, MetricMap) {
    let low = |t: usize| f64::from(terms[t].low);
    let high = |t: usize| f64::from(terms[t].high);
    if matches!(config.objective, TrlObjective::Cispo { .. }) {
        return (vec![token_mean(input, "cispo_clip_ratio", high)], MetricMap::new());
    }
    let smallest = row_means(&input.sequences, low).into_iter().fold(f64::INFINITY, f64::min);
    let largest = row_means(&input.sequences, high).into_iter().fold(f64::NEG_INFINITY, f64::max);
    let means = vec![
        token_mean(input, "clip_ratio/low_mean", low),
        token_mean(input, "clip_ratio/high_mean", high),
        token_mean(input, "clip_ratio/region_mean", |t| low(t) + high(t)),
    ];
    let extremes =
        MetricMap::from([("clip_ratio/low_min".into(), smallest), ("clip_ratio/high_max".into(), largest)]);
    (means, extremes)
}

/// `scripts/make_reference_values.py` has the formula of TRL's `normalize_then_sum`.
#[test]
fn gdpo_has_the_advantages_of_trls_normalize_then_sum() {
    let path = in_repository("tests/fixtures/gdpo.json");
    let batches: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(batches.len(), 100);
    let numbers = |value: &Value| -> Vec<f32> {
        let numbers = value.as_array().unwrap().iter();
        numbers.map(|n| n.as_f64().map_or(f32::NAN, |n| n as f32)).collect()
    };
    for (index, batch) in batches.iter().enumerate() {
        let columns = batch["rewards"].as_array().unwrap().iter().map(numbers);
        let rewards: Vec<(f32, Vec<f32>)> = numbers(&batch["weights"]).into_iter().zip(columns).collect();
        let sizes = batch["group_sizes"].as_array().unwrap().iter();
        let sizes: Vec<usize> = sizes.map(|size| size.as_u64().unwrap() as usize).collect();
        let advantages = gdpo(&rewards, &sizes).unwrap();
        let expected: Vec<f64> =
            batch["advantages"].as_array().unwrap().iter().map(|a| a.as_f64().unwrap()).collect();
        assert_eq!(advantages.len(), expected.len());
        for (&advantage, expected) in advantages.iter().zip(expected) {
            let difference = (f64::from(advantage) - expected).abs();
            assert!(difference <= 1e-6 + 5e-6 * expected.abs(), "batch {index}: {advantage}, not {expected}");
        }
    }
    assert!(gdpo(&[(1.0, vec![f32::INFINITY, 0.0])], &[2]).is_err());
    assert!(gdpo(&[(1.0, vec![1.0])], &[2]).is_err());
}
