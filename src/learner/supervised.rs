//! The loss of supervised steps: the mean negative log-likelihood of trained tokens.

use super::batch_runner::{BatchObjective, BatchRunner};
use super::forward_backward::PassSettings;
use super::micro_batch::{MicroBatch, Sequence, mean_of_rows};
use crate::metrics::Console;
use anyhow::Result;

/// The result of one supervised step.
pub struct SupervisedOutput {
    /// Mean negative log-likelihood of the trained tokens.
    pub loss: f64,
    /// Load-balancing loss before its coefficient; 0 without such a loss.
    pub load_balance: f64,
    /// Number of tokens that went through the model.
    pub tokens: usize,
}

/// Computes the gradients of the mean negative log-likelihood of `sequences`, and stores them in the runner's
/// parameters.
///
/// # Errors
/// When a pass fails.
pub fn gradients(
    runner: &BatchRunner,
    sequences: &[Sequence],
    micro_batch_tokens: usize,
    pass: PassSettings,
    console: &Console,
) -> Result<SupervisedOutput> {
    let batches = MicroBatch::split(sequences, runner.limits(micro_batch_tokens));
    let targets: usize = batches.iter().map(|b| b.targets.len()).sum();
    let share = -1.0 / targets.max(1) as f32;
    let stage = console.start_pass("update", runner.local_tokens(&batches));
    let objective: BatchObjective<'_, 2> =
        &|_, [log_probs, entropies]| Ok([vec![share; log_probs.len()], vec![0.0; entropies.len()]]);
    let outputs = runner.accumulate(&batches, pass, None, objective, &stage)?;
    stage.finish();
    let tokens: usize = batches.iter().map(|b| b.tokens.len()).sum();
    let sum: f64 = outputs.iter().flat_map(|o| o.log_probs()).map(|&l| f64::from(l)).sum();
    let load_balance = mean_of_rows(&batches, outputs.iter().map(|output| output.load_balance_loss));
    Ok(SupervisedOutput { loss: -sum / targets.max(1) as f64, load_balance, tokens })
}

/// Returns the mean negative log-likelihood of the trained tokens of `sequences`, without gradients.
///
/// # Errors
/// When a pass fails.
pub fn loss(
    runner: &BatchRunner,
    sequences: &[Sequence],
    micro_batch_tokens: usize,
    pass: PassSettings,
    console: &Console,
) -> Result<f64> {
    let batches = MicroBatch::split(sequences, runner.limits(micro_batch_tokens));
    let stage = console.start_pass("validation loss", runner.local_tokens(&batches));
    let outputs = runner.forward(&batches, pass, &stage)?;
    stage.finish();
    let log_probs = outputs.iter().flat_map(|o| o.log_probs());
    let (sum, count) = log_probs.fold((0.0, 0usize), |(sum, n), &l| (sum + f64::from(l), n + 1));
    Ok(-sum / count.max(1) as f64)
}
