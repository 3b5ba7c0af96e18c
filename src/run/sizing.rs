//! Proposes the sizes of a recipe for a model and this machine, so that a step fits into memory and takes
//! minutes.

use super::memory::{MemoryPlan, ModelCommand, available_memory, gigabytes};
use super::preflight::Preflight;
use crate::metrics::Console;
use crate::recipe::{KeyScope, Plan, RecipeSource, resolve_for};
use anyhow::Result;
use std::path::Path;

/// Target time of a training step, in seconds.
const STEP_SECONDS: f64 = 600.0;
/// Floating-point operations per second of one core, roughly.
const CORE_FLOPS: f64 = 2e10;
/// Operations per parameter and sampled token: 2 in sampling, 6 in the update.
const FLOPS_PER_PARAMETER: f64 = 8.0;
/// Share of the free memory to plan for.
const MEMORY_SHARE: f64 = 0.8;
/// Minimum of the proposed maximum of sampled tokens of a trajectory.
const RESPONSE_TOKENS_MIN: usize = 256;
/// Minimum of the proposed group size.
const SAMPLES_MIN: usize = 4;
/// Minimum of the proposed number of prompts per step.
const PROMPTS_MIN: usize = 2;

/// Proposed changes of a recipe.
pub struct Sizing {
    /// Key, value and remark of each change. The remark may be empty.
    pub changes: Vec<(&'static str, String, String)>,
    /// The peak memory of training with the changes, as text.
    pub memory: String,
    /// Threads and memory of this machine, as text.
    pub machine: String,
}

/// Proposes sizes for training the recipe of `source` with `sets`, which name the model. Reads no data and
/// no weights.
///
/// # Errors
/// [`crate::error::BadInput`] for mistakes of the recipe or the model.
pub fn propose(source: &RecipeSource, sets: &[String]) -> Result<Sizing> {
    let plan = source.resolve_for(KeyScope::Export, sets)?;
    let (threads, parameters) = {
        let preflight = preflight(&plan, &[])?;
        let input = preflight.memory_plan_input();
        let parameters: usize = preflight.source.specs().iter().map(|spec| spec.element_count()).sum();
        (input.threads, parameters as f64)
    };
    let free = available_memory();
    let machine = match &free {
        Some(free) => format!("{threads} threads and {} {}", gigabytes(free.bytes), free.limit),
        None => format!("{threads} threads"),
    };
    let bytes = free.map_or(f64::INFINITY, |free| free.bytes as f64 * MEMORY_SHARE);
    let rollout = &plan.recipe.rollout;
    // The sampled tokens of a step are divided into trajectories of a useful length.
    let tokens = STEP_SECONDS * threads as f64 * CORE_FLOPS / (FLOPS_PER_PARAMETER * parameters);
    let response = rollout.response_tokens_max.min(RESPONSE_TOKENS_MIN.max(tokens as usize / 64));
    let trajectories = (tokens as usize / response).max(PROMPTS_MIN * SAMPLES_MIN);
    let samples = rollout.samples_per_prompt.min(SAMPLES_MIN.max(trajectories / 8));
    let prompts = rollout.prompts_per_step.min((trajectories / samples).max(PROMPTS_MIN));
    let mut changes = vec![
        ("rollout.prompts_per_step", prompts.to_string(), String::new()),
        ("rollout.samples_per_prompt", samples.to_string(), String::new()),
        ("rollout.response_tokens_max", response.to_string(), String::new()),
        ("rollout.sequences_max", rollout.sequences_max.min(prompts * samples).to_string(), String::new()),
        (
            "train.micro_batch_tokens",
            plan.recipe.train.micro_batch_tokens.min(2 * (rollout.prompt_tokens_max + response)).to_string(),
            String::new(),
        ),
        (
            "eval.problems_max",
            plan.recipe.eval.problems_max.min(4 * prompts * samples).to_string(),
            String::new(),
        ),
    ];
    let mut peak = peak_bytes(&plan, &changes)?;
    if peak > bytes && plan.recipe.adapter.is_none() {
        let whole = format!("training every weight would take {}", gigabytes(peak as u64));
        changes.push(("adapter.rank", "8".to_owned(), whole));
        changes.push(("adapter.alpha", "16.0".to_owned(), String::new()));
        let rate = "about ten times that of full training".to_owned();
        changes.push(("train.optimizer.lr", format!("{:e}", 10.0 * plan.recipe.train.optimizer.lr), rate));
        peak = peak_bytes(&plan, &changes)?;
    }
    if peak > bytes {
        changes.push(("policy.kl.place", "\"none\"".to_owned(), "keeps no reference".to_owned()));
        changes.push(("train.recompute_layers", "true".to_owned(), String::new()));
        peak = peak_bytes(&plan, &changes)?;
    }
    Ok(Sizing { changes, memory: gigabytes(peak as u64), machine })
}

/// Opens the model of `plan` with `changes`, as training would.
fn preflight(plan: &Plan, changes: &[(&'static str, String, String)]) -> Result<Preflight> {
    let sets: Vec<String> = changes.iter().map(|(key, value, _)| format!("{key}={value}")).collect();
    let plan = resolve_for(KeyScope::Export, Path::new("recipe.toml"), &plan.to_toml(), &sets)?;
    Preflight::open(plan, ModelCommand::Train, &Console::silent())
}

fn peak_bytes(plan: &Plan, changes: &[(&'static str, String, String)]) -> Result<f64> {
    Ok(MemoryPlan::new(&preflight(plan, changes)?.memory_plan_input()).peak_bytes() as f64)
}
