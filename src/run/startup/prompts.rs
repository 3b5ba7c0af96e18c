//! Opens the environment: the task with its prompts, and the rows of an SFT file.

use super::task::OpenedTask;
use crate::chat::{Chat, system_prompt, template::today};
use crate::learner::examples::read_rows;
use crate::metrics::format_count;
use crate::recipe::Plan;
use crate::rollout::PromptLimits;
use crate::run::data_inputs::problems_per_step;
use crate::run::environment::Environment;
use crate::run::memory::ModelCommand;
use crate::run::source::ModelSource;
use crate::run::teacher::prompt_change;
use crate::tasks::LongPrompts;
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
        long_problems: 0,
        sft_rows: None,
        teacher_prompt: None,
    };
    if environment.plan.reads("task.train_file") {
        leave_out_long_problems(&mut environment, source.config.max_position_embeddings)?;
        count_steps(&mut environment)?;
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

/// Replaces `train.data_epochs` by the steps that use up so many epochs of the rows.
fn count_steps(environment: &mut Environment) -> Result<()> {
    let Environment { plan, task, .. } = environment;
    let Some(epochs) = plan.recipe.train.data_epochs.take() else { return Ok(()) };
    let Some(rows) = task.training_rows() else {
        let message = format!("the task {} generates its problems; give train.steps", plan.recipe.task.name);
        return Err(plan.mistake("train.data_epochs", message).into());
    };
    let steps = (rows as f64 * epochs / problems_per_step(&plan.recipe) as f64).floor();
    plan.recipe.train.steps = (steps as u64).max(1);
    Ok(())
}

/// Leaves out the training problems whose prompts are too long, with a warning. `context_tokens_max` is the
/// model's context.
///
/// # Errors
/// [`crate::error::BadInput`] if `task.long_prompts` refuses them.
fn leave_out_long_problems(environment: &mut Environment, context_tokens_max: usize) -> Result<()> {
    let has_tools = environment.has_tools();
    let Environment { plan, chat, task, system_prompt, long_problems, .. } = environment;
    let prompt_tokens_max = plan.recipe.rollout.prompt_tokens_max;
    let limits = PromptLimits { chat, system_prompt, has_tools, prompt_tokens_max, context_tokens_max };
    let left_out = task.leave_out_training_problems(&limits.fits());
    *long_problems = left_out;
    let (count, tokens_max) = (format_count(left_out as u64, "training problem"), limits.tokens_max());
    let reason = format!(
        "longer than the {tokens_max} tokens that rollout.prompt_tokens_max and the model's context allow"
    );
    match plan.recipe.task.long_prompts {
        _ if left_out == 0 => {}
        LongPrompts::Drop => plan.warnings.push(format!("task.train_file: {count} left out: {reason}")),
        LongPrompts::Refuse => {
            let message = format!("{count} {reason}; raise that key, or write \"drop\"");
            return Err(plan.mistake("task.long_prompts", message).into());
        }
    }
    Ok(())
}
