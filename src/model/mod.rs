//! Models as pure functions over `ops`: configuration, weights, forward pass, KV cache.

pub mod ablations;
pub mod adapter;
pub mod attention;
pub mod cache;
pub mod config;
mod config_json;
pub mod decode;
pub mod decode_rows;
pub mod decoder_stack;
pub mod families;
pub mod forward;
pub mod init;
pub mod layer;
pub mod layers_on_demand;
pub mod matrix;
pub mod names;
#[cfg(feature = "cuda")]
#[cfg(test)]
mod on_device;
pub mod parallel;
pub mod parameters;
pub mod policy_view;
pub mod rope;
pub mod rounding;
pub mod settings;
pub mod storage;
pub mod weights;
