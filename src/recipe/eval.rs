//! `[eval]`: success on held-out problems.

use super::limits::{above, from};
use super::table::table;

table! {
    /// Success on held-out problems.
    pub struct Eval {
        /// Training steps between evaluations, the last step always included; 0 means never during training.
        pub every_steps: u64 = 10,
        /// Evaluate the first so many held-out problems.
        pub problems_max: usize = 512 => from(1.0),
        /// Samples of a problem: the k of mean@k.
        pub samples: usize = 1 => from(1.0).to(1e6),
        /// Sampling temperature; 0 means greedy.
        pub temperature: f64 = 1.0 => from(0.0).to(100.0),
        /// Nucleus sampling: keep the likeliest tokens up to this probability; 1 means off.
        pub top_p: f64 = 1.0 => above(0.0).to(1.0),
        /// Keep the k likeliest tokens; 0 means off.
        pub top_k: usize = 0,
        /// Keep tokens with at least this share of the likeliest one's probability; 0 means off.
        pub min_p: f64 = 0.0 => from(0.0).to(1.0),
        /// Also evaluate before the first step of reinforcement learning.
        pub before_training: bool = true,
        /// The k of each pass@k that is reported; none above `samples`.
        pub pass_at: Vec<usize> = Vec::new() => from(1.0),
    }
}
