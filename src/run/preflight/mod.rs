//! Preflight: opens and checks everything that a command needs, before any work. Does not read the weights.

mod fit;
mod load;

use crate::bad_input;
use crate::chat::{ConversationRenderer, chatml_identity, system_prompt};
use crate::checkpoint::peft::is_adapter_folder;
use crate::dist::{Mesh, PackedWeightPlacement, RolloutWeightPlacement};
use crate::harmony::Message;
use crate::interpreter::{self, Interpreter};
use crate::learner::examples::read_rows;
use crate::learner::micro_batch::Sequence;
use crate::metrics::{Console, format_count};
use crate::model::config::{Config, WeightFormat};
use crate::ops::head_parts::head_split_error;
use crate::ops::mxfp4;
use crate::ops::threads::Threads;
use crate::recipe::{KeyScope, Plan, Recipe};
use crate::rollout::PromptLimits;
use crate::run::adapter::RunAdapter;
use crate::run::data_inputs::DataInputs;
use crate::run::device::{ComputeDevice, choose_device};
use crate::run::expert_parallel::TrainedExperts;
use crate::run::family::unsupported_keys;
use crate::run::memory::{MemoryPlanInput, ModelCommand, tokenizer_bytes};
use crate::run::source::ModelSource;
use crate::run::teacher::{TeacherSettings, prompt_change};
use crate::run::trainable_flags::{critic_trainable_flags, policy_trainable_flags};
use crate::tasks::{self, McpTask, Problem, Task, TaskContext};
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;

/// Everything that a recipe names, opened and checked. Only the headers of weight files are read.
pub struct Preflight {
    pub plan: Plan,
    command: ModelCommand,
    /// The processes of the run.
    mesh: Arc<Mesh>,
    /// Number of processes of the memory plan.
    processes: usize,
    /// How each process holds the trainable weights while it samples.
    rollout_weights: RolloutWeightPlacement,
    /// How each process holds the packed weights.
    packed_weights: PackedWeightPlacement,
    threads: Threads,
    compute_device: ComputeDevice,
    /// Number of sequences in the GPU's KV cache. `None` on the CPU.
    gpu_sequences: Option<usize>,
    /// Whether the backward pass recomputes layers, chosen by the available memory.
    recompute_layers: Option<bool>,
    /// Whether two samplings of training may be in flight, chosen by the available memory.
    two_samplings: bool,
    pub(super) source: ModelSource,
    /// Trainable flags of the model's own tensors in the first stage of training.
    trainable: Vec<bool>,
    critic_trainable: Option<Vec<bool>>,
    adapter: Option<RunAdapter>,
    pub task: Box<dyn Task>,
    interpreter: Option<Box<dyn Interpreter>>,
    system_prompt: Vec<Message>,
    chatml_identity: Option<String>,
    /// Whether layers stay on disk and are read on demand.
    layers_on_demand: bool,
    /// The rows of `cold_start.train_file`, if the command trains on them.
    sft_rows: Option<Arc<[Sequence]>>,
    /// The teacher, if the command distills.
    teacher: Option<TeacherSettings>,
}

impl Preflight {
    /// Opens everything that the plan names. Writes nothing and reads no weights.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with all mistakes, each with its location and remedy.
    pub fn open(plan: Plan, command: ModelCommand, console: &Console) -> Result<Self> {
        Self::open_on_mesh(plan, command, &Mesh::single(), None, console)
    }

