//! How each family of the reference vectors maps to the library's functions.

mod correction;
mod divergence;

use super::fixture::{rng, starts};
use super::vectors::{Actual, Batch, Outcome, Row, floats, numbers};
use anyhow::{Result, anyhow, bail};
use rloss::policy::advantage::{dr_grpo, gae, grpo, maxrl, opo, reinforce_plus_plus, remax, rloo, whiten};
use rloss::policy::loss::{
    BinaryDivergence, CispoClip, ClipCov, ClipCovSettings, ClipRange, DppoBounds, GeoMean, Gspo,
    KlCovSettings, LossFunction, LossInput, PolicyLoss, PpoClip, Reinforce, SapoSettings, SelectionInput,
    VespoSettings,
};
use rloss::policy::{Aggregation, BatchSize, Normalizer, Sequences};
use serde_json::Value;

/// What the library gives for `row`. An unknown function fails the test.
pub fn compute(row: &Row) -> Outcome {
    match row.function.rsplit('.').next().expect("a name") {
        "agg_loss(kl_penalty)" => divergence::kl_loss_row(row),
        "agg_loss" => aggregation(row),
        "kl_penalty" => divergence::kl_penalty(row),
        "apply_kl_penalty" => divergence::kl_in_reward_row(row),
        "compute_rollout_correction_weights" => correction::weights(row),
        "compute_rollout_rejection_mask" => correction::rejection(row),
        "compute_rollout_correction_and_rejection_mask" => correction::both(row),
        "get_off_policy_mask" => correction::off_policy_mask_row(row),
        "compute_policy_loss_bypass_mode" => correction::bypass_row(row),
        "compute_offpolicy_metrics" => correction::offpolicy(row),
        "calculate_debug_metrics" => correction::probs_diff(row),
        "compute_value_loss" => divergence::value(row),
        "compute_entropy_loss" => divergence::entropy_row(row),
        "_compute_loss" => divergence::trl_row(row),
        "compute_gae_advantage_return" => advantages(row),
        name if name.ends_with("_outcome_advantage") => advantages(row),
        name if name.starts_with("compute_policy_loss_") => loss(row),
        other => panic!("{}: unknown function {other}", row.name),
    }
}

pub fn widen(values: &[f32]) -> Actual {
    Actual::Values(values.iter().map(|&v| f64::from(v)).collect())
}

/// The rows of the batch reordered group by group: (order, group sizes).
fn grouped(index: &[f64]) -> (Vec<usize>, Vec<usize>) {
    let mut ids: Vec<f64> = index.to_vec();
    ids.sort_by(f64::total_cmp);
    ids.dedup();
    let members = |id: &f64| (0..index.len()).filter(|&row| index[row] == *id).collect::<Vec<_>>();
    let groups: Vec<Vec<usize>> = ids.iter().map(members).collect();
    (groups.concat(), groups.iter().map(Vec::len).collect())
}

/// The size of the group that the value at flat index `i` belongs to.
pub fn group_size_of_value(row: &Row, i: usize) -> usize {
    let index = numbers(&row.inputs["index"]);
    let width = Batch::new(row, "response_mask").width;
    index.iter().filter(|&&id| id == index[i / width]).count()
}

fn advantages(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let sequences = batch.sequences();
    let rewards = floats(&row.inputs["token_level_rewards"]);
    let param = |key: &str| row.params[key].as_f64().expect("a number");
    let mask = || batch.mask.clone();
    let masked = |values: &[f32]| Actual::Masked(values.iter().map(|&v| f64::from(v)).collect(), mask());
    match row.family() {
        "reinforce_plus_plus" => {
            let result = reinforce_plus_plus(&sequences, &rewards)?;
            Ok(vec![("advantages", widen(&result.advantages)), ("returns", widen(&result.returns))])
        }
        "remax" => {
            let result = remax(&sequences, &rewards, &floats(&row.inputs["reward_baselines"]))?;
            Ok(vec![("advantages", masked(&result.advantages)), ("returns", masked(&result.returns))])
        }
        "gae" => {
            let values = floats(&row.inputs["values"]);
            let result = gae(&sequences, &rewards, &values, param("gamma"), param("lam"))?;
            let whitened = whiten(&sequences, &result.advantages)?;
            Ok(vec![
                ("advantages_unwhitened", masked(&result.advantages)),
                ("advantages", masked(&whitened)),
                ("returns", masked(&result.returns)),
            ])
        }
        _ => group_based(row, &sequences, &rewards),
    }
}

