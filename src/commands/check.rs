//! `rloss check RECIPE|RUN`: what a recipe comes to, before anything is done.

use crate::commands::arguments::RecipeArgs;
use crate::error::EXIT_DONE;
use crate::metrics::{Console, sanitize_terminal};
use crate::recipe::{Plan, locate};
use crate::run::collect::{pin_model, show};
use crate::run::memory::{Intent, MemoryPlan, available, gigabytes};
use crate::run::preflight::Preflight;
use anyhow::Result;

/// Prints the recipe as resolved, its warnings, the first prompt as rendered and the plan of memory of each command.
/// Nothing is trained, sampled or written, and no weights are read.
///
/// # Errors
/// [`crate::error::BadInput`] with every mistake of the recipe, its model and its task, and when training, or sampling where
/// nothing is trained, would not fit into memory.
pub fn run(args: &RecipeArgs) -> Result<u8> {
    let source = locate(&args.recipe)?;
    let mut plan = source.resolve(&args.sets)?;
    pin_model(&mut plan, &source, &args.sets)?;
    let console = Console::stderr(plan.recipe.logging.console_every_steps);
    let preflight = Preflight::open(plan, Intent::Train, &console)?;
    show(&sanitize_terminal(&resolved(&preflight.plan)))?;
    show(&sanitize_terminal(&first_prompt(&preflight)?))?;
    memory(&preflight)
}

/// The recipe, and what is likely not meant.
fn resolved(plan: &Plan) -> String {
    let warnings: String = plan.warnings.iter().map(|warning| format!("\nwarning: {warning}\n")).collect();
    format!("{}{warnings}", plan.to_toml())
}

fn first_prompt(preflight: &Preflight) -> Result<String> {
    let (text, tokens) = preflight.first_prompt()?;
    Ok(format!("\nFirst prompt of {}, {tokens} tokens:\n\n{text}\n", preflight.task.name()))
}

/// The plan of training in full, or of sampling where nothing is trained, and the peaks of the other commands.
fn memory(preflight: &Preflight) -> Result<u8> {
    let first = if preflight.plan.recipe.trains() { Intent::Train } else { Intent::Rollout };
    let subject = preflight.subject_of(first);
    let plan = MemoryPlan::new(&subject);
    show(&format!("\nMemory that `rloss {}` takes at most:\n\n{plan}\n", first.name()))?;
    for intent in [Intent::Eval, Intent::Rollout, Intent::CheckMismatch] {
        let peak = MemoryPlan::new(&preflight.subject_of(intent)).peak_bytes();
        show(&format!("`rloss {}`: {}\n", intent.name(), gigabytes(peak)))?;
    }
    let available = available();
    if let Some(found) = &available {
        show(&format!("There are {} {}.\n", gigabytes(found.bytes), found.bound))?;
    }
    if let Some(warning) = plan.admit(available.as_ref(), &subject.remedies())? {
        show(&format!("warning: {warning}\n"))?;
    }
    Ok(EXIT_DONE)
}
