//! `[cold_start]`: the supervised stage before reinforcement learning.

use super::limits::from;
use super::optimizer::Optimizer;
use super::table::table;
use std::path::PathBuf;

table! {
    /// The supervised stage before reinforcement learning, on assistant tokens only.
    pub struct ColdStart {
        /// Steps; 0 means no cold start.
        pub steps: u64 = 0,
        /// Demonstrations of a step.
        pub batch_size: usize = 32 => from(1.0),
        /// JSONL rows `{"messages": [...]}` or `{"tokens": [...], "mask": [...]}`; absent means generated demonstrations.
        pub train_file: Option<PathBuf> = None,
        /// Held-out rows of the same form, whose loss is measured; absent means none.
        pub validation_file: Option<PathBuf> = None,
        /// Keep the first so many held-out rows; absent means all.
        pub validation_rows_max: Option<usize> = None => from(1.0),
        /// Steps between measurements of the held-out loss; 0 means only after the last step.
        pub eval_every_steps: u64 = 0,
        /// Weight of the load-balancing loss over experts; 0 means none.
        pub load_balance_coefficient: f64 = 0.0 => from(0.0),
        /// Optimizer of this stage.
        pub optimizer: Optimizer = Optimizer { lr: 1e-5, ..Optimizer::default() },
    }
}
