//! Proposes the sizes in a recipe for a model and this machine, so that a step fits in memory and takes
//! minutes.

use super::memory::{ModelCommand, available_memory, gigabytes};
use super::startup::Startup;
use crate::metrics::{Console, format_count};
use crate::recipe::{KeyScope, resolve_for};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Target time of a training step, in seconds.
const STEP_SECONDS: f64 = 600.0;
/// Approximate floating-point operations per second of one core.
const CORE_FLOPS: f64 = 2e10;
/// Operations per parameter and sampled token: 2 in sampling, 6 in the update.
const FLOPS_PER_PARAMETER: f64 = 8.0;
/// Fraction of the free memory to plan for.
const MEMORY_SHARE: f64 = 0.8;
/// Smallest saving of memory, as a fraction of the peak, for which sampling is slowed down.
const SAVING_MIN: f64 = 0.02;
/// Smallest `response_tokens_max` that is proposed.
const RESPONSE_TOKENS_MIN: usize = 256;
/// Mean length of a trajectory as a fraction of the maximum. It was 0.58 for Qwen2.5-0.5B on GSM8K.
const MEAN_LENGTH: f64 = 0.6;
/// Smallest `samples_per_prompt` that is proposed.
const SAMPLES_MIN: usize = 4;
/// Smallest `prompts_per_step` that is proposed.
const PROMPTS_MIN: usize = 2;

/// Proposed steps between two checkpoints, because a step takes minutes.
const CHECKPOINT_STEPS: u64 = 5;
/// Maximum parameters of a toy model. A larger model does not learn at a toy model's learning rate.
const TOY_PARAMETERS: f64 = 1e7;
/// Usual learning rate of LoRA for a model of more than [`TOY_PARAMETERS`].
const LORA_RATE: f64 = 1e-4;
/// A higher rate of the SFT warm-up is that of a toy model.
const TOY_RATE: f64 = 1e-3;
/// Usual learning rate of full training for a model of more than [`TOY_PARAMETERS`].
const FULL_RATE: f64 = 1e-6;

