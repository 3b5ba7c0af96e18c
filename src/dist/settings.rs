//! `[parallel]`: threads and processes.

use crate::settings::{above, choice, from, table};

table! {
    /// Threads and processes. They change results by rounding at most.
    pub struct ParallelSettings {
        /// Number of threads of a process; 0 means its share of the machine's cores.
        pub threads: usize = 0 => from(0.0).to(4096.0),
        /// Index of the GPU among those in `CUDA_VISIBLE_DEVICES`. If a machine has several processes, it is
        /// the GPU of the first process, and the other processes use the next GPUs.
        pub device_index: usize = 0 => from(0.0).to(1023.0),
        /// Sequence parallelism: number of processes that share each sequence in training. The rows of a
        /// sequence are sharded, and attention's heads are exchanged. It must divide the number of processes
        /// and of query heads, and divide the key-value heads or be a multiple of them.
        pub sequence: usize = 1 => from(1.0),
        /// Hybrid sharding (HSDP): number of consecutive processes that share a copy of the weights, such as
        /// those of a node. Only they exchange weights, expert rows and the gradients of a pass. Gradients of
        /// all copies are added once per update, so the number of copies changes results by rounding. It must
        /// divide the number of processes, and be a multiple of `sequence`; 0 means all processes.
        pub shard_size: usize = 0 => from(0.0),
        /// How each process holds the trainable weights during sampling, if there are several processes.
        pub rollout_weights: RolloutWeightPlacement = RolloutWeightPlacement::Auto,
        /// How the processes share trainable experts in training, if there are several processes.
        pub experts: ExpertPlacement = ExpertPlacement::Gathered,
        /// How each process holds frozen packed weights, such as an adapter's base, during training, if there
        /// are several processes.
        pub packed_weights: PackedWeightPlacement = PackedWeightPlacement::Auto,
        /// Time limit in seconds of one exchange between processes, including rollouts. At the limit, the
        /// process ends with an error that names the missing processes. A dead process is detected at once; a
        /// stopped or unreachable process is detected after two minutes.
        pub exchange_timeout_s: f64 = 1800.0 => above(0.0).to(1e6),
    }
}

choice! {
    /// How a process holds the packed weights. The choice does not change any bit.
    pub enum PackedWeightPlacement {
        /// Unsharded if there is enough memory, else sharded.
        Auto = "auto",
        /// Unsharded.
        Whole = "whole",
        /// Sharded, only on CPUs. A layer is gathered whenever a forward or backward pass reaches it.
        Sharded = "cut",
    }
}

choice! {
    /// How processes share trainable experts in training. The choice does not change any bit.
    pub enum ExpertPlacement {
        /// Experts are sharded as all tensors are. All experts of a layer are gathered whenever a pass
        /// reaches it, and their gradients are exchanged.
        Gathered = "gathered",
        /// Each process has its own experts, their gradients and their optimizer state. Tokens are sent to
        /// them and back (expert parallelism). Only on GPUs, without `[adapter]` and frozen experts.
        ByExpert = "by_expert",
    }
}

choice! {
    /// How a process holds the trainable weights during sampling. The choice does not change any bit.
    pub enum RolloutWeightPlacement {
        /// The first of the other values that fits in memory.
        Auto = "auto",
        /// All weights, gathered once per rollout.
        Whole = "whole",
        /// All weights except the experts, gathered once per rollout. Each process has its own experts, and
        /// tokens are sent to them and back (expert parallelism). So all processes run their forward passes
        /// together. For families with experts.
        ByExpert = "by_expert",
    }
}
