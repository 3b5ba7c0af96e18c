//! Files of models and runs: Hugging Face folders, GGUF files, adapters in PEFT format, and checkpoints. A
//! checkpoint is written to a temporary folder, synced and renamed, so that a kill never leaves a partial
//! one.
//!
//! A checkpoint is a Hugging Face folder (`config.json`, safetensors, tokenizer) with these additional files:
//! - `trainer.json`: the progress of the run.
//! - `trainer.safetensors`: the optimizer's state, as f32 or 8-bit codes.
//! - `critic.safetensors`, with a critic: its weights and its optimizer's state.
//! - `trainer.toml`: the recipe as resolved.
//! - `manifest.b3`, written last: the digest of every other file.
//!
//! With several processes, each writes its own shard of the safetensors files of the trainer and the
//! critic. Random numbers need no state: they are functions of the seed and the step.

mod base;
pub mod gguf;
pub mod load;
pub mod merge;
pub mod peft;
pub mod reference;
mod resume;
pub mod save;
mod state_files;
pub mod tensor_file;

pub use base::{BASE_FOLDER, BaseModel};
pub use resume::{
    ResumePoint, check_all, folder_name, has_state, newest_folder, newest_intact_checkpoint, read_state,
    remove_partial_checkpoints, verify_folder,
};

use crate::atomic_file::{remove_folder, replace_folder};
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
use save::{CompanionFiles, SHARD_BYTES_MAX, save, save_without_weights};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

table! {
    /// Checkpoints of a run. The last step, and a stop by a signal, always save one.
    pub struct CheckpointSettings {
        /// Steps between checkpoints, in either stage; 0 means only at the end.
        pub every_steps: u64 = 20,
        /// Number of checkpoints to keep; older ones are removed.
        pub keep: usize = 2 => from(1.0),
        /// Format of the saved weights. The f32 masters are saved with the optimizer in any case.
        pub dtype: WeightFormat = WeightFormat::Bf16,
    }
}

const STATE_FILE: &str = "trainer.json";
/// Stems of the files with optimizer state: see [`state_files`].
const STATE_STEM: &str = "trainer";
const CRITIC_STEM: &str = "critic";
const RECIPE_FILE: &str = "trainer.toml";

/// The progress of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// The stage: SFT warm-up or reinforcement learning.
    pub phase: Phase,
    /// Finished steps of that stage.
    pub step: u64,
    /// Updates by the stage's optimizer.
    pub updates: u64,
    /// Updates by the critic's optimizer; 0 without a critic.
    #[serde(default)]
    pub critic_updates: u64,
    /// Length of `metrics.jsonl` at this point, in bytes.
    pub metrics_bytes: u64,
    /// The digest of those bytes; `None` in a checkpoint without a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "resume::hexadecimal")]
    pub metrics_digest: Option<Hash>,
    /// The digest of the run's frozen reference, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "resume::hexadecimal")]
    pub reference_digest: Option<Hash>,
    /// The coefficient of `policy.kl`, if it is adaptive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_coefficient: Option<f64>,
}

/// Removes all but the `keep` newest checkpoints of `run`.
///
/// # Errors
/// When the disk refuses.
pub fn prune(run: &Path, keep: usize) -> Result<()> {
    let mut old = resume::checkpoint_folders(run)?;
    old.truncate(old.len().saturating_sub(keep.max(1)));
    old.iter().try_for_each(|folder| remove_folder(folder))
}

/// The content of a checkpoint.
pub struct Snapshot<'a> {
    pub config: &'a Config,
    pub format: WeightFormat,
    pub companions: &'a CompanionFiles,
    pub parameters: &'a Parameters,
    /// The base of the adapter, if `parameters` have one.
    pub base: Option<&'a BaseModel>,
    pub critic: Option<&'a Parameters>,
    /// The recipe as resolved.
    pub recipe: &'a str,
    pub state: TrainerState,
}

