//! `[parallel]`: threads and processes.

use crate::settings::{above, choice, from, table};

table! {
    /// Threads and processes. No result depends on them.
    pub struct ParallelSettings {
        /// Threads; 0 means all that the machine offers.
        pub threads: usize = 0 => from(0.0).to(4096.0),
        /// Which of the GPUs that `CUDA_VISIBLE_DEVICES` leaves to the process it takes; of several processes on a machine the first,
        /// and the others the next ones.
        pub device_index: usize = 0 => from(0.0).to(1023.0),
        /// Processes that share a sequence in training: its rows are split, and attention's heads exchanged. It divides the processes
        /// and the model's heads.
        pub sequence: usize = 1 => from(1.0),
        /// What of the learning weights each of several processes holds while they sample.
        pub rollout_weights: RolloutWeights = RolloutWeights::Auto,
        /// What each of several processes that train holds of the packed weights that do not learn, such as an adapter's base.
        pub packed_weights: PackedWeights = PackedWeights::Auto,
        /// Seconds that a process waits for the others in one exchange, their rollouts among it, before it
        /// gives up with an error that names them. A process that ends is noticed at once, one that is
        /// stopped or cannot be reached after two minutes.
        pub exchange_timeout_s: f64 = 1800.0 => above(0.0).to(1e6),
    }
}

choice! {
    /// What of the packed weights a process holds. It changes no bit.
    pub enum PackedWeights {
        /// All of them where memory allows.
        Auto = "auto",
        /// All of them.
        Whole = "whole",
        /// A piece of each; a layer is gathered whenever a walk comes to it.
        Cut = "cut",
    }
}

choice! {
    /// What of the learning weights a process holds while it samples. It changes no bit.
    pub enum RolloutWeights {
        /// The first of these that memory allows.
        Auto = "auto",
        /// All of them, gathered once a rollout.
        Whole = "whole",
        /// All but the experts, gathered once a rollout; each process has its own experts, and tokens travel to them and back. All
        /// processes make their forwards together. GPT-OSS only.
        ByExpert = "by_expert",
    }
}
