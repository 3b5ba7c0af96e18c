//! Opens the environment: the task with its prompts, and the rows of an SFT file.

use super::task::OpenedTask;
use crate::chat::{Chat, system_prompt, template::today};
use crate::learner::examples::read_rows;
use crate::metrics::format_count;
use crate::recipe::Plan;
use crate::rollout::PromptLimits;
use crate::run::environment::Environment;
use crate::run::memory::ModelCommand;
use crate::run::source::ModelSource;
use crate::run::teacher::prompt_change;
use anyhow::Result;
use std::path::Path;

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
    // The day that a template tells is the day of the run's start, also after the run goes on.
    if source.chat.template_reads("strftime_now") {
        plan.recipe.chat.current_date.get_or_insert_with(today);
    }
    let place = plan.recipe.model.path.as_deref().unwrap_or(Path::new("model")).display().to_string();
    let chat = source.chat.clone().with_settings(&plan.recipe.chat, &place)?;
    // A system message of bytes is longer than the context of such a model.
    if chat.vocabulary().is_of_bytes() && !plan.is_written("chat.system_message") {
        plan.recipe.chat.system_message = Some(false);
    }
    let prompt_settings = plan.recipe.prompt_settings();
    let declares_python = plan.recipe.declares_python(task.as_ref());
    let system_prompt = system_prompt(&chat, &prompt_settings, declares_python, task.tools());
    let (has_tools, is_agent) = (declares_python || !task.tools().is_empty(), plan.recipe.task.is_agent());
    let is_told = |fact: &&String| match fact.starts_with("after a user's") {
        true => is_agent && fact.contains("rewrites"),
        false => (has_tools || is_agent) && (fact.starts_with("calls: ") || fact.contains("rewrites")),
    };
    let facts = chat.template_facts().iter().filter(is_told);
    plan.warnings.extend(facts.map(|fact| format!("the model's chat template: {fact}")));
    let template = source.companions.template().filter(|_| matches!(chat, Chat::Harmony(_)));
    plan.warnings.extend(template.and_then(|template| chat.difference_from(&template)));
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
