//! `[critic]`: the critic of `policy.advantage = "gae"`.

use super::limits::from;
use super::optimizer::OptimizerConfig;
use super::table::table;

table! {
    /// The critic and how it learns.
    pub struct CriticConfig {
        /// Discount of later rewards, a token.
        pub gamma: f64 = 1.0 => from(0.0).to(1.0),
        /// Weight of later errors of the critic: 1 trusts the returns, 0 the next value.
        pub lambda: f64 = 1.0 => from(0.0).to(1.0),
        /// First steps of reinforcement learning in which only the critic learns.
        pub warmup_steps: u64 = 0 => from(0.0).to(1e9),
        /// Updates of a pass over the step's trajectories, as `train.minibatches` of the policy.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Passes over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// A token whose value came nearer to its return by more than this within a step learns no more in it; 0 means no bound.
        pub value_clip: f64 = 0.5 => from(0.0).to(1e6),
        /// Parameters of the critic that stay as they are, as patterns like those of `train.freeze`; its head is
        /// `score.weight` and `score.bias`.
        pub freeze: Vec<String> = Vec::new(),
        /// Optimizer of the critic.
        pub optimizer: OptimizerConfig = OptimizerConfig { lr: 1e-5, ..OptimizerConfig::default() },
    }
}
