//! The frozen reference: the model as it was when reinforcement learning began.
//!
//! It lies in the run folder beside the checkpoints, so that a resumed run measures against the same bits.

use crate::bad_input;
use crate::model::config::Config;
use crate::model::weights::Parameters;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor, safetensors};
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

const FILE: &str = "reference.safetensors";

/// A copy of `parameters` that later updates do not reach.
///
/// # Errors
/// When memory runs out.
pub fn copy(config: &Config, parameters: &Parameters) -> Result<Parameters> {
    let tensors = parameters
        .specs
        .iter()
        .enumerate()
        .map(|(index, spec)| Ok((spec.clone(), parameters.var(index).as_tensor().detach().copy()?)));
    Parameters::new(config, tensors.collect::<Result<_>>()?)
}

/// Writes the reference into the run folder `run`, in working layout and precision.
///
/// # Errors
/// When the disk refuses; a reference that was there stays whole.
pub fn write(run: &Path, reference: &Parameters) -> Result<()> {
    let (target, aside) = (run.join(FILE), run.join(format!(".{FILE}.partial")));
    let tensors: HashMap<&str, Tensor> = reference
        .specs
        .iter()
        .enumerate()
        .map(|(index, spec)| (spec.name.as_str(), reference.var(index).as_tensor().detach()))
        .collect();
    safetensors::save(&tensors, &aside)
        .and_then(|()| Ok(File::open(&aside)?.sync_all()?))
        .and_then(|()| Ok(fs::rename(&aside, &target)?))
        .and_then(|()| Ok(File::open(run)?.sync_all()?))
        .with_context(|| format!("writing the reference {}", target.display()))
}

/// Reads the reference of the run folder `run` back.
///
/// # Errors
/// [`crate::error::BadInput`] when it is missing or does not fit the model.
pub fn read(run: &Path, config: &Config, parameters: &Parameters) -> Result<Parameters> {
    let path = run.join(FILE);
    let damaged = |what: String| {
        bad_input!(
            "{}: the reference of policy.kl {what}; start the run again in another folder",
            path.display()
        )
    };
    let mut tensors =
        safetensors::load(&path, &Device::Cpu).map_err(|e| damaged(format!("cannot be read: {e}")))?;
    let found = parameters.specs.iter().map(|spec| {
        let tensor = tensors.remove(&spec.name).ok_or_else(|| damaged(format!("lacks {}", spec.name)))?;
        Ok((spec.clone(), tensor))
    });
    let found = found.collect::<Result<Vec<_>>>()?;
    Parameters::new(config, found).map_err(|e| damaged(format!("does not fit the model: {e:#}")))
}
