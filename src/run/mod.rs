//! Code that all commands with a model share: startup, run folder, evaluation, sampling, signals.

pub mod adapter;
pub mod causes;
pub mod data_inputs;
mod device;
pub mod environment;
pub mod evaluation;
mod expert_parallel;
pub mod export;
mod family;
pub mod header;
pub mod inputs;
pub mod loaded;
pub mod memory;
pub mod processes;
pub mod run_folder;
pub mod sampling;
pub mod sampling_folder;
pub mod signals;
pub mod sizing;
pub mod source;
pub mod startup;
pub mod step_time;
mod symlinks;
pub mod target;
pub mod teacher;
mod trainable_flags;
pub mod trust;