fn group_based(row: &Row, sequences: &Sequences, rewards: &[f32]) -> Outcome {
    let scores = sequences.sequence_sums(rewards)?;
    let (order, sizes) = grouped(&numbers(&row.inputs["index"]));
    let ordered: Vec<f32> = order.iter().map(|&row| scores[row]).collect();
    let rows: Vec<_> = sequences.token_ranges().collect();
    let lengths: Vec<usize> =
        order.iter().map(|&row| sequences.valid_indices(rows[row].clone()).count()).collect();
    let by_group = |ordered: Vec<f32>| -> Result<Vec<f32>> {
        let mut per_sequence = vec![0.0; order.len()];
        for (&row, advantage) in order.iter().zip(ordered) {
            per_sequence[row] = advantage;
        }
        sequences.broadcast(&per_sequence)
    };
    if let Some(epsilon) = row.params.get("epsilon") {
        assert_eq!(epsilon.as_f64(), Some(1e-6), "{}", row.name);
    }
    let estimate: fn(&[f32], &[usize]) -> Result<Vec<f32>> =
        match (row.family(), row.params.get("norm_adv_by_std_in_grpo").and_then(Value::as_bool)) {
            ("grpo" | "grpo_vectorized", Some(true)) => grpo,
            ("dr_grpo" | "grpo_vectorized", Some(false)) => dr_grpo,
            ("rloo" | "rloo_vectorized", None) => rloo,
            ("maxrl", None) => |rewards, sizes| maxrl(rewards, sizes, 0.0),
            ("opo", None) => {
                return Ok(vec![("advantages", widen(&by_group(opo(&ordered, &sizes, &lengths)?)?))]);
            }
            ("reinforce_plus_plus_baseline", None) => return whitened_by_group(row, sequences, &scores),
            other => panic!("{}: unknown family {other:?}", row.name),
        };
    Ok(vec![("advantages", widen(&by_group(estimate(&ordered, &sizes)?)?))])
}

/// The function takes sequences group by group, so the batch itself is reordered, and its result put back.
fn whitened_by_group(row: &Row, sequences: &Sequences, scores: &[f32]) -> Outcome {
    let (order, sizes) = grouped(&numbers(&row.inputs["index"]));
    let width = sequences.tokens() / sequences.len();
    let moved_mask: Vec<bool> =
        order.iter().flat_map(|&r| sequences.mask[r * width..(r + 1) * width].to_vec()).collect();
    let starts = starts(sequences);
    let moved = Sequences::new(&starts, &moved_mask)?;
    let ordered: Vec<f32> = order.iter().map(|&row| scores[row]).collect();
    let back = |values: Vec<f32>| {
        let mut restored = vec![0.0; values.len()];
        for (from, &to) in order.iter().enumerate() {
            restored[to * width..(to + 1) * width].copy_from_slice(&values[from * width..(from + 1) * width]);
        }
        restored
    };
    let centred = moved.broadcast(&dr_grpo(&ordered, &sizes)?)?;
    let whitened = whiten(&moved, &centred)?;
    Ok(vec![("advantages_unwhitened", widen(&back(centred))), ("advantages", widen(&back(whitened)))])
}

/// The normalizer that verl's parameters describe: counts of the whole batch where given, else the batch's
/// own.
pub fn normalizer(mode: &str, info: &Value, sequences: &Sequences, width: usize) -> Result<Normalizer> {
    let count = |key: &str| info.get(key).and_then(Value::as_u64).map(|n| n as usize);
    let aggregation = match mode {
        "token-mean" => Aggregation::TokenMean,
        "token-sum" => Aggregation::TokenSum,
        "seq-mean-token-mean" => Aggregation::SequenceMeanTokenMean,
        "seq-mean-token-sum" => Aggregation::SequenceMeanTokenSum,
        "seq-mean-token-sum-norm" => Aggregation::Constant,
        other => return Err(anyhow!("unknown aggregation {other}")),
    };
    let response_tokens_max = count("loss_scale_factor").unwrap_or(width);
    let replicas = count("dp_size").unwrap_or(1);
    let size = match (count("batch_num_tokens"), count("global_batch_size")) {
        (Some(tokens), Some(sequences)) => BatchSize { tokens, sequences, response_tokens_max },
        (None, None) if replicas == 1 => BatchSize::from_sequences(sequences, response_tokens_max),
        (None, None) => bail!("one replica's counts are not those of {replicas}"),
        mixed => panic!("global counts {mixed:?}"),
    };
    Normalizer::new(aggregation, size)
}

fn aggregation(row: &Row) -> Outcome {
    let batch = Batch::new(row, "loss_mask");
    let sequences = batch.sequences();
    let mode = row.params["loss_agg_mode"].as_str().expect("a mode");
    let losses = numbers(&row.inputs["loss_mat"]);
    let (loss, gradient) = normalizer(mode, &row.params, &sequences, batch.width)?
        .reduce(&sequences, |_, token| (losses[token], 1.0));
    let actual = vec![("loss", Actual::Values(vec![loss])), ("grad_loss_mat", widen(&gradient))];
    Ok(of_replicas(actual, &row.params))
}

