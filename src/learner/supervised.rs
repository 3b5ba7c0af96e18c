//! The loss of supervised steps: the mean negative log-likelihood of trained tokens.

use crate::actor::micro_batch::Sequence;
use crate::actor::{Actor, BatchPart, Forward, PassInput, PassSettings, PolicyColumns, StartProgress};
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

/// Adds the gradients of the mean negative log-likelihood of `sequences` to those of `actor`.
///
/// # Errors
/// When a pass fails.
pub fn add_gradients(
    actor: &mut Actor,
    sequences: &[Sequence],
    pass: PassSettings,
    progress: StartProgress<'_>,
) -> Result<SupervisedOutput> {
    let input = input(sequences);
    let targets = |sequence: &&Sequence| sequence.mask.iter().skip(1).filter(|mask| **mask).count();
    let targets: usize = input.sequences.iter().map(targets).sum();
    let share = -1.0 / targets.max(1) as f32;
    let loss = |_: &BatchPart, columns: &PolicyColumns| {
        let count = columns.log_probs.len();
        let (log_probs, entropies) = (vec![share; count], vec![0.0; count]);
        Ok((PolicyColumns { log_probs, entropies, divergences: None }, ()))
    };
    let (forward, _) = actor.forward_backward(&input, pass, &loss, progress)?;
    let Forward { columns, load_balance, tokens, .. } = forward;
    Ok(SupervisedOutput { loss: mean_loss(&columns.log_probs), load_balance, tokens })
}

/// Returns the mean negative log-likelihood of the trained tokens of `sequences`, without gradients.
///
/// # Errors
/// When a pass fails.
pub fn loss(
    actor: &Actor,
    sequences: &[Sequence],
    pass: PassSettings,
    progress: StartProgress<'_>,
) -> Result<f64> {
    let forward = actor.forward::<PolicyColumns>(&input(sequences), pass, progress)?;
    Ok(mean_loss(&forward.columns.log_probs))
}

fn input(sequences: &[Sequence]) -> PassInput<'_> {
    PassInput { sequences: sequences.iter().collect(), ..PassInput::default() }
}

fn mean_loss(log_probs: &[f32]) -> f64 {
    let sum: f64 = log_probs.iter().map(|&log_prob| f64::from(log_prob)).sum();
    -sum / log_probs.len().max(1) as f64
}