    /// Opens everything as [`Self::open`] does, for a run on the processes of `mesh`. `checkpoint` is the
    /// checkpoint to resume from, if any. If it has an adapter, it also has the path of the adapter's base.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn open_on_mesh(
        mut plan: Plan,
        command: ModelCommand,
        mesh: &Arc<Mesh>,
        checkpoint: Option<&Path>,
        console: &Console,
    ) -> Result<Self> {
        let _stage = console.start_inner_stage("starting", 0);
        let threads = Threads::for_process(plan.recipe.parallel.threads, mesh.ranks_on_cores())?;
        let mut errors = ErrorList(vec![]);
        let reads_held_out = plan.reads("task.validation_file");
        let task_context = TaskContext {
            reads_training: plan.reads("task.train_file"),
            reads_held_out,
            validation_problems_max: if reads_held_out { plan.recipe.eval.problems_max } else { 0 },
            turns_max: plan.reads("rollout.turns_max").then_some(plan.recipe.rollout.turns_max),
            console: console.clone(),
        };
        let source = errors.collect(match checkpoint.filter(|folder| is_adapter_folder(folder)) {
            Some(folder) => ModelSource::from_adapter(folder, plan.recipe.model.path.as_deref())
                .map(|source| source.unpack_for_precision(&plan.recipe)),
            None => threads.run_on_all(|| ModelSource::open(&plan.recipe)),
        });
        let task = errors.collect(tasks::build(&plan.recipe.task, &task_context));
        let task = task.and_then(|task| errors.collect(with_tools(task, &plan.recipe, command, console)));
        if let Some((source, task)) = source.as_ref().zip(task.as_ref())
            && let Err(reason) = source.chat.check_declarations(task.tools())
        {
            let key = if plan.recipe.tools.is_some() { "tools.mcp.allowed_tools" } else { "task.name" };
            errors.0.push(plan.mistake(key, reason).to_string());
        }
        let adapter = source.as_ref().and_then(|s| {
            let existing = s.adapter.as_ref().map(|adapter| &adapter.lora);
            errors.collect(RunAdapter::resolve(&plan, &s.config, existing, command.trains()))
        });
        let trainable = source.as_ref().zip(adapter.as_ref()).and_then(|(s, adapter)| match adapter {
            Some(adapter) if !adapter.after_cold_start => Some(vec![false; s.specs().len()]),
            Some(adapter) => {
                let all = [&s.specs()[..], &adapter.specs].concat();
                errors.collect(policy_trainable_flags(&plan, &all)).map(|all| all[..s.specs().len()].to_vec())
            }
            None => errors.collect(policy_trainable_flags(&plan, &s.specs())),
        });
        let critic_trainable = source.as_ref().zip(adapter.as_ref()).and_then(|(s, adapter)| {
            let factors = adapter.as_ref().map(|adapter| &adapter.specs[..]);
            errors.collect(critic_trainable_flags(&plan, &s.config, factors))
        });
        let interpreter = match &task {
            Some(task) if task.uses_python() => errors
                .collect(open_interpreter(&plan.recipe, threads.count(), mesh.ranks_on_host()).map(Some)),
            _ => Some(None),
        };
        let pauses = command.trains() && plan.recipe.rollout.step_tokens_max > 0;
        if pauses && task.as_ref().is_some_and(|task| task.uses_python()) {
            let reason = "the task's Python tool keeps state between the calls of a trajectory, and a trajectory that pauses would \
                          lose it; write 0, or use a task without the tool";
            errors.0.push(plan.mistake("rollout.step_tokens_max", reason.to_owned()).to_string());
        }
        if let Some(source) = &source {
            errors.collect(check_budgets(&plan, &source.config));
            errors.collect(check_heads(&plan, &source.config));
            errors.0.extend(unsupported_keys(&plan, source.config.family));
        }
        let teacher =
            source.as_ref().and_then(|s| errors.collect(TeacherSettings::open(&plan, s, command))).flatten();
        let compute_device = source.as_ref().map(|s| choose_device(&mut plan, &s.config, mesh, command));
        let compute_device = compute_device
            .and_then(|compute_device| compute_device.map_err(|messages| errors.0.extend(messages)).ok());
        if let (Some(source), Some(device), Some(trainable), Some(critic)) =
            (&source, &compute_device, &trainable, &critic_trainable)
            && (command.trains() || mesh.ranks() > 1)
        {
            let trained = TrainedExperts {
                config: &source.config,
                trainable,
                critic_trainable: critic.as_deref(),
                has_adapter: adapter.as_ref().is_some_and(Option::is_some),
                on_gpu: device.available.is_some(),
            };
            errors.0.extend(trained.mistakes(&plan));
        }
        let (
            Some(source),
            Some(compute_device),
            Some(mut task),
            Some(trainable),
            Some(critic_trainable),
            Some(interpreter),
        ) = (source, compute_device, task, trainable, critic_trainable, interpreter)
        else {
            return Err(errors.into_error());
        };
        if !errors.0.is_empty() {
            return Err(errors.into_error());
        }
        if let Some(folder) = &source.folder_without_weights {
            plan.warnings
                .push(format!("{} has no weights; the weights are initialized at random", folder.display()));
        }
        if let Some(file) = &source.unknown_template {
            plan.warnings.push(format!(
                "{}: its chat template is not the one published for this family; conversations are rendered in {}",
                file.display(),
                source.chat.name()
            ));
        }
        if let Some(confinement) = interpreter.as_ref().map(|i| i.sandbox_description())
            && confinement.contains("NOT SANDBOXED")
        {
            plan.warnings
                .push(format!("THE PYTHON TOOL IS {confinement}: the model's code runs with your rights"));
        }
        let simplified = source.chat.simplified_parameters(task.tools());
        if !simplified.is_empty() {
            plan.warnings.push(format!(
                "{} shows the type `any` for what a tool's schema writes with `$ref`, `anyOf` or `allOf`: {}",
                source.chat.name(),
                simplified.join(", ")
            ));
        }
        let thinking = plan.recipe.harmony.enable_thinking.unwrap_or(true);
        let source = ModelSource { chat: source.chat.clone().with_thinking(thinking), ..source };
        // A system message of bytes is longer than the context of such a model.
        if source.chat.vocabulary().is_of_bytes() && !plan.is_written("harmony.system_message") {
            plan.recipe.harmony.system_message = Some(false);
        }
        let system_prompt =
            system_prompt(&source.chat, &plan.recipe.harmony, task.uses_python(), task.tools());
        if task_context.reads_training {
            let has_tools = interpreter.is_some() || !task.tools().is_empty();
            let limits = prompt_limits(&plan, &source, &system_prompt, has_tools);
            let tokens_max = limits.tokens_max();
            let left_out = task.leave_out_training_problems(&limits.fits());
            if left_out > 0 {
                plan.warnings.push(format!(
                    "task.train_file: {} left out: longer than the {tokens_max} tokens that rollout.prompt_tokens_max and the model's context allow",
                    format_count(left_out as u64, "training problem")
                ));
            }
        }
        let mut teacher = teacher;
        if let Some(teacher) = &mut teacher {
            let tools = (task.uses_python(), task.tools());
            teacher.prompt = prompt_change(&plan.recipe, &source.chat, &system_prompt, tools)?;
        }
        let chatml_identity = chatml_identity(&source.chat, &plan.recipe.harmony);
        let renderer = renderer(&source, &system_prompt, chatml_identity.as_deref());
        // `rloss init` plans before the data is there.
        let file = plan.recipe.cold_start.train_file.as_ref();
        let sft_rows = match file.filter(|file| command.trains() && file.exists()) {
            Some(file) => Some(read_rows(&renderer, file, None)?.into()),
            None => None,
        };
        let preflight = Self {
            plan,
            command,
            mesh: mesh.clone(),
            processes: mesh.ranks(),
            rollout_weights: RolloutWeightPlacement::Whole,
            packed_weights: PackedWeightPlacement::Whole,
            threads,
            gpu_sequences: compute_device.available.is_some().then_some(1),
            recompute_layers: None,
            two_samplings: false,
            compute_device,
            source,
            trainable,
            critic_trainable,
            adapter: adapter.flatten(),
            task,
            interpreter,
            system_prompt,
            chatml_identity,
            layers_on_demand: false,
            sft_rows,
            teacher,
        };
        if let Some(teacher) = &preflight.teacher {
            let tokens = preflight.memory_plan_input().longest_sequence();
            teacher.check_context(&preflight.plan, &preflight.source.config, tokens)?;
        }
        Ok(preflight)
    }

    /// Returns the first training problem.
    pub fn first_problem(&self) -> Problem {
        self.task.training_problem(self.plan.recipe.train.seed, 0)
    }

    /// Returns the prompt of `problem` as the model reads it, and the prompt's length in tokens.
    ///
    /// # Errors
    /// When the tokenizer fails. [`crate::error::BadInput`] for a prompt that is too long.
    pub fn prompt(&self, problem: &Problem) -> Result<(String, usize)> {
        let tokens = self.prompt_limits().tokens(problem)?;
        Ok((self.source.chat.vocabulary().decode(&tokens), tokens.len()))
    }

    /// Returns the limits that a prompt of this run must keep.
    fn prompt_limits(&self) -> PromptLimits<'_> {
        let has_tools = self.interpreter.is_some() || !self.task.tools().is_empty();
        prompt_limits(&self.plan, &self.source, &self.system_prompt, has_tools)
    }

    /// Returns the inputs with which the run's data is opened.
    pub fn data_inputs(&self) -> DataInputs<'_> {
        DataInputs {
            plan: &self.plan,
            task: self.task.as_ref(),
            renderer: renderer(&self.source, &self.system_prompt, self.chatml_identity.as_deref()),
            prompt_limits: self.prompt_limits(),
            config: &self.source.config,
            on_cpu: self.compute_device.device.is_cpu(),
            sft_rows: self.sft_rows.as_ref(),
        }
    }

    /// Returns the memory plan's input.
    pub fn memory_plan_input(&self) -> MemoryPlanInput<'_> {
        self.memory_plan_input_for(self.command)
    }

    /// Returns the memory plan's input for another command.
    pub fn memory_plan_input_for(&self, command: ModelCommand) -> MemoryPlanInput<'_> {
        MemoryPlanInput {
            command,
            recipe: &self.plan.recipe,
            config: &self.source.config,
            formats: &self.source.formats,
            trainable: self.trainable.clone(),
            // SFT alone has no critic.
            critic_trainable: self.critic_trainable.clone().filter(|_| self.plan.recipe.train.steps > 0),
            adapter: self.adapter.as_ref().map(RunAdapter::adapter_input),
            tokenizer_bytes: tokenizer_bytes(self.source.chat.vocabulary()),
            python_workers: match &self.interpreter {
                Some(_) => worker_count(&self.plan.recipe, self.threads.count(), self.mesh.ranks_on_host()),
                None => 0,
            },
            reply_chars_max: self.plan.recipe.reply_chars_max(self.task.as_ref(), self.interpreter.is_some()),
            threads: self.threads.count(),
            layers_on_demand: self.layers_on_demand,
            processes: self.processes,
            rollout_weights: self.rollout_weights,
            packed_weights: self.packed_weights,
            gpu_sequences: self.gpu_sequences,
            recompute_layers: self.recompute_layers,
            two_samplings: self.two_samplings,
            sft_row_tokens_max: self
                .sft_rows
                .iter()
                .flat_map(|rows| rows.iter().map(|row| row.tokens.len()))
                .max(),
            teacher: self
                .teacher
                .as_ref()
                .filter(|_| command.trains())
                .map(|teacher| teacher.memory_input(&self.source.config)),
        }
    }
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

