//! Layers that are built each time a pass reaches them, so that memory holds one built layer at a time. They
//! have two uses. If the model is larger than memory, the tensors of a layer are read from disk. If a change
//! such as rounding makes the tensors much larger, each layer is changed when the pass reaches it.

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

/// A change that is applied to a tensor before the model computes with it, such as rounding.
pub type WeightChange = Arc<dyn Fn(&ParameterSpec, Weight) -> Result<Weight> + Send + Sync>;

/// The source of the tensors of layers: the files of a model, or memory.
pub trait TensorSource: Send + Sync {
    /// Returns the tensor of `spec`. The tensor is packed if it is stored packed.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    fn tensor(&self, spec: &ParameterSpec) -> Result<Weight>;

    /// Returns the size of the tensor of `spec` in memory, in bytes.
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

/// The layers of a model, and the changes that are applied to their tensors after reading.
#[derive(Clone)]
pub struct LayersOnDemand {
    pub source: Arc<dyn TensorSource>,
    pub config: Config,
    /// The changes, in the order in which they are applied: first the rounding of `model.dtype`, then
    /// ablations or changes that reproduce a known bug.
    pub changes: Vec<WeightChange>,
    /// The adapters by the names of the adapted matrices.
    pub adapters: HashMap<String, Adapter>,
    /// The precision of matrix products with dense weights on a CPU.
    pub precision: Precision,
}

impl LayersOnDemand {
    /// Returns layers without changes or adapters.
    pub fn new(source: Arc<dyn TensorSource>, config: &Config) -> Self {
        let (changes, adapters) = (vec![], HashMap::new());
        Self { source, config: config.clone(), changes, adapters, precision: Precision::F32 }
    }

    /// Returns the tensor of `spec` after all changes.
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
        let tensors = ModelTensors { find: &find, adapters: &self.adapters, expert_parallel: None };
        (self.config.family.layer)(&tensors.layer(index))
    }
}
