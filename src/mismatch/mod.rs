//! Measures how much two computations of the same log-probabilities differ, and finds out why.
//!
//! [`bitwise_equality`] proves that rollout and training compute the same forward pass. [`compare`] computes
//! the statistics of a log-prob mismatch. [`diagnose`] finds its likely cause among [`causes`].
//! [`external_engine`] compares another engine's rows. [`ablations`] parses the ablations, [`measure`]
//! measures them, and [`output`] prints the result.

pub mod ablations;
pub mod bitwise_equality;
pub mod causes;
pub mod compare;
pub mod diagnose;
pub mod distance;
pub mod engine_log_probs;
pub mod expert_comparison;
pub mod export;
pub mod external_engine;
pub mod formats;
pub mod head;
pub mod locate;
pub mod measure;
pub mod output;
pub mod page;
pub mod passes;
mod rounding;
pub mod rows;
pub mod search;
mod ties;
