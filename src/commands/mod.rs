//! One file a subcommand: it composes and computes nothing.

pub mod check_mismatch;
pub mod collect;
pub mod eval;
pub mod evaluation;
mod freeze;
#[cfg(feature = "cuda")]
pub mod gpu_check;
pub mod report;
pub mod rollout;
pub mod run_folder;
pub mod signals;
pub mod train;
pub mod workbench;
