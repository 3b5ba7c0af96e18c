//! One file a subcommand: it composes and computes nothing.

pub mod arguments;
pub mod check_mismatch;
pub mod eval;
#[cfg(feature = "cuda")]
pub mod gpu_check;
pub mod report;
pub mod rollout;
pub mod train;
pub mod verify;
