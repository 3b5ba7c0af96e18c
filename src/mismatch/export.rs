//! Exports rollouts in the format of other trainers, with training's log-probs of the same tokens.

use super::formats::prime_rl::ExportLine;
use crate::actor::micro_batch::{MicroBatch, Sequence};
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::trajectory::Trajectory;
use anyhow::Result;

/// Returns the text of prime-rl's `token_exports/step_N/rank_0.jsonl` for the `trajectories` of `step`.
/// `training` computes the trainer's log-probs. Conversations without a sampled token are left out, as in
/// prime-rl.
///
/// # Errors
/// When a forward pass fails.
pub fn prime_rl(
    threads: &Threads,
    training: &PolicyView,
    trajectories: &[&Trajectory],
    (step, env_name): (u64, &str),
    (temperature, micro_batch_tokens): (f64, usize),
) -> Result<String> {
    let sampled: Vec<&Trajectory> = trajectories.iter().copied().filter(|t| t.sampled_tokens() > 0).collect();
    let sequences: Vec<Sequence> = sampled.iter().map(|t| Sequence::from(*t)).collect();
    let batches = MicroBatch::split(&sequences, micro_batch_tokens);
    let computed = training.all_log_probs(threads, &batches, temperature, &|_| ())?;
    let (mut text, mut rest) = (String::new(), computed.as_slice());
    for (index, trajectory) in sampled.into_iter().enumerate() {
        let (log_probs, following) = rest.split_at(trajectory.sampled_tokens().min(rest.len()));
        rest = following;
        let line = ExportLine::new(trajectory, log_probs, (step, index), env_name);
        text.push_str(&serde_json::to_string(&line)?);
        text.push('\n');
    }
    Ok(text)
}
