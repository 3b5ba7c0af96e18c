//! The critic: a trunk of the policy's architecture with a value head, its estimate of advantages, and its updates.
//!
//! The value of a token is read where the policy chooses it, before it is seen: V of the state, not of the action.

use super::batch::{MicroBatch, Sequence};
use super::batch_runner::BatchRunner;
use super::experience::{Experience, spans};
use super::forward_backward::PassSettings;
use super::optimizer::Optimizer;
use crate::learner::CriticSettings;
use crate::metrics::Metrics;
use crate::model::adapter::{Lora, Owner};
use crate::model::config::Config;
use crate::model::held::Loaded;
use crate::model::init::value_model;
use crate::model::names::value_model_specs;
use crate::model::parameters::Parameters;
use crate::policy::advantage::{gae, whiten};
use crate::policy::value::{ValueLoss, explained_variance, value_loss};
use crate::policy::{Aggregation, BatchSize, Normalizer, Sequences};
use anyhow::{Context, Result};
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// A critic and what moves it.
pub struct Critic {
    pub settings: CriticSettings,
    pub parameters: Parameters,
    pub optimizer: Optimizer,
}

impl Critic {
    /// A critic that starts from a copy of the `policy`'s trunk, with a head drawn from the run's `seed`; where the policy has an
    /// adapter, a second one on the same base. Of its tensors those learn that `trainable` marks.
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
            return Self::adapted((config, policy, lora), trainable, settings, seed, round_to_bf16);
        }
        let learns: HashSet<String> = value_model_specs(config)
            .into_iter()
            .zip(trainable)
            .filter(|(_, learns)| **learns)
            .map(|(s, _)| s.name)
            .collect();
        let values = value_model(config, seed, |spec| {
            let index = policy.position(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
            // What neither learns is one and the same.
            let shared = policy.shared(index).filter(|_| !learns.contains(&spec.name));
            let own = || anyhow::Ok(policy.of_place(index)?.decoded(spec)?.flatten_all()?.to_vec1()?);
            Ok(match shared {
                Some(packed) => packed,
                None => Loaded::Values(own()?),
            })
        });
        let values = values.enumerate().map(|(index, found)| {
            let (spec, values) = found?;
            Ok((spec, if trainable[index] { values.cut(policy.mesh(), index) } else { values }))
        });
        let parameters = Parameters::with_value_head(config, values)?.shared_by(policy.mesh());
        let mut parameters = parameters.placed_beside(policy)?;
        parameters.learn(trainable)?;
        let optimizer = Optimizer::new(&settings.optimizer, &mut parameters, round_to_bf16)?;
        Ok(Self { settings: settings.clone(), parameters, optimizer })
    }

    /// A second adapter with a head on the policy's base, none of which is copied.
    fn adapted(
        (config, policy, lora): (&Config, &Parameters, &Lora),
        trainable: &[bool],
        settings: &CriticSettings,
        seed: u64,
        round_to_bf16: bool,
    ) -> Result<Self> {
        let values = value_model(config, seed, |spec| {
            let index = policy.position(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
            policy.shared(index).map_or_else(|| Ok(Loaded::Packed(policy.of_place(index)?)), Ok)
        });
        let parameters = Parameters::with_value_head(config, values)?.shared_by(policy.mesh());
        let mut parameters = parameters.placed_beside(policy)?;
        let start = lora.start(&parameters.specs, seed, Owner::Critic)?;
        parameters.adapt(lora.clone(), start)?;
        parameters.learn(trainable)?;
        let optimizer = Optimizer::new(&settings.optimizer, &mut parameters, round_to_bf16)?;
        Ok(Self { settings: settings.clone(), parameters, optimizer })
    }
}

/// How a critic sees a step's trajectories.
#[derive(Clone, Copy)]
pub struct CriticStep<'a> {
    /// Over the critic's parameters.
    pub runner: BatchRunner<'a>,
    pub settings: &'a CriticSettings,
    /// That of the policy loss, with the constant that it may need.
    pub aggregation: Aggregation,
    pub response_tokens_max: usize,
    pub pass: PassSettings,
    pub micro_batch_tokens: usize,
}

