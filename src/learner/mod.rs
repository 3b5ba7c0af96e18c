//! Reinforcement learning and SFT as clients of the actor: batches, advantages, losses, the critic.

pub mod advantages;
pub mod batch;
pub mod critic;
mod episodes;
pub mod examples;
pub mod policy_loss;
pub mod rollout_correction;
mod settings;
pub mod supervised;
pub mod token_selection;

pub use settings::{CriticSettings, OnBadStep, SftWarmUpSettings, TrainSettings};
