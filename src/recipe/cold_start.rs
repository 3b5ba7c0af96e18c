//! `[cold_start]`: the supervised stage before reinforcement learning.

use super::limits::from;
use super::optimizer::OptimizerConfig;
use super::table::table;
use std::path::PathBuf;

table! {
    /// The supervised stage before reinforcement learning, on assistant tokens only.
    pub struct ColdStart {
        /// Steps; 0 means no cold start.
        pub steps: u64 = 0 => from(0.0).to(1e9),
        /// Demonstrations of a step.
        pub batch_size: usize = 32 => from(1.0).to(1e6),
        /// JSONL rows `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`; absent means the task's own demonstrations.
        pub train_file: Option<PathBuf> = None,
        /// Held-out rows of the same form, on which the loss is measured; absent means the task's own held-out demonstrations.
        pub validation_file: Option<PathBuf> = None,
        /// Measure the loss on the first so many held-out rows or demonstrations.
        pub validation_rows_max: usize = 256 => from(1.0).to(1e6),
        /// Steps between measurements of the held-out loss; 0 means only after the last step.
        pub eval_every_steps: u64 = 0,
        /// Weight of the load-balancing loss over experts; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0).to(1000.0),
        /// Optimizer of this stage.
        pub optimizer: OptimizerConfig = OptimizerConfig { lr: 1e-5, ..OptimizerConfig::default() },
    }
}
