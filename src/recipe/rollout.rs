//! `[rollout]`: how trajectories are sampled for training.

use super::limits::{above, from};
use super::table::table;

table! {
    /// How trajectories are sampled for training.
    pub struct RolloutConfig {
        /// Prompts of a training step.
        pub prompts_per_step: usize = 8 => from(1.0).to(1e6),
        /// Samples of a prompt: the group over which advantages are computed.
        pub samples_per_prompt: usize = 8 => from(1.0).to(1e6),
        /// Dynamic sampling (DAPO): up to so many more draws of prompts in place of groups whose rewards are all equal; 0 means none.
        pub resample_rounds_max: u64 = 0 => from(0.0).to(1000.0),
        /// Sampling temperature; log-probabilities are those of the distribution sampled from.
        pub temperature: f64 = 1.0 => above(0.0).to(100.0),
        /// Nucleus sampling: only 1 (off) in training.
        pub top_p: f64 = 1.0 => above(0.0).to(1.0),
        /// Keep the k likeliest tokens: only 0 (off) in training.
        pub top_k: usize = 0,
        /// Keep tokens with at least this share of the likeliest one's probability: only 0 (off) in training.
        pub min_p: f64 = 0.0 => from(0.0).to(1.0),
        /// Assistant turns of a trajectory, so one more than its answered tool calls.
        pub turns_max: usize = 3 => from(1.0).to(1e6),
        /// Longest prompt, in tokens; a longer one is an error.
        pub prompt_tokens_max: usize = 2048 => from(1.0).to(16777216.0),
        /// Tokens sampled in a trajectory, all turns together.
        pub response_tokens_max: usize = 72 => from(1.0).to(16777216.0),
        /// Sequences that a worker decodes together.
        pub sequences_max: usize = 64 => from(1.0).to(65536.0),
        /// Tool calls that run at the same time.
        pub tool_calls_concurrent_max: usize = 64 => from(1.0).to(65536.0),
        /// Keep each token's chosen experts in the trajectory.
        pub keep_routes: bool = false,
        /// On a GPU: launches of decode are recorded and replayed as one. The bits are the same.
        pub cuda_graphs: bool = true,
    }
}
