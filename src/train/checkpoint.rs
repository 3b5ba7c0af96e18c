//! Checkpoints: written aside, synced and renamed, so that a kill at any moment leaves whole ones only.
//!
//! A checkpoint is a Hugging Face folder (`config.json`, safetensors, tokenizer) with two files more:
//! `trainer.json` says where the run stood, `trainer.safetensors` holds the optimizer's state: f32, and codes of 8 bits.
//! A critic adds a third, `critic.safetensors`: its weights and its optimizer's state.
//! `trainer.toml` is the recipe as resolved. `manifest.b3`, written last, holds the digest of every other file.
//! Random numbers need no state: they are functions of the seed and the step.

mod list;

pub use list::{
    ResumePoint, clear_partial, each, folder_name, holds_state, newest, newest_folder, read_state, sound,
};

use super::critic::Critic;
use super::optimizer::Optimizer;
use crate::atomic_file::{remove_folder, replace_folder};
use crate::bad_input;
use crate::integrity::{Manifest, sealed};
use crate::metrics::Phase;
use crate::model::adapter::{Base, Lora, peft};
use crate::model::config::{Config, Form};
use crate::model::names::{ParameterSpec, StoredTensor, TensorRole, parameter_specs};
use crate::model::parameters::{MASTER, Parameters};
use crate::model::save::{Companions, SHARD_BYTES_MAX, save, save_without_weights};
use crate::model::tensor_file::{TensorFile, f32_values, write_f32, write_tensors};
use crate::ops::cpu::{edit, edit_codes, host_codes, host_values};
use crate::ops::mxfp4;
use anyhow::{Context, Result};
use blake3::Hash;
use candle_core::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const STATE_FILE: &str = "trainer.json";
const TENSORS_FILE: &str = "trainer.safetensors";
const CRITIC_FILE: &str = "critic.safetensors";
const RECIPE_FILE: &str = "trainer.toml";

/// Where a run stood.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// The stage: cold start or reinforcement learning.
    pub phase: Phase,
    /// Steps of that stage that are done.
    pub step: u64,
    /// Updates that the stage's optimizer made.
    pub updates: u64,
    /// Updates that the critic's optimizer made; 0 without one.
    #[serde(default)]
    pub critic_updates: u64,
    /// Length of `metrics.jsonl` at this point, bytes.
    pub metrics_bytes: u64,
    /// The digest of that much of it; none in a checkpoint without a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "list::hexadecimal")]
    pub metrics_digest: Option<Hash>,
    /// The digest of the run's frozen reference, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "list::hexadecimal")]
    pub reference_digest: Option<Hash>,
    /// What the coefficient of `policy.kl` was steered to, where it is steered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_coefficient: Option<f64>,
}

/// Removes all but the `keep` newest checkpoints of `run`.
///
/// # Errors
/// When the disk refuses.
pub fn prune(run: &Path, keep: usize) -> Result<()> {
    let mut old = list::all(run)?;
    old.truncate(old.len().saturating_sub(keep.max(1)));
    old.iter().try_for_each(|folder| remove_folder(folder))
}

/// What a checkpoint holds.
pub struct Snapshot<'a> {
    pub config: &'a Config,
    pub form: Form,
    pub companions: &'a Companions,
    pub parameters: &'a Parameters,
    /// What an adapter among them stands on.
    pub base: Option<&'a Base>,
    pub critic: Option<&'a Critic>,
    /// The recipe as resolved.
    pub recipe: &'a str,
    pub state: TrainerState,
}

