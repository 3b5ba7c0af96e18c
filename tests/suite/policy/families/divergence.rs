//! Families of the divergences, the value loss, the entropy and TRL's losses.

use rloss::policy::divergence::kl_loss;
use rloss::policy::kl_in_reward::{KlController, kl_in_reward};
use rloss::policy::loss::{ClipRange, LossInput};
use rloss::policy::value::value_loss;
use rloss::policy::{Aggregation, BatchSize, MetricMap, Normalizer};

use super::super::entropy::entropy;
use super::super::trl::{TrlConfig, TrlObjective, trl};
use super::super::vectors::{Actual, Batch, Outcome, Row, floats};
use super::super::verl;
use super::correction::add_metrics;
use super::{loss_actual, normalizer, widen};

fn scalar(value: f64) -> Actual {
    Actual::Values(vec![value])
}

fn text<'a>(row: &'a Row, key: &str) -> &'a str {
    row.params[key].as_str().unwrap_or_else(|| panic!("{}: no {key}", row.name))
}

fn number(row: &Row, key: &str) -> f64 {
    row.params[key].as_f64().unwrap_or_else(|| panic!("{}: no {key}", row.name))
}

pub fn kl_penalty(row: &Row) -> Outcome {
    let divergence = verl::estimator(text(row, "kl_penalty"))?;
    let (log_prob, reference) = (floats(&row.inputs["logprob"]), floats(&row.inputs["ref_logprob"]));
    let (values, slopes) = log_prob.iter().zip(&reference).map(|(&l, &r)| divergence.estimate(l, r)).unzip();
    Ok(vec![("kl", Actual::Values(values)), ("grad_logprob", Actual::Values(slopes))])
}

pub fn kl_loss_row(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let sequences = batch.sequences();
    let normalizer = normalizer(text(row, "loss_agg_mode"), &row.params, &sequences, batch.width)?;
    let divergence = verl::estimator(text(row, "kl_loss_type"))?;
    let (log_prob, reference) = (floats(&row.inputs["log_prob"]), floats(&row.inputs["ref_log_prob"]));
    let (loss, gradient) = kl_loss(&sequences, &log_prob, &reference, divergence, &normalizer)?;
    let coefficient = number(row, "kl_loss_coef");
    let gradient = gradient.iter().map(|&g| coefficient * f64::from(g)).collect();
    Ok(vec![("kl_loss", scalar(loss)), ("grad_log_prob_of_coef_times_kl_loss", Actual::Values(gradient))])
}

pub fn kl_in_reward_row(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let settings = &row.params["controller"];
    let setting = |key: &str| settings[key].as_f64().expect("a number");
    let mut controller = match settings["type"].as_str() {
        Some("fixed") => KlController::fixed(setting("kl_coef")),
        Some("adaptive") => {
            KlController::adaptive(setting("kl_coef"), setting("target_kl"), setting("horizon"))?
        }
        other => panic!("{}: unknown controller {other:?}", row.name),
    };
    let coefficient = controller.coefficient;
    let (rewards, kl) = kl_in_reward(
        &batch.sequences(),
        &floats(&row.inputs["token_level_scores"]),
        &floats(&row.inputs["old_log_probs"]),
        &floats(&row.inputs["ref_log_prob"]),
        verl::estimator(text(row, "kl_penalty"))?,
        coefficient,
    )?;
    controller.update(kl, batch.sequences().len());
    let metrics = MetricMap::from([
        ("actor/reward_kl_penalty".into(), kl),
        ("actor/reward_kl_penalty_coeff".into(), coefficient),
    ]);
    Ok(vec![
        ("token_level_rewards", widen(&rewards)),
        ("metrics", Actual::Metrics(metrics)),
        ("kl_coef_after_update", scalar(controller.coefficient)),
    ])
}

pub fn value(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let sequences = batch.sequences();
    let result = value_loss(
        &sequences,
        &floats(&row.inputs["vpreds"]),
        &floats(&row.inputs["values"]),
        &floats(&row.inputs["returns"]),
        number(row, "cliprange_value"),
        &normalizer(text(row, "loss_agg_mode"), &row.params, &sequences, batch.width)?,
    )?;
    Ok(vec![
        ("vf_loss", scalar(result.loss)),
        ("vf_clipfrac", scalar(result.clipped.value())),
        ("grad_vpreds", widen(&result.grad_values)),
    ])
}

pub fn entropy_row(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let sequences = batch.sequences();
    let logits = floats(&row.inputs["logits"]);
    let normalizer = normalizer(text(row, "loss_agg_mode"), &row.params, &sequences, batch.width)?;
    let result = entropy(&sequences, &logits, logits.len() / sequences.tokens(), &normalizer)?;
    Ok(vec![
        ("entropy", scalar(result.entropy)),
        ("token_entropy", widen(&result.token_entropy)),
        ("grad_logits", widen(&result.grad_logits)),
    ])
}

pub fn trl_row(row: &Row) -> Outcome {
    let batch = Batch::new(row, "completion_mask");
    let sequences = batch.sequences();
    let array = |key: &str| row.inputs.get(key).map(floats);
    let (log_prob, old_log_prob) =
        (floats(&row.inputs["per_token_logps"]), floats(&row.inputs["old_per_token_logps"]));
    let advantages = floats(&row.inputs["advantages"]);
    let advantages =
        if advantages.len() == sequences.len() { sequences.broadcast(&advantages)? } else { advantages };
    let weights = array("importance_sampling_ratio");
    let reference = array("ref_per_token_logps");
    let input = LossInput {
        sequences,
        log_prob: &log_prob,
        old_log_prob: &old_log_prob,
        advantages: &advantages,
        weights: weights.as_deref(),
        selected: None,
    };
    let loss_type = text(row, "loss_type");
    let objective = match loss_type {
        "cispo" => TrlObjective::Cispo { ratio_max: number(row, "epsilon_high") },
        _ => TrlObjective::OutputClipper {
            range: ClipRange::new(number(row, "epsilon"), number(row, "epsilon_high"))?,
            delta: row.params["delta"].as_f64(),
        },
    };
    let sequence_level = row.params["importance_sampling_level"] == "sequence";
    let kl = reference.as_deref().map(|reference| (number(row, "beta"), reference));
    let aggregation = match loss_type {
        "grpo" => Aggregation::SequenceMeanTokenMean,
        "dr_grpo" => Aggregation::Constant,
        "bnpo" | "dapo" | "cispo" => Aggregation::TokenMean,
        other => panic!("{}: unknown loss {other}", row.name),
    };
    // TRL counts every sequence, those without a valid token included.
    let size = BatchSize {
        sequences: sequences.len(),
        ..BatchSize::from_sequences(
            &sequences,
            row.params["max_completion_length"].as_u64().unwrap_or(0) as usize,
        )
    };
    let normalizer = Normalizer::new(aggregation, size)?;
    let (result, extremes) = trl(&input, &TrlConfig { objective, sequence_level, kl }, &normalizer)?;
    let mut actual = loss_actual(result);
    actual[1].0 = "grad_per_token_logps";
    add_metrics(&mut actual, extremes);
    Ok(actual)
}
