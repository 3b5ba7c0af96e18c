//! Advantages, importance ratios, losses, divergences: pure functions of tensors.
//!
//! Per-token quantities are packed f32 slices described by [`Sequences`]; sums are taken in f64 in token order. A
//! loss returns its value, its gradient with respect to the log-probs, derived by hand, and its metrics.

pub mod advantage;
pub mod aggregation;
pub mod loss;
pub mod ratio;
mod sequences;

pub use aggregation::{Aggregation, Normalizer};
pub use sequences::Sequences;