impl Snapshot<'_> {
    /// Writes the checkpoint into `run` and removes all but the `keep` newest.
    ///
    /// # Errors
    /// When the disk refuses; checkpoints that were there stay whole.
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
            None => save(aside, self.config, self.form, self.companions, SHARD_BYTES_MAX, |spec| {
                let index = self
                    .parameters
                    .position(&spec.name)
                    .with_context(|| format!("no tensor {}", spec.name))?;
                match self.parameters.packed(index) {
                    None => self.parameters.whole(index, MASTER),
                    Some(packed) => packed.decoded(spec),
                }
            })?,
        };
        // A frozen tensor is in the model's own files; only where those round it is it kept beside them too. An adapter's base is
        // in its own folder.
        let adapted = self.parameters.adapter().is_some();
        let rounded = |spec: &ParameterSpec, values: &[f32]| !adapted && !self.form_keeps(spec, values);
        manifest.note(TENSORS_FILE, write_state(&aside.join(TENSORS_FILE), self.parameters, &rounded)?);
        if let Some(critic) = self.critic {
            let digest = write_state(&aside.join(CRITIC_FILE), &critic.parameters, &|_, _| true)?;
            manifest.note(CRITIC_FILE, digest);
        }
        manifest.write_file(aside, RECIPE_FILE, sealed(self.recipe).as_bytes())?;
        let state = serde_json::to_string_pretty(&self.state)? + "\n";
        manifest.write_file(aside, STATE_FILE, state.as_bytes())?;
        manifest.write(aside)
    }

    /// An adapter's folder, with the config and the tokenizer of its base.
    fn save_adapter(&self, aside: &Path, lora: &Lora) -> Result<Manifest> {
        let base = self.base.context("an adapter without a base")?;
        let mut manifest = Manifest::default();
        peft::write(aside, &mut manifest, (lora, &parameter_specs(self.config)), base, |name| {
            let index = self.parameters.position(name).with_context(|| format!("no tensor {name}"))?;
            Ok(self.parameters.whole(index, MASTER)?.flatten_all()?.to_vec1()?)
        })?;
        save_without_weights(aside, self.config, self.form, self.companions, &mut manifest)?;
        Ok(manifest)
    }

    /// Whether the saved weights hold `values` of a tensor to the bit.
    fn form_keeps(&self, spec: &ParameterSpec, values: &[f32]) -> bool {
        match (self.form, spec.stored_shape.as_slice()) {
            (Form::F32, _) => true,
            (Form::Mxfp4, &[experts, input, output]) => {
                let shape = [experts, input, output];
                let (blocks, scales) = mxfp4::encode(values, shape);
                mxfp4::decode(&blocks, &scales, shape) == values
            }
            _ => values.iter().all(|&v| half::bf16::from_f32(v).to_f32() == v),
        }
    }
}

/// About how many bytes a checkpoint of `parameters`, with their optimizer's state, takes; the small files left out.
pub fn bytes(form: Form, parameters: &Parameters) -> u64 {
    let of = |(index, spec): (usize, &ParameterSpec)| {
        let stored: u64 = match (parameters.adapter(), spec.role) {
            // The base stays where it is.
            (Some(_), role) if role != TensorRole::AdapterFactor => 0,
            (Some(_), _) => (spec.element_count() * size_of::<f32>()) as u64,
            (None, _) => spec.stored_tensors(form).iter().map(StoredTensor::bytes).sum(),
        };
        let state = parameters.state(index);
        // What learns is kept with all its digits; under bf16 the optimizer's state has them.
        let is_kept_too = parameters.learns(index) && !state.contains_key(MASTER);
        let master = if is_kept_too { spec.element_count() * size_of::<f32>() } else { 0 };
        let kept = |kind: &&str| {
            parameters.kept(index, kind).map_or(0, |(dtype, length)| length * dtype.size_in_bytes())
        };
        stored + (master + state.keys().map(kept).sum::<usize>()) as u64
    };
    parameters.specs.iter().enumerate().map(of).sum()
}

/// The type in a file of what an optimizer keeps.
fn stored_dtype(dtype: DType) -> Dtype {
    if dtype == DType::U8 { Dtype::U8 } else { Dtype::F32 }
}

