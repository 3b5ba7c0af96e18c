//! Advantages: how much better than expected a response, or one of its tokens, turned out.

mod group;
mod token;

pub use group::{dr_grpo, grpo, grpo_batch_std, informative_groups, rloo};
pub use token::{TokenAdvantages, gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, whiten};

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
        /// Rewards to go, normalised over the whole batch.
        ReinforcePlusPlus = "reinforce_plus_plus",
        /// Reward minus the group's mean, normalised over the tokens of the whole batch.
        ReinforcePlusPlusBaseline = "reinforce_plus_plus_baseline",
        /// Reward to go minus the reward of one more, greedy sample of the prompt, which is not trained on.
        Remax = "remax",
        /// What a token turned out better than the critic of `[critic]` expected (GAE), normalised over the whole batch.
        Gae = "gae",
    }
}
