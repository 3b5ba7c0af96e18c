//! Exports rollouts in the format of other trainers, with training's log-probs of the same tokens.

use super::formats::prime_rl::ExportLine;
use crate::learner::micro_batch::{MicroBatch, Sequence};
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::trajectory::Trajectory;
use anyhow::Result;

/// Returns prime-rl's `token_exports/step_N/rank_0.jsonl` for `trajectories` of `step`. `training` computes
/// the trainer's side. Conversations without a sampled token are left out, as prime-rl does.
///
/// # Errors
/// When a forward fails.
pub fn prime_rl(
    threads: &Threads,
    training: &PolicyView,
    trajectories: &[&Trajectory],
    (step, env_name): (u64, &str),
    (temperature, micro_batch_tokens): (f64, usize),
) -> Result<String> {
    let sampled: Vec<&Trajectory> = trajectories.iter().copied().filter(|t| t.sampled_tokens() > 0).collect();
    let sequence = |t: &&Trajectory| Sequence { tokens: t.tokens.clone(), mask: t.mask.clone() };
    let sequences: Vec<Sequence> = sampled.iter().map(sequence).collect();
    let batches = MicroBatch::split(&sequences, micro_batch_tokens);
    let computed = training.all_log_probs(threads, &batches, temperature, &|_| ())?;
    let (mut text, mut rest) = (String::new(), computed.as_slice());
    for (index, trajectory) in sampled.into_iter().enumerate() {
        let (own, others) = rest.split_at(trajectory.sampled_tokens().min(rest.len()));
        rest = others;
        let line = ExportLine::new(trajectory, own, (step, index), env_name);
        text.push_str(&serde_json::to_string(&line)?);
        text.push('\n');
    }
    Ok(text)
}
