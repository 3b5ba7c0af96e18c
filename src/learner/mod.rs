//! The parts of a training step: batches, forward and backward passes, losses, gradients, optimizer, critic.

pub mod actor;
pub mod advantages;
pub mod batch;
pub mod batch_runner;
pub mod critic;
mod episodes;
pub mod examples;
pub mod forward_backward;
pub mod gradients;
pub mod micro_batch;
pub mod optimizer;
mod pass_results;
pub mod policy_loss;
pub mod replica_sum;
pub mod rollout_correction;
pub mod routed_experts;
mod settings;
pub mod sharded_muon;
pub mod supervised;
pub mod teacher;
pub mod token_selection;

pub use settings::{
    CriticSettings, OnBadStep, OptimizerKind, OptimizerSettings, Schedule, SftWarmUpSettings, TrainSettings,
};
