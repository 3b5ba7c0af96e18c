//! `[logging]`: TensorBoard, trajectories and progress lines.

use crate::settings::table;

table! {
    /// Output of a run beside `metrics.jsonl`.
    pub struct LoggingSettings {
        /// Writes TensorBoard event files.
        pub tensorboard: bool = true,
        /// Number of trajectories of a step that are written to `trajectories/`.
        pub trajectories_per_step: usize = 8,
        /// Number of steps between progress lines on the console, at most one every two seconds; 0 means no
        /// progress lines.
        pub console_every_steps: u64 = 1,
    }
}
