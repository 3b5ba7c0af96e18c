//! Checkpoints: written aside, synced and renamed, so that a kill at any moment leaves whole ones only.
//!
//! A checkpoint is a Hugging Face folder (`config.json`, safetensors, tokenizer) with two files more:
//! `trainer.json` says where the run stood, `trainer.safetensors` holds the optimizer's f32 state. A critic adds a third,
//! `critic.safetensors`: its weights and its optimizer's state, f32.
//! Random numbers need no state: they are functions of the seed and the step.

use super::critic::Critic;
use super::optimizer::Optimizer;
use crate::atomic_file::{is_partial, replace_folder};
use crate::bad_input;
use crate::metrics::Phase;
use crate::model::config::{Config, Form};
use crate::model::held::Held;
use crate::model::names::{ParameterSpec, StoredTensor};
use crate::model::parameters::{MASTER, Parameters};
use crate::model::save::{Companions, SHARD_BYTES_MAX, save};
use crate::model::tensor_file::{TensorFile, f32_values, write_f32, write_tensors};
use crate::ops::cpu::{edit, host_values};
use crate::ops::mxfp4;
use anyhow::{Context, Result};
use candle_core::Tensor;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const STATE_FILE: &str = "trainer.json";
const TENSORS_FILE: &str = "trainer.safetensors";
const CRITIC_FILE: &str = "critic.safetensors";

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
    /// What the coefficient of `policy.kl` was steered to, where it is steered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_coefficient: Option<f64>,
}

/// The name of a checkpoint's folder: `step-NNNNNN`, or `cold-start-NNNNNN` before reinforcement learning.
pub fn folder_name(phase: Phase, step: u64) -> String {
    let stem = if phase == Phase::ColdStart { "cold-start" } else { "step" };
    format!("{stem}-{step:06}")
}

/// The last whole checkpoint of the run folder `run`, if it has any.
///
/// # Errors
/// When a checkpoint's `trainer.json` cannot be read.
pub fn latest(run: &Path) -> Result<Option<PathBuf>> {
    Ok(all(run)?.pop().map(|(_, folder)| folder))
}

/// Every whole checkpoint of `run`, oldest first.
fn all(run: &Path) -> Result<Vec<(TrainerState, PathBuf)>> {
    let mut found = vec![];
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Ok(found) };
    for entry in entries {
        let folder = entry.with_context(|| format!("{}", run.display()))?.path();
        let hidden = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if !hidden && folder.join(STATE_FILE).is_file() {
            found.push((read_state(&folder)?, folder));
        }
    }
    found.sort_by_key(|(state, _)| (state.phase != Phase::ColdStart, state.step));
    Ok(found)
}

/// Whether `folder` is a checkpoint of a run, and not just a model.
pub fn holds_state(folder: &Path) -> bool {
    folder.join(STATE_FILE).is_file()
}

/// Removes what a kill left half written in the run folder `run`.
///
/// # Errors
/// When a folder cannot be removed.
pub fn clear_partial(run: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Ok(()) };
    for entry in entries {
        let folder = entry.with_context(|| format!("{}", run.display()))?.path();
        if folder.file_name().is_some_and(is_partial) {
            fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        }
    }
    Ok(())
}

/// Reads where the run stood at the checkpoint `folder`.
///
/// # Errors
/// [`crate::error::BadInput`] when the file is missing or damaged.
pub fn read_state(folder: &Path) -> Result<TrainerState> {
    let path = folder.join(STATE_FILE);
    let text =
        fs::read_to_string(&path).map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| {
        bad_input!("{}: damaged: {e}; remove this checkpoint to go on from the one before", path.display())
    })
}

/// What a checkpoint holds.
pub struct Snapshot<'a> {
    pub config: &'a Config,
    pub form: Form,
    pub companions: &'a Companions,
    pub parameters: &'a Parameters,
    pub critic: Option<&'a Critic>,
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
        let mut old = all(run)?;
        old.truncate(old.len().saturating_sub(keep.max(1)));
        for (_, folder) in old {
            fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        }
        Ok(target)
    }

    fn fill(&self, aside: &Path) -> Result<()> {
        save(aside, self.config, self.form, self.companions, SHARD_BYTES_MAX, |spec| {
            let index =
                self.parameters.position(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
            match self.parameters.of_place(index)? {
                Held::Plain(_) => Ok(self.parameters.master(index)?.clone()),
                packed => packed.decoded(spec),
            }
        })?;
        // A frozen tensor is in the model's own files; only where those round it is it kept beside them too.
        let rounded = |spec: &ParameterSpec, values: &[f32]| !self.form_keeps(spec, values);
        write_state(&aside.join(TENSORS_FILE), self.parameters, &rounded)?;
        if let Some(critic) = self.critic {
            write_state(&aside.join(CRITIC_FILE), &critic.parameters, &|_, _| true)?;
        }
        let state = aside.join(STATE_FILE);
        fs::write(&state, serde_json::to_string_pretty(&self.state)? + "\n")?;
        Ok(File::open(&state)?.sync_all()?)
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

/// Writes into the file `path`, a tensor at a time, what the optimizer keeps of each tensor that learns, its master among it,
/// and those frozen tensors that `keep` asks for.
fn write_state(
    path: &Path,
    parameters: &Parameters,
    keep: &dyn Fn(&ParameterSpec, &[f32]) -> bool,
) -> Result<()> {
    let mut kept: BTreeMap<String, &Tensor> = BTreeMap::new();
    for (index, spec) in parameters.specs.iter().enumerate() {
        // What is packed is in the files that the model was read from.
        let Ok(values) = parameters.values(index) else { continue };
        if parameters.learns(index) || keep(spec, &host_values(values)?) {
            kept.insert(format!("{MASTER}.{}", spec.name), parameters.master(index)?);
        }
        for (name, tensor) in parameters.state(index) {
            kept.insert(format!("{name}.{}", spec.name), tensor);
        }
    }
    let (names, tensors): (Vec<String>, Vec<&Tensor>) = kept.into_iter().unzip();
    let stored = names.into_iter().zip(&tensors).map(|(name, tensor)| StoredTensor {
        name,
        dtype: Dtype::F32,
        shape: vec![tensor.elem_count()],
    });
    write_tensors(path, stored.collect(), |index, out| write_f32(out, &host_values(tensors[index])?))
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
    let damaged = |what: String| {
        bad_input!("{}: {what}; remove this checkpoint to go on from the one before", path.display())
    };
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
            let values = file.read(info)?;
            if info.dtype != Dtype::F32 || values.len() != spec.element_count() * size_of::<f32>() {
                return Err(damaged(format!("{} has another size or optimizer", spec.name)));
            }
            let target =
                if kind == MASTER { parameters.master(index)? } else { &parameters.state(index)[kind] };
            edit(target, |target| {
                target.iter_mut().zip(f32_values(&values)).for_each(|(t, v)| *t = v);
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