/// Proposed changes to a recipe.
pub struct Sizing {
    /// Key, value and remark of each change. The remark may be empty.
    pub changes: Vec<(&'static str, String, String)>,
    /// The peak memory of training with the changes, as text.
    pub memory: String,
    /// Whether training with the changes fits in this machine's free memory.
    pub fits: bool,
    /// Threads and memory of this machine, as text.
    pub machine: String,
    /// The proposed `response_tokens_max` and that of the recipe, if the proposed one is smaller.
    pub shorter_response: Option<(usize, usize)>,
    /// The recipe's missing data files, and the argument of `rloss fetch` that fetches them. The argument is
    /// empty if `rloss fetch` cannot fetch them.
    pub missing_data: (Vec<PathBuf>, &'static str),
}

/// Proposes sizes for training the recipe `text`, which names a base and the model, and will be written to
/// `file`. Reads neither data nor weights.
///
/// # Errors
/// [`crate::error::BadInput`] for mistakes in the recipe or the model.
pub fn propose_sizes(file: &Path, text: &str) -> Result<Sizing> {
    let plan = resolve_for(KeyScope::Export, file, text, &[])?;
    let (threads, parameters, context, has_blocks) = {
        let startup = open_startup(file, text, &[])?;
        let input = startup.memory_plan_input();
        let parameters: usize = startup.source.specs().iter().map(|spec| spec.element_count()).sum();
        let context = startup.source.config.max_position_embeddings;
        (input.threads, parameters as f64, context, input.blocks_note().is_some())
    };
    let free = available_memory();
    let cores = format_count(threads as u64, "thread");
    let machine = match &free {
        Some(free) => format!("{cores} and {} {}", gigabytes(free.bytes), free.limit),
        None => cores,
    };
    let bytes = free.as_ref().map_or(f64::INFINITY, |free| free.bytes as f64 * MEMORY_SHARE);
    let rollout = &plan.recipe.rollout;
    // The number of sampled tokens per step is divided into trajectories of a useful length.
    let tokens = STEP_SECONDS * threads as f64 * CORE_FLOPS / (FLOPS_PER_PARAMETER * parameters);
    let longest = (tokens / (MEAN_LENGTH * (PROMPTS_MIN * SAMPLES_MIN) as f64)) as usize;
    let room = context.saturating_sub(rollout.prompt_tokens_max).max(context / 2);
    let longest = RESPONSE_TOKENS_MIN.max(longest / RESPONSE_TOKENS_MIN * RESPONSE_TOKENS_MIN);
    let response = rollout.response_tokens_max.min(longest).min(room);
    let trajectories = ((tokens / (MEAN_LENGTH * response as f64)) as usize).max(PROMPTS_MIN * SAMPLES_MIN);
    let samples = rollout.samples_per_prompt.min(SAMPLES_MIN.max(trajectories / 8));
    let prompts = rollout.prompts_per_step.min((trajectories / samples).max(PROMPTS_MIN));
    let from = |before: usize, now: usize| {
        if now < before { format!("{before} in the base") } else { String::new() }
    };
    let response_remark = match response < rollout.response_tokens_max {
        true => format!("{}: longer answers are truncated", from(rollout.response_tokens_max, response)),
        false => String::new(),
    };
    let mut changes = vec![
        ("rollout.prompts_per_step", prompts.to_string(), from(rollout.prompts_per_step, prompts)),
        ("rollout.samples_per_prompt", samples.to_string(), from(rollout.samples_per_prompt, samples)),
        ("rollout.response_tokens_max", response.to_string(), response_remark),
        ("rollout.sequences_max", rollout.sequences_max.min(prompts * samples).to_string(), String::new()),
        (
            "train.micro_batch_tokens",
            plan.recipe
                .train
                .micro_batch_tokens
                .min((2 * (rollout.prompt_tokens_max + response)).next_multiple_of(RESPONSE_TOKENS_MIN))
                .to_string(),
            String::new(),
        ),
        (
            "eval.problems_max",
            plan.recipe.eval.problems_max.min(4 * prompts * samples).to_string(),
            String::new(),
        ),
    ];
    let minibatches = |key, before: usize| {
        (before > prompts * samples).then(|| (key, (prompts * samples).to_string(), from(before, 0)))
    };
    changes.extend(minibatches("train.minibatches", plan.recipe.train.minibatches));
    let critic = plan.recipe.critic.as_ref();
    changes.extend(critic.and_then(|critic| minibatches("critic.minibatches", critic.minibatches)));
    let buffer = plan.recipe.policy.overlong.buffer_tokens;
    if buffer > response {
        let scaled = buffer * response / rollout.response_tokens_max;
        changes.push(("policy.overlong.buffer_tokens", scaled.to_string(), from(buffer, scaled)));
    }
    let every_steps = plan.recipe.checkpoint.every_steps;
    if every_steps > CHECKPOINT_STEPS && parameters > TOY_PARAMETERS {
        let remark = format!("{every_steps} in the base, whose steps may be shorter");
        changes.push(("checkpoint.every_steps", CHECKPOINT_STEPS.to_string(), remark));
    }
    let peak_bytes = |changes: &[_]| -> Result<f64> {
        Ok(open_startup(file, text, changes)?.memory_plan_input().peak_bytes() as f64)
    };
    let is_toy = plan.recipe.train.optimizer.lr > LORA_RATE && parameters > TOY_PARAMETERS;
    let warm_up = &plan.recipe.cold_start;
    if is_toy && warm_up.steps > 0 && warm_up.optimizer.lr > TOY_RATE && plan.recipe.train.steps > 0 {
        let remark = format!("{} in the base, which teaches a much smaller model", warm_up.steps);
        changes.push(("cold_start.steps", "0".to_owned(), remark));
    }
    let mut peak = peak_bytes(&changes)?;
    // With an adapter the blocks of a file stay packed.
    let adds_adapter = (peak > bytes || has_blocks) && plan.recipe.adapter.is_none();
    if adds_adapter {
        let whole = format!("full training would take {}", gigabytes(peak as u64));
        changes.push(("adapter.rank", "8".to_owned(), whole));
        changes.push(("adapter.alpha", "16.0".to_owned(), String::new()));
        peak = peak_bytes(&changes)?;
    }
    if is_toy || adds_adapter {
        let (rate, kind) = match adds_adapter || plan.recipe.adapter.is_some() {
            true => (LORA_RATE, "LoRA"),
            false => (FULL_RATE, "full training"),
        };
        let why =
            if is_toy { "the base is for a much smaller model" } else { "full training has about 1e-6" };
        changes.push(("train.optimizer.lr", format!("{rate:e}"), format!("usual for {kind}; {why}")));
        if is_toy && critic.is_some() {
            changes.push(("critic.optimizer.lr", format!("{:e}", 2.0 * rate), String::new()));
        }
    }
    if peak > bytes {
        changes.push(("policy.kl.place", "\"none\"".to_owned(), "keeps no reference".to_owned()));
        changes.push(("train.recompute_layers", "true".to_owned(), String::new()));
        peak = peak_bytes(&changes)?;
    }
    let mut sequences = rollout.sequences_max.min(prompts * samples);
    while peak > bytes && sequences > 1 {
        sequences /= 2;
        let mut fewer = changes.clone();
        fewer.retain(|(key, ..)| *key != "rollout.sequences_max");
        let remark = "fewer take less memory, and longer".to_owned();
        fewer.push(("rollout.sequences_max", sequences.to_string(), remark));
        let fewer_peak = peak_bytes(&fewer)?;
        if fewer_peak > peak - peak * SAVING_MIN {
            break;
        }
        (changes, peak) = (fewer, fewer_peak);
    }
    let fits = free.as_ref().is_none_or(|free| peak <= free.bytes as f64);
    // `check` and `train` keep all activations if enough memory is free.
    let with_all_activations = {
        let mut startup = open_startup(file, text, &changes)?;
        startup.choose_sharding(1, free.as_ref());
        startup.memory_plan_input().peak_bytes()
    };
    let memory = match with_all_activations > peak as u64 {
        true => format!(
            "{}, or {} if activations are recomputed",
            gigabytes(with_all_activations),
            gigabytes(peak as u64)
        ),
        false => gigabytes(peak as u64),
    };
    let task = &plan.recipe.task;
    let files = task.train_file.iter().chain(&task.validation_file).chain(&task.validation_files);
    let missing_data = (files.filter(|file| !file.exists()).cloned().collect(), task.name.data);
    let before = plan.recipe.rollout.response_tokens_max;
    let shorter_response = (response < before).then_some((response, before));
    Ok(Sizing { changes, memory, fits, machine, shorter_response, missing_data })
}

/// Opens the model of the recipe `text` with `changes`, as training does.
fn open_startup(file: &Path, text: &str, changes: &[(&'static str, String, String)]) -> Result<Startup> {
    let sets: Vec<String> = changes.iter().map(|(key, value, _)| format!("{key}={value}")).collect();
    Startup::open(resolve_for(KeyScope::Export, file, text, &sets)?, ModelCommand::Train, &Console::silent())
}
