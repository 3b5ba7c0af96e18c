//! The advantages of a batch: rewards, reward shaping, the KL penalty and the advantage estimator.

use super::batch::Batch;
use super::critic::Critic;
use super::episodes::Episodes;
use crate::bad_input;
use crate::metrics::Metrics;
use crate::policy::Sequences;
use crate::policy::advantage::Advantage;
use crate::policy::advantage::{
    dr_grpo, gdpo, grpo, grpo_batch_std, maxrl, opo, reinforce_plus_plus, remax, rloo, whiten,
};
use crate::policy::kl_in_reward::kl_in_reward;
use crate::policy::ratio::OldLogProbSource;
use crate::policy::shaping::OverlongPenalty;
use crate::policy::{KlPlacement, PolicySettings, Truncated};
use crate::trajectory::Group;
use anyhow::{Context, Result};
use std::collections::BTreeMap;

/// Estimates the advantages of a batch.
pub struct AdvantageEstimator<'a> {
    pub policy: &'a PolicySettings,
    /// The source of the old log-probs in the importance ratio.
    pub old_log_prob_source: OldLogProbSource,
    /// Coefficient of the KL penalty in the reward at this step.
    pub kl_coefficient: f64,
    /// The token limit that overlong shaping uses.
    pub response_tokens_max: usize,
    /// The task's least reward.
    pub reward_min: f32,
    /// The weights of the task's named rewards; empty if it has none.
    pub reward_weights: &'a BTreeMap<String, f32>,
    /// The critic, which computes the returns. The advantage `gae` needs a critic.
    pub critic: Option<&'a Critic>,
}

impl AdvantageEstimator<'_> {
    /// Computes the advantages of `batch`, which holds the trajectories of `groups`. With a critic, also
    /// computes the returns. Returns the metrics.
    ///
    /// # Errors
    /// When a column is missing, a value is NaN, or `remax` has no greedy samples.
    pub fn estimate(&self, batch: &mut Batch, groups: &[&Group]) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        let shaping = self.overlong_penalty()?;
        let truncated = self.policy.truncated;
        let rewards = rewards(groups, (shaping.as_ref(), truncated), &mut metrics);
        let sequences = batch.masked_sequences()?;
        let penalties = self.kl_penalties(batch, &sequences, &mut metrics)?;
        let episodes = Episodes::new(groups);
        let per_token = || token_rewards(&sequences, &rewards, penalties.clone());
        let episode_rewards =
            || anyhow::Ok(episodes.rewards(&rewards, &sequences.sequence_sums(&penalties)?));
        type GroupEstimator<'e> = &'e dyn Fn(&[f32], &[usize]) -> Result<Vec<f32>>;
        let group_advantages = |estimate: GroupEstimator| {
            let rewards = episode_rewards()?;
            sequences.broadcast(&episodes.spread(&estimate(&rewards, &episodes.group_sizes)?))
        };
        let mut returns = None;
        let advantages = match self.policy.advantage {
            Advantage::Grpo => group_advantages(&grpo)?,
            Advantage::DrGrpo => group_advantages(&dr_grpo)?,
            Advantage::GrpoBatchStd => group_advantages(&grpo_batch_std)?,
            Advantage::Rloo => group_advantages(&rloo)?,
            Advantage::Maxrl => group_advantages(&|rewards, sizes| maxrl(rewards, sizes, self.reward_min))?,
            Advantage::Gdpo => {
                let shaped = episode_rewards()?;
                let mut named = episodes.named_rewards(groups, self.reward_weights, truncated);
                if named.is_empty() {
                    named.push((1.0, shaped));
                } else if shaping.is_some() || self.policy.kl.place == KlPlacement::Reward {
                    // Shaping and penalty are one more reward.
                    let plain = self::rewards(groups, (None, truncated), &mut Metrics::new());
                    let plain = episodes.rewards(&plain, &vec![0.0; plain.len()]);
                    let added = shaped.iter().zip(plain).map(|(shaped, plain)| shaped - plain);
                    named.push((1.0, added.collect()));
                }
                sequences.broadcast(&episodes.spread(&gdpo(&named, &episodes.group_sizes)?))?
            }
            Advantage::Opo => {
                let rows = sequences.token_ranges();
                let lengths: Vec<usize> = rows.map(|row| sequences.valid_indices(row).count()).collect();
                let lengths = episodes.sums(&lengths);
                group_advantages(&|rewards, sizes| opo(rewards, sizes, &lengths))?
            }
            Advantage::ReinforcePlusPlus => reinforce_plus_plus(&sequences, &per_token())?.advantages,
            Advantage::ReinforcePlusPlusBaseline => whiten(&sequences, &group_advantages(&dr_grpo)?)?,
            Advantage::Remax => {
                let greedy = greedy_rewards(groups, shaping.as_ref(), truncated)?;
                remax(&sequences, &per_token(), &greedy)?.advantages
            }
            Advantage::Gae => {
                let (critic, values) = self.critic.zip(batch.values.as_ref()).context("no critic")?;
                let (estimate, of_values) = critic.estimate(&sequences, &per_token(), values)?;
                metrics.extend(of_values);
                returns = Some(estimate.returns);
                estimate.advantages
            }
        };
        let values = || advantages.iter().map(|&a| f64::from(a));
        metrics.set("critic/advantages/mean", values().sum::<f64>() / advantages.len() as f64);
        metrics.set("critic/advantages/max", values().fold(f64::NEG_INFINITY, f64::max));
        metrics.set("critic/advantages/min", values().fold(f64::INFINITY, f64::min));
        (batch.advantages, batch.returns) = (advantages, returns);
        Ok(metrics)
    }

    /// Returns the overlong penalty; `None` if the recipe does not enable it.
    fn overlong_penalty(&self) -> Result<Option<OverlongPenalty>> {
        let settings = &self.policy.overlong;
        if settings.buffer_tokens == 0 {
            return Ok(None);
        }
        OverlongPenalty::new(self.response_tokens_max, settings.buffer_tokens, settings.penalty).map(Some)
    }

    /// Returns the KL term of each token's reward: minus the coefficient times the estimated KL between the
    /// old and the reference log-probabilities. It is 0 if the recipe has no KL penalty in the reward.
    fn kl_penalties(&self, batch: &Batch, sequences: &Sequences, metrics: &mut Metrics) -> Result<Vec<f32>> {
        let zeros = vec![0.0; sequences.tokens()];
        let (KlPlacement::Reward, Some(reference)) = (self.policy.kl.place, &batch.reference_log_probs)
        else {
            return Ok(zeros);
        };
        let rollout = &batch.rollout_log_probs;
        let training = batch.training_log_probs.as_deref().unwrap_or(rollout);
        let old_log_probs = self.old_log_prob_source.select(training, rollout, Some(training), 1)?;
        let divergence = self.policy.kl.estimator;
        let (rewards, kl) =
            kl_in_reward(sequences, &zeros, old_log_probs, reference, divergence, self.kl_coefficient)?;
        metrics.set("actor/reward_kl_penalty", kl);
        metrics.set("actor/reward_kl_penalty_coeff", self.kl_coefficient);
        Ok(rewards)
    }
}