/// Returns the limits that a prompt must keep. `has_tools`: whether the system prompt declares tools.
fn prompt_limits<'a>(
    plan: &Plan,
    source: &'a ModelSource,
    system_prompt: &'a [Message],
    has_tools: bool,
) -> PromptLimits<'a> {
    PromptLimits {
        chat: &source.chat,
        system_prompt,
        has_tools,
        prompt_tokens_max: plan.recipe.rollout.prompt_tokens_max,
        context_tokens_max: source.config.max_position_embeddings,
    }
}

/// Returns the renderer that turns conversations into training examples. `identity` is the text of ChatML's
/// system message.
fn renderer<'a>(
    source: &'a ModelSource,
    system_prompt: &'a [Message],
    identity: Option<&'a str>,
) -> ConversationRenderer<'a> {
    ConversationRenderer {
        chat: &source.chat,
        system_prompt,
        identity,
        context_tokens_max: source.config.max_position_embeddings,
        vocabulary: source.config.vocab_size,
    }
}

/// Collects the messages of errors.
pub(super) struct ErrorList(pub(super) Vec<String>);

impl ErrorList {
    /// Returns the value of `result`, or adds its error to the list.
    fn collect<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(format!("{error:#}"))).ok()
    }

    /// Combines all messages into one error, in the format of the mistakes in a recipe.
    pub(super) fn into_error(self) -> anyhow::Error {
        match self.0.as_slice() {
            [only] => bad_input!("{only}"),
            all => bad_input!("{} mistakes:\n  {}", all.len(), all.join("\n  ")),
        }
    }
}

