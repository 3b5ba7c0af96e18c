//! `rloss sft MODEL --data FILE`: supervised fine-tuning on conversations. It is the SFT warm-up of
//! `rloss train` (`[cold_start]`), without reinforcement learning after it.

use super::train::{Resume, StartingWeights, run_source};
use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use crate::commands::arguments::{RunArgs, absolute_path_text, locate_recipe_or_model, name_of, recipe_help};
use crate::dist::Mesh;
use crate::recipe::{RecipeSource, override_key};
use crate::tasks::{TaskSettings, rows};
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};

/// Default number of passes over the rows.
const EPOCHS: u64 = 3;

/// The form of a row, for messages.
const ROW_FORMAT: &str = "{\"messages\": [...]}";

/// The recipe for a model's folder or file. The task is not used.
const MODEL_RECIPE: RecipeSource =
    RecipeSource::BuiltIn { name: "rloss sft", text: "task.name = \"arithmetic_single\"\n" };

/// Returns the task in the recipe of a run that started from a model's folder or file.
///
/// # Errors
/// None in practice: the recipe is a constant.
pub(super) fn unused_task() -> Result<TaskSettings> {
    Ok(MODEL_RECIPE.resolve(&[])?.recipe.task)
}

/// Arguments of `rloss sft`.
#[derive(Args, Debug, Clone)]
pub struct SftArgs {
    #[arg(help = format!("A model folder or a GGUF file, or one of these: {}", recipe_help()))]
    recipe: PathBuf,
    /// JSONL file with rows {"messages": [...]}; an assistant message with "weight": 0 is not learned
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// JSONL file with rows whose loss is measured after each epoch
    #[arg(long, value_name = "FILE")]
    validation: Option<PathBuf>,
    /// Passes over the rows [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    epochs: Option<u64>,
    /// Replace a recipe's value, such as --set cold_start.optimizer.lr=1e-5 or --set adapter.rank=16
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Folder for the results [default: runs/NAME-sft]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Resume the run in the folder from its last checkpoint; with =auto, start a run if there is none
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    resume: Option<Resume>,
    /// Resume although rows or templates changed, with the same number of steps; the run records the changes
    #[arg(long, requires = "resume")]
    accept_changes: bool,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    trust: bool,
}

/// Fine-tunes a model. The exit code is 130 if a signal stopped the run after a checkpoint.
///
/// # Errors
/// [`crate::error::BadInput`] before any work. Other errors leave the last checkpoint intact.
pub fn run(args: &SftArgs) -> Result<u8> {
    let mesh = Mesh::connect()?;
    let (source, run) = mesh.require_success("the recipe", resolve(args))?;
    run_source(mesh, &source, &run, (args.resume, args.accept_changes), StartingWeights::Checkpoint)
}

/// Returns the recipe, and the arguments with which `rloss train` would do the same.
fn resolve(args: &SftArgs) -> Result<(RecipeSource, RunArgs)> {
    let (source, name, mut sets) = match locate_recipe_or_model(&args.recipe)? {
        Some(source) => (source.clone(), source.stem(), vec![]),
        None => (MODEL_RECIPE, name_of(&args.recipe), vec![file_set("model.path", &args.recipe)?]),
    };
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(format!("{name}-sft")));
    let has_set = |key: &str| args.sets.iter().any(|set| override_key(set) == Some(key));
    if args.epochs.is_some() && has_set("cold_start.steps") {
        return Err(bad_input!("--epochs and cold_start.steps both set the length; leave one of them out"));
    }
    sets.extend(args.sets.iter().cloned());
    sets.push("train.steps=0".into());
    sets.push(file_set("cold_start.train_file", &args.data)?);
    if let Some(validation) = &args.validation {
        sets.push(file_set("cold_start.validation_file", validation)?);
        if !has_set("cold_start.validation_rows_max") {
            let rows = rows::read(validation, None, ROW_FORMAT, |_| Ok(()))?.len();
            sets.push(format!("cold_start.validation_rows_max={rows}"));
        }
    }
    let mut sets_with_a_length = sets.clone();
    if !has_set("cold_start.steps") {
        sets_with_a_length.push("cold_start.steps=1".into());
    }
    let recipe = source.resolve(&sets_with_a_length)?.recipe;
    let row_count = rows::read(&args.data, None, ROW_FORMAT, |_| Ok(()))?.len();
    let examples = row_count as u64 * args.epochs.unwrap_or(EPOCHS);
    let mut batch_size = recipe.cold_start.batch_size.min(row_count);
    if !has_set("cold_start.steps") {
        // Batches of one size end with the last epoch, or a few rows after it.
        if !has_set("cold_start.batch_size") {
            batch_size = examples.div_ceil(examples.div_ceil(batch_size as u64)) as usize;
        }
        sets.push(format!("cold_start.batch_size={batch_size}"));
        sets.push(format!("cold_start.steps={}", examples.div_ceil(batch_size as u64)));
    }
    if args.validation.is_some() && !has_set("cold_start.eval_every_steps") {
        sets.push(format!("cold_start.eval_every_steps={}", row_count.div_ceil(batch_size)));
    }
    if args.accept_changes {
        // With changed rows, the run keeps its number of steps.
        let text = bounded_file::read_text(&out.join("recipe.toml"), TOML_BYTES_MAX).unwrap_or_default();
        let stored = text.parse::<toml::Table>().unwrap_or_default();
        let keys = ["steps", "batch_size", "eval_every_steps", "validation_rows_max"];
        let value = |key| Some((format!("cold_start.{key}"), stored.get("cold_start")?.get(key)?));
        let kept = keys.into_iter().filter_map(value).filter(|(key, _)| !has_set(key));
        sets.extend(kept.map(|(key, value)| format!("{key}={value}")));
    }
    // Without this key, an adapter would be attached only after the warm-up.
    if recipe.adapter.is_some() && !has_set("adapter.cold_start") {
        sets.push("adapter.cold_start=true".into());
    }
    let run = RunArgs { recipe: args.recipe.clone(), sets, out: Some(out), trust: args.trust };
    Ok((source, run))
}

/// Returns the argument of `--set` that sets `key` to the absolute form of `path`.
fn file_set(key: &str, path: &Path) -> Result<String> {
    Ok(format!("{key}={}", absolute_path_text(path, "file")?))
}
