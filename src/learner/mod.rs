//! Training: pack, forward and backward, clip, optimizer, checkpoint.

pub mod batch;
pub mod batch_runner;
pub mod critic;
pub mod experience;
pub mod forward_backward;
pub mod gradients;
mod objective;
pub mod optimizer;
pub mod policy_step;
mod settings;
pub mod supervised;

pub use settings::{
    ColdStartSettings, CriticSettings, OptimizerKind, OptimizerSettings, Schedule, TrainSettings,
};
