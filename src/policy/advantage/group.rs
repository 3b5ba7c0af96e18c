//! Advantages from the rewards of a group: several responses to one prompt.

use anyhow::{Result, bail, ensure};

use crate::policy::sequences::{mean, sample_std};

/// Added to the standard deviation that GRPO divides by.
const STD_EPSILON: f64 = 1e-6;

/// GRPO (Shao et al. 2024): (r − mean) / (std + 1e-6), std with n − 1. A group of one is divided by 1 + 1e-6.
///
/// Here and below: one advantage a response, in the order of `rewards`, which lists the groups one after the other;
/// `group_sizes` are their sizes. A group of one has nothing to be compared with and keeps its reward. Equal rewards give
/// exactly 0: n copies of an f32 add up in f64 without rounding, so their mean is the value itself.
///
/// # Errors
/// When the sizes do not add up to the number of rewards, or a reward is not finite.
pub fn grpo(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    scaled(rewards, group_sizes, |group| 1.0 / (group.std + STD_EPSILON))
}

/// Dr. GRPO (Liu et al. 2025): r − mean.
///
/// # Errors
/// As [`grpo`].
pub fn dr_grpo(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    scaled(rewards, group_sizes, |_| 1.0)
}

/// Lite PPO (Liu et al. 2025): (r − mean) / (std + 1e-6) with the std, n − 1, of all rewards of the batch. A group of one is
/// divided by it too.
///
/// # Errors
/// As [`grpo`].
pub fn grpo_batch_std(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    let std = sample_std(&rewards.iter().map(|&r| f64::from(r)).collect::<Vec<_>>());
    scaled(rewards, group_sizes, |_| 1.0 / (std + STD_EPSILON))
}

/// RLOO (Ahmadian et al. 2024): r − the mean of the others = n/(n − 1) · (r − mean).
///
/// # Errors
/// As [`grpo`].
pub fn rloo(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    scaled(rewards, group_sizes, |group| match group.responses {
        1 => 1.0,
        n => n as f64 / (n - 1) as f64,
    })
}

/// What a group's factor is made of.
struct GroupFigures {
    responses: usize,
    /// With n − 1; 1 for a group of one.
    std: f64,
}

/// (r − mean) · factor; the mean of a group of one is taken for 0.
fn scaled(rewards: &[f32], group_sizes: &[usize], factor: impl Fn(&GroupFigures) -> f64) -> Result<Vec<f32>> {
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in split_groups(rewards, group_sizes)? {
        let rewards: Vec<f64> = group.iter().map(|&r| f64::from(r)).collect();
        let (baseline, std) = match rewards.len() {
            1 => (0.0, 1.0),
            _ => (mean(rewards.iter().copied()), sample_std(&rewards)),
        };
        let factor = factor(&GroupFigures { responses: rewards.len(), std });
        advantages.extend(rewards.iter().map(|r| ((r - baseline) * factor) as f32));
    }
    Ok(advantages)
}

/// For each group, whether its rewards differ: only then does it move the policy.
///
/// DAPO's dynamic sampling replaces the others. A group of one keeps its reward as advantage, so it is informative
/// unless that reward is 0.
pub fn informative_groups(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<bool>> {
    let informative = |group: &[f32]| match group {
        [reward] => *reward != 0.0,
        _ => group.windows(2).any(|pair| pair[0] != pair[1]),
    };
    Ok(split_groups(rewards, group_sizes)?.into_iter().map(informative).collect())
}

/// `rewards` cut into groups.
fn split_groups<'a>(rewards: &'a [f32], group_sizes: &[usize]) -> Result<Vec<&'a [f32]>> {
    let total: usize = group_sizes.iter().sum();
    ensure!(total == rewards.len(), "groups of {total} responses in all for {} rewards", rewards.len());
    if let Some(bad) = rewards.iter().position(|r| !r.is_finite()) {
        bail!("the reward of response {bad} is {}", rewards[bad]);
    }
    let mut rest = rewards;
    Ok(group_sizes
        .iter()
        .map(|&size| {
            let (group, tail) = rest.split_at(size);
            rest = tail;
            group
        })
        .collect())
}