/// What the values make of the rewards, one a token.
pub struct ValueEstimate {
    /// Normalised over the batch.
    pub advantages: Vec<f32>,
    pub returns: Vec<f32>,
    pub metrics: Metrics,
}

impl CriticStep<'_> {
    fn batches(&self, sequences: &[Sequence]) -> Vec<MicroBatch> {
        let shared_max = self.runner.shared_positions_max();
        MicroBatch::split_sharing(sequences, self.runner.cut(self.micro_batch_tokens), |_| shared_max)
    }

    /// The value of every trained token of `sequences`, one after the other.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn values(&self, sequences: &[Sequence]) -> Result<Vec<f32>> {
        self.runner.values(&self.batches(sequences), self.pass)
    }

    /// Advantages and returns from `rewards` and `values`, one a token.
    ///
    /// # Errors
    /// When a value is no number, or the batch has too few tokens to be normalised.
    pub fn estimate(&self, sequences: &Sequences, rewards: &[f32], values: &[f32]) -> Result<ValueEstimate> {
        let found = gae(sequences, rewards, values, self.settings.gamma, self.settings.lambda)?;
        let advantages = whiten(sequences, &found.advantages)?;
        let mut metrics = Metrics::new();
        for (name, column) in [("values", values), ("returns", &found.returns)] {
            let of = || sequences.all_valid().map(|t| f64::from(column[t]));
            metrics.set(format!("critic/{name}/mean"), of().sum::<f64>() / of().count() as f64);
            metrics.set(format!("critic/{name}/max"), of().fold(f64::NEG_INFINITY, f64::max));
            metrics.set(format!("critic/{name}/min"), of().fold(f64::INFINITY, f64::min));
        }
        if let Some(explained) = explained_variance(sequences, values, &found.returns)? {
            metrics.set("critic/vf_explained_var", explained);
        }
        Ok(ValueEstimate { advantages, returns: found.returns, metrics })
    }

    /// Gradients of the value loss over `experience`, or the part of it that one update takes: they are in the critic's
    /// parameters then. Returns the figures; `None` when every token was rejected.
    ///
    /// # Errors
    /// When a pass fails, or a value is no number.
    pub fn gradients(&self, experience: &Experience) -> Result<Option<Metrics>> {
        let tokens = experience.tokens()?;
        if tokens.valid_tokens() == 0 {
            return Ok(None);
        }
        let (old_values, returns) =
            experience.values.as_ref().zip(experience.returns.as_ref()).context("no values to learn from")?;
        let normalizer = Normalizer::new(self.aggregation, BatchSize::of(&tokens, self.response_tokens_max))?;
        let clip = if self.settings.value_clip > 0.0 { self.settings.value_clip } else { f64::INFINITY };
        let batches = self.batches(&experience.sequences);
        let spans = spans(&batches);
        let shares: Vec<Mutex<Option<ValueLoss>>> = batches.iter().map(|_| Mutex::new(None)).collect();
        self.runner.accumulate_values(&batches, self.pass, &|index, values| {
            let span = spans[index].clone();
            let sequences = Sequences::new(&batches[index].cu_targets, &experience.mask[span.clone()])?;
            let (old_values, returns) = (&old_values[span.clone()], &returns[span]);
            let share = value_loss(&sequences, values, old_values, returns, clip, &normalizer)?;
            let gradient = share.grad_values.clone();
            *shares[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(share);
            Ok(gradient)
        })?;
        let (mut loss, mut clipped, mut count) = (0.0, 0.0, 0.0);
        for share in shares {
            let share =
                share.into_inner().unwrap_or_else(PoisonError::into_inner).context("a loss is missing")?;
            loss += share.loss;
            clipped += share.clipped.sum;
            count += share.clipped.tokens;
        }
        Ok(Some(Metrics::from_iter([("critic/vf_loss", loss), ("critic/vf_clipfrac", clipped / count)])))
    }
}
