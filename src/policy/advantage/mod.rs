//! Advantages: how much better than expected a response or a token was.

mod group;
mod token;

pub use group::{dr_grpo, gdpo, grpo, grpo_batch_std, informative_groups, maxrl, opo, rloo};
pub use token::{TokenAdvantages, gae, reinforce_plus_plus, remax, whiten};

use crate::settings::choice;

choice! {
    /// How rewards become advantages.
    pub enum Advantage {
        /// Reward minus the group's mean, divided by the group's standard deviation.
        Grpo = "grpo",
        /// Reward minus the group's mean.
        DrGrpo = "dr_grpo",
        /// Reward minus the group's mean, divided by the standard deviation of all the batch's rewards.
        GrpoBatchStd = "grpo_batch_std",
        /// Reward minus the mean of the group's other rewards.
        Rloo = "rloo",
        /// Reward minus the group's mean, divided by that mean. The task's least reward counts as 0.
        Maxrl = "maxrl",
        /// Reward minus the group's mean reward, in which each response is weighted by its length.
        Opo = "opo",
        /// Each named reward normalised in its group, their weighted sum normalised over the batch. For a
        /// task with several rewards.
        Gdpo = "gdpo",
        /// Return of each token (the sum of the rewards from that token on), normalised over the whole batch.
        ReinforcePlusPlus = "reinforce_plus_plus",
        /// Reward minus the group's mean, normalised over the tokens of the whole batch.
        ReinforcePlusPlusBaseline = "reinforce_plus_plus_baseline",
        /// Return of each token minus the reward of one greedy sample of the prompt. The greedy sample is not
        /// trained on.
        Remax = "remax",
        /// Generalised advantage estimation (GAE) with the critic of `[critic]`, normalised over the whole
        /// batch.
        Gae = "gae",
    }
}
