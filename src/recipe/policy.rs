//! `[policy]`: advantage, ratio and loss.

use super::limits::{above, from};
use super::table::{choice, table};

table! {
    /// Advantage, importance ratio and loss.
    pub struct Policy {
        /// How rewards of a group become advantages.
        pub advantage: Advantage = Advantage::Grpo,
        /// The policy loss.
        pub loss: Loss = Loss::Ppo,
        /// How token losses become one number.
        pub aggregation: Aggregation = Aggregation::TokenMean,
        /// The log-probabilities that the importance ratio is taken against.
        pub old_logprob: OldLogprob = OldLogprob::Detach,
        /// The ratio is clipped below at 1 - `clip_low`.
        pub clip_low: f64 = 0.2 => above(0.0).below(1.0),
        /// The ratio is clipped above at 1 + `clip_high`.
        pub clip_high: f64 = 0.2 => above(0.0).below(1.0),
        /// Bound of `ppo` on the ratio for negative advantages, more than 1; 0 means none.
        pub dual_clip: f64 = 3.0 => from(0.0).to(1e6),
    }
}

choice! {
    /// How rewards become advantages.
    pub enum Advantage {
        /// Reward minus the group's mean, divided by the group's standard deviation.
        Grpo = "grpo",
        /// Reward minus the group's mean.
        DrGrpo = "dr_grpo",
        /// Reward minus the mean of the group's other rewards.
        Rloo = "rloo",
        /// Rewards to go, normalised over the whole batch.
        ReinforcePlusPlus = "reinforce_plus_plus",
    }
}

choice! {
    /// Policy losses.
    pub enum Loss {
        /// Clipped ratio a token, with dual clip.
        Ppo = "ppo",
        /// Clipped ratio a sequence.
        Gspo = "gspo",
        /// Gradient of the log-probability, weighted by the clipped ratio.
        Cispo = "cispo",
        /// Gradient of the log-probability.
        Reinforce = "reinforce",
    }
}

choice! {
    /// How token losses become one number.
    pub enum Aggregation {
        /// Sum over the tokens of the whole batch, divided by their count.
        TokenMean = "token_mean",
        /// Mean over sequences of the mean over tokens.
        SequenceMeanTokenMean = "sequence_mean_token_mean",
        /// Mean over sequences of the sum over tokens.
        SequenceMeanTokenSum = "sequence_mean_token_sum",
        /// Sum over tokens divided by sequences times `rollout.response_tokens_max`.
        Constant = "constant",
    }
}

choice! {
    /// Log-probabilities that the importance ratio is taken against.
    pub enum OldLogprob {
        /// The training forward's own, detached: for one update a batch, the ratio is 1 by construction.
        Detach = "detach",
        /// Those kept at sampling.
        Rollout = "rollout",
        /// A second forward before the update.
        Recompute = "recompute",
    }
}
