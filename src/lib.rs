//! Reinforcement learning for GPT-OSS mixture-of-experts models: one forward serves rollout and training.
//!
//! The rooms and who may import whom are described in `docs/ARCHITECTURE.md`; a test holds the table.

pub mod cli;
pub mod commands;
pub mod error;
pub mod harmony;
pub mod interpreter;
pub mod metrics;
pub mod mismatch;
pub mod model;
pub mod ops;
pub mod policy;
pub mod random;
pub mod recipe;
pub mod report;
pub mod rollout;
pub mod tasks;
pub mod train;
pub mod trajectory;
