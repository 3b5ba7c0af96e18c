//! Export of a run for other programs: only its adapter, the model with the adapter merged, or a GGUF file.

use super::environment::Environment;
use super::loaded::LoadedModel;
use super::source::ModelSource;
use crate::actor::micro_batch::Sequence;
use crate::actor::{Actor, PassInput, PassSettings, PolicyColumns};
use crate::atomic_file::replace_folder;
use crate::bad_input;
use crate::checkpoint::gguf::{self, GgufFormat, GgufTokenizer};
use crate::checkpoint::merge::{merge, merged_config};
use crate::checkpoint::peft::{self, AdapterFolder};
use crate::checkpoint::save::{SHARD_BYTES_MAX, save};
use crate::integrity::Manifest;
use crate::metrics::Console;
use crate::model::forward::Model;
use crate::model::names::ParameterSpec;
use crate::recipe::Recipe;
use crate::report::model_card;
use crate::rollout::trajectory_file;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Change of log-probabilities when weights are rounded to the saved dtype.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundingError {
    /// Number of sampled tokens that were compared.
    pub tokens: usize,
    /// Largest change of a log-probability, in nats.
    pub largest: f64,
    /// Mean change of a log-probability over the tokens, in nats.
    pub mean: f64,
    /// Mean change of a log-probability by the adapter, in nats: what training changed.
    pub trained_mean: f64,
}

impl RoundingError {
    /// Returns the mean rounding error as a share of what training changed.
    pub fn share(&self) -> f64 {
        if self.mean == 0.0 { 0.0 } else { self.mean / self.trained_mean }
    }
}

/// The file of a model card.
const CARD_FILE: &str = "README.md";

/// Returns an error if the export would overwrite an existing path.
///
/// # Errors
/// [`crate::error::BadInput`] when the path exists.
pub fn refuse_existing(out: &Path) -> Result<()> {
    match out.exists() {
        true => Err(bad_input!("{}: already exists and is not changed; name another folder", out.display())),
        false => Ok(()),
    }
}

/// Returns the error for the export of a model without an adapter.
fn no_adapter_error(recipe: &Recipe) -> anyhow::Error {
    let model =
        recipe.model.path.as_ref().map_or("the recipe's model".to_owned(), |path| path.display().to_string());
    bad_input!(
        "{model}: has no adapter; a checkpoint of full training is already a folder that other programs can read"
    )
}

/// Creates the parent folders of `out`.
fn create_parents(out: &Path) -> Result<()> {
    let Some(parent) = out.parent() else { return Ok(()) };
    std::fs::create_dir_all(parent)
        .map_err(|e| bad_input!("{}: cannot create the folder: {e}; name another", parent.display()))
}

/// Creates the folder `out` atomically, after its parent folders. `fill` writes the contents.
fn write_folder(out: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    create_parents(out)?;
    replace_folder(out, fill)
}

/// Writes the adapter of the recipe's model to `out`, in PEFT's format, with the tokenizer, the chat template
/// and the generation config that belong to it, and with a model card for the run in `run`.
///
/// # Errors
/// [`crate::error::BadInput`] when there is no adapter, or when `model.path` is not the base on which the
/// adapter was trained.
pub fn export_adapter(recipe: &Recipe, run: Option<&Path>, out: &Path) -> Result<()> {
    let source = ModelSource::open(recipe)?;
    let Some(adapter) = &source.adapter else { return Err(no_adapter_error(recipe)) };
    let base = source.base()?.context("an adapter without a base")?;
    let specs = source.specs();
    let mut values = adapter_factors(adapter, &specs)?;
    write_folder(out, |temporary| {
        let mut manifest = Manifest::default();
        peft::write(temporary, &mut manifest, (&adapter.lora, &specs), &base, |name| {
            values.remove(name).with_context(|| format!("no factor {name}"))
        })?;
        source.companions.write(temporary, &source.config, &mut manifest)?;
        if let Some(run) = run {
            let card = model_card(run, "peft")?;
            manifest.write_file(temporary, CARD_FILE, card.as_bytes())?;
        }
        manifest.write(temporary)
    })
}

/// Reads the factors of `adapter`, in working layout, by name.
fn adapter_factors(adapter: &AdapterFolder, specs: &[ParameterSpec]) -> Result<HashMap<String, Vec<f32>>> {
    let names = adapter.lora.factor_specs(specs)?.into_iter().map(|spec| spec.name);
    Ok(names.zip(adapter.read_values(specs)?).collect())
}

/// Writes the adapter of the recipe's model to the GGUF file `out`, in llama.cpp's form. Returns false
/// without doing anything if the model has no adapter.
///
/// # Errors
/// The errors of [`export_adapter`], and [`crate::error::BadInput`] when the adapter has factors of experts.
pub fn write_gguf_adapter(recipe: &Recipe, out: &Path) -> Result<bool> {
    let source = ModelSource::open(recipe)?;
    let Some(adapter) = &source.adapter else { return Ok(false) };
    let mut values = adapter_factors(adapter, &source.specs())?;
    create_parents(out)?;
    gguf::write_adapter(out, &source.config, &adapter.lora, |name| {
        values.remove(name).with_context(|| format!("no factor {name}"))
    })?;
    Ok(true)
}

