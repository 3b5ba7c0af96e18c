//! Advantages of single tokens, from token rewards and, for GAE, the critic's values.
//!
//! Only valid tokens count as time steps: tool output in the middle of a response adds no discount and no
//! reward. Results are 0 where the mask is false.

use anyhow::{Result, ensure};

use crate::bad_input;
use crate::policy::sequences::Sequences;

/// Added to the variance before [`whiten`] divides by its square root.
const VARIANCE_EPSILON: f64 = 1e-8;

/// Advantages and returns, with one value per token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenAdvantages {
    pub advantages: Vec<f32>,
    /// The targets that the critic learns to predict.
    pub returns: Vec<f32>,
}

/// Normalises `values` over all valid tokens of the batch: (x − mean) / √(var + 1e-8), where var has n − 1 in
/// its denominator.
///
/// Every token has the same weight, so long responses have more weight than short ones.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) when the batch has fewer than two valid tokens, because one token has
/// no variance.
pub fn whiten(sequences: &Sequences, values: &[f32]) -> Result<Vec<f32>> {
    sequences.check("values to whiten", values)?;
    let count = sequences.valid_tokens();
    if count < 2 {
        return Err(bad_input!(
            "whitening advantages needs at least two sampled tokens in the batch: this batch has {count}"
        ));
    }
    let mean = sequences.mean(|t| f64::from(values[t]));
    let squares: f64 = sequences.all_valid_indices().map(|t| (f64::from(values[t]) - mean).powi(2)).sum();
    let factor = 1.0 / (squares / (count - 1) as f64 + VARIANCE_EPSILON).sqrt();
    let mut whitened = vec![0.0; values.len()];
    for t in sequences.all_valid_indices() {
        whitened[t] = ((f64::from(values[t]) - mean) * factor) as f32;
    }
    Ok(whitened)
}

/// Returns the advantages of REINFORCE++ (Hu 2025) without discount: the returns R_t = r_t + R_{t+1},
/// whitened over the batch.
///
/// # Errors
/// The errors of [`whiten`].
pub fn reinforce_plus_plus(sequences: &Sequences, rewards: &[f32]) -> Result<TokenAdvantages> {
    let returns = returns_to_go(sequences, rewards)?;
    Ok(TokenAdvantages { advantages: whiten(sequences, &returns)?, returns })
}

/// Returns the advantages of ReMax (Li et al. 2023): the return of each token minus the reward of the greedy
/// response. They are not whitened.
///
/// `rewards` has one value per token, `baselines` one value per sequence.
pub fn remax(sequences: &Sequences, rewards: &[f32], baselines: &[f32]) -> Result<TokenAdvantages> {
    let returns = returns_to_go(sequences, rewards)?;
    let baselines = sequences.broadcast(baselines)?;
    let advantages = returns.iter().zip(&baselines).map(|(r, b)| r - b).collect();
    Ok(TokenAdvantages { advantages, returns })
}

/// Returns generalised advantage estimates (Schulman et al. 2016). They are not whitened; PPO calls
/// [`whiten`] on them.
///
/// ```text
/// δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   returns = A + V
/// ```
///
/// Here t + 1 is the next valid token, and V = A = 0 after the last valid token.
///
/// # Errors
/// [`BadInput`](crate::error::BadInput) for γ or λ outside [0, 1].
pub fn gae(
    sequences: &Sequences,
    rewards: &[f32],
    values: &[f32],
    gamma: f64,
    lambda: f64,
) -> Result<TokenAdvantages> {
    check_fraction("gamma", gamma)?;
    check_fraction("lambda", lambda)?;
    sequences.check("rewards", rewards)?;
    sequences.check("values", values)?;
    let mut advantages = vec![0.0; rewards.len()];
    let mut returns = vec![0.0; rewards.len()];
    for range in sequences.token_ranges() {
        let (mut next_value, mut next_advantage) = (0.0, 0.0);
        for t in sequences.valid_indices(range).rev() {
            let value = f64::from(values[t]);
            let delta = f64::from(rewards[t]) + gamma * next_value - value;
            next_advantage = delta + gamma * lambda * next_advantage;
            next_value = value;
            advantages[t] = next_advantage as f32;
            returns[t] = (next_advantage + value) as f32;
        }
    }
    Ok(TokenAdvantages { advantages, returns })
}

/// Returns the undiscounted returns R_t = r_t + R_{t+1} over valid tokens.
fn returns_to_go(sequences: &Sequences, rewards: &[f32]) -> Result<Vec<f32>> {
    sequences.check("rewards", rewards)?;
    let mut returns = vec![0.0; rewards.len()];
    for range in sequences.token_ranges() {
        let mut running = 0.0;
        for t in sequences.valid_indices(range).rev() {
            running += f64::from(rewards[t]);
            returns[t] = running as f32;
        }
    }
    Ok(returns)
}

fn check_fraction(name: &str, value: f64) -> Result<()> {
    ensure!((0.0..=1.0).contains(&value), bad_input!("{name} is {value}: it must lie between 0 and 1"));
    Ok(())
}
