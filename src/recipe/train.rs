//! `[train]`: the update.

use super::limits::from;
use super::optimizer::OptimizerConfig;
use super::table::table;
use std::path::PathBuf;

table! {
    /// The reinforcement-learning stage.
    pub struct Train {
        /// Steps of reinforcement learning.
        pub steps: u64 = 80 => from(0.0).to(1e9),
        /// Seed of the run: every random number derives from it.
        pub seed: u64 = 0,
        /// Tokens packed into one forward and backward; a longer trajectory makes a micro-batch of its own. Models of up to
        /// 256 MiB run them side by side on a CPU, and get an even number of them.
        pub micro_batch_tokens: usize = 1280 => from(1.0).to(16777216.0),
        /// Updates of a pass over the step's trajectories, which are shuffled and split evenly; 1 keeps their order. With more
        /// than 1 a forward over the whole batch comes before the first update: the mismatch is measured on all of it.
        pub minibatches: usize = 1 => from(1.0).to(1e6),
        /// Passes over the step's trajectories.
        pub epochs: usize = 1 => from(1.0).to(1e6),
        /// Weight of the load-balancing loss over experts in reinforcement learning; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Keep only each layer's input and compute the layer again in the backward: less memory, more work, same bits. Absent
        /// means: where the micro-batches that run side by side would keep more than 1 GiB.
        pub recompute_layers: Option<bool> = None,
        /// Parameters that stay as they are, as patterns over their names in which `*` stands for any characters.
        pub freeze: Vec<String> = Vec::new(),
        /// Train on these trajectories, as `rloss rollout` writes them, instead of sampling: `rollout.prompts_per_step` of
        /// their groups a step, from the first again after the last. Rewards and log-probabilities stay as stored, so give
        /// `rollout.temperature` the value they were sampled at. Absent means sampling.
        pub trajectories: Option<PathBuf> = None,
        /// Optimizer of this stage.
        pub optimizer: OptimizerConfig = OptimizerConfig::default(),
    }
}
