//! Several processes or GPUs: which of them holds what, and what they exchange in a pass.
//!
//! - `sharded_layers`: layers in shards, gathered when a pass reaches them (ZeRO-3);
//! - `expert_parallel`: experts on ranks, and rows exchanged through host memory;
//! - `expert_exchange`: rows of experts exchanged between GPUs;
//! - `expert_outputs`: chooses between these exchanges;
//! - `sequence_parallel`: sequences split over ranks, and rows exchanged for attention heads;
//! - `resharding`: the ranges of a tensor that ranks send each other when its sharding changes;
//! - `device_exchange`: exchanges between the memories of GPUs, which all of these use.

pub mod device_exchange;
pub mod expert_exchange;
mod expert_outputs;
pub mod expert_parallel;
pub(super) mod resharding;
pub mod sequence_parallel;
pub mod sharded_layers;

pub use expert_outputs::{ExpertOutputs, RoutedRows};
