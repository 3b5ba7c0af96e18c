//! Layers that stay on disk: a model larger than memory is read layer after layer, as often as a walk passes.

use super::config::Config;
use super::layer::Layer;
use super::load::ModelFolder;
use super::names::ParameterSpec;
use super::rounding::WeightRounding;
use anyhow::{Context, Result};
use std::sync::Arc;

/// The layers of a folder, and what is made of their weights as they are read.
#[derive(Clone)]
pub struct StoredLayers {
    pub files: Arc<ModelFolder>,
    pub config: Config,
    /// What `model.dtype` asks for, then the arms.
    pub roundings: Vec<WeightRounding>,
}

impl StoredLayers {
    /// Layer `index`, read anew.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file was changed meanwhile.
    pub fn layer(&self, index: usize) -> Result<Layer> {
        let family = self.config.family;
        let specs = family.layer_specs(&self.config, index);
        family.layer(index, &|name| {
            let spec: &ParameterSpec =
                specs.iter().find(|spec| spec.name == name).with_context(|| format!("no tensor {name}"))?;
            let mut held = self.files.loaded(spec, false)?.held(spec)?;
            for rounding in &self.roundings {
                held = rounding.apply(spec, held)?;
            }
            Ok(held.frozen())
        })
    }
}
