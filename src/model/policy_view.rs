//! A policy with its ablations. One value holds the model, the changed weights and the forward options, so no
//! command can apply only some of the ablations.

use super::ablations::Ablations;
use super::decoder_stack::DecoderStack;
use super::forward::{ForwardOptions, Model};
use super::parameters::Parameters;
use super::rounding::WeightRounding;
use super::weights::Weights;
use crate::dist::RolloutWeightPlacement;
use crate::ops::router_noise::{NoisyPass, RouterNoise};
use anyhow::Result;
use std::sync::Arc;

/// A policy for passes without gradients.
#[derive(Clone)]
pub struct PolicyView<'a> {
    pub model: &'a Model,
    pub weights: Arc<Weights>,
    pub forward: ForwardOptions,
}

impl<'a> PolicyView<'a> {
    /// Returns the policy without ablations, for evaluation.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn without_ablations(model: &'a Model, parameters: &Parameters) -> Result<Self> {
        Ok(Self {
            model,
            weights: Arc::new(parameters.frozen_weights(None)?),
            forward: ForwardOptions::default(),
        })
    }

    /// Returns the policy of the rollout, with `ablations` applied.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when `rollout_mxfp4` is on and the number of inputs of an expert matrix is
    /// not a multiple of the MXFP4 block size.
    pub fn for_rollout(
        model: &'a Model,
        parameters: &Parameters,
        ablations: &Ablations,
        seed: u64,
    ) -> Result<Self> {
        Self::across_processes(model, parameters, Some(ablations), seed, RolloutWeightPlacement::Whole)
    }

    /// Returns the policy of a rollout that all processes of a run share, with `ablations` applied if given.
    /// Every process must run the same passes at the same time, unless `weights` gives each process all
    /// weights.
    ///
    /// # Errors
    /// Errors of [`Self::for_rollout`], and when a rank does not respond in time.
    pub fn across_processes(
        model: &'a Model,
        parameters: &Parameters,
        ablations: Option<&Ablations>,
        seed: u64,
        weights: RolloutWeightPlacement,
    ) -> Result<Self> {
        let rounding = ablations.map(WeightRounding::from_ablations).unwrap_or_default().weight_change();
        let weights = match weights {
            RolloutWeightPlacement::Auto | RolloutWeightPlacement::Whole => {
                parameters.frozen_weights(Some(&rounding))?
            }
            RolloutWeightPlacement::ByExpert => parameters.expert_parallel_weights(&rounding)?,
        };
        let forward =
            ablations.map(|ablations| ForwardOptions::for_rollout(ablations, seed)).unwrap_or_default();
        Ok(Self { model, weights: Arc::new(weights), forward })
    }

    /// Returns the policy of the training forward pass, with `ablations` applied.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn for_training(
        model: &'a Model,
        parameters: &Parameters,
        ablations: &Ablations,
        seed: u64,
    ) -> Result<Self> {
        Ok(Self {
            forward: ForwardOptions::for_training(ablations, seed),
            ..Self::without_ablations(model, parameters)?
        })
    }

    /// Returns the decoder stack of the policy.
    pub fn decoder_stack(&self) -> DecoderStack<'_> {
        DecoderStack { model: self.model, weights: self.weights.as_ref(), forward: self.forward }
    }
}

impl ForwardOptions {
    /// Returns the options of the rollout's forward pass under `ablations`.
    fn for_rollout(ablations: &Ablations, seed: u64) -> Self {
        Self {
            router_noise: noise(ablations.rollout_noise(), seed, NoisyPass::Rollout),
            mantissa_bits: ablations.rollout_mantissa_limit(),
            ..Self::default()
        }
    }

    /// Returns the options of the training forward pass under `ablations`.
    pub fn for_training(ablations: &Ablations, seed: u64) -> Self {
        Self {
            sinks: !ablations.no_train_sinks,
            sink_gradient: !ablations.no_sink_gradient,
            router_noise: noise(ablations.train_noise(), seed, NoisyPass::Training),
            ..Self::default()
        }
    }

    /// Returns the options of the second forward pass, for the old log-probs; `None` unless the ablation
    /// `second_forward_old_logprobs` is on.
    pub fn for_old_log_probs(ablations: &Ablations, seed: u64) -> Option<Self> {
        let router_noise = noise(ablations.train_noise(), seed, NoisyPass::SecondForward);
        ablations
            .second_forward_old_logprobs
            .then(|| Self { router_noise, ..Self::for_training(ablations, seed) })
    }
}

fn noise(std: f64, seed: u64, pass: NoisyPass) -> Option<RouterNoise> {
    (std > 0.0).then_some(RouterNoise { std, seed, pass })
}
