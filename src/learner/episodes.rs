//! Trajectories of one episode share its reward, so group advantages compare episodes, not trajectories.

use crate::policy::Truncated;
use crate::trajectory::{Group, Trajectory};
use std::collections::BTreeMap;

/// The episode of each trajectory of a batch.
pub(super) struct Episodes {
    /// For each trajectory: the index of its episode.
    of_trajectory: Vec<usize>,
    /// Number of trajectories of each episode.
    trajectories: Vec<usize>,
    /// Number of episodes of each group.
    pub group_sizes: Vec<usize>,
}

impl Episodes {
    pub fn new(groups: &[&Group]) -> Self {
        let (mut of_trajectory, mut trajectories, mut group_sizes) = (vec![], vec![], vec![]);
        for group in groups {
            let before = trajectories.len();
            for (index, trajectory) in group.trajectories.iter().enumerate() {
                if index == 0 || trajectory.begins_episode() {
                    trajectories.push(0);
                }
                of_trajectory.push(trajectories.len() - 1);
                if let Some(count) = trajectories.last_mut() {
                    *count += 1;
                }
            }
            group_sizes.push(trajectories.len() - before);
        }
        Self { of_trajectory, trajectories, group_sizes }
    }

    /// Returns the reward of each episode: the mean of the rewards of its trajectories, which differ only by
    /// shaping, plus the sum of their KL penalties.
    pub fn rewards(&self, rewards: &[f32], penalties: &[f32]) -> Vec<f32> {
        let sums = |values: &[f32]| {
            let mut sums = vec![0f64; self.trajectories.len()];
            self.of_trajectory.iter().zip(values).for_each(|(&episode, &r)| sums[episode] += f64::from(r));
            sums
        };
        let counts = self.trajectories.iter().map(|&count| count as f64);
        let means = sums(rewards).into_iter().zip(counts).map(|(sum, count)| (sum / count) as f32);
        means.zip(sums(penalties)).map(|(mean, penalty)| mean + penalty as f32).collect()
    }

    /// Returns the sum over each episode.
    pub fn sums(&self, values: &[usize]) -> Vec<usize> {
        let mut sums = vec![0; self.trajectories.len()];
        self.of_trajectory.iter().zip(values).for_each(|(&episode, value)| sums[episode] += value);
        sums
    }

    /// Returns the named rewards of each episode, those of its first trajectory, with their weights.
    pub fn named_rewards(
        &self,
        groups: &[&Group],
        weights: &BTreeMap<String, f32>,
        truncated: Truncated,
    ) -> Vec<(f32, Vec<f32>)> {
        let trajectories: Vec<&Trajectory> = groups.iter().flat_map(|group| &group.trajectories).collect();
        let starts: Vec<usize> = (0..self.of_trajectory.len())
            .filter(|&i| i == 0 || self.of_trajectory[i] != self.of_trajectory[i - 1])
            .collect();
        let of = |name: &str| {
            starts.iter().map(|&start| trajectories[start].trained_named_reward(name, truncated)).collect()
        };
        weights.iter().map(|(name, &weight)| (weight, of(name))).collect()
    }

    /// Returns, for each trajectory, the value of its episode.
    pub fn spread(&self, values: &[f32]) -> Vec<f32> {
        self.of_trajectory.iter().map(|&episode| values[episode]).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::policy::advantage::grpo;

    /// Returns an empty trajectory, the part `part` of its episode.
    pub(in crate::learner) fn trajectory(part: u64) -> Trajectory {
        Trajectory { step: 1, part, ..Trajectory::default() }
    }

    #[test]
    fn an_episode_counts_once_however_many_trajectories_it_has() {
        let group = |parts: &[u64]| Group {
            trajectories: parts.iter().map(|&part| trajectory(part)).collect(),
            greedy: None,
        };
        let (first, second) = (group(&[0, 1, 2, 0]), group(&[0, 0]));
        let episodes = Episodes::new(&[&first, &second]);
        assert_eq!(episodes.group_sizes, [2, 2]);
        let rewards = episodes.rewards(&[1.0, 1.0, 1.0, 0.0, 0.5, 0.25], &[0.0; 6]);
        assert_eq!(rewards, [1.0, 0.0, 0.5, 0.25]);
        let advantages = episodes.spread(&grpo(&rewards, &episodes.group_sizes).unwrap());
        let alone = grpo(&[1.0, 0.0, 0.5, 0.25], &[2, 2]).unwrap();
        assert_eq!(advantages, [alone[0], alone[0], alone[0], alone[1], alone[2], alone[3]]);
        assert_eq!(episodes.sums(&[1, 2, 3, 4, 5, 6]), [6, 4, 5, 6]);
        // The penalty was a mean, so an episode of many trajectories had less of it.
        let penalties = [-0.25, -0.25, -0.5, -1.0, 0.0, 0.0];
        assert_eq!(episodes.rewards(&[1.0; 6], &penalties), [0.0, 0.0, 1.0, 1.0]);
    }
}
