//! `[logging]`: TensorBoard, trajectories and progress lines.

use crate::settings::table;

table! {
    /// Output of a run in addition to `metrics.jsonl`.
    pub struct LoggingSettings {
        /// Whether TensorBoard event files are written.
        pub tensorboard: bool = true,
        /// Number of trajectories per step, and per evaluation, that are written to `trajectories/`.
        pub trajectories_per_step: usize = 8,
        /// Number of steps between two progress lines on the console. Lines are at least two seconds apart; 0
        /// means no progress lines.
        pub console_every_steps: u64 = 1,
    }
}
