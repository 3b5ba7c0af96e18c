//! GPT-OSS as pure maths over `ops`: configuration, weights, forward, KV cache.

pub mod config;
mod config_json;
pub mod init;
pub mod load;
pub mod mxfp4;
pub mod names;
pub mod save;