/// Checks the recipe's token budget and checkpoint dtype against the model.
fn check_budgets(plan: &Plan, config: &Config) -> Result<()> {
    let context = config.max_position_embeddings;
    let response = plan.recipe.rollout.response_tokens_max;
    // In a chat, the end of the context ends an answer.
    if response >= context && plan.scope != KeyScope::Chat && plan.reads("rollout.response_tokens_max") {
        let source = match &plan.recipe.model.path {
            Some(path) => {
                format!(", the max_position_embeddings of {}", path.join("config.json").display())
            }
            None => String::new(),
        };
        let reason = format!(
            "{response} sampled tokens and a prompt do not fit in the model's context of {context} tokens{source}; lower this \
             key, or use a model with a longer context"
        );
        return Err(plan.mistake("rollout.response_tokens_max", reason).into());
    }
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let is_divisible = hidden % mxfp4::BLOCK == 0 && intermediate % mxfp4::BLOCK == 0;
    if plan.reads("checkpoint.dtype") && plan.recipe.checkpoint.dtype == WeightFormat::Mxfp4 && !is_divisible
    {
        let reason = format!(
            "MXFP4 needs sizes that are multiples of {}, but hidden_size = {hidden} and intermediate_size = {intermediate}; write \"bf16\"",
            mxfp4::BLOCK
        );
        return Err(plan.mistake("checkpoint.dtype", reason).into());
    }
    Ok(())
}

