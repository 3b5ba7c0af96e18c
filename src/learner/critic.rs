//! The critic: a decoder stack like the policy's, with a value head. Also its advantage estimates and
//! gradients.
//!
//! The value of a token is computed at the row that predicts the token. It is the value of the state before
//! the token is chosen.

use super::CriticSettings;
use super::batch::Batch;
use crate::actor::{Actor, BatchPart, CriticColumns, PassSettings};
use crate::metrics::{Metrics, Progress};
use crate::model::adapter::{Lora, Owner};
use crate::model::forward::ForwardOptions;
use crate::model::init::value_model;
use crate::model::names::value_model_specs;
use crate::model::parameters::Parameters;
use crate::model::storage::TensorStorage;
use crate::policy::advantage::{TokenAdvantages, gae, whiten};
use crate::policy::value::{ValueLoss, explained_variance, value_loss};
use crate::policy::{Aggregation, BatchSize, Normalizer, Sequences};
use anyhow::{Context, Result};
use std::collections::HashSet;

/// A critic: an actor with a value head.
pub struct Critic {
    pub settings: CriticSettings,
    pub actor: Actor,
}

impl Critic {
    /// Creates a critic: a copy of the policy's decoder stack, with a value head that is initialised at
    /// random from `seed`. If the policy has an adapter, the critic is a second adapter on the same base.
    /// `trainable` selects the trainable tensors.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        policy: &Actor,
        trainable: &[bool],
        settings: &CriticSettings,
        seed: u64,
        round_to_bf16: bool,
    ) -> Result<Self> {
        let mut parameters = match policy.parameters.adapter() {
            Some(lora) => Self::with_adapter(policy, lora, seed)?,
            None => Self::with_own_weights(policy, trainable, seed)?,
        };
        parameters.set_trainable(trainable)?;
        let mut actor = policy.beside(parameters);
        actor.start_optimizer(&settings.optimizer, round_to_bf16)?;
        Ok(Self { settings: settings.clone(), actor })
    }

    /// Returns the weights of a critic with a decoder stack of its own, of which `trainable` tensors are
    /// trained.
    fn with_own_weights(policy: &Actor, trainable: &[bool], seed: u64) -> Result<Parameters> {
        let (config, policy) = (&policy.model.config, &policy.parameters);
        let specs = value_model_specs(config).into_iter().zip(trainable);
        let is_trainable: HashSet<String> =
            specs.filter(|(_, is_trainable)| **is_trainable).map(|(s, _)| s.name).collect();
        let values = value_model(config, seed, |spec| {
            let index = policy.index_of(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
            // Frozen tensors share memory with the policy.
            match policy.share(index).filter(|_| !is_trainable.contains(&spec.name)) {
                Some(shared) => Ok(shared),
                None => TensorStorage::to_variable(spec, &policy.weight(index)?),
            }
        });
        let values = values.enumerate().map(|(index, tensor)| {
            let (spec, stored) = tensor?;
            let is_trainable = trainable[index];
            let stored =
                if is_trainable { stored.into_shard(&spec, index, policy.shard_mesh())? } else { stored };
            Ok((spec, stored))
        });
        Parameters::with_value_head(config, &policy.backend, values)
    }

    /// Returns the weights of a critic that is a second adapter on the policy's base. No tensor of the base
    /// is copied.
    fn with_adapter(policy: &Actor, lora: &Lora, seed: u64) -> Result<Parameters> {
        let (config, policy) = (&policy.model.config, &policy.parameters);
        let values = value_model(config, seed, |spec| {
            let index = policy.index_of(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
            policy.share(index).map_or_else(|| Ok(TensorStorage::from_weight(policy.weight(index)?)), Ok)
        });
        let mut parameters = Parameters::with_value_head(config, &policy.backend, values)?;
        let initial_values = lora.initial_values(&parameters.specs, seed, Owner::Critic)?;
        parameters.attach_adapter(lora.clone(), initial_values)?;
        Ok(parameters)
    }

    /// Returns the value of every trained token of `batch`, in batch order.
    ///
    /// # Errors
    /// When a pass fails.
    pub fn values(&self, batch: &Batch) -> Result<Vec<f32>> {
        let forward =
            self.actor.forward::<CriticColumns>(&batch.input(), pass_settings(), &|_| Progress::hidden())?;
        Ok(forward.columns.values)
    }

    /// Returns advantages, normalised over the batch, and returns from `rewards` and `values`, which have one
    /// value per token. Also returns metrics.
    ///
    /// # Errors
    /// When a value is NaN, or the batch has too few tokens to normalise the advantages.
    pub fn estimate(
        &self,
        sequences: &Sequences,
        rewards: &[f32],
        values: &[f32],
    ) -> Result<(TokenAdvantages, Metrics)> {
        let estimate = gae(sequences, rewards, values, self.settings.gamma, self.settings.lambda)?;
        let advantages = whiten(sequences, &estimate.advantages)?;
        let mut metrics = Metrics::new();
        for (name, column) in [("values", values), ("returns", &estimate.returns)] {
            let valid = || sequences.all_valid_indices().map(|t| f64::from(column[t]));
            metrics.set(format!("critic/{name}/mean"), valid().sum::<f64>() / valid().count() as f64);
            metrics.set(format!("critic/{name}/max"), valid().fold(f64::NEG_INFINITY, f64::max));
            metrics.set(format!("critic/{name}/min"), valid().fold(f64::INFINITY, f64::min));
        }
        if let Some(explained_var) = explained_variance(sequences, values, &estimate.returns)? {
            metrics.set("critic/vf_explained_var", explained_var);
        }
        Ok((TokenAdvantages { advantages, ..estimate }, metrics))
    }
}

/// Returns the settings of a critic's passes. Ablations do not apply to them.
fn pass_settings() -> PassSettings {
    PassSettings::new(1.0, ForwardOptions::default())
}

/// Adds the gradients of the value loss over `batch`, which may be a minibatch, to those of `critic`. Returns
/// the metrics; `None` when every token was rejected. The policy loss has the same `aggregation`.
///
/// # Errors
/// When a pass fails, a value is NaN, or the batch has no values or no returns.
pub fn add_value_gradients(
    critic: &mut Actor,
    settings: &CriticSettings,
    (aggregation, response_tokens_max): (Aggregation, usize),
    batch: &Batch,
) -> Result<Option<Metrics>> {
    let tokens = batch.masked_sequences()?;
    if tokens.valid_tokens() == 0 {
        return Ok(None);
    }
    let (old_values, returns) =
        batch.values.as_ref().zip(batch.returns.as_ref()).context("no values or no returns")?;
    let size = BatchSize::from_sequences(&tokens, response_tokens_max);
    let normalizer = Normalizer::new(aggregation, size)?;
    let clip = if settings.value_clip > 0.0 { settings.value_clip } else { f64::INFINITY };
    let loss = |part: &BatchPart, columns: &CriticColumns| {
        let span = part.targets.clone();
        let sequences = Sequences::new(&part.cu_targets, &batch.mask[span.clone()])?;
        let (old_values, returns) = (&old_values[span.clone()], &returns[span]);
        let mut share = value_loss(&sequences, &columns.values, old_values, returns, clip, &normalizer)?;
        Ok((CriticColumns { values: std::mem::take(&mut share.grad_values) }, share))
    };
    let (_, shares) =
        critic.forward_backward(&batch.input(), pass_settings(), &loss, &|_| Progress::hidden())?;
    let sum = |field: fn(&ValueLoss) -> f64| shares.iter().map(field).fold(0.0, |sum, share| sum + share);
    let clip_fraction = sum(|share| share.clipped.sum) / sum(|share| share.clipped.tokens);
    let loss = sum(|share| share.loss);
    Ok(Some(Metrics::from_iter([("critic/vf_loss", loss), ("critic/vf_clipfrac", clip_fraction)])))
}
