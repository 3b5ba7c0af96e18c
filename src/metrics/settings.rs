//! `[logging]`: what a run shows beside `metrics.jsonl`.

use crate::settings::table;

table! {
    /// What a run shows beside `metrics.jsonl`.
    pub struct LoggingSettings {
        /// Write TensorBoard event files.
        pub tensorboard: bool = true,
        /// Trajectories of a step written to `trajectories/`.
        pub trajectories_per_step: usize = 8,
        /// Steps between progress lines on the console, of which at most one appears in two seconds; 0 means no progress at all.
        pub console_every_steps: u64 = 1,
    }
}