/// Writes into the file `path`, a tensor at a time, what the optimizer keeps of each tensor that learns, its master among it,
/// and those frozen tensors that `keep` asks for.
fn write_state(
    path: &Path,
    parameters: &Parameters,
    keep: &dyn Fn(&ParameterSpec, &[f32]) -> bool,
) -> Result<Hash> {
    // By name in the file: the tensor, and what is kept of it.
    let mut kept: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for (index, spec) in parameters.specs.iter().enumerate() {
        // What is packed is in the files that the model was read from.
        let Ok(values) = parameters.values(index) else { continue };
        if parameters.learns(index) || keep(spec, &host_values(values)?) {
            kept.insert(format!("{MASTER}.{}", spec.name), (index, MASTER));
        }
        for name in parameters.state(index).keys() {
            kept.insert(format!("{name}.{}", spec.name), (index, name));
        }
    }
    let stored = kept.iter().map(|(name, &(index, kind))| {
        let (dtype, length) = parameters.kept(index, kind)?;
        Ok(StoredTensor { name: name.clone(), dtype: stored_dtype(dtype), shape: vec![length] })
    });
    let stored = stored.collect::<Result<_>>()?;
    let places: Vec<(usize, &str)> = kept.into_values().collect();
    write_tensors(path, stored, |place, out| {
        let (index, kind) = places[place];
        let tensor = parameters.whole(index, kind)?;
        match tensor.dtype() {
            DType::U8 => Ok(out.write_all(&host_codes(&tensor)?)?),
            _ => write_f32(out, &host_values(&tensor)?),
        }
    })
}

/// Restores weights and optimizer from the checkpoint `folder`, bit for bit.
///
/// # Errors
/// [`crate::error::BadInput`] when the checkpoint's state does not fit the model.
pub fn restore(folder: &Path, parameters: &mut Parameters, optimizer: &Optimizer) -> Result<()> {
    restore_state(&folder.join(TENSORS_FILE), parameters, optimizer, false)
}

/// Restores the critic of the checkpoint `folder`, bit for bit.
///
/// # Errors
/// [`crate::error::BadInput`] when the checkpoint holds no critic, or one that does not fit the model.
pub fn restore_critic(folder: &Path, critic: &mut Critic) -> Result<()> {
    restore_state(&folder.join(CRITIC_FILE), &mut critic.parameters, &critic.optimizer, true)
}

/// Reads what [`write_state`] wrote, a tensor at a time. With `whole` every frozen tensor must be there too.
fn restore_state(path: &Path, parameters: &mut Parameters, optimizer: &Optimizer, whole: bool) -> Result<()> {
    let damaged = |what: String| bad_input!("{}: {what}; {}", path.display(), list::REMEDY);
    let file = TensorFile::open(path).map_err(|e| damaged(format!("{e:#}")))?;
    let names = file.metadata.offset_keys();
    let mut unread: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    for (index, spec) in parameters.specs.iter().enumerate() {
        if parameters.values(index).is_err() {
            continue;
        }
        let kinds = parameters.state(index).keys().copied().chain([MASTER]).collect::<BTreeSet<_>>();
        for kind in kinds {
            let name = format!("{kind}.{}", spec.name);
            let Some(info) = file.metadata.info(&name) else {
                if parameters.learns(index) || whole {
                    return Err(damaged(format!("{} is missing", spec.name)));
                }
                continue;
            };
            unread.remove(name.as_str());
            let bytes = file.read(info)?;
            let target =
                if kind == MASTER { parameters.master(index)? } else { &parameters.state(index)[kind] };
            let (dtype, length) = parameters.kept(index, kind)?;
            if info.dtype != stored_dtype(dtype) || bytes.len() != length * dtype.size_in_bytes() {
                return Err(damaged(format!("{} has another size or optimizer", spec.name)));
            }
            let own = parameters.own_part(index, kind, length);
            if info.dtype == Dtype::U8 {
                edit_codes(target, |target| {
                    target.copy_from_slice(&bytes[own]);
                    Ok(())
                })?;
                continue;
            }
            if let Some(value) = f32_values(&bytes).find(|value| !value.is_finite()) {
                return Err(damaged(format!("{name} holds {value}")));
            }
            edit(target, |target| {
                target.iter_mut().zip(f32_values(&bytes).skip(own.start)).for_each(|(t, v)| *t = v);
                Ok(())
            })?;
        }
    }
    // Another optimizer's state of a tensor that learns would be lost in silence. One without values says nothing.
    let lost = unread.into_iter().find(|name| file.metadata.info(name).is_some_and(|i| i.shape != [0]));
    if let Some(name) = lost {
        return Err(damaged(format!("{name} belongs to another model or optimizer")));
    }
    optimizer.write_weights(parameters)
}
