//! Files of models and runs: Hugging Face folders, GGUF files, adapters in PEFT format, and checkpoints. A
//! checkpoint is written to a temporary folder, synced and renamed. So a killed process never leaves a
//! partial checkpoint.
//!
//! A checkpoint is a Hugging Face folder (`config.json`, safetensors, tokenizer) with these additional files:
//! - `trainer.json`: the progress of the run.
//! - `trainer.safetensors`: the optimizer state, as f32 or 8-bit codes.
//! - `critic.safetensors`, if the run has a critic: the weights and the optimizer state of the critic.
//! - `trainer.toml`: the resolved recipe.
//! - `sampled_ahead.json`, if sampling runs ahead or trajectories are partial: the samples of later steps.
//! - `manifest.b3`, which is written last: the digests of all other files.
//!
//! If a run has several processes, each writes its own shards of `trainer.safetensors` and
//! `critic.safetensors`. Random numbers have no state in a checkpoint, because they are functions of the seed
//! and the step.

mod base;
pub mod gguf;
pub mod hub;
pub mod load;
pub mod merge;
pub mod peft;
pub mod reference;
mod resume;
pub mod save;
mod state_files;
pub mod tensor_file;

pub use base::{BASE_FOLDER, BaseFiles, BaseModel};
pub use resume::{
    ResumePoint, check_all_checkpoints, folder_name, is_checkpoint, newest_checkpoint,
    newest_intact_checkpoint, read_state, remove_partial_checkpoints, verify_folder,
};

use crate::atomic_file::{remove_folder, replace_folder};
use crate::bad_input;
use crate::bounded_file::{self, SAMPLED_AHEAD_BYTES_MAX};
use crate::dist::serialization::f32_bytes;
use crate::integrity::{Manifest, add_checksum};
use crate::metrics::Phase;
use crate::model::adapter::Lora;
use crate::model::config::{Config, WeightFormat};
use crate::model::names::{ParameterSpec, StoredTensor, TensorRole, parameter_specs};
use crate::model::parameters::{MASTER, Parameters, ShardRequest};
use crate::ops::mxfp4;
use crate::settings::{from, table};
use anyhow::{Context, Result};
use blake3::Hash;
use peft::AdapterFolder;
pub use resume::DAMAGE_REMEDY;
use save::{CompanionFiles, SHARD_BYTES_MAX, save, save_index, save_without_weights};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

table! {
    /// Checkpoints of a run. The last step and a stop by a signal always save a checkpoint.
    pub struct CheckpointSettings {
        /// Number of steps between checkpoints, in SFT warm-up and in reinforcement learning. 0 means only at
        /// the end.
        pub every_steps: u64 = 20,
        /// Number of checkpoints to keep. Older checkpoints are removed.
        pub keep: usize = 2 => from(1.0),
        /// Format of the saved weights; an adapter is saved in f32. The f32 master weights are always saved
        /// with the optimizer state.
        pub dtype: WeightFormat = WeightFormat::Bf16,
    }
}

const STATE_FILE: &str = "trainer.json";
/// The stem of the names of files with optimizer state. See [`state_files`].
const STATE_STEM: &str = "trainer";
const CRITIC_STEM: &str = "critic";
const RECIPE_FILE: &str = "trainer.toml";
const SAMPLED_AHEAD_FILE: &str = "sampled_ahead.json";

/// The progress of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// The stage: SFT warm-up or reinforcement learning.
    pub phase: Phase,
    /// Number of finished steps of this stage.
    pub step: u64,
    /// Number of updates by the optimizer of this stage.
    pub updates: u64,
    /// Number of updates by the optimizer of the critic; 0 without a critic.
    #[serde(default)]
    pub critic_updates: u64,
    /// Length of `metrics.jsonl` when the checkpoint was written, in bytes.
    pub metrics_bytes: u64,
    /// The digest of the first `metrics_bytes` bytes of `metrics.jsonl`; `None` in a checkpoint without a
    /// manifest.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "resume::hexadecimal")]
    pub metrics_digest: Option<Hash>,
    /// The digest of the frozen reference of the run, if the run has one.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "resume::hexadecimal")]
    pub reference_digest: Option<Hash>,
    /// The digest of the teacher of `policy.distill`, if the teacher is another model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher_digest: Option<String>,
    /// The coefficient of `policy.kl`, if the coefficient is adaptive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_coefficient: Option<f64>,
}

