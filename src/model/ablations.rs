//! `[arms]`: ablations, which switch known failures on to measure them.

use crate::settings::{changed_entries, entries, from, table};

table! {
    /// Ablations: known failures that a run can switch on to measure them. All are off by default.
    pub struct Ablations {
        /// Leave the attention sinks out of the training forward, as a framework without them would.
        pub no_train_sinks: bool = false,
        /// Give the sinks no gradient: the forward pass is right, the backward pass is not.
        pub no_sink_gradient: bool = false,
        /// Take the old log-probs from a second training forward; with router noise the two passes differ.
        pub second_forward_old_logprobs: bool = false,
        /// Standard deviation of the noise on router logits in rollout and training. Each pass draws its
        /// own noise.
        pub router_noise: f64 = 0.0 => from(0.0).to(100.0),
        /// Standard deviation of router noise in rollout only.
        pub router_noise_rollout: f64 = 0.0 => from(0.0).to(100.0),
        /// Standard deviation of router noise in training only.
        pub router_noise_train: f64 = 0.0 => from(0.0).to(100.0),
        /// Sample in bf16: weights, the residual stream and outputs of the norms are rounded to 8
        /// significant bits.
        pub rollout_bf16: bool = false,
        /// Sample with the experts' matrices rounded to MXFP4, the format of the released checkpoints.
        pub rollout_mxfp4: bool = false,
        /// Stored mantissa bits in the rollout. Rounds the same tensors as `rollout_bf16`. 0 keeps all 23.
        pub rollout_mantissa_bits: usize = 0 => from(0.0).to(23.0),
        /// Freeze every attention tensor, sinks included.
        pub freeze_attention: bool = false,
    }
}

impl Ablations {
    /// Returns the key and the documentation of each ablation.
    pub fn descriptions() -> Vec<(String, &'static str)> {
        entries(&Self::default()).into_iter().map(|entry| entry.into_key()).collect()
    }

    /// Returns the ablations that are switched on.
    pub fn list_enabled(&self) -> Vec<(String, &'static str)> {
        changed_entries(self).into_iter().map(|entry| entry.into_key()).collect()
    }

    /// Returns the standard deviation of router noise in rollout. The key of the pass overrides the common
    /// key.
    pub fn rollout_noise(&self) -> f64 {
        if self.router_noise_rollout > 0.0 { self.router_noise_rollout } else { self.router_noise }
    }

    /// Returns the standard deviation of router noise in training. The key of the pass overrides the common
    /// key.
    pub fn train_noise(&self) -> f64 {
        if self.router_noise_train > 0.0 { self.router_noise_train } else { self.router_noise }
    }

    /// Returns the stored mantissa bits of the rollout's numbers; `None` keeps all bits of f32.
    pub fn rollout_mantissa_limit(&self) -> Option<u32> {
        let short = (self.rollout_mantissa_bits > 0).then_some(self.rollout_mantissa_bits as u32);
        let bf16 = self.rollout_bf16.then_some(7);
        short.into_iter().chain(bf16).min()
    }
}
