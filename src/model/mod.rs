//! Models as pure maths over `ops`: configuration, weights, forward, KV cache.

pub mod adapter;
pub mod arms;
pub mod attend;
pub mod cache;
pub mod config;
mod config_json;
pub mod decode;
pub mod expert_ranks;
pub mod family;
pub mod forward;
mod gpt_oss;
pub mod held;
pub mod init;
pub mod layer;
pub mod layers_in_turn;
pub mod names;
#[cfg(feature = "cuda")]
#[cfg(test)]
mod on_device;
pub mod parameters;
pub mod pieces;
pub mod policy_view;
mod qwen2;
pub mod rope;
pub mod rounding;
pub mod settings;
pub mod split_rows;
pub mod trunk;
pub mod weights;
