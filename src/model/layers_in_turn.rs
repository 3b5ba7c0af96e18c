//! Layers that are made anew whenever a walk passes, so that one at a time is in memory: those of a model larger than memory,
//! read from disk, and those whose changed tensors would take more memory than what they are made of.

use super::config::Config;
use super::held::{Held, Weight};
use super::layer::{Adapter, Layer};
use super::names::ParameterSpec;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// What is made of each tensor before a model computes with it.
pub type WeightChange = Arc<dyn Fn(&ParameterSpec, Held) -> Result<Held> + Send + Sync>;

/// Where the layers' tensors are read from: a model's files, or memory.
pub trait TensorSource: Send + Sync {
    /// The tensor of `spec`, packed where it is stored so.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read.
    fn tensor(&self, spec: &ParameterSpec) -> Result<Held>;

    /// Bytes that the tensor of `spec` takes in memory.
    fn resident_bytes(&self, spec: &ParameterSpec) -> u64;
}

impl TensorSource for HashMap<String, Held> {
    fn tensor(&self, spec: &ParameterSpec) -> Result<Held> {
        Ok(self.get(&spec.name).with_context(|| format!("no tensor {}", spec.name))?.clone())
    }

    fn resident_bytes(&self, spec: &ParameterSpec) -> u64 {
        self.get(&spec.name).map_or(0, Held::bytes)
    }
}

/// The layers of a model, and what is made of their weights as they are taken.
#[derive(Clone)]
pub struct LayersInTurn {
    pub source: Arc<dyn TensorSource>,
    pub config: Config,
    /// What `model.dtype` asks for, then the arms or a mistake to recognise others by.
    pub changes: Vec<WeightChange>,
    /// By the name of the matrix.
    pub adapters: HashMap<String, Adapter>,
}

impl LayersInTurn {
    /// Layer `index`, made anew.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file was changed meanwhile, and those of the changes.
    pub fn layer(&self, index: usize) -> Result<Layer> {
        let family = self.config.family;
        let specs = family.layer_specs(&self.config, index);
        family.layer(index, &|name| {
            let spec: &ParameterSpec =
                specs.iter().find(|spec| spec.name == name).with_context(|| format!("no tensor {name}"))?;
            Ok(adapted(self.tensor(spec)?.frozen(), self.adapters.get(name)))
        })
    }

    /// One tensor after all changes.
    ///
    /// # Errors
    /// As [`Self::layer`].
    pub fn tensor(&self, spec: &ParameterSpec) -> Result<Held> {
        let held = self.source.tensor(spec)?;
        self.changes.iter().try_fold(held, |held, change| change(spec, held))
    }
}

/// `weight` with its adapter beside it, if it has one.
pub(super) fn adapted(weight: Weight, adapter: Option<&Adapter>) -> Weight {
    match adapter {
        Some(adapter) => Weight::Adapted(Box::new(weight), adapter.clone()),
        None => weight,
    }
}
