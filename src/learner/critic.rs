//! The critic: a decoder stack like the policy's, with a value head. Also its advantage estimates and
//! gradients.
//!
//! The value of a token is computed at the row that predicts the token. It is the value of the state before
//! the token is chosen.

use super::batch::Batch;
use super::batch_runner::{BatchObjective, BatchRunner};
use super::forward_backward::{PassOutput, PassSettings};
use super::micro_batch::{MicroBatch, MicroBatchValues};
use super::optimizer::Optimizer;
use crate::learner::CriticSettings;
use crate::metrics::{Metrics, Progress};
use crate::model::adapter::{Lora, Owner};
use crate::model::config::Config;
use crate::model::init::value_model;
use crate::model::names::value_model_specs;
use crate::model::parameters::Parameters;
use crate::model::storage::TensorStorage;
use crate::policy::advantage::{gae, whiten};
use crate::policy::value::{ValueLoss, explained_variance, value_loss};
use crate::policy::{Aggregation, BatchSize, Normalizer, Sequences};
use anyhow::{Context, Result};
use std::borrow::Cow;
use std::collections::HashSet;

/// A critic with its optimizer.
pub struct Critic {
    pub settings: CriticSettings,
    pub parameters: Parameters,
    pub optimizer: Optimizer,
}

impl Critic {
    /// Creates a critic: a copy of the policy's decoder stack, with a value head that is initialised at
    /// random from `seed`. If the policy has an adapter, the critic is a second adapter on the same base.
    /// `trainable` selects the trainable tensors.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        config: &Config,
        policy: &Parameters,
        trainable: &[bool],
        settings: &CriticSettings,
        seed: u64,
        round_to_bf16: bool,
    ) -> Result<Self> {
        if let Some(lora) = policy.adapter() {
            return Self::with_adapter((config, policy, lora), trainable, settings, seed, round_to_bf16);
        }
        let is_trainable: HashSet<String> = value_model_specs(config)
            .into_iter()
            .zip(trainable)
            .filter(|(_, is_trainable)| **is_trainable)
            .map(|(s, _)| s.name)
            .collect();
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
        let mut parameters = Parameters::with_value_head(config, policy.backend(), values)?;
        parameters.set_trainable(trainable)?;
        let optimizer = Optimizer::new(&settings.optimizer, &mut parameters, round_to_bf16)?;
        Ok(Self { settings: settings.clone(), parameters, optimizer })
    }

    /// Creates a critic that is a second adapter on the policy's base. No tensor of the base is copied.
    fn with_adapter(
        (config, policy, lora): (&Config, &Parameters, &Lora),
        trainable: &[bool],
        settings: &CriticSettings,
        seed: u64,
        round_to_bf16: bool,
    ) -> Result<Self> {
        let values = value_model(config, seed, |spec| {
            let index = policy.index_of(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
            policy.share(index).map_or_else(|| Ok(TensorStorage::from_weight(policy.weight(index)?)), Ok)
        });
        let mut parameters = Parameters::with_value_head(config, policy.backend(), values)?;
        let initial_values = lora.initial_values(&parameters.specs, seed, Owner::Critic)?;
        parameters.attach_adapter(lora.clone(), initial_values)?;
        parameters.set_trainable(trainable)?;
        let optimizer = Optimizer::new(&settings.optimizer, &mut parameters, round_to_bf16)?;
        Ok(Self { settings: settings.clone(), parameters, optimizer })
    }
}

/// The critic at one step, with its settings.
#[derive(Clone, Copy)]
pub struct CriticStep<'a> {
    /// Runs batches with the critic's parameters.
    pub runner: BatchRunner<'a>,
    pub settings: &'a CriticSettings,
    /// The aggregation of the value loss. It is the aggregation that the policy loss uses.
    pub aggregation: Aggregation,
    pub response_tokens_max: usize,
    pub pass: PassSettings,
    pub micro_batch_tokens: usize,
}

/// The critic's advantages and returns, with one value per token.
pub struct ValueEstimate {
    /// Normalised over the batch.
    pub advantages: Vec<f32>,
    pub returns: Vec<f32>,
    pub metrics: Metrics,
}

impl CriticStep<'_> {
    fn micro_batches<'b>(&self, batch: &'b Batch) -> Cow<'b, [MicroBatch]> {
        batch.micro_batches_for(self.runner.packing_parameters(self.micro_batch_tokens))
    }

    /// Returns the value of every trained token of `batch`, in batch order.
    ///
    /// # Errors
    /// When a pass fails.
    pub fn values(&self, batch: &Batch) -> Result<Vec<f32>> {
        let outputs = self.runner.forward(&self.micro_batches(batch), self.pass, &Progress::hidden())?;
        Ok(outputs.into_iter().flat_map(|PassOutput { head: [values], .. }| values).collect())
    }

    /// Returns advantages and returns from `rewards` and `values`, which have one value per token.
    ///
    /// # Errors
    /// When a value is NaN, or the batch has too few tokens to normalise the advantages.
    pub fn estimate(&self, sequences: &Sequences, rewards: &[f32], values: &[f32]) -> Result<ValueEstimate> {
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
        Ok(ValueEstimate { advantages, returns: estimate.returns, metrics })
    }

    /// Computes the gradients of the value loss over `batch`, which may be a minibatch, and stores them in
    /// the critic's parameters. Returns the metrics; `None` when every token was rejected.
    ///
    /// # Errors
    /// When a pass fails, a value is NaN, or the batch has no values or no returns.
    pub fn gradients(&self, batch: &Batch) -> Result<Option<Metrics>> {
        let tokens = batch.masked_sequences()?;
        if tokens.valid_tokens() == 0 {
            return Ok(None);
        }
        let (old_values, returns) =
            batch.values.as_ref().zip(batch.returns.as_ref()).context("no values or no returns")?;
        let size = BatchSize::from_sequences(&tokens, self.response_tokens_max);
        let normalizer = Normalizer::new(self.aggregation, size)?;
        let clip = if self.settings.value_clip > 0.0 { self.settings.value_clip } else { f64::INFINITY };
        let micro_batches = self.micro_batches(batch);
        let shares: MicroBatchValues<ValueLoss> = MicroBatchValues::new(&micro_batches);
        let objective: BatchObjective<'_, 1> = &|index, [values]| {
            let span = batch.column_range(&micro_batches[index]);
            let sequences = Sequences::new(&micro_batches[index].cu_targets, &batch.mask[span.clone()])?;
            let (old_values, returns) = (&old_values[span.clone()], &returns[span]);
            let mut share = value_loss(&sequences, values, old_values, returns, clip, &normalizer)?;
            let gradient = std::mem::take(&mut share.grad_values);
            shares.set(index, share);
            Ok([gradient])
        };
        self.runner.accumulate(&micro_batches, self.pass, None, objective, &Progress::hidden())?;
        let shares = shares.into_values()?;
        let sum = |field: fn(&ValueLoss) -> f64| shares.iter().map(field).fold(0.0, |sum, share| sum + share);
        let clip_fraction = sum(|share| share.clipped.sum) / sum(|share| share.clipped.tokens);
        let loss = sum(|share| share.loss);
        Ok(Some(Metrics::from_iter([("critic/vf_loss", loss), ("critic/vf_clipfrac", clip_fraction)])))
    }
}
