//! The frozen reference, which is the model at the start of reinforcement learning.
//!
//! The reference is a file of the run folder, so that a resumed run uses the same bits.

use super::tensor_file::{FRAMEWORK, TensorFile, write_f32, write_tensors};
use crate::atomic_file::replace_file;
use crate::bad_input;
use crate::dist::serialization::f32_values;
use crate::integrity::file_digest;
use crate::model::config::Config;
use crate::model::names::{ParameterSpec, StoredTensor};
use crate::model::parameters::{Parameters, VALUES};
use crate::model::storage::TensorStorage;
use crate::ops::cpu::{host_values, to_host};
use anyhow::{Context, Result};
use blake3::Hash;
use safetensors::Dtype;
use std::path::Path;

const FILE: &str = "reference.safetensors";

/// Returns a copy of `parameters` that later updates do not change. Frozen tensors are shared.
///
/// # Errors
/// When memory runs out.
pub fn copy(config: &Config, parameters: &Parameters) -> Result<Parameters> {
    let tensors = parameters.specs.iter().enumerate().map(|(index, spec)| {
        let stored = match parameters.share(index) {
            Some(frozen) => frozen,
            None if parameters.is_sharded(index) => {
                let own = to_host(parameters.values(index)?)?;
                TensorStorage::from_shard(host_values(&own)?.to_vec())?
            }
            None => TensorStorage::to_variable(spec, &parameters.weight(index)?)?,
        };
        Ok((spec.clone(), stored))
    });
    Parameters::load(config, &parameters.backend, tensors)
}

/// Writes the reference into the run folder `run`, one tensor at a time, in working layout and precision.
/// Packed tensors are left out, because the model's files have them. Returns the digest of the file. Every
/// checkpoint records this digest.
///
/// # Errors
/// When writing fails. An earlier reference then stays intact.
pub fn write(run: &Path, reference: &Parameters) -> Result<Hash> {
    let specs = reference.specs.iter().enumerate();
    let kept: Vec<(usize, &ParameterSpec)> =
        specs.filter(|(index, _)| reference.values(*index).is_ok()).collect();
    let stored = |(_, spec): &(usize, &ParameterSpec)| StoredTensor {
        name: spec.name.clone(),
        dtype: Dtype::F32,
        shape: spec.working_shape(),
    };
    let mut digest = None;
    replace_file(&run.join(FILE), |temporary| {
        digest =
            Some(write_tensors(temporary, kept.iter().map(stored).collect(), FRAMEWORK, |index, out| {
                write_f32(out, &host_values(&reference.gather(kept[index].0, VALUES)?)?)
            })?);
        Ok(())
    })?;
    digest.context("the reference was not written")
}

/// Compares the digest of the reference in the run folder `run` with `digest`, which a checkpoint recorded.
///
/// # Errors
/// [`crate::error::BadInput`] when the reference is missing or changed.
pub fn check(run: &Path, digest: Hash) -> Result<()> {
    let path = run.join(FILE);
    let remedy = "restore the file, or start a new run in another folder";
    match file_digest(&path, None) {
        Ok(found) if found == digest => Ok(()),
        Ok(_) => {
            Err(bad_input!("{}: damaged: its digest differs from the checkpoint; {remedy}", path.display()))
        }
        Err(e) => Err(bad_input!("{}: cannot be read: {e}; {remedy}", path.display())),
    }
}

/// Reads the reference from the run folder `run`, one tensor at a time.
///
/// # Errors
/// [`crate::error::BadInput`] when the file is missing or does not match the model.
pub fn read(run: &Path, config: &Config, parameters: &Parameters) -> Result<Parameters> {
    let path = run.join(FILE);
    let damaged = |problem: String| {
        bad_input!(
            "{}: the reference of policy.kl {problem}; start a new run in another folder",
            path.display()
        )
    };
    let file = TensorFile::open(&path).map_err(|e| damaged(format!("cannot be used: {e:#}")))?;
    let found = parameters.specs.iter().enumerate().map(|(index, spec)| {
        if let Some(frozen) = parameters.share(index) {
            return Ok((spec.clone(), frozen));
        }
        let info = file.metadata.info(&spec.name).ok_or_else(|| damaged(format!("lacks {}", spec.name)))?;
        if info.dtype != Dtype::F32 || info.shape != spec.working_shape() {
            return Err(damaged(format!("does not match the model: {} has another shape", spec.name)));
        }
        let stored = TensorStorage::variable(spec, f32_values(&file.read(info)?).collect())?;
        let is_sharded = parameters.is_sharded(index);
        let stored =
            if is_sharded { stored.into_shard(spec, index, parameters.shard_mesh())? } else { stored };
        Ok((spec.clone(), stored))
    });
    Parameters::load(config, &parameters.backend, found)
}
