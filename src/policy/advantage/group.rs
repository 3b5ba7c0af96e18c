//! Advantages from the rewards of a group: several responses to one prompt.

use anyhow::{Result, bail, ensure};

use crate::bad_input;
use crate::policy::sequences::{mean, sample_std};

/// Added to the standard deviation, which GRPO divides by.
const STD_EPSILON: f64 = 1e-6;

/// Returns the advantages of GRPO (Shao et al. 2024): (r − mean) / (std + 1e-6), where std has n − 1 in its
/// denominator.
///
/// `rewards` lists the groups one after the other. `group_sizes` holds the size of each group. The result has
/// one advantage per response, in the order of `rewards`. This holds for every function of this file.
///
/// A group of one has no baseline: its advantage is its reward divided by 1 + 1e-6. Equal rewards give
/// exactly 0: f64 adds n copies of an f32 without rounding, so their mean is the value itself.
///
/// # Errors
/// When the sizes do not add up to the number of rewards, or a reward is not finite.
pub fn grpo(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    scale_rewards(rewards, group_sizes, |group| 1.0 / (group.std + STD_EPSILON))
}

/// Returns the advantages of Dr. GRPO (Liu et al. 2025): r − mean.
///
/// # Errors
/// As [`grpo`].
pub fn dr_grpo(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    scale_rewards(rewards, group_sizes, |_| 1.0)
}

/// Returns the advantages of Lite PPO (Liu et al. 2025): (r − mean) / (std + 1e-6). Here mean is that of the
/// group, and std is the standard deviation (n − 1) of all rewards of the batch; if it is 0, the divisor is
/// 1. A group of one keeps its reward, divided by the same divisor.
///
/// # Errors
/// The errors of [`grpo`].
pub fn grpo_batch_std(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    let std = sample_std(&rewards.iter().map(|&r| f64::from(r)).collect::<Vec<_>>());
    let scale = if std == 0.0 { 1.0 } else { 1.0 / (std + STD_EPSILON) };
    scale_rewards(rewards, group_sizes, |_| scale)
}

