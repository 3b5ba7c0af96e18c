//! The data of a run in addition to its own samples: supervised examples, validation examples, stored
//! trajectories.

use crate::actor::micro_batch::Sequence;
use crate::bad_input;
use crate::learner::examples::{Examples, read_rows};
use crate::policy::RouterReplay;
use crate::recipe::Plan;
use crate::rollout::Prompt;
use crate::rollout::trajectory_file::{RoutedExpertsShape, StoredRollouts};
use crate::run::data_inputs::{DataInputs, training_prompts, validation_prompts};
use anyhow::Result;
use std::path::PathBuf;

/// A run's data. It is opened and checked before any work.
pub struct TrainingData {
    pub(super) examples: Examples,
    /// Validation examples. Their loss is measured, but they are not trained on.
    pub(super) validation: Vec<Sequence>,
    /// Stored trajectories, if the recipe trains on them instead of sampling.
    pub(super) stored: Option<StoredRollouts>,
}

impl TrainingData {
    /// Opens the data that the recipe names, and renders the first prompts.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names file and row, or the problem whose prompt is too long.
    pub fn open(inputs: &DataInputs) -> Result<Self> {
        let file = inputs.plan.recipe.cold_start.train_file.as_deref();
        let rows = match (inputs.sft_rows, file) {
            (None, Some(file)) => Some(read_rows(&inputs.renderer, file, None)?.sequences.into()),
            (rows, _) => rows.cloned(),
        };
        let examples = Examples::new(rows);
        let validation = open_validation(inputs, &examples)?;
        let stored = open_stored(inputs)?;
        check_prompts(inputs, stored.is_none())?;
        Ok(Self { examples, validation, stored })
    }
}

/// Checks that prompts fit in the context: the validation prompts and, if `checks_training_prompts` is true,
/// the prompts of the first step.
fn check_prompts(inputs: &DataInputs, checks_training_prompts: bool) -> Result<()> {
    let &DataInputs { task, plan: Plan { recipe, .. }, ref prompt_limits, .. } = inputs;
    if recipe.train.steps == 0 {
        return Ok(());
    }
    let check =
        |prompts: &[Prompt]| prompts.iter().try_for_each(|p| prompt_limits.tokens(&p.problem).map(drop));
    if checks_training_prompts {
        check(&training_prompts(recipe, task, (1, 0), recipe.rollout.prompts_per_step))?;
    }
    if recipe.eval.every_steps > 0 || recipe.eval.before_training {
        validation_prompts(recipe, task).iter().try_for_each(|(_, held_out)| check(held_out))?;
    }
    Ok(())
}

/// Opens the stored trajectories; `None` if the recipe names no such file.
fn open_stored(inputs: &DataInputs) -> Result<Option<StoredRollouts>> {
    let &DataInputs { config, plan, on_cpu, .. } = inputs;
    let recipe = &plan.recipe;
    let replayed_shape =
        (recipe.policy.router_replay == RouterReplay::Rollout).then_some(RoutedExpertsShape {
            per_token: config.num_hidden_layers * config.num_experts_per_tok,
            experts: config.num_local_experts,
        });
    let tokens_max = inputs.prompt_limits.context_tokens_max;
    // As in sampling: a group of an agent's episodes needs two for its baseline.
    let episodes_min = if recipe.task.is_agent() { recipe.rollout.samples_per_prompt.min(2) } else { 1 };
    let open = |file: &PathBuf| {
        StoredRollouts::open(file, config.vocab_size, tokens_max, replayed_shape, episodes_min)
    };
    let stored = recipe.train.trajectories.as_ref().map(open).transpose()?;
    let reason = if !on_cpu {
        "no GPU kernel computes training's log-probs over the kept tokens yet; use the CPU with device = \"cpu\""
    } else if recipe.policy.distill.is_some() {
        "with policy.distill all log-probs are over the whole vocabulary; sample without these keys"
    } else {
        return Ok(stored);
    };
    if stored.as_ref().is_some_and(StoredRollouts::has_kept_tokens) {
        let reason = format!("the trajectories were sampled with top_p, top_k or min_p, and {reason}");
        return Err(bad_input!("{}", plan.mistake("train.trajectories", reason)));
    }
    Ok(stored)
}

/// Returns the validation examples: rows of a file, or the task's validation demonstrations.
fn open_validation(inputs: &DataInputs, examples: &Examples) -> Result<Vec<Sequence>> {
    let DataInputs { plan: Plan { recipe, .. }, renderer, task, .. } = inputs;
    let cold_start = &recipe.cold_start;
    if cold_start.steps == 0 {
        return Ok(vec![]);
    }
    // This call reports a task without demonstrations before any work.
    examples.batch(renderer, *task, recipe.train.seed, 0, 1)?;
    if let Some(path) = &cold_start.validation_file {
        return Ok(read_rows(renderer, path, Some(cold_start.validation_rows_max))?.sequences);
    }
    if cold_start.train_file.is_some() {
        return Ok(vec![]);
    }
    (0..cold_start.validation_rows_max as u64)
        .map_while(|index| task.held_out_demonstration(index))
        .map(|demonstration| renderer.render_demonstration(&demonstration.messages).map(Sequence::from))
        .collect()
}
