//! The inputs with which a run's data is opened and checked. There are no weights among them, so `rloss
//! check` makes the same checks as `rloss train`.

use crate::actor::micro_batch::Sequence;
use crate::chat::ConversationRenderer;
use crate::model::config::Config;
use crate::recipe::{Plan, Recipe};
use crate::rollout::{Prompt, PromptLimits};
use crate::tasks::{Task, ValidationSet};
use std::sync::Arc;

/// The inputs of [`crate::trainer::TrainingData::open`]: parts of an environment and of the model.
pub struct DataInputs<'a> {
    pub plan: &'a Plan,
    pub task: &'a dyn Task,
    pub renderer: ConversationRenderer<'a>,
    pub prompt_limits: PromptLimits<'a>,
    pub config: &'a Config,
    /// Whether the run computes on the CPU.
    pub on_cpu: bool,
    /// The rows of `cold_start.train_file`, if they have been read.
    pub sft_rows: Option<&'a Arc<[Sequence]>>,
}

/// Returns the number of problems that each training step has for itself: those of all its sampling rounds.
pub fn problems_per_step(recipe: &Recipe) -> u64 {
    (recipe.rollout.resample_rounds_max + 1) * recipe.rollout.prompts_per_step as u64
}

/// Returns `count` prompts for sampling round `round` (from 0) of training step `step` (from 1). Each step
/// has its own fixed range of the task's problems, large enough for all rounds. A step's prompts thus depend
/// only on its number.
pub fn training_prompts(
    recipe: &Recipe,
    task: &dyn Task,
    (step, round): (u64, u64),
    count: usize,
) -> Vec<Prompt> {
    let first = (step - 1) * problems_per_step(recipe) + round * recipe.rollout.prompts_per_step as u64;
    let problem = |index| task.training_problem(recipe.train.seed, index);
    (first..first + count as u64).map(|index| Prompt { index, problem: problem(index) }).collect()
}

/// Returns the problems to evaluate for each validation set. The index of a prompt does not depend on
/// `eval.problems_max`.
pub fn validation_prompts<'t>(recipe: &Recipe, task: &'t dyn Task) -> Vec<(&'t ValidationSet, Vec<Prompt>)> {
    let (mut first, mut sets) = (0, vec![]);
    for set in task.validation_sets() {
        let problems = set.problems.iter().take(recipe.eval.problems_max).cloned().zip(first..);
        sets.push((set, problems.map(|(problem, index)| Prompt { index, problem }).collect()));
        first += set.problems.len() as u64;
    }
    sets
}
