//! The one store of what a model consists of: every tensor under one name and one index, with its values, whether it learns,
//! its gradient and what its optimizer keeps.

use super::config::Config;
use super::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use super::weights::{Resident, VALUE_HEAD};
use crate::ops::Parameter;
use crate::ops::parameter::GradientSink;
use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor, Var};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What an optimizer keeps of a tensor, by name, each in the tensor's shape.
pub type OptimizerState = BTreeMap<&'static str, Tensor>;

/// The state under which an optimizer keeps the digits that the working weights do not have.
pub const MASTER: &str = "master";

/// Every tensor of a model, in [`parameter_specs`] order, or in [`value_model_specs`] order for a critic.
pub struct Parameters {
    config: Config,
    pub specs: Vec<ParameterSpec>,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
}

/// One tensor.
struct Entry {
    values: Var,
    /// Present where it learns.
    gradient: Option<Tensor>,
    state: OptimizerState,
}

impl Parameters {
    /// Takes the f32 values of every tensor of `config` in working layout, one after the other, in file order.
    ///
    /// # Errors
    /// Those of `values`, and when names or sizes are not those of `config`.
    pub fn new(
        config: &Config,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Vec<f32>)>>,
    ) -> Result<Self> {
        Self::of(config, parameter_specs(config), values)
    }

    /// The same for a model with a value head.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_value_head(
        config: &Config,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Vec<f32>)>>,
    ) -> Result<Self> {
        Self::of(config, value_model_specs(config), values)
    }

    fn of(
        config: &Config,
        specs: Vec<ParameterSpec>,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Vec<f32>)>>,
    ) -> Result<Self> {
        let mut entries = Vec::with_capacity(specs.len());
        for found in values {
            let (spec, values) = found?;
            let expected =
                specs.get(entries.len()).with_context(|| format!("{} is one too many", spec.name))?;
            ensure!(spec == *expected, "tensor {} where {} was expected", spec.name, expected.name);
            ensure!(values.len() == spec.element_count(), "{}: {} values", spec.name, values.len());
            let values = Var::from_vec(values, spec.working_shape(), &Device::Cpu)?;
            entries.push(Entry { values, gradient: None, state: OptimizerState::new() });
        }
        ensure!(entries.len() == specs.len(), "{} tensors, expected {}", entries.len(), specs.len());
        let index = specs.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        Ok(Self { config: config.clone(), specs, entries, index })
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of values over all tensors.
    pub fn element_count(&self) -> usize {
        self.specs.iter().map(ParameterSpec::element_count).sum()
    }

    /// Place of the tensor named `name`.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// The values of tensor `index` as the model computes with them.
    pub fn values(&self, index: usize) -> &Tensor {
        self.entries[index].values.as_tensor()
    }

    /// Those of the tensor named `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn named(&self, name: &str) -> Result<&Tensor> {
        let index = self.position(name).with_context(|| format!("no tensor {name}"))?;
        Ok(self.values(index))
    }

    /// The values with all their digits: what an optimizer keeps of them, or they themselves.
    pub fn master(&self, index: usize) -> &Tensor {
        self.entries[index].state.get(MASTER).unwrap_or_else(|| self.values(index))
    }

    /// Makes those tensors learn that `trainable` marks (all of [`Self::len`]); their gradients are 0.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn learn(&mut self, trainable: &[bool]) -> Result<()> {
        ensure!(trainable.len() == self.len(), "{} marks for {} tensors", trainable.len(), self.len());
        for (entry, &learns) in self.entries.iter_mut().zip(trainable) {
            entry.gradient = learns.then(|| entry.values.as_detached_tensor().zeros_like()).transpose()?;
            entry.state.clear();
        }
        Ok(())
    }

    /// How often a pass uses tensor `index`: twice for an embedding that is the head too.
    pub fn uses(&self, index: usize) -> usize {
        let is_head_too = self.config.tie_word_embeddings && !self.index.contains_key(VALUE_HEAD);
        if is_head_too && self.specs[index].role == TensorRole::Embedding { 2 } else { 1 }
    }

    /// Whether tensor `index` learns.
    pub fn learns(&self, index: usize) -> bool {
        self.entries[index].gradient.is_some()
    }

    /// The gradient of tensor `index`, where it learns: the sum of the last batch that ran through [`crate::train`].
    pub fn gradient(&self, index: usize) -> Option<&Tensor> {
        self.entries[index].gradient.as_ref()
    }

    /// All gradients, in order.
    pub fn gradients(&self) -> impl Iterator<Item = Option<&Tensor>> {
        self.entries.iter().map(|entry| entry.gradient.as_ref())
    }

    /// What the optimizer keeps of tensor `index`.
    pub fn state(&self, index: usize) -> &OptimizerState {
        &self.entries[index].state
    }

    /// Gives tensor `index` what an optimizer keeps of it.
    pub fn set_state(&mut self, index: usize, state: OptimizerState) {
        self.entries[index].state = state;
    }

    /// The weights without gradients: what rollout and recomputed forwards use.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn frozen(&self) -> Result<Resident> {
        self.resident(&|index| Ok(Parameter::frozen(self.values(index))))
    }

    /// The weights after `map`, without gradients.
    ///
    /// # Errors
    /// Those of `map`.
    pub fn mapped(&self, map: &dyn Fn(&ParameterSpec, &Tensor) -> Result<Tensor>) -> Result<Resident> {
        self.resident(&|index| Ok(Parameter::frozen(&map(&self.specs[index], &self.values(index).detach())?)))
    }

    /// The weights whose gradients go to `sink`, for those that learn.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn learning(&self, sink: &Arc<dyn GradientSink>) -> Result<Resident> {
        self.resident(&|index| {
            let values = self.values(index);
            Ok(match self.learns(index) {
                true => Parameter::learning(values, sink.clone(), index),
                false => Parameter::frozen(values),
            })
        })
    }

    fn resident(&self, parameter: &dyn Fn(usize) -> Result<Parameter>) -> Result<Resident> {
        let find = |name: &str| parameter(self.position(name).with_context(|| format!("no tensor {name}"))?);
        Resident::new(&self.config, self.index.contains_key(VALUE_HEAD), &find)
    }
}
