//! Opens the task with its tools.

use crate::chat::{Chat, ToolForm};
use crate::interpreter::{self, Interpreter};
use crate::metrics::Console;
use crate::recipe::{Plan, Recipe};
use crate::run::memory::{ModelCommand, ToolInput};
use crate::tasks::{self, McpTask, Task, TaskContext};
use anyhow::Result;

/// A task and the Python tool. `None` if the task does not use it.
pub(super) struct OpenedTask {
    pub task: Box<dyn Task>,
    pub interpreter: Option<Box<dyn Interpreter>>,
}

/// Opens the recipe's task, and starts its MCP server. `console` shows later failures of their programs.
pub(super) fn open_task(plan: &Plan, command: ModelCommand, console: &Console) -> Result<Box<dyn Task>> {
    let reads_held_out = plan.reads("task.validation_file");
    let context = TaskContext {
        reads_training: plan.reads("task.train_file"),
        reads_held_out,
        validation_problems_max: if reads_held_out { plan.recipe.eval.problems_max } else { 0 },
        turns_max: plan.reads("rollout.turns_max").then_some(plan.recipe.rollout.turns_max),
        steps: plan.recipe.train.steps,
        console: console.clone(),
    };
    with_tools(tasks::build(&plan.recipe.task, &context)?, &plan.recipe, command, console)
}

/// Returns `task` with the tools of the recipe's MCP server. `rloss serve` calls no tools, so it does not
/// start the server.
fn with_tools(
    task: Box<dyn Task>,
    recipe: &Recipe,
    command: ModelCommand,
    console: &Console,
) -> Result<Box<dyn Task>> {
    match &recipe.tools {
        Some(tools) if !matches!(command, ModelCommand::Serve) => {
            Ok(Box::new(McpTask::start(task, &tools.mcp, console.clone())?))
        }
        _ => Ok(task),
    }
}

/// Checks that the model's chat format can declare the task's tools.
pub(super) fn check_declarations(plan: &Plan, chat: &Chat, task: &dyn Task) -> Result<()> {
    chat.check_declarations(task.tools()).map_err(|reason| {
        let key = if plan.recipe.tools.is_some() { "tools.mcp.allowed_tools" } else { "task.name" };
        plan.mistake(key, reason).into()
    })
}

/// Checks that no other tool needs the chat format's calls, if programs in answers run.
pub(super) fn check_tool_form(plan: &Plan, task: &dyn Task) -> Result<()> {
    let settings = &plan.recipe.task;
    if plan.recipe.interpreter.form == ToolForm::Call || !(task.answers_calls() || settings.is_agent()) {
        return Ok(());
    }
    let reason = "the task has tools that are called in the chat format, or a program that has tools of its own; write \
                  \"call\", or take these tools away";
    Err(plan.mistake("interpreter.form", reason.to_owned()).into())
}

/// Checks that no trajectory pauses while it uses the Python tool.
pub(super) fn check_pauses(plan: &Plan, command: ModelCommand, task: &dyn Task) -> Result<()> {
    if !command.trains() || plan.recipe.rollout.step_tokens_max == 0 || !plan.recipe.uses_python(task) {
        return Ok(());
    }
    let reason = "the task's Python tool keeps state between the calls of a trajectory, and a trajectory that pauses would \
                  lose it; write 0, or use a task without the tool";
    Err(plan.mistake("rollout.step_tokens_max", reason.to_owned()).into())
}

/// Returns the number of the Python tool's workers in one of `processes` processes on this machine.
fn worker_count(recipe: &Recipe, threads: usize, processes: usize) -> usize {
    match recipe.interpreter.workers {
        0 => threads,
        workers => workers.div_ceil(processes),
    }
}

/// Opens the Python tool, if the task uses it. The `processes` processes on a machine share its workers.
pub(super) fn open_interpreter(
    recipe: &Recipe,
    task: &dyn Task,
    (threads, processes): (usize, usize),
    console: &Console,
) -> Result<Option<Box<dyn Interpreter>>> {
    if !recipe.uses_python(task) {
        return Ok(None);
    }
    let mut settings = recipe.interpreter.clone();
    settings.workers = worker_count(recipe, threads, processes);
    let (rollout, eval) = (&recipe.rollout, &recipe.eval);
    let samplings = if rollout.lag_steps > 0 { 2 } else { 1 };
    let sessions_max = (samplings * rollout.prompts_per_step * rollout.samples_per_prompt)
        .max(eval.problems_max.saturating_mul(eval.samples));
    interpreter::open(settings, sessions_max, console).map(Some)
}

/// Returns the sizes of the tools in the memory plan of one of `processes` processes on this machine.
pub(super) fn tool_input(
    recipe: &Recipe,
    task: &dyn Task,
    has_python: bool,
    (threads, processes): (usize, usize),
) -> ToolInput {
    ToolInput {
        python_workers: if has_python { worker_count(recipe, threads, processes) } else { 0 },
        reply_chars_max: recipe.reply_chars_max(task, has_python),
    }
}

/// Warns about a tool without a sandbox, and about tools that the model sees without all of their types.
pub(super) fn warn_about_tools(plan: &mut Plan, chat: &Chat, opened: &OpenedTask) {
    let OpenedTask { task, interpreter } = opened;
    if let Some(confinement) = interpreter.as_ref().map(|interpreter| interpreter.sandbox_description())
        && confinement.contains("NOT SANDBOXED")
    {
        plan.warnings
            .push(format!("THE PYTHON TOOL IS {confinement}: the model's code runs with your rights"));
    }
    let simplified = chat.simplified_parameters(task.tools());
    if !simplified.is_empty() {
        plan.warnings.push(format!(
            "{} shows the type `any` for what a tool's schema writes with `$ref`, `anyOf` or `allOf`: {}",
            chat.name(),
            simplified.join(", ")
        ));
    }
}
