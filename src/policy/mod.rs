//! Advantages, importance ratios, losses and divergences: pure functions of slices.
//!
//! Per-token quantities are packed f32 slices, which [`Sequences`] describes. Sums are taken in f64 in token
//! order. A loss returns its value, its gradient with respect to the log-probs, derived by hand, and its
//! metrics. Losses are computed one micro-batch at a time with the denominators of the whole batch
//! ([`Normalizer`]); shares add up.

pub mod advantage;
pub mod aggregation;
pub mod alarm;
pub mod correction;
pub mod divergence;
pub mod kl_in_reward;
pub mod loss;
pub mod off_policy;
pub mod ratio;
mod sequences;
mod settings;
pub mod shaping;
pub mod value;

pub use aggregation::{Aggregation, BatchSize, Normalizer};
pub use sequences::Sequences;
pub use settings::{
    CorrectionSettings, KlPlacement, KlSettings, OverlongSettings, PolicySettings, RouterReplay,
};

/// Metrics of a whole batch, by name.
pub type MetricMap = std::collections::BTreeMap<String, f64>;
