//! One file per subcommand. A subcommand combines other modules and does not compute anything itself.

pub mod arguments;
pub mod chat;
pub mod check;
pub mod check_mismatch;
pub mod completions;
pub mod eval;
pub mod export;
pub mod fetch;
pub mod follow;
pub mod init;
pub mod report;
pub mod rollout;
pub mod schema;
pub mod serve;
pub mod sft;
pub mod train;
pub mod verify;
