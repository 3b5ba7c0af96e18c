//! Startup: opens and checks everything that a command needs, before any work. Then reads the weights.

mod errors;
mod fit;
mod load;
mod model;
mod prompts;
mod task;

pub(super) use errors::ErrorList;
pub use load::{Resources, Started, start, start_on_mesh};
pub use model::Trainables;

use super::data_inputs::DataInputs;
use super::device::{ComputeDevice, choose_device};
use super::environment::Environment;
use super::expert_parallel::expert_mistakes;
use super::memory::{MemoryChoices, MemoryPlanInput, ModelCommand, WeightPlacement, tokenizer_bytes};
use super::source::ModelSource;
use super::target::TargetMachine;
use super::teacher::{TeacherSettings, check_context};
use crate::dist::Mesh;
use crate::metrics::Console;
use crate::ops::threads::Threads;
use crate::recipe::Plan;
use crate::tasks::Problem;
use anyhow::Result;
use model::{check_model, open_source, warn_about_model};
use prompts::open_environment;
use std::path::Path;
use std::sync::Arc;
use task::{
    OpenedTask, check_declarations, check_pauses, check_tool_form, open_interpreter, open_task, tool_input,
    warn_about_tools,
};

/// Everything that a recipe names, opened and checked. Only the headers of weight files are read.
pub struct Startup {
    /// The environment, without the server of an agent.
    pub environment: Environment,
    command: ModelCommand,
    /// The processes of the run.
    mesh: Arc<Mesh>,
    /// The threads of the run.
    pub threads: Threads,
    compute_device: ComputeDevice,
    pub(super) source: ModelSource,
    trainables: Trainables,
    /// The teacher, if the command distills.
    teacher: Option<TeacherSettings>,
    placement: WeightPlacement,
    choices: MemoryChoices,
}

impl Startup {
    /// Opens everything that the plan names. Writes nothing and reads no weights.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with all mistakes, each with its location and remedy.
    pub fn open(plan: Plan, command: ModelCommand, console: &Console) -> Result<Self> {
        Self::open_for(plan, command, (&Mesh::single(), None), None, console)
    }

    /// Opens everything as [`Self::open`] does, for a run on the processes of `mesh`. `checkpoint` is the
    /// checkpoint to resume from, if any. With a `target`, to plan for that machine.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn open_for(
        mut plan: Plan,
        command: ModelCommand,
        (mesh, checkpoint): (&Arc<Mesh>, Option<&Path>),
        target: Option<&TargetMachine>,
        console: &Console,
    ) -> Result<Self> {
        let _stage = console.start_inner_stage("starting", 0);
        let threads = Threads::for_process(plan.recipe.parallel.threads, mesh.ranks_on_cores)?;
        let mut errors = ErrorList::default();
        let source = errors.collect(open_source(&plan.recipe, checkpoint, &threads));
        let task = errors.collect(open_task(&plan, command, console));
        if let (Some(source), Some(task)) = (&source, &task) {
            errors.collect(check_declarations(&plan, &source.chat, task.as_ref()));
        }
        let trainables =
            source.as_ref().and_then(|source| Trainables::open(&plan, source, command, &mut errors));
        let workers = (threads.count(), mesh.ranks_on_host);
        let opened = task.and_then(|task| {
            let interpreter = errors.collect(open_interpreter(&plan.recipe, task.as_ref(), workers, console));
            errors.collect(check_tool_form(&plan, task.as_ref()));
            errors.collect(check_pauses(&plan, command, task.as_ref()));
            Some(OpenedTask { task, interpreter: interpreter? })
        });
        if let Some(source) = &source {
            check_model(&plan, &source.config, &source.chat, &mut errors);
        }
        let teacher = source
            .as_ref()
            .and_then(|source| errors.collect(TeacherSettings::open(&plan, source, command)).flatten());
        let compute_device = source.as_ref().and_then(|source| {
            let device = choose_device(&mut plan, &source.config, mesh, command, target);
            device.map_err(|messages| errors.extend(messages)).ok()
        });
        if let (Some(source), Some(device), Some(trainables)) = (&source, &compute_device, &trainables)
            && (command.trains() || mesh.ranks() > 1)
        {
            errors.extend(expert_mistakes(&plan, &source.config, trainables, device.available.is_some()));
        }
        let (Some(source), Some(trainables), Some(opened), Some(compute_device), true) =
            (source, trainables, opened, compute_device, errors.is_empty())
        else {
            return Err(errors.into_error());
        };
        warn_about_model(&mut plan, &source);
        warn_about_tools(&mut plan, &source.chat, &opened);
        let startup = Self {
            environment: open_environment(plan, &source, opened, command, teacher.is_some())?,
            command,
            mesh: mesh.clone(),
            threads,
            source,
            trainables,
            teacher,
            placement: WeightPlacement::whole(mesh.ranks()),
            choices: compute_device.memory_choices(),
            compute_device,
        };
        startup.check_teacher()?;
        Ok(startup)
    }

    /// Checks that the longest sequence fits in the context of the teacher, if the command distills.
    fn check_teacher(&self) -> Result<()> {
        let input = self.memory_plan_input();
        let Some(teacher) = input.teacher else { return Ok(()) };
        check_context(&self.environment.plan, teacher, input.longest_sequence())
    }

    /// Returns the first training problem.
    pub fn first_problem(&self) -> Problem {
        self.environment.task.training_problem(self.environment.recipe().train.seed, 0)
    }

    /// Returns the prompt of `problem` as the model reads it, and the prompt's length in tokens.
    ///
    /// # Errors
    /// When the tokenizer fails. [`crate::error::BadInput`] for a prompt that is too long.
    pub fn prompt(&self, problem: &Problem) -> Result<(String, usize)> {
        let limits = self.environment.prompt_limits(self.source.config.max_position_embeddings);
        let tokens = limits.tokens(problem)?;
        Ok((self.environment.chat.vocabulary().decode(&tokens), tokens.len()))
    }

    /// Returns the inputs with which the run's data is opened.
    pub fn data_inputs(&self) -> DataInputs<'_> {
        self.environment.data_inputs(&self.source.config, self.compute_device.is_cpu())
    }

    /// Returns the memory plan's input.
    pub fn memory_plan_input(&self) -> MemoryPlanInput<'_> {
        self.memory_plan_input_for(self.command)
    }

    /// Returns the memory plan's input for another command.
    pub fn memory_plan_input_for(&self, command: ModelCommand) -> MemoryPlanInput<'_> {
        let Environment { chat, task, interpreter, sft_rows, teacher_prompt, .. } = &self.environment;
        let (recipe, config) = (self.environment.recipe(), &self.source.config);
        let workers = (self.threads.count(), self.mesh.ranks_on_host);
        let teacher = self.teacher.as_ref().filter(|_| command.trains());
        let rows = sft_rows.iter().flat_map(|rows| rows.iter());
        MemoryPlanInput {
            command,
            recipe,
            config,
            formats: &self.source.formats,
            trainable: self.trainables.memory_input(recipe),
            tokenizer_bytes: tokenizer_bytes(chat.vocabulary()),
            tools: tool_input(recipe, task.as_ref(), interpreter.is_some(), workers),
            threads: self.threads.count(),
            placement: self.placement,
            choices: self.choices,
            sft_row_tokens_max: rows.map(|row| row.tokens.len()).max(),
            teacher: teacher.map(|teacher| teacher.memory_input(config, teacher_prompt.as_ref())),
        }
    }
}
