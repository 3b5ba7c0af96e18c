//! Layers that are built whenever a pass reaches them, so that memory holds one at a time. Their tensors
//! are read from disk when the model is larger than memory. Or they are derived from tensors in memory when
//! the derived ones are much larger.

use super::config::Config;
use super::layer::Layer;
use super::matrix::{Adapter, ModelTensors};
use super::names::ParameterSpec;
use super::weights::LayerSource;
use crate::ops::product::Precision;
use crate::ops::weight::Weight;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// A change of a tensor before a model computes with it, such as rounding.
pub type WeightChange = Arc<dyn Fn(&ParameterSpec, Weight) -> Result<Weight> + Send + Sync>;

/// The source of the layers' tensors: a model's files, or memory.
pub trait TensorSource: Send + Sync {
    /// Returns the tensor of `spec`, packed if it is stored packed.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    fn tensor(&self, spec: &ParameterSpec) -> Result<Weight>;

    /// Returns the bytes of the tensor of `spec` in memory.
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

/// The layers of a model, and the changes of their weights when read.
#[derive(Clone)]
pub struct LayersOnDemand {
    pub source: Arc<dyn TensorSource>,
    pub config: Config,
    /// The rounding of `model.dtype` first, then ablations or changes that reproduce a known mistake.
    pub changes: Vec<WeightChange>,
    /// The key is the name of the adapted matrix.
    pub adapters: HashMap<String, Adapter>,
    /// The precision in which a CPU multiplies dense weights.
    pub precision: Precision,
}

impl LayersOnDemand {
    /// Returns layers without changes or adapters.
    pub fn new(source: Arc<dyn TensorSource>, config: &Config) -> Self {
        let (changes, adapters) = (vec![], HashMap::new());
        Self { source, config: config.clone(), changes, adapters, precision: Precision::F32 }
    }

    /// Returns one tensor after all changes.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file changed since it was opened, or when a change fails.
    pub fn tensor(&self, spec: &ParameterSpec) -> Result<Weight> {
        let read = self.source.tensor(spec)?;
        let changed = self.changes.iter().try_fold(read, |weight, change| change(spec, weight))?;
        Ok(changed.with_precision(self.precision))
    }
}

impl LayerSource for LayersOnDemand {
    fn layer(&self, index: usize, _: Option<usize>) -> Result<Arc<dyn Layer>> {
        let specs = (self.config.family.layer_specs)(&self.config, index);
        let find = |name: &str| {
            let spec = specs.iter().find(|spec| spec.name == name);
            Ok(self.tensor(spec.with_context(|| format!("no tensor {name}"))?)?.without_gradient())
        };
        let tensors = ModelTensors { find: &find, adapters: &self.adapters, ranks: None };
        (self.config.family.layer)(&tensors.layer(index))
    }
}
