//! The KL penalty in the token rewards, and the coefficient of the penalty.

use anyhow::Result;

use super::divergence::KlEstimator;
use super::sequences::{Sequences, mean};
use crate::bad_input;

/// Limit of the relative error that one update of the adaptive coefficient uses.
const ERROR_MAX: f64 = 0.2;

/// The coefficient β of the penalty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlController {
    pub coefficient: f64,
    adaptation: Option<Adaptation>,
}

/// An adaptive coefficient changes so that the divergence approaches `target`, over about `horizon` samples
/// (Ziegler et al. 2019).
#[derive(Debug, Clone, Copy, PartialEq)]
struct Adaptation {
    target: f64,
    horizon: f64,
}

impl KlController {
    pub fn fixed(coefficient: f64) -> Self {
        Self { coefficient, adaptation: None }
    }

    /// Creates an adaptive coefficient.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) unless `target` and `horizon` are positive and the coefficient is
    /// not negative.
    pub fn adaptive(coefficient: f64, target: f64, horizon: f64) -> Result<Self> {
        if !(target > 0.0 && horizon > 0.0 && coefficient >= 0.0) {
            return Err(bad_input!(
                "an adaptive KL coefficient needs a positive target, a positive horizon and a coefficient of at least 0; \
                 the values are target {target}, horizon {horizon}, coefficient {coefficient}"
            ));
        }
        Ok(Self { coefficient, adaptation: Some(Adaptation { target, horizon }) })
    }

    /// Returns the coefficient if it is adaptive, because a checkpoint must then store it.
    pub fn adaptive_coefficient(&self) -> Option<f64> {
        self.adaptation.map(|_| self.coefficient)
    }

    /// Updates β after a batch of `samples` with the divergence `kl`: β ← β·(1 + clip(kl/target − 1,
    /// ±0.2)·samples/horizon).
    pub fn update(&mut self, kl: f64, samples: usize) {
        if let Some(Adaptation { target, horizon }) = self.adaptation {
            let error = (kl / target - 1.0).clamp(-ERROR_MAX, ERROR_MAX);
            self.coefficient *= 1.0 + error * samples as f64 / horizon;
        }
    }
}

/// Subtracts the penalty from the rewards: r_t − β·kl_t for every valid token. Rewards of masked tokens do
/// not change. Also returns the measured divergence, `actor/reward_kl_penalty`: the mean over all sequences
/// of the mean over their valid tokens.
pub fn kl_in_reward(
    sequences: &Sequences,
    rewards: &[f32],
    old_log_prob: &[f32],
    reference: &[f32],
    estimator: KlEstimator,
    coefficient: f64,
) -> Result<(Vec<f32>, f64)> {
    sequences.check("rewards", rewards)?;
    sequences.check("old_log_prob", old_log_prob)?;
    sequences.check("reference log_prob", reference)?;
    let kl = |t: usize| estimator.estimate(old_log_prob[t], reference[t]).0;
    let mut penalised = rewards.to_vec();
    for t in sequences.all_valid_indices() {
        penalised[t] = (f64::from(rewards[t]) - coefficient * kl(t)) as f32;
    }
    Ok((penalised, mean(sequences.sequence_means(kl).into_iter())))
}