/// Multiplied by verl's number of replicas, which averages their gradients afterwards.
fn of_replicas(mut actual: Vec<(&'static str, Actual)>, info: &Value) -> Vec<(&'static str, Actual)> {
    let replicas = info.get("dp_size").and_then(Value::as_u64).unwrap_or(1) as f64;
    for (_, found) in &mut actual {
        if let Actual::Values(values) = found {
            values.iter_mut().for_each(|value| *value *= replicas);
        }
    }
    actual
}

fn loss(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let sequences = batch.sequences();
    let array = |key: &str| floats(&row.inputs[key]);
    let anchor = if row.inputs.get("old_log_prob").is_some() { "old_log_prob" } else { "rollout_log_prob" };
    let (log_prob, old_log_prob, advantages) = (array("log_prob"), array(anchor), array("advantages"));
    let weights = row.inputs.get("rollout_is_weights").map(floats);
    let flags = |values: &Value| numbers(values).iter().map(|&v| v != 0.0).collect::<Vec<bool>>();
    let selected = row.inputs.get("selected").map(flags);
    let input = LossInput {
        sequences,
        log_prob: &log_prob,
        old_log_prob: &old_log_prob,
        advantages: &advantages,
        weights: weights.as_deref(),
        selected: selected.as_deref(),
    };
    let param = |key: &str| row.params[key].as_f64().expect("a number");
    let range = || ClipRange::new(param("clip_ratio_low"), param("clip_ratio_high"));
    let mode = row.params["loss_agg_mode"].as_str().expect("a mode");
    let normalizer = normalizer(mode, &row.params["global_batch_info"], &sequences, batch.width)?;
    let loss: Box<dyn LossFunction> = match row.family() {
        "vanilla" => Box::new(PpoClip::new(range()?, Some(param("clip_ratio_c")))?),
        "gspo" => Box::new(Gspo(range()?)),
        "cispo" => Box::new(CispoClip::new(param("clip_ratio_low"), param("clip_ratio_high"))?),
        "geo_mean" => Box::new(GeoMean(range()?)),
        "dppo_tv" | "dppo_kl" => {
            let divergence =
                if row.family() == "dppo_tv" { BinaryDivergence::Tv } else { BinaryDivergence::Kl };
            Box::new(DppoBounds::new(divergence, range()?, Some(param("clip_ratio_c")))?)
        }
        "sapo" => {
            let (temperature_positive, temperature_negative) = (param("tau_pos"), param("tau_neg"));
            Box::new(SapoSettings { temperature_positive, temperature_negative })
        }
        "vespo" => Box::new(VespoSettings {
            power_positive: param("k_pos"),
            decay_positive: param("lambda_pos"),
            power_negative: param("k_neg"),
            decay_negative: param("lambda_neg"),
        }),
        "reinforce" => Box::new(Reinforce),
        "clip_cov" => Box::new(ClipCov { range: range()?, settings: ClipCovSettings::default() }),
        "kl_cov" => Box::new(KlCovSettings { coefficient: param("ppo_kl_coef"), ..KlCovSettings::default() }),
        other => panic!("{}: unknown family {other}", row.name),
    };
    let result = loss.loss(&input, &normalizer, sequences.len())?;
    let mut actual = of_replicas(loss_actual(result), &row.params["global_batch_info"]);
    if row.params.get("cov_fraction").is_some() {
        let input = SelectionInput { sequences, old_log_prob: &log_prob, advantages: &advantages };
        actual.push(("selected", selection(row, &input)?));
    }
    Ok(actual)
}

/// The tokens that Clip-Cov or KL-Cov selects: 1 for a selected token, else 0.
fn selection(row: &Row, input: &SelectionInput) -> Result<Actual> {
    let param = |key: &str| row.params[key].as_f64().expect("a number");
    let fraction = param("cov_fraction");
    let loss: Box<dyn LossFunction> = match row.family() {
        "kl_cov" => Box::new(KlCovSettings { fraction, ..KlCovSettings::default() }),
        _ => Box::new(ClipCov {
            range: ClipRange::new(param("clip_ratio_low"), param("clip_ratio_high"))?,
            settings: ClipCovSettings {
                fraction,
                covariance_min: param("clip_cov_lb"),
                covariance_max: param("clip_cov_ub"),
            },
        }),
    };
    let selected = loss.select_tokens(input, &mut rng(1))?;
    Ok(Actual::Values(selected.into_iter().map(f64::from).collect()))
}

pub fn loss_actual(result: PolicyLoss) -> Vec<(&'static str, Actual)> {
    let metrics = result.metrics.iter().map(|m| (m.name.to_owned(), m.value())).collect();
    vec![
        ("loss", Actual::Values(vec![result.loss])),
        ("grad_log_prob", widen(&result.grad_log_prob)),
        ("metrics", Actual::Metrics(metrics)),
    ]
}