/// Writes the model to `out` in the recipe's `checkpoint.dtype`, with its adapter merged, and with a model
/// card for the run in `run`. With a file `trajectories`, returns the rounding error on the file's tokens.
///
/// # Errors
/// [`crate::error::BadInput`] when there is no adapter, or when the dtype cannot hold the model.
pub fn export_merged_model(
    loaded: &LoadedModel,
    recipe: &Recipe,
    (run, trajectories): (Option<&Path>, Option<&Path>),
    out: &Path,
    console: &Console,
) -> Result<Option<RoundingError>> {
    let Actor { model, parameters, .. } = &loaded.actor;
    if parameters.adapter().is_none() {
        return Err(no_adapter_error(recipe));
    }
    // A run that was killed may have left an incomplete last line.
    let rows = trajectories.map(|file| trajectory_file::read(file, true)).transpose()?;
    let rows = rows.into_iter().flat_map(|(rows, _)| rows).filter(|row| !row.trajectory.tokens.is_empty());
    let sequences: Vec<Sequence> = rows.map(|row| Sequence::from(&row.trajectory)).collect();
    let format = recipe.checkpoint.dtype;
    let config = merged_config(&model.config, parameters);
    let stage = console.start_inner_stage("writing the merged model", 0);
    write_folder(out, |temporary| {
        let companions = &loaded.companions;
        let mut manifest =
            save(temporary, &config, format, companions, SHARD_BYTES_MAX, |spec| merge(parameters, spec))?;
        if let Some(run) = run {
            manifest.write_file(temporary, CARD_FILE, model_card(run, "transformers")?.as_bytes())?;
        }
        manifest.write(temporary)
    })?;
    stage.finish();
    if sequences.is_empty() {
        return Ok(None);
    }
    let log_probs = |name: &str, actor: &Actor| -> Result<Vec<f32>> {
        let settings = PassSettings::new(recipe.rollout.temperature, Default::default());
        let input = PassInput { sequences: sequences.iter().collect(), ..PassInput::default() };
        let progress = |tokens| console.start_pass(name, tokens);
        Ok(actor.forward::<PolicyColumns>(&input, settings, &progress)?.columns.log_probs)
    };
    let untrained = log_probs("log-probs of the base", &loaded.actor.without_adapter())?;
    let before = log_probs("log-probs with the adapter", &loaded.actor)?;
    // The folder is read back, so that the comparison uses the weights that other programs will read.
    let read = loaded.load_weights_of(&config, recipe, out, console)?;
    let model = Arc::new(Model::new(config, model.context_tokens_max()));
    let merged = Actor::new(model, read, loaded.actor.execution.clone());
    let after = log_probs("log-probs merged", &merged)?;
    let changes = |from: &[f32], to: &[f32]| {
        let changes = from.iter().zip(to).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        changes.fold((0.0, 0f64), |(sum, largest), change| (sum + change, largest.max(change)))
    };
    let (count, (sum, largest)) = (before.len().max(1) as f64, changes(&before, &after));
    Ok(Some(RoundingError {
        tokens: before.len(),
        largest,
        mean: sum / count,
        trained_mean: changes(&untrained, &before).0 / count,
    }))
}

/// Writes the model to the GGUF file `out`, after creating its parent folders. `merges_adapter`: whether the
/// user asked to merge the adapter.
///
/// # Errors
/// [`crate::error::BadInput`] when there is no adapter to merge, and the errors of [`gguf::write`].
pub fn write_gguf_file(
    loaded: &LoadedModel,
    environment: &Environment,
    format: GgufFormat,
    merges_adapter: bool,
    out: &Path,
    console: &Console,
) -> Result<()> {
    let parameters = &loaded.actor.parameters;
    if merges_adapter && parameters.adapter().is_none() {
        return Err(no_adapter_error(environment.recipe()));
    }
    create_parents(out)?;
    let chat = &environment.chat;
    let json = chat.vocabulary().json_bytes();
    let template = loaded.companions.template().unwrap_or_else(|| chat.jinja().to_owned());
    let tokenizer = GgufTokenizer { json, template: &template, tool_use: chat.tool_use_jinja() };
    let _stage = console.start_inner_stage("writing the file", 0);
    let config = &merged_config(loaded.config(), parameters);
    gguf::write(out, config, format, tokenizer, |spec| merge(parameters, spec))
}

/// Returns the newest file of training trajectories. If there is none, returns the newest one of an
/// evaluation.
///
/// # Errors
/// When the folder cannot be read.
pub fn last_trajectories(run: &Path) -> Result<Option<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(run.join("trajectories")) else { return Ok(None) };
    let mut files = vec![];
    for entry in entries {
        let path = entry.with_context(|| format!("{}", run.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".jsonl") {
            files.push((name.starts_with("step-"), name, path));
        }
    }
    files.sort();
    Ok(files.pop().map(|(_, _, path)| path))
}
