//! `[arms]`: failures that can be switched on to be measured.

use crate::settings::{changed, entries, from, table};

table! {
    /// Failures that can be switched on to be measured. All off in a healthy run.
    pub struct Arms {
        /// Leave the attention sinks out of the training forward, as a framework without them would.
        pub no_train_sinks: bool = false,
        /// Give the sinks no gradient: the forward is right, its backward is not.
        pub no_sink_gradient: bool = false,
        /// Take the old log-probs from a second training forward; with router noise the two passes differ.
        pub second_forward_old_logprobs: bool = false,
        /// Standard deviation of the noise on router logits in rollout and training, drawn anew by each pass.
        pub router_noise: f64 = 0.0 => from(0.0).to(100.0),
        /// That noise in rollout only.
        pub router_noise_rollout: f64 = 0.0 => from(0.0).to(100.0),
        /// That noise in training only.
        pub router_noise_train: f64 = 0.0 => from(0.0).to(100.0),
        /// Sample in bf16: every weight, the residual stream and what the norms give rounded to 8 significant bits.
        pub rollout_bf16: bool = false,
        /// Sample with the experts' matrices rounded to MXFP4, as the released checkpoints hold them.
        pub rollout_mxfp4: bool = false,
        /// Sample with so many stored mantissa bits, in the places of `rollout_bf16`; 0 for all 23.
        pub rollout_mantissa_bits: usize = 0 => from(0.0).to(23.0),
        /// Freeze every attention tensor, sinks included.
        pub freeze_attention: bool = false,
    }
}

impl Arms {
    /// Each ablation's key with its documentation.
    pub fn all() -> Vec<(String, &'static str)> {
        entries(&Self::default()).into_iter().map(|entry| entry.into_key()).collect()
    }

    /// Those that are switched on.
    pub fn switched_on(&self) -> Vec<(String, &'static str)> {
        changed(self).into_iter().map(|entry| entry.into_key()).collect()
    }

    /// Standard deviation of the router's noise in rollout; the pass's own key wins over the common one.
    pub fn rollout_noise(&self) -> f64 {
        if self.router_noise_rollout > 0.0 { self.router_noise_rollout } else { self.router_noise }
    }

    /// Standard deviation of the router's noise in training.
    pub fn train_noise(&self) -> f64 {
        if self.router_noise_train > 0.0 { self.router_noise_train } else { self.router_noise }
    }

    /// Stored mantissa bits of the rollout's numbers; `None` for all of f32's.
    pub fn rollout_bits(&self) -> Option<u32> {
        let short = (self.rollout_mantissa_bits > 0).then_some(self.rollout_mantissa_bits as u32);
        let bf16 = self.rollout_bf16.then_some(7);
        short.into_iter().chain(bf16).min()
    }
}
