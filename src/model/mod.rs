//! GPT-OSS as pure maths over `ops`: configuration, weights, forward, KV cache.

pub mod cache;
pub mod config;
mod config_json;
pub mod forward;
pub mod init;
pub mod load;
pub mod mxfp4;
pub mod names;
pub mod perturb;
pub mod rope;
pub mod save;
pub mod weights;