/// Returns the advantages of RLOO (Ahmadian et al. 2024): r minus the mean of the group's other rewards. This
/// equals n/(n − 1) · (r − mean).
///
/// # Errors
/// The errors of [`grpo`].
pub fn rloo(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<f32>> {
    scale_rewards(rewards, group_sizes, |group| match group.responses {
        1 => 1.0,
        n => n as f64 / (n - 1) as f64,
    })
}

/// Returns the advantages of MaxRL (Tajwar et al. 2026, arXiv 2602.02710): (r − mean) / (mean − least +
/// 1e-6). `least` is the task's least reward; the paper has 0. With two rewards this is (s − p) / p, where s
/// is 1 for a success and p the group's success rate.
///
/// In a group without a success, all advantages are 0.
///
/// # Errors
/// The errors of [`grpo`], and [`BadInput`](crate::error::BadInput) for a reward below `least`.
pub fn maxrl(rewards: &[f32], group_sizes: &[usize], least: f32) -> Result<Vec<f32>> {
    if let Some(response) = rewards.iter().position(|r| *r < least) {
        return Err(bad_input!(
            "policy.advantage = \"maxrl\" counts the task's least reward, {least}, as 0: response {response} of the \
             batch has {}; use another advantage",
            rewards[response]
        ));
    }
    let gains: Vec<f32> = rewards.iter().map(|reward| reward - least).collect();
    scale_rewards(&gains, group_sizes, |group| 1.0 / (group.mean + STD_EPSILON))
}

/// Returns the advantages of OPO (Hao et al. 2025, arXiv 2505.23585): r − Σ l·r / Σ l. `lengths` holds l, the
/// number of sampled tokens of each response.
///
/// # Errors
/// The errors of [`grpo`], and when `lengths` and `rewards` have different lengths.
pub fn opo(rewards: &[f32], group_sizes: &[usize], lengths: &[usize]) -> Result<Vec<f32>> {
    ensure!(lengths.len() == rewards.len(), "{} lengths for {} rewards", lengths.len(), rewards.len());
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in split_groups(rewards, group_sizes)? {
        let lengths = &lengths[advantages.len()..][..group.len()];
        let tokens: usize = lengths.iter().sum();
        let weighted: f64 = group.iter().zip(lengths).map(|(&r, &l)| f64::from(r) * l as f64).sum();
        let baseline = if group.len() == 1 || tokens == 0 { 0.0 } else { weighted / tokens as f64 };
        advantages.extend(group.iter().map(|&r| (f64::from(r) - baseline) as f32));
    }
    Ok(advantages)
}

/// Added to standard deviations by [`gdpo`], as in TRL.
const GDPO_STD_EPSILON: f64 = 1e-4;

/// Returns the advantages of GDPO (Liu et al. 2026), as TRL's `normalize_then_sum`. Each of the named
/// `rewards`, a weight and a number per response, becomes (r − mean) / (std + 1e-4) in its group. Their
/// weighted sum is normalised in the same way over the batch. Standard deviations have n − 1 in their
/// denominator.
///
/// A reward that is NaN is left out. A reward that only one response of a group has counts as 0 there.
///
/// # Errors
/// When the sizes do not add up to the number of rewards, or a reward is infinite.
pub fn gdpo(rewards: &[(f32, Vec<f32>)], group_sizes: &[usize]) -> Result<Vec<f32>> {
    let responses: usize = group_sizes.iter().sum();
    let mut sums = vec![0.0; responses];
    for (weight, rewards) in rewards {
        ensure!(
            rewards.len() == responses,
            "the groups hold {responses} responses, but there are {} rewards",
            rewards.len()
        );
        ensure!(!rewards.iter().any(|reward| reward.is_infinite()), "a reward is infinite");
        let mut start = 0;
        for &size in group_sizes {
            let group = start..start + size;
            let present = || rewards[group.clone()].iter().map(|&r| f64::from(r)).filter(|r| !r.is_nan());
            let values: Vec<f64> = present().collect();
            if values.len() > 1 {
                let (mean, std) = (mean(values.iter().copied()), sample_std(&values));
                for (sum, &reward) in sums[group.clone()].iter_mut().zip(&rewards[group]) {
                    let normal = (f64::from(reward) - mean) / (std + GDPO_STD_EPSILON);
                    *sum += if normal.is_nan() { 0.0 } else { f64::from(*weight) * normal };
                }
            }
            start += size;
        }
    }
    let (mean, std) =
        if sums.len() == 1 { (sums[0], 0.0) } else { (mean(sums.iter().copied()), sample_std(&sums)) };
    Ok(sums.iter().map(|sum| ((sum - mean) / (std + GDPO_STD_EPSILON)) as f32).collect())
}

/// Values of a group that determine its scale factor.
struct GroupStats {
    responses: usize,
    /// Mean of the group's rewards; 1 for a group of one, so that its reward is divided by about 1.
    mean: f64,
    /// Standard deviation (n − 1) of the group's rewards; 1 for a group of one, for the same reason.
    std: f64,
}

/// Returns (r − mean) · factor for each reward. A group of one has baseline 0 in place of its mean.
fn scale_rewards(
    rewards: &[f32],
    group_sizes: &[usize],
    factor: impl Fn(&GroupStats) -> f64,
) -> Result<Vec<f32>> {
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in split_groups(rewards, group_sizes)? {
        let rewards: Vec<f64> = group.iter().map(|&r| f64::from(r)).collect();
        let (baseline, std) = match rewards.len() {
            1 => (0.0, 1.0),
            _ => (mean(rewards.iter().copied()), sample_std(&rewards)),
        };
        let mean = if rewards.len() == 1 { 1.0 } else { baseline };
        let factor = factor(&GroupStats { responses: rewards.len(), mean, std });
        advantages.extend(rewards.iter().map(|r| ((r - baseline) * factor) as f32));
    }
    Ok(advantages)
}

/// Returns, for each group, whether it changes the policy: its rewards are not all equal, or it is a group of
/// one whose reward is not 0. The advantage of a group of one is proportional to its reward.
///
/// DAPO's dynamic sampling replaces the groups that do not change the policy.
///
/// # Errors
/// The errors of [`grpo`].
pub fn informative_groups(rewards: &[f32], group_sizes: &[usize]) -> Result<Vec<bool>> {
    let informative = |group: &[f32]| match group {
        [reward] => *reward != 0.0,
        _ => group.windows(2).any(|pair| pair[0] != pair[1]),
    };
    Ok(split_groups(rewards, group_sizes)?.into_iter().map(informative).collect())
}

/// Splits `rewards` into groups.
fn split_groups<'a>(rewards: &'a [f32], group_sizes: &[usize]) -> Result<Vec<&'a [f32]>> {
    let total: usize = group_sizes.iter().sum();
    ensure!(
        total == rewards.len(),
        "the groups hold {total} responses, but there are {} rewards",
        rewards.len()
    );
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