/// Checks that attention heads can be divided among the processes of a sequence-parallel group.
fn check_heads(plan: &Plan, config: &Config) -> Result<()> {
    let sequence = plan.recipe.parallel.sequence;
    match head_split_error(config.num_attention_heads, config.num_key_value_heads, sequence) {
        None => Ok(()),
        Some(error) => {
            let reason = format!("{sequence} {error}; write a divisor, or 1");
            Err(plan.mistake("parallel.sequence", reason).into())
        }
    }
}

/// Returns the number of the Python tool's workers in one of `processes` processes on this machine.
fn worker_count(recipe: &Recipe, threads: usize, processes: usize) -> usize {
    match recipe.interpreter.workers {
        0 => threads,
        workers => workers.div_ceil(processes),
    }
}

/// Opens the Python tool. The `processes` processes on a machine share its workers.
fn open_interpreter(recipe: &Recipe, threads: usize, processes: usize) -> Result<Box<dyn Interpreter>> {
    let mut settings = recipe.interpreter.clone();
    settings.workers = worker_count(recipe, threads, processes);
    let (rollout, eval) = (&recipe.rollout, &recipe.eval);
    let samplings = if rollout.lag_steps > 0 { 2 } else { 1 };
    let sessions_max = (samplings * rollout.prompts_per_step * rollout.samples_per_prompt)
        .max(eval.problems_max.saturating_mul(eval.samples));
    interpreter::open(settings, sessions_max)
}