impl Snapshot<'_> {
    /// Writes the checkpoint into `run` and removes all but the `keep` newest ones.
    ///
    /// # Errors
    /// When the disk refuses; earlier checkpoints stay whole.
    pub fn write(&self, run: &Path, keep: usize) -> Result<PathBuf> {
        let checkpoints = run.join("checkpoints");
        let name = folder_name(self.state.phase, self.state.step);
        let target = checkpoints.join(&name);
        fs::create_dir_all(&checkpoints).with_context(|| format!("writing {}", target.display()))?;
        replace_folder(&target, |aside| self.fill(aside))?;
        prune(run, keep)?;
        Ok(target)
    }

    fn fill(&self, aside: &Path) -> Result<()> {
        let mut manifest = match self.parameters.adapter() {
            Some(lora) => self.save_adapter(aside, lora)?,
            None => save(aside, self.config, self.format, self.companions, SHARD_BYTES_MAX, |spec| {
                let index = self
                    .parameters
                    .index_of(&spec.name)
                    .with_context(|| format!("no tensor {}", spec.name))?;
                self.parameters.gather(index, MASTER)
            })?,
        };
        // The model's files hold frozen tensors. State files hold those that the model's files round. An
        // adapter's base has a folder of its own.
        let adapted = self.parameters.adapter().is_some();
        let rounded = |spec: &ParameterSpec, values: &[f32]| !adapted && !self.format_preserves(spec, values);
        state_files::write((aside, STATE_STEM), self.parameters, false, &rounded, &mut manifest)?;
        if let Some(critic) = self.critic {
            let all = |_: &ParameterSpec, _: &[f32]| true;
            state_files::write((aside, CRITIC_STEM), critic, true, &all, &mut manifest)?;
        }
        manifest.write_file(aside, RECIPE_FILE, add_checksum(self.recipe).as_bytes())?;
        let state = serde_json::to_string_pretty(&self.state)? + "\n";
        manifest.write_file(aside, STATE_FILE, state.as_bytes())?;
        manifest.write(aside)
    }

    /// Writes the adapter, with the config and the tokenizer of its base.
    fn save_adapter(&self, aside: &Path, lora: &Lora) -> Result<Manifest> {
        let base = self.base.context("an adapter without a base")?;
        let mut manifest = Manifest::default();
        peft::write(aside, &mut manifest, (lora, &parameter_specs(self.config)), base, |name| {
            let index = self.parameters.index_of(name).with_context(|| format!("no tensor {name}"))?;
            Ok(self.parameters.gather(index, MASTER)?.flatten_all()?.to_vec1()?)
        })?;
        save_without_weights(aside, self.config, self.format, self.companions, &mut manifest)?;
        Ok(manifest)
    }

    /// Whether the saved weights represent `values` of a tensor exactly.
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

/// Estimates the bytes of a checkpoint of `parameters` with their optimizer state, without the small files.
pub fn estimate_bytes(format: WeightFormat, parameters: &Parameters) -> u64 {
    let of = |(index, spec): (usize, &ParameterSpec)| {
        let stored: u64 = match (parameters.adapter(), spec.role) {
            // The base stays in its own folder.
            (Some(_), role) if role != TensorRole::AdapterFactor => 0,
            (Some(_), _) => (spec.element_count() * size_of::<f32>()) as u64,
            (None, _) => spec.stored_tensors(format).iter().map(StoredTensor::bytes).sum(),
        };
        let state = parameters.state(index);
        // Trained tensors are saved in full precision; under bf16 the optimizer's state holds those values.
        let is_kept_too = parameters.is_trained(index) && !state.contains_key(MASTER);
        let master = if is_kept_too { spec.element_count() * size_of::<f32>() } else { 0 };
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
        ShardRequest::File { folder, stem, of_critic } => state_files::serve(
            folder,
            stem,
            if *of_critic { critic.unwrap_or(parameters) } else { parameters },
            *of_critic,
        ),
        request => parameters.serve(critic, request),
    }
}

/// Restores weights and optimizer state from the checkpoint `folder`, bit for bit. The caller's optimizer
/// must then write the working weights.
///
/// # Errors
/// [`crate::error::BadInput`] when the checkpoint's state does not fit the model.
pub fn restore(folder: &Path, parameters: &mut Parameters) -> Result<()> {
    state_files::restore((folder, STATE_STEM), parameters, false)
}

/// Restores a critic's weights and optimizer state from the checkpoint `folder`, as [`restore`] does for
/// the policy.
///
/// # Errors
/// [`crate::error::BadInput`] when the checkpoint holds no critic, or one that does not fit the model.
pub fn restore_critic(folder: &Path, critic: &mut Parameters) -> Result<()> {
    state_files::restore((folder, CRITIC_STEM), critic, true)
}
