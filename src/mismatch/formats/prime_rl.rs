//! prime-rl's `token_exports/step_N/rank_R.jsonl`: one sequence per line, as columns with one value per
//! token. It has the log-probs of the inference engine and of the trainer. Values where `loss_mask` is false
//! are ignored.

use super::{RawRow, TokenTexts, parse};
use crate::trajectory::Trajectory;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const SCHEMA_VERSION: u64 = 1;

#[derive(Deserialize)]
struct Export {
    schema_version: Option<u64>,
    token_ids: Vec<u64>,
    loss_mask: Vec<bool>,
    inference_logprobs: Vec<Option<f64>>,
    trainer_logprobs: Option<Vec<Option<f64>>>,
}

pub(super) fn rows(value: Value, _: &TokenTexts) -> Result<Vec<RawRow>, String> {
    let export: Export = parse(value, "a line of prime-rl's token export")?;
    if let Some(version) = export.schema_version.filter(|version| *version != SCHEMA_VERSION) {
        return Err(format!("schema_version = {version} is not supported; use version {SCHEMA_VERSION}"));
    }
    let count = export.token_ids.len();
    if export.loss_mask.len() != count {
        return Err(format!("{count} token_ids but a loss_mask of {}", export.loss_mask.len()));
    }
    let select_sampled = |values: Vec<Option<f64>>| -> Vec<Option<f64>> {
        let pairs = values.into_iter().zip(&export.loss_mask);
        pairs.map(|(value, &is_sampled)| value.filter(|_| is_sampled)).collect()
    };
    Ok(vec![RawRow {
        log_probs: select_sampled(export.inference_logprobs),
        trainer_log_probs: export.trainer_logprobs.map(select_sampled),
        tokens: export.token_ids,
        ..RawRow::default()
    }])
}

/// A line of the export, as `rloss rollout --format prime-rl` writes it. It has all columns of prime-rl. A
/// column for which a rollout has no value is null.
#[derive(Serialize)]
pub struct ExportLine {
    schema_version: u64,
    step: u64,
    export_step: u64,
    rank: u64,
    micro_step: u64,
    micro_sequence_idx: usize,
    export_sequence_idx: usize,
    run_id: Option<String>,
    env_name: String,
    token_ids: Vec<u32>,
    position_ids: Vec<usize>,
    loss_mask: Vec<bool>,
    advantages: Vec<Option<f32>>,
    rewards: Vec<f32>,
    inference_logprobs: Vec<f32>,
    trainer_logprobs: Vec<f32>,
    entropy: Vec<Option<f32>>,
    mismatch_kl: Vec<f64>,
    log_importance_ratio: Vec<f64>,
    importance_ratio: Vec<f64>,
    prob_delta: Vec<f64>,
    is_masked: Vec<Option<bool>>,
    is_masked_high: Vec<Option<bool>>,
    is_masked_low: Vec<Option<bool>>,
}

impl ExportLine {
    /// Creates the line of `trajectory`, which has the number `index` in `step`. `trainer` holds one log-prob
    /// for each sampled token.
    pub fn new(
        trajectory: &Trajectory,
        trainer: &[f32],
        (step, index): (u64, usize),
        env_name: &str,
    ) -> Self {
        let count = trajectory.tokens.len();
        let mut values = trainer.iter().copied();
        let mut next_log_prob = |&sampled: &bool| if sampled { values.next().unwrap_or(0.0) } else { 0.0 };
        let trainer: Vec<f32> = trajectory.mask.iter().map(&mut next_log_prob).collect();
        let pairs = || trainer.iter().zip(&trajectory.log_probs).map(|(t, i)| (f64::from(*t), f64::from(*i)));
        let ratio: Vec<f64> = pairs().map(|(trainer, inference)| trainer - inference).collect();
        Self {
            schema_version: SCHEMA_VERSION,
            step,
            export_step: step,
            rank: 0,
            micro_step: 0,
            micro_sequence_idx: index,
            export_sequence_idx: index,
            run_id: None,
            env_name: env_name.to_owned(),
            token_ids: trajectory.tokens.clone(),
            position_ids: (0..count).collect(),
            loss_mask: trajectory.mask.clone(),
            advantages: vec![None; count],
            rewards: vec![trajectory.reward; count],
            inference_logprobs: trajectory.log_probs.clone(),
            entropy: vec![None; count],
            mismatch_kl: ratio.iter().map(|r| r.exp() - r - 1.0).collect(),
            importance_ratio: ratio.iter().map(|r| r.exp()).collect(),
            log_importance_ratio: ratio,
            prob_delta: pairs().map(|(trainer, inference)| trainer.exp() - inference.exp()).collect(),
            is_masked: vec![None; count],
            is_masked_high: vec![None; count],
            is_masked_low: vec![None; count],
            trainer_logprobs: trainer,
        }
    }
}
