//! Advantages, importance ratios, losses and divergences, as pure functions of slices.
//!
//! Per-token quantities are packed f32 slices; [`Sequences`] describes their layout. Sums are computed in f64
//! in token order. A loss returns its value, its metrics, and its gradient with respect to the log-probs,
//! which is derived by hand. Each micro-batch has its own loss, with the denominators of the whole batch
//! ([`Normalizer`]). The losses of all micro-batches add up.

pub mod advantage;
pub mod aggregation;
pub mod alarm;
pub mod correction;
pub mod distill;
pub mod divergence;
pub mod kl_in_reward;
pub mod loss;
pub mod off_policy;
pub mod ratio;
mod sequences;
mod settings;
pub mod shaping;
pub mod sum_loss;
pub mod value;

pub use aggregation::{Aggregation, BatchSize, Normalizer};
pub use sequences::Sequences;
pub use settings::{
    CorrectionSettings, KlPlacement, KlSettings, OverlongSettings, PolicySettings, RouterReplay, Truncated,
};

/// Metrics of a whole batch, by name.
pub type MetricMap = std::collections::BTreeMap<String, f64>;
