//! Reinforcement learning for GPT-OSS mixture-of-experts models: one forward pass serves rollout and
//! training.
//!
//! `docs/ARCHITECTURE.md` describes the modules and their allowed imports; a test checks them.

// No panic may reach a user, and every unsafe block must state why it is sound.
#![warn(
    clippy::dbg_macro,
    clippy::expect_used,
    clippy::panic,
    clippy::todo,
    clippy::undocumented_unsafe_blocks
)]
#![warn(clippy::unimplemented, clippy::unwrap_used)]
// CI rejects items that no command uses, so types with `len` have no `is_empty`.
#![allow(clippy::len_without_is_empty)]

#[cfg(not(target_os = "linux"))]
compile_error!("rloss needs Linux: landlock and seccomp confine the Python tool");

pub mod actor;
pub mod agents;
pub mod atomic_file;
pub mod bounded_file;
pub mod chat;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod dist;
pub mod engine;
pub mod error;
pub mod harmony;
pub mod http;
pub mod integrity;
pub mod interpreter;
pub mod learner;
pub mod metrics;
pub mod mismatch;
pub mod model;
pub mod ops;
pub mod panics;
pub mod policy;
pub mod pool;
pub mod process_group;
pub mod random;
pub mod recipe;
pub mod report;
pub mod rollout;
pub mod run;
pub mod serve;
pub mod settings;
pub mod table_file;
pub mod tasks;
pub mod tinker;
pub mod trainer;
pub mod trajectory;
pub mod user_key;
pub mod vocabulary;
