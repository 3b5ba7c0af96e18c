//! `[arms]`: ablations. Each switches on a known failure to measure its effect.

use crate::settings::{changed_entries, entries, from, table};

table! {
    /// Ablations: known failures that a run can switch on to measure their effects. Those of
    /// `router_` and `rollout_` run on a CPU only.
    pub struct Ablations {
        /// Leave the attention sinks out of the training forward pass, as a framework without sinks would.
        pub no_train_sinks: bool = false,
        /// Give the sinks no gradient: the forward pass is right, but the backward pass is not.
        pub no_sink_gradient: bool = false,
        /// Take the old log-probs from a second training forward pass. With router noise the two passes
        /// differ.
        pub second_forward_old_logprobs: bool = false,
        /// Standard deviation of the noise on router logits in rollout and training. Each pass draws its
        /// own noise.
        pub router_noise: f64 = 0.0 => from(0.0).to(100.0),
        /// Standard deviation of router noise in rollout only.
        pub router_noise_rollout: f64 = 0.0 => from(0.0).to(100.0),
        /// Standard deviation of router noise in training only.
        pub router_noise_train: f64 = 0.0 => from(0.0).to(100.0),
        /// Sample in bf16: round weights, the residual stream and the outputs of norms to 8 significant bits.
        pub rollout_bf16: bool = false,
        /// Sample with the experts' matrices rounded to MXFP4, the format of the released checkpoints.
        pub rollout_mxfp4: bool = false,
        /// Number of stored mantissa bits in rollout. Rounds the same tensors as `rollout_bf16`. 0 keeps all
        /// 23 bits.
        pub rollout_mantissa_bits: usize = 0 => from(0.0).to(23.0),
        /// Freeze every attention tensor, sinks included.
        pub freeze_attention: bool = false,
    }
}

impl Ablations {
    /// Returns the recipe key and the documentation of each ablation.
    pub fn descriptions() -> Vec<(String, &'static str)> {
        entries(&Self::default()).into_iter().map(|entry| entry.into_key()).collect()
    }

    /// Returns the recipe key and the documentation of each ablation that is switched on.
    pub fn list_enabled(&self) -> Vec<(String, &'static str)> {
        changed_entries(self).into_iter().map(|entry| entry.into_key()).collect()
    }

    /// Returns the standard deviation of router noise in rollout. `router_noise_rollout` overrides
    /// `router_noise`.
    pub fn rollout_noise(&self) -> f64 {
        if self.router_noise_rollout > 0.0 { self.router_noise_rollout } else { self.router_noise }
    }

    /// Returns the standard deviation of router noise in training. `router_noise_train` overrides
    /// `router_noise`.
    pub fn train_noise(&self) -> f64 {
        if self.router_noise_train > 0.0 { self.router_noise_train } else { self.router_noise }
    }

    /// Returns the number of stored mantissa bits in rollout; `None` keeps all bits of f32.
    pub fn rollout_mantissa_limit(&self) -> Option<u32> {
        let limit = (self.rollout_mantissa_bits > 0).then_some(self.rollout_mantissa_bits as u32);
        limit.into_iter().chain(self.rollout_bf16.then_some(7)).min()
    }
}
