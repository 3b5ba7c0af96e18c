//! `rloss export RUN --out FOLDER`: exports a run's adapter for other programs, alone or merged into its
//! base.

use crate::error::EXIT_DONE;
use crate::metrics::{Console, sanitize_terminal};
use crate::recipe::{KeyScope, RecipeSource, locate};
use crate::run::collect::show;
use crate::run::context::RunContext;
use crate::run::export;
use crate::run::memory::Intent;
use crate::run::source::pin_model;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// Arguments of `rloss export`.
#[derive(Args, Debug, Clone)]
pub struct ExportArgs {
    /// A run folder (its last checkpoint) or a checkpoint, of a run with an adapter
    run: PathBuf,
    /// Write a whole model with the adapter merged into its weights, in checkpoint.dtype
    #[arg(long)]
    merged: bool,
    /// Replace a recipe's value, such as --set checkpoint.dtype=f32
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// The folder to write
    #[arg(long)]
    out: PathBuf,
}

/// Writes the folder and lists its files. For a merged model, also prints the rounding error.
///
/// # Errors
/// [`crate::error::BadInput`] before anything is written.
pub fn run(args: &ExportArgs) -> Result<u8> {
    export::refuse_existing(&args.out)?;
    let source = locate(&args.run)?;
    let mut plan = source.resolve_for(KeyScope::Export, &args.sets)?;
    pin_model(&mut plan, &source, &args.sets)?;
    let shown = args.out.display().to_string();
    let shown = sanitize_terminal(&shown);
    if !args.merged {
        export::adapter(&plan.recipe, &args.out)?;
        show(&format!("{shown}: the adapter, in PEFT's form\n"))?;
        return Ok(EXIT_DONE);
    }
    let console = Console::stderr(plan.recipe.logging.console_every_steps);
    let context = RunContext::open(plan, Intent::Rollout, &console)?;
    let trajectories = match &source {
        RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. } => export::last_trajectories(run)?,
        RecipeSource::File(_) | RecipeSource::BuiltIn { .. } => None,
    };
    let cost = export::merged_model(&context, trajectories.as_deref(), &args.out, &console)?;
    let dtype = context.recipe().checkpoint.dtype;
    show(&match cost {
        Some(cost) => format!(
            "{shown}: the model with its adapter merged in, {dtype}; against the two side by side the log-probabilities of {} \
             sampled tokens change by {:.2e} at most, {:.2e} in the mean\n",
            cost.tokens, cost.largest, cost.mean
        ),
        None => format!(
            "{shown}: the model with its adapter merged in, {dtype}; what rounding cost is not measured, for the run keeps no \
             trajectories\n"
        ),
    })?;
    Ok(EXIT_DONE)
}