/// Reads what was sampled for later steps from the checkpoint `folder`. Returns the path and the contents.
///
/// # Errors
/// [`crate::error::BadInput`] when the file is missing or too large.
pub fn read_sampled_ahead(folder: &Path) -> Result<(PathBuf, Vec<u8>)> {
    let path = folder.join(SAMPLED_AHEAD_FILE);
    match bounded_file::read(&path, SAMPLED_AHEAD_BYTES_MAX) {
        Ok(bytes) => Ok((path, bytes)),
        Err(e) => Err(bad_input!("{}: cannot be read: {e}; {DAMAGE_REMEDY}", path.display())),
    }
}

/// Removes all checkpoints of `run` except the `keep` newest.
///
/// # Errors
/// When a checkpoint cannot be removed.
pub fn prune(run: &Path, keep: usize) -> Result<()> {
    let mut old = resume::checkpoint_folders(run)?;
    old.truncate(old.len().saturating_sub(keep.max(1)));
    old.iter().try_for_each(|folder| remove_folder(folder))
}

/// The files of a model in a folder, beside its weights.
#[derive(Clone, Copy)]
pub struct ModelFiles<'a> {
    pub config: &'a Config,
    /// The format of the weights. An adapter is written in f32.
    pub format: WeightFormat,
    pub companions: &'a CompanionFiles,
    /// The base of the adapter, if the model has an adapter.
    pub base: Option<&'a BaseModel>,
}

impl ModelFiles<'_> {
    /// Writes the weights of `parameters` into the new folder `folder`: a Hugging Face folder, or PEFT's
    /// files of the adapter. With `has_optimizer`, also writes the optimizer state and the weights in full
    /// precision. Returns the manifest of the files.
    ///
    /// # Errors
    /// When writing fails.
    pub fn write(&self, folder: &Path, parameters: &Parameters, has_optimizer: bool) -> Result<Manifest> {
        let mut manifest = match parameters.adapter() {
            Some(lora) => self.write_adapter(folder, parameters, lora)?,
            None => {
                let tensor = |spec: &ParameterSpec| {
                    let index = parameters.index_of(&spec.name);
                    parameters.gather(index.with_context(|| format!("no tensor {}", spec.name))?, MASTER)
                };
                let (config, format) = (self.config, self.format);
                let mut manifest = save(folder, config, format, self.companions, SHARD_BYTES_MAX, tensor)?;
                save_index(folder, config, format, &mut manifest)?;
                manifest
            }
        };
        if has_optimizer {
            // Trained tensors are always in the state files, in full precision. A frozen tensor is in the
            // model's files, and is added to the state files only if the model's files round it. The base of
            // an adapter has its own folder.
            let adapted = parameters.adapter().is_some();
            let rounded =
                |spec: &ParameterSpec, values: &[f32]| !adapted && !self.format_preserves(spec, values);
            state_files::write((folder, STATE_STEM), parameters, false, &rounded, &mut manifest)?;
        }
        Ok(manifest)
    }

    /// Writes the adapter, and the config and the tokenizer of its base.
    fn write_adapter(&self, folder: &Path, parameters: &Parameters, lora: &Lora) -> Result<Manifest> {
        let base = self.base.context("the adapter has no base")?;
        let mut manifest = Manifest::default();
        peft::write(folder, &mut manifest, (lora, &parameter_specs(self.config)), base, |name| {
            let index = parameters.index_of(name).with_context(|| format!("no tensor {name}"))?;
            Ok(parameters.gather(index, MASTER)?.flatten_all()?.to_vec1()?)
        })?;
        save_without_weights(folder, self.config, self.format, self.companions, &mut manifest)?;
        Ok(manifest)
    }

    /// Returns whether the format of the saved weights represents `values` of a tensor exactly.
    fn format_preserves(&self, spec: &ParameterSpec, values: &[f32]) -> bool {
        match (self.format, spec.stored_shape.as_slice()) {
            (WeightFormat::F32, _) => true,
            (WeightFormat::Mxfp4, &[experts, input, output]) => {
                let shape = [experts, input, output];
                let (blocks, scales) = mxfp4::encode(values, shape);
                mxfp4::decode(&blocks, &scales, shape) == values
            }
            _ => values.iter().all(|&v| half::bf16::from_f32(v).to_f32() == v),
        }
    }
}

/// The content of a run's checkpoint.
pub struct Snapshot<'a> {
    pub files: ModelFiles<'a>,
    pub parameters: &'a Parameters,
    pub critic: Option<&'a Parameters>,
    /// The resolved recipe.
    pub recipe: &'a str,
    /// The samples of later steps, if the recipe keeps any.
    pub sampled_ahead: Option<&'a [u8]>,
    pub state: TrainerState,
}

