//! Layers that are made anew whenever a pass comes to them, so that one at a time is in memory: those of a model larger than
//! memory, read from disk, and those whose changed tensors would take more memory than what they are made of.

use super::config::Config;
use super::layer::Layer;
use super::matrix::{Adapter, Tensors};
use super::names::ParameterSpec;
use super::weights::Layers;
use crate::ops::product::Precision;
use crate::ops::weight::Weight;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// A change that is made to each tensor before a model computes with it.
pub type WeightChange = Arc<dyn Fn(&ParameterSpec, Weight) -> Result<Weight> + Send + Sync>;

/// Where the layers' tensors are read from: a model's files, or memory.
pub trait TensorSource: Send + Sync {
    /// The tensor of `spec`, packed where it is stored so.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    fn tensor(&self, spec: &ParameterSpec) -> Result<Weight>;

    /// Bytes that the tensor of `spec` takes in memory.
    fn resident_bytes(&self, spec: &ParameterSpec) -> u64;
}

impl TensorSource for HashMap<String, Weight> {
    fn tensor(&self, spec: &ParameterSpec) -> Result<Weight> {
        Ok(self.get(&spec.name).with_context(|| format!("no tensor {}", spec.name))?.clone())
    }

    fn resident_bytes(&self, spec: &ParameterSpec) -> u64 {
        self.get(&spec.name).map_or(0, Weight::bytes)
    }
}

/// The layers of a model, and what is made of their weights as they are read.
#[derive(Clone)]
pub struct LayersOnDemand {
    pub source: Arc<dyn TensorSource>,
    pub config: Config,
    /// The rounding that `model.dtype` asks for, then ablations or a mistake to recognise others by.
    pub changes: Vec<WeightChange>,
    /// By the name of the matrix.
    pub adapters: HashMap<String, Adapter>,
    /// The precision in which a CPU multiplies dense weights.
    pub precision: Precision,
}

impl LayersOnDemand {
    /// Unchanged layers, without adapters.
    pub fn new(source: Arc<dyn TensorSource>, config: &Config) -> Self {
        let (changes, adapters) = (vec![], HashMap::new());
        Self { source, config: config.clone(), changes, adapters, precision: Precision::F32 }
    }

    /// One tensor after all changes.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file was changed meanwhile, and those of the changes.
    pub fn tensor(&self, spec: &ParameterSpec) -> Result<Weight> {
        let read = self.source.tensor(spec)?;
        let changed = self.changes.iter().try_fold(read, |weight, change| change(spec, weight))?;
        Ok(changed.in_precision(self.precision))
    }
}

impl Layers for LayersOnDemand {
    fn layer(&self, index: usize, _: Option<usize>) -> Result<Arc<dyn Layer>> {
        let specs = (self.config.family.layer_specs)(&self.config, index);
        let find = |name: &str| {
            let spec = specs.iter().find(|spec| spec.name == name);
            Ok(self.tensor(spec.with_context(|| format!("no tensor {name}"))?)?.without_gradient())
        };
        let tensors = Tensors { find: &find, adapters: &self.adapters, ranks: None };
        (self.config.family.layer)(&tensors.layer(index))
    }
}