/// Returns the shaped reward of each trajectory.
fn rewards(
    groups: &[&Group],
    (shaping, truncated): (Option<&OverlongPenalty>, Truncated),
    metrics: &mut Metrics,
) -> Vec<f32> {
    let trajectories = || groups.iter().flat_map(|g| &g.trajectories);
    let mut rewards: Vec<f32> = trajectories().map(|t| t.trained_reward(truncated)).collect();
    if let Some(overlong) = shaping {
        let shaping: Vec<f32> = trajectories().map(|t| overlong.reward(t.sampled_tokens())).collect();
        let sum: f64 = shaping.iter().map(|&s| f64::from(s)).sum();
        metrics.set("critic/overlong_reward/mean", sum / rewards.len().max(1) as f64);
        rewards.iter_mut().zip(&shaping).for_each(|(reward, shaping)| *reward += shaping);
    }
    rewards
}

/// Returns the reward of each token: its KL term from `penalties`. The last token of a response also gets the
/// reward of the response.
fn token_rewards(sequences: &Sequences, rewards: &[f32], penalties: Vec<f32>) -> Vec<f32> {
    let mut token_rewards = penalties;
    for (reward, row) in rewards.iter().zip(sequences.token_ranges()) {
        if let Some(last) = row.last() {
            token_rewards[last] += *reward;
        }
    }
    token_rewards
}

/// Returns, for each trajectory, the shaped reward of the greedy sample of its prompt.
fn greedy_rewards(
    groups: &[&Group],
    shaping: Option<&OverlongPenalty>,
    truncated: Truncated,
) -> Result<Vec<f32>> {
    let repeat_greedy_reward = |group: &&Group| -> Result<Vec<f32>> {
        let Some(greedy) = &group.greedy else {
            return Err(bad_input!(
                "policy.advantage = \"remax\" needs a greedy sample of every prompt, but these trajectories have none; \
                 sample them again with this advantage"
            ));
        };
        let shaping = shaping.map_or(0.0, |overlong| overlong.reward(greedy.sampled_tokens()));
        Ok(vec![greedy.trained_reward(truncated) + shaping; group.trajectories.len()])
    };
    Ok(groups.iter().map(repeat_greedy_reward).collect::<Result<Vec<_>>>()?.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learner::episodes::tests::trajectory;
    use crate::trajectory::Trajectory;

    /// The baseline of `reinforce_plus_plus_baseline` was the mean over trajectories.
    #[test]
    fn every_baseline_is_a_mean_over_episodes() {
        let group = |episodes: &[(u64, f32)]| Group {
            trajectories: episodes
                .iter()
                .map(|&(part, reward)| Trajectory {
                    tokens: vec![1, 2],
                    prompt_tokens: 1,
                    mask: vec![false, true],
                    log_probs: vec![0.0, -1.0],
                    reward,
                    ..trajectory(part)
                })
                .collect(),
            greedy: None,
        };
        let (first, second) =
            (group(&[(0, 1.0), (1, 1.0), (2, 1.0), (0, 0.0)]), group(&[(0, 0.5), (0, 0.25)]));
        let groups = [&first, &second];
        let mut batch = Batch::new(&groups);
        let policy =
            PolicySettings { advantage: Advantage::ReinforcePlusPlusBaseline, ..PolicySettings::default() };
        let estimator = AdvantageEstimator {
            policy: &policy,
            old_log_prob_source: policy.old_logprob,
            kl_coefficient: 0.0,
            response_tokens_max: 8,
            reward_min: 0.0,
            reward_weights: &BTreeMap::new(),
            critic: None,
        };
        estimator.estimate(&mut batch, &groups).unwrap();
        let centred = [0.5, 0.5, 0.5, -0.5, 0.125, -0.125];
        let sequences = Sequences::new(&batch.cu_seqlens, &batch.mask).unwrap();
        assert_eq!(batch.advantages, whiten(&sequences, &centred).unwrap());
    }
}
