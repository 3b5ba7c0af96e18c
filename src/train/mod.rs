//! Training: pack, forward and backward, clip, optimizer, checkpoint.

pub mod accumulate;
pub mod batch;
pub mod forward_backward;
pub mod gradients;
pub mod optimizer;
