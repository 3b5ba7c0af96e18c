//! `[policy.correction]`: importance weights and rejection between rollout and training.

use super::table::{choice, table};

table! {
    /// Rollout correction: with ρ = π_train/π_rollout before the step's first update, weigh tokens by ρ or reject them.
    pub struct Correction {
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

choice! {
    /// Importance weights.
    pub enum ImportanceSampling {
        /// None.
        None = "none",
        /// ρ of each token: low variance, biased.
        Token = "token",
        /// ρ of the whole response on each of its tokens: unbiased, high variance.
        Sequence = "sequence",
    }
}

choice! {
    /// Statistics of x = log ρ: k1 = −x, k2 = ½·x², k3 = eˣ − 1 − x.
    pub enum RejectOption {
        /// k1 of the token.
        TokenK1 = "token_k1",
        /// k2 of the token.
        TokenK2 = "token_k2",
        /// k3 of the token.
        TokenK3 = "token_k3",
        /// Sum of k1 over the response.
        SeqSumK1 = "seq_sum_k1",
        /// Sum of k2 over the response.
        SeqSumK2 = "seq_sum_k2",
        /// Sum of k3 over the response.
        SeqSumK3 = "seq_sum_k3",
        /// Mean of k1 over the response.
        SeqMeanK1 = "seq_mean_k1",
        /// Mean of k2 over the response.
        SeqMeanK2 = "seq_mean_k2",
        /// Mean of k3 over the response.
        SeqMeanK3 = "seq_mean_k3",
        /// Largest k2 of the response.
        SeqMaxK2 = "seq_max_k2",
        /// Largest k3 of the response.
        SeqMaxK3 = "seq_max_k3",
    }
}

impl Correction {
    /// Whether weights or rejection are asked for.
    pub fn active(&self) -> bool {
        self.is != ImportanceSampling::None || !self.reject.is_empty()
    }
}
