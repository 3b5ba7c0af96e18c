//! Families of the rollout correction and of the mismatch metrics.

use anyhow::Result;
use rloss::policy::correction::{
    CorrectionRules, ImportanceSettings, RejectionRule, correct, importance_weights, off_policy_mask, reject,
};
use rloss::policy::loss::{ClipRange, PpoClip};
use rloss::policy::off_policy::{off_policy_metrics, probs_diff_metrics};
use rloss::policy::{Aggregation, MetricMap};
use rloss::settings::Choice;
use serde_json::Value;

use super::super::bypass::{BypassLoss, bypass};
use super::super::vectors::{Actual, Batch, Outcome, Row, floats};
use super::super::verl;
use super::{loss_actual, widen};

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Number(n) => Some(n.to_string()),
        _ => None,
    }
}

fn mask_values(mask: &[bool]) -> Actual {
    Actual::Values(mask.iter().map(|&m| f64::from(m)).collect())
}

/// The importance sampling in verl's parameters, with its default threshold 2.
fn importance(params: &Value) -> Result<Option<ImportanceSettings>> {
    let level = params["rollout_is"].as_str().unwrap_or("none");
    let threshold = text(&params["rollout_is_threshold"]).unwrap_or("2.0".into());
    verl::importance(level, &threshold, params["rollout_is_batch_normalize"] == true)
}

/// The rules in verl's parameters: through the parser for verl's strings and, where the row gives the
/// converted k1 bounds, through the native one, which must agree.
fn rules(params: &Value) -> Result<Vec<RejectionRule>> {
    let Some(options) = params["rollout_rs"].as_str() else { return Ok(Vec::new()) };
    let thresholds = text(&params["rollout_rs_threshold"]);
    let rules = verl::verl_rules(options, thresholds.as_deref())?;
    for (option, bounds) in params["k1_bounds_on_train_over_rollout"].as_object().into_iter().flatten() {
        let bounds = floats(bounds);
        let native = verl::rules(option, Some(&format!("{}_{}", bounds[0], bounds[1])))?;
        let same = rules.iter().find(|rule| rule.option.name() == option).expect("the option");
        let differ = |a: f64, b: f64| (a - b).abs() > 1e-6;
        let other = &native[0];
        assert!(
            !differ(same.low, other.low) && !differ(same.high, other.high),
            "{options}: {same:?}, {native:?}"
        );
    }
    Ok(rules)
}

pub fn off_policy_mask_row(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let [log_prob, rollout, advantages] =
        ["log_prob", "old_log_prob", "advantages"].map(|key| floats(&row.inputs[key]));
    let bound = row.params["bound"].as_f64().expect("a number");
    let (mask, _) = off_policy_mask(&batch.sequences(), &log_prob, &rollout, &advantages, bound)?;
    Ok(vec![("masked", mask_values(&mask))])
}

pub fn weights(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let settings = importance(&row.params)?.expect("a level");
    let (weights, metrics) =
        importance_weights(&batch.sequences(), &floats(&row.inputs["log_ratio"]), &settings)?;
    Ok(vec![("rollout_is_weights", widen(&weights)), ("metrics", Actual::Metrics(metrics))])
}

pub fn rejection(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let (mask, metrics) =
        reject(&batch.sequences(), &floats(&row.inputs["log_ratio"]), &rules(&row.params)?)?;
    Ok(vec![("modified_response_mask", mask_values(&mask)), ("metrics", Actual::Metrics(metrics))])
}

pub fn both(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let config = CorrectionRules { importance: importance(&row.params)?, reject: rules(&row.params)? };
    let train = floats(&row.inputs["old_log_prob"]);
    let rollout = floats(&row.inputs["rollout_log_prob"]);
    let result = correct(&batch.sequences(), &train, &rollout, &config)?;
    let mut actual = vec![
        ("modified_response_mask", mask_values(&result.mask)),
        ("metrics", Actual::Metrics(result.metrics)),
    ];
    actual.extend(result.weights.map(|weights| ("rollout_is_weights", widen(&weights))));
    Ok(actual)
}

pub fn bypass_row(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let settings = &row.params["rollout_correction"];
    let config = CorrectionRules { importance: importance(settings)?, reject: rules(settings)? };
    let param = |key: &str| row.params[key].as_f64().expect("a number");
    let loss = match settings["loss_type"].as_str() {
        Some("reinforce") => BypassLoss::Reinforce,
        Some("ppo_clip") => {
            let range = ClipRange::new(param("clip_ratio_low"), param("clip_ratio_high"))?;
            BypassLoss::PpoClip(PpoClip::new(range, Some(param("clip_ratio_c")))?)
        }
        other => panic!("{}: unknown loss {other:?}", row.name),
    };
    let aggregation = match row.params["loss_agg_mode"].as_str() {
        Some("token-mean") => Aggregation::TokenMean,
        Some("seq-mean-token-sum") => Aggregation::SequenceMeanTokenSum,
        Some("seq-mean-token-mean") => Aggregation::SequenceMeanTokenMean,
        other => panic!("{}: unknown aggregation {other:?}", row.name),
    };
    let (result, correction) = bypass(
        &batch.sequences(),
        &floats(&row.inputs["log_prob"]),
        &floats(&row.inputs["rollout_log_prob"]),
        &floats(&row.inputs["advantages"]),
        &config,
        &loss,
        aggregation,
    )?;
    let mut actual = loss_actual(result);
    add_metrics(&mut actual, correction);
    Ok(actual)
}

pub fn add_metrics(actual: &mut [(&'static str, Actual)], more: MetricMap) {
    for (_, value) in actual {
        if let Actual::Metrics(metrics) = value {
            metrics.extend(more.clone());
        }
    }
}

pub fn offpolicy(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let rollout = &row.inputs["rollout_log_prob"];
    let rollout = (!rollout.is_null()).then(|| floats(rollout));
    let train = floats(&row.inputs["old_log_prob"]);
    let metrics = off_policy_metrics(&batch.sequences(), &train, rollout.as_deref())?;
    Ok(vec![("metrics", Actual::Metrics(metrics))])
}

pub fn probs_diff(row: &Row) -> Outcome {
    let batch = Batch::new(row, "response_mask");
    let train = floats(&row.inputs["old_log_probs"]);
    let rollout = floats(&row.inputs["rollout_log_probs"]);
    Ok(vec![("metrics", Actual::Metrics(probs_diff_metrics(&batch.sequences(), &train, &rollout)?))])
}
