//! The frozen reference: the model as it was when reinforcement learning began.
//!
//! It lies in the run folder beside the checkpoints, so that a resumed run measures against the same bits.

use crate::atomic_file::replace_file;
use crate::bad_input;
use crate::model::config::Config;
use crate::model::names::{ParameterSpec, StoredTensor};
use crate::model::parameters::Parameters;
use crate::model::tensor_file::{TensorFile, f32_values, write_f32, write_tensors};
use crate::ops::cpu::host_values;
use anyhow::Result;
use safetensors::Dtype;
use std::path::Path;

const FILE: &str = "reference.safetensors";

/// A copy of `parameters` that later updates do not reach.
///
/// # Errors
/// When memory runs out.
pub fn copy(config: &Config, parameters: &Parameters) -> Result<Parameters> {
    let values = parameters.specs.iter().enumerate().map(|(index, spec)| {
        let values = parameters.values(index).flatten_all()?.to_vec1()?;
        Ok((spec.clone(), values))
    });
    Parameters::new(config, values)
}

/// Writes the reference into the run folder `run`, in working layout and precision, a tensor at a time.
///
/// # Errors
/// When the disk refuses; a reference that was there stays whole.
pub fn write(run: &Path, reference: &Parameters) -> Result<()> {
    let stored = |spec: &ParameterSpec| StoredTensor {
        name: spec.name.clone(),
        dtype: Dtype::F32,
        shape: spec.working_shape(),
    };
    replace_file(&run.join(FILE), |aside| {
        write_tensors(aside, reference.specs.iter().map(stored).collect(), |index, out| {
            write_f32(out, &host_values(reference.values(index))?)
        })
    })
}

/// Reads the reference of the run folder `run` back, a tensor at a time.
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
    let file = TensorFile::open(&path).map_err(|e| damaged(format!("cannot be used: {e:#}")))?;
    let found = parameters.specs.iter().map(|spec| {
        let info = file.metadata.info(&spec.name).ok_or_else(|| damaged(format!("lacks {}", spec.name)))?;
        if info.dtype != Dtype::F32 || info.shape != spec.working_shape() {
            return Err(damaged(format!("does not fit the model: {} has another shape", spec.name)));
        }
        Ok((spec.clone(), f32_values(&file.read(info)?).collect()))
    });
    Parameters::new(config, found)
}