impl Snapshot<'_> {
    /// Writes the checkpoint into `run`. Then removes all checkpoints except the `keep` newest.
    ///
    /// # Errors
    /// When writing fails. Earlier checkpoints stay intact.
    pub fn write(&self, run: &Path, keep: usize) -> Result<PathBuf> {
        let checkpoints = run.join("checkpoints");
        let name = folder_name(self.state.phase, self.state.step);
        let target = checkpoints.join(&name);
        fs::create_dir_all(&checkpoints).with_context(|| format!("writing {}", target.display()))?;
        replace_folder(&target, |temporary| self.fill(temporary))?;
        prune(run, keep)?;
        Ok(target)
    }

    fn fill(&self, temporary: &Path) -> Result<()> {
        let mut manifest = self.files.write(temporary, self.parameters, true)?;
        if let Some(critic) = self.critic {
            let all = |_: &ParameterSpec, _: &[f32]| true;
            state_files::write((temporary, CRITIC_STEM), critic, true, &all, &mut manifest)?;
        }
        manifest.write_file(temporary, RECIPE_FILE, add_checksum(self.recipe).as_bytes())?;
        if let Some(samples) = self.sampled_ahead {
            manifest.write_file(temporary, SAMPLED_AHEAD_FILE, samples)?;
        }
        let state = serde_json::to_string_pretty(&self.state)? + "\n";
        manifest.write_file(temporary, STATE_FILE, state.as_bytes())?;
        manifest.write(temporary)
    }
}

/// Estimates the size of a checkpoint of `parameters` with their optimizer state, in bytes, without the small
/// files.
pub fn estimate_bytes(format: WeightFormat, parameters: &Parameters) -> u64 {
    let of = |(index, spec): (usize, &ParameterSpec)| {
        let stored: u64 = match (parameters.adapter(), spec.role) {
            // The base is not part of the checkpoint.
            (Some(_), role) if role != TensorRole::AdapterFactor => 0,
            (Some(_), _) => (spec.element_count() * size_of::<f32>()) as u64,
            (None, _) => spec.stored_tensors(format).iter().map(StoredTensor::bytes).sum(),
        };
        let state = parameters.state(index);
        // Trained tensors are also saved in full precision. With bf16 weights, the optimizer state already
        // has the full-precision values.
        let is_also_kept = parameters.is_trained(index) && !state.contains_key(MASTER);
        let master = if is_also_kept { spec.element_count() * size_of::<f32>() } else { 0 };
        let kept = |kind: &&str| {
            parameters.state_shape(index, kind).map_or(0, |(dtype, length)| length * dtype.size_in_bytes())
        };
        stored + (master + state.keys().map(kept).sum::<usize>()) as u64
    };
    parameters.specs.iter().enumerate().map(of).sum()
}

/// Serves a request of rank 0 while it writes a checkpoint of `parameters` and `critic`.
///
/// # Errors
/// When a rank does not respond in time.
pub fn serve(parameters: &Parameters, critic: Option<&Parameters>, request: &ShardRequest) -> Result<()> {
    match request {
        ShardRequest::File { folder, stem, of_critic } => {
            let source = if *of_critic { critic.unwrap_or(parameters) } else { parameters };
            state_files::serve(folder, stem, source, *of_critic)
        }
        request => parameters.serve(critic, request),
    }
}

/// Restores the weights and the optimizer state of a policy or a critic from `folder`, bit for bit. The
/// caller must then let the optimizer write the working weights.
///
/// # Errors
/// [`crate::error::BadInput`] when the folder has no such state, or its state does not match the model.
pub fn restore(folder: &Path, parameters: &mut Parameters) -> Result<()> {
    let of_critic = parameters.is_critic();
    let stem = if of_critic { CRITIC_STEM } else { STATE_STEM };
    state_files::restore((folder, stem), parameters, of_critic)
}

/// Restores the values of the adapter from PEFT's files in `folder`. Optimizer state stays.
///
/// # Errors
/// [`crate::error::BadInput`] when the folder has no adapter, or another one than `parameters`.
pub fn restore_adapter(folder: &Path, parameters: &mut Parameters) -> Result<()> {
    let first = parameters.specs.iter().position(|spec| spec.role == TensorRole::AdapterFactor);
    let Some(first) = first.filter(|_| peft::is_adapter_folder(folder)) else {
        return Err(bad_input!("{}: has no adapter for this model", folder.display()));
    };
    let base = parameters.specs[..first].to_vec();
    let adapter = AdapterFolder::open(folder, &base)?;
    if parameters.adapter() != Some(&adapter.lora) {
        return Err(bad_input!("{}: has another rank, scale or targets", folder.display()));
    }
    for (index, values) in (first..).zip(adapter.read_values(&base)?) {
        let (_, length) = parameters.state_shape(index, MASTER)?;
        let own = parameters.local_range(index, MASTER, length);
        parameters.overwrite(index, MASTER, f32_bytes(&values[own]))?;
    }
    Ok(())
}
