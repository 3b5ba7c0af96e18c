//! `[parallel]`: threads and processes.

use crate::settings::{above, choice, from, table};

table! {
    /// Threads and processes. No result depends on them.
    pub struct ParallelSettings {
        /// Number of threads; 0 means all cores of the machine.
        pub threads: usize = 0 => from(0.0).to(4096.0),
        /// Index of the GPU among those in `CUDA_VISIBLE_DEVICES`. With several processes on a machine it is
        /// the first process's GPU; the others take the next ones.
        pub device_index: usize = 0 => from(0.0).to(1023.0),
        /// Processes that share a sequence in training: its rows are split, and attention's heads exchanged
        /// (sequence parallelism). It must divide the number of processes and the model's heads.
        pub sequence: usize = 1 => from(1.0),
        /// How the trainable weights are held during sampling, with several processes.
        pub rollout_weights: RolloutWeightPlacement = RolloutWeightPlacement::Auto,
        /// How frozen packed weights, such as an adapter's base, are held in training, with several
        /// processes.
        pub packed_weights: PackedWeightPlacement = PackedWeightPlacement::Auto,
        /// Time limit in seconds of one exchange between processes, rollouts included. At the limit the
        /// process ends with an error that names the missing ones. A dead process is noticed at once, a
        /// stopped or unreachable one after two minutes.
        pub exchange_timeout_s: f64 = 1800.0 => above(0.0).to(1e6),
    }
}

choice! {
    /// How a process holds the packed weights. The choice changes no bit.
    pub enum PackedWeightPlacement {
        /// Unsharded if memory allows.
        Auto = "auto",
        /// Unsharded.
        Whole = "whole",
        /// Sharded; a layer is gathered whenever a forward or backward pass reaches it.
        Sharded = "cut",
    }
}

choice! {
    /// How a process holds the trainable weights during sampling. The choice changes no bit.
    pub enum RolloutWeightPlacement {
        /// The first of these that fits in memory.
        Auto = "auto",
        /// All weights, gathered once a rollout.
        Whole = "whole",
        /// All weights but the experts, gathered once a rollout. Each process has its own experts, and tokens
        /// travel to them and back (expert parallelism), so all processes run their forward passes together.
        /// For families with experts.
        ByExpert = "by_expert",
    }
}
