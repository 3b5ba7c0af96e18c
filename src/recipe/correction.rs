//! `[policy.correction]`: importance weights and rejection between rollout and training.

use super::table::table;
pub use crate::policy::correction::{ImportanceSampling, RejectOption};

table! {
    /// Rollout correction: with ρ = π_train/π_rollout before the step's first update, weigh tokens by ρ or reject them.
    pub struct CorrectionConfig {
        /// Importance weights of the loss.
        pub is: ImportanceSampling = ImportanceSampling::None,
        /// Bounds of the weights: one number truncates above it, a low and a high one give weight 0 outside.
        pub threshold: Vec<f64> = vec![2.0],
        /// Divide the weights by their mean over the batch.
        pub normalize: bool = false,
        /// Statistics that must stay within their bounds for a token to count; what fails leaves the loss and its denominators.
        pub reject: Vec<RejectOption> = Vec::new(),
        /// For each of `reject`: for k1 a low and a high bound on ρ, or one number u for 1/u to u; for k2 and k3 one upper bound.
        pub reject_bounds: Vec<Vec<f64>> = Vec::new(),
    }
}

impl CorrectionConfig {
    /// Whether weights or rejection are asked for.
    pub fn active(&self) -> bool {
        self.is != ImportanceSampling::None || !self.reject.is_empty()
    }
}
