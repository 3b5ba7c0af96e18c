//! Opens the environment: the task with its prompts, and the rows of an SFT file.

use super::task::OpenedTask;
use crate::chat::system_prompt;
use crate::learner::examples::read_rows;
use crate::metrics::format_count;
use crate::recipe::Plan;
use crate::rollout::PromptLimits;
use crate::run::environment::Environment;
use crate::run::memory::ModelCommand;
use crate::run::source::ModelSource;
use crate::run::teacher::prompt_change;
use anyhow::Result;

/// Renders the messages before every prompt, and leaves out problems that are too long. `distills`: whether
/// the command distills. The agent's server starts later.
///
/// # Errors
/// [`crate::error::BadInput`] for a damaged row.
pub(super) fn open_environment(
    mut plan: Plan,
    source: &ModelSource,
    OpenedTask { task, interpreter }: OpenedTask,
    command: ModelCommand,
    distills: bool,
) -> Result<Environment> {
    let chat = source.chat.clone().with_thinking(plan.recipe.chat.enable_thinking.unwrap_or(true));
    // A system message of bytes is longer than the context of such a model.
    if chat.vocabulary().is_of_bytes() && !plan.is_written("chat.system_message") {
        plan.recipe.chat.system_message = Some(false);
    }
    let prompt_settings = plan.recipe.prompt_settings();
    let declares_python = plan.recipe.declares_python(task.as_ref());
    let system_prompt = system_prompt(&chat, &prompt_settings, declares_python, task.tools());
    let mut environment = Environment {
        plan,
        chat,
        task,
        agent: None,
        interpreter,
        system_prompt,
        prompt_settings,
        sft_rows: None,
        teacher_prompt: None,
    };
    if environment.plan.reads("task.train_file") {
        leave_out_long_problems(&mut environment, source.config.max_position_embeddings);
    }
    if distills {
        let Environment { plan, chat, task, system_prompt, .. } = &environment;
        let tools = (declares_python, task.tools());
        environment.teacher_prompt = prompt_change(&plan.recipe, chat, system_prompt, tools)?;
    }
    // `rloss init` plans before the data is there.
    let file = environment.recipe().cold_start.train_file.as_ref();
    if let Some(file) = file.filter(|file| command.trains() && file.exists()) {
        let rows = read_rows(&environment.renderer(&source.config), file, None)?;
        environment.sft_rows = Some(rows.sequences.into());
        environment.plan.warnings.extend(rows.warning);
    }
    Ok(environment)
}

/// Leaves out the training problems whose prompts are too long, with a warning. `context_tokens_max` is the
/// model's context.
fn leave_out_long_problems(environment: &mut Environment, context_tokens_max: usize) {
    let has_tools = environment.has_tools();
    let Environment { plan, chat, task, system_prompt, .. } = environment;
    let prompt_tokens_max = plan.recipe.rollout.prompt_tokens_max;
    let limits = PromptLimits { chat, system_prompt, has_tools, prompt_tokens_max, context_tokens_max };
    let left_out = task.leave_out_training_problems(&limits.fits());
    if left_out > 0 {
        plan.warnings.push(format!(
            "task.train_file: {} left out: longer than the {} tokens that rollout.prompt_tokens_max and the model's context allow",
            format_count(left_out as u64, "training problem"),
            limits.tokens_max()
        ));
    }
}
