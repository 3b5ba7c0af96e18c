//! The context of every command that runs a model.

use super::adapter::RunAdapter;
use super::data_inputs::{DataInputs, training_prompts};
use super::family::unsupported_keys;
use super::memory::{ModelCommand, available_memory, min_over_processes, remaining_memory};
use super::preflight::{ErrorList, Preflight};
use super::source::{ModelSource, Placement, model_folder, reading_note};
use super::teacher::TeacherModel;
use crate::agents::{AgentSession, EpisodeTrajectories};
use crate::bad_input;
use crate::chat::{Chat, ConversationRenderer};
use crate::checkpoint::BaseModel;
use crate::checkpoint::save::CompanionFiles;
use crate::dist::Mesh;
use crate::dist::RolloutWeightPlacement;
use crate::engine::{Engine, EngineLimits};
use crate::harmony::Message;
use crate::interpreter::Interpreter;
use crate::learner::micro_batch::Sequence;
use crate::learner::teacher::PromptChange;
use crate::metrics::Console;
use crate::model::cache::CacheCapacity;
use crate::model::config::Config;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::parameters::Parameters;
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::random::Purpose;
use crate::recipe::{Plan, Recipe};
use crate::rollout::partial::GroupInProgress;
use crate::rollout::{
    Observer, Prompt, PromptLimits, Rollout, RolloutPlan, RolloutProgress, RolloutSettings, Rollouts,
};
use crate::tasks::Task;
use anyhow::Result;
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;

/// A model with its chat format, task and tool, ready to run.
pub struct RunContext {
    pub plan: Plan,
    pub threads: Threads,
    /// The tokenizer and the chat format.
    pub chat: Chat,
    /// The tokenizer and other files that are copied into every checkpoint.
    pub companions: CompanionFiles,
    pub model: Model,
    pub parameters: Parameters,
    /// Whether the weights were drawn at random instead of read.
    pub random_weights: bool,
    /// Name of the device that computes.
    pub device_name: String,
    /// The memory plan as text.
    pub memory: String,
    /// Capacity of the GPU's KV cache.
    pub cache_capacity: CacheCapacity,
    /// Tokens whose keys and values are kept for later requests.
    pub prefix_tokens_max: usize,
    /// Whether the backward pass recomputes layers.
    pub recompute_layers: bool,
    /// Whether two samplings of training may be in flight.
    pub two_samplings: bool,
    /// How each process holds the weights while it samples.
    pub rollout_weights: RolloutWeightPlacement,
    /// Trainable flags of the policy's parameters, from `train.freeze`.
    pub trainable: Vec<bool>,
    /// Trainable flags of the critic's parameters, from `critic.freeze`. `None` without a critic.
    pub critic_trainable: Option<Vec<bool>>,
    /// The adapter that is trained, or that is part of the model.
    pub adapter: Option<RunAdapter>,
    /// The adapter's base, as checkpoints refer to it. `None` until a folder has the base.
    pub base: Option<BaseModel>,
    pub task: Box<dyn Task>,
    /// The server and the program of the task `agent`, if this command plays its episodes.
    pub agent: Option<AgentSession>,
    /// The Python tool. `None` if the task does not use it.
    pub interpreter: Option<Box<dyn Interpreter>>,
    /// The system and developer messages before every prompt.
    pub system_prompt: Vec<Message>,
    /// The text of ChatML's system message without functions.
    pub chatml_identity: Option<String>,
    /// The teacher of distillation, if it is another model.
    pub teacher: Option<TeacherModel>,
    /// The rows of `cold_start.train_file`, if the command trains on them.
    pub sft_rows: Option<Arc<[Sequence]>>,
    /// The teacher's system prompt, if it is not the policy's.
    pub teacher_prompt: Option<PromptChange>,
}

impl RunContext {
    /// Opens everything that the recipe names, and reads the weights if there is enough memory. Writes
    /// nothing. `console` shows the progress, and later failures of a task's program.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with all mistakes, each with its location and remedy.
    pub fn open(plan: Plan, command: ModelCommand, console: &Console) -> Result<Self> {
        Self::open_on_mesh(plan, command, &Mesh::single(), None, console)
    }

    /// Opens everything as [`Self::open`] does, for a run on the processes of `mesh`. `checkpoint` is the
    /// checkpoint to resume from, if any.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn open_on_mesh(
        plan: Plan,
        command: ModelCommand,
        mesh: &Arc<Mesh>,
        checkpoint: Option<&Path>,
        console: &Console,
    ) -> Result<Self> {
        // The collective call comes first, because the code below may fail on only one process.
        let local = available_memory().map(|memory| memory.process_share(mesh.ranks_on_host()));
        let available = min_over_processes(mesh, local)?;
        // This line is printed first, because reading the first weights may take a minute.
        if let Some(model) = reading_note(&plan.recipe) {
            console.print(&model);
        }
        let mut preflight = Preflight::open_on_mesh(plan, command, mesh, checkpoint, console)?;
        preflight.check_memory(available)?;
        preflight.load(console)
    }

    /// Rejects `plan` if it has keys that the family of this context's model does not support. `plan` is
    /// another recipe for this model.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with every such key.
    pub fn check_family(&self, plan: &Plan) -> Result<()> {
        let errors = ErrorList(unsupported_keys(plan, self.model.config.family));
        if errors.0.is_empty() { Ok(()) } else { Err(errors.into_error()) }
    }

    /// Returns the resolved recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.plan.recipe
    }

    /// Returns the renderer that turns conversations into training examples.
    pub fn renderer(&self) -> ConversationRenderer<'_> {
        ConversationRenderer {
            chat: &self.chat,
            system_prompt: &self.system_prompt,
            identity: self.chatml_identity.as_deref(),
            context_tokens_max: self.model.context_tokens_max(),
            vocabulary: self.model.config.vocab_size,
        }
    }

    /// Reads frozen weights of the same architecture from `folder`: a Hugging Face folder, a checkpoint, or a
    /// run folder (its last checkpoint). Weights that do not fit in the remaining memory stay on disk, with a
    /// warning on `console`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the folder has no weights, or weights of another architecture.
    pub fn load_weights(&self, folder: &Path, console: &Console) -> Result<Parameters> {
        let source = ModelSource::from_folder(&model_folder(folder)?)?.unpack_for_precision(self.recipe());
        let comparable = Config {
            max_position_embeddings: self.model.config.max_position_embeddings,
            ..source.config.clone()
        };
        if source.weights.is_none() || comparable != self.model.config {
            return Err(bad_input!(
                "{}: has no weights of this architecture; name a folder of the same model at another step",
                folder.display()
            ));
        }
        let layers_on_demand =
            remaining_memory().is_some_and(|remaining| source.resident_bytes() > remaining.bytes);
        if layers_on_demand {
            console.print(&format!(
                "warning: {}: each layer is read from disk when it is needed",
                folder.display()
            ));
        }
        let frozen = vec![false; self.trainable.len()];
        let placement = if layers_on_demand { Placement::OnDisk } else { Placement::Replicated };
        let backend = (self.mesh(), &Device::Cpu);
        source.parameters(self.recipe(), &frozen, ModelCommand::Eval, backend, placement, console)
    }

    /// Returns the options of the training forward pass, with the ablations applied.
    pub fn training_forward(&self) -> ForwardOptions {
        ForwardOptions::for_training(&self.recipe().arms, self.recipe().train.seed)
    }

    /// Returns the inputs with which the run's data is opened.
    pub fn data_inputs(&self) -> DataInputs<'_> {
        DataInputs {
            plan: &self.plan,
            task: self.task.as_ref(),
            renderer: self.renderer(),
            prompt_limits: self.prompt_limits(),
            config: &self.model.config,
            on_cpu: self.parameters.device().is_cpu(),
            sft_rows: self.sft_rows.as_ref(),
        }
    }

    /// Returns [`training_prompts`] of this run.
    pub fn training_prompts(&self, step: u64, round: u64, count: usize) -> Vec<Prompt> {
        training_prompts(self.recipe(), self.task.as_ref(), (step, round), count)
    }

    /// Returns the policy that samples for training, with the ablations applied.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when an ablation does not fit the model.
    pub fn rollout_policy(&self) -> Result<PolicyView<'_>> {
        self.rollout_policy_of(&self.parameters)
    }

    /// Returns the policy that samples for training with the weights `parameters`, with the ablations
    /// applied.
    ///
    /// # Errors
    /// The errors of [`Self::rollout_policy`].
    pub fn rollout_policy_of(&self, parameters: &Parameters) -> Result<PolicyView<'_>> {
        let (arms, seed) = (&self.recipe().arms, self.recipe().train.seed);
        PolicyView::across_processes(&self.model, parameters, Some(arms), seed, self.rollout_weights)
    }

    /// Returns the policy without ablations, for evaluation.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn policy_without_ablations(&self) -> Result<PolicyView<'_>> {
        PolicyView::across_processes(&self.model, &self.parameters, None, 0, self.rollout_weights)
    }

    /// Returns the plan of step `step`'s training rollout.
    pub fn training_rollout(&self, step: u64) -> RolloutPlan {
        let recipe = self.recipe();
        RolloutPlan::for_training(&recipe.rollout, recipe.train.seed, step)
    }

    /// Returns the plan of the evaluation after step `step`.
    pub fn evaluation_rollout(&self, step: u64) -> RolloutPlan {
        let recipe = self.recipe();
        RolloutPlan::for_evaluation(&recipe.rollout, &recipe.eval, recipe.train.seed, step)
    }

    /// Returns the limits that a prompt of this run must keep.
    pub fn prompt_limits(&self) -> PromptLimits<'_> {
        PromptLimits {
            chat: &self.chat,
            system_prompt: &self.system_prompt,
            has_tools: self.interpreter.is_some() || !self.task.tools().is_empty(),
            prompt_tokens_max: self.recipe().rollout.prompt_tokens_max,
            context_tokens_max: self.model.context_tokens_max(),
        }
    }

    /// Returns an engine for `policy`, whose weights are those after step `version`.
    ///
    /// # Errors
    /// When a GPU's memory does not suffice for the KV caches.
    pub fn engine<'a>(
        &'a self,
        policy: PolicyView<'a>,
        version: u64,
        settings: &RolloutSettings,
    ) -> Result<Engine<'a>> {
        self.engine_on(&self.threads, policy, version, settings)
    }

    /// Returns an engine as [`Self::engine`] does, which computes on `threads`.
    ///
    /// # Errors
    /// The errors of [`Self::engine`].
    pub fn engine_on<'a>(
        &'a self,
        threads: &'a Threads,
        policy: PolicyView<'a>,
        version: u64,
        settings: &RolloutSettings,
    ) -> Result<Engine<'a>> {
        let limits = EngineLimits {
            sequences_max: settings.sequences_max,
            cuda_graphs: settings.cuda_graphs,
            cache_capacity: self.cache_capacity,
            prefix_tokens_max: self.prefix_tokens_max,
        };
        Engine::new(threads, policy, version, limits)
    }

    /// Returns a rollout according to `plan` on `engine`.
    pub fn rollout<'a>(&'a self, engine: &'a Engine<'a>, plan: &'a RolloutPlan) -> Rollout<'a> {
        Rollout {
            reward_min: self.recipe().task.name.reward_min,
            engine,
            chat: &self.chat,
            task: self.task.as_ref(),
            interpreter: self.interpreter.as_deref(),
            reply_chars_max: self.recipe().reply_chars_max(self.task.as_ref(), self.interpreter.is_some()),
            system_prompt: &self.system_prompt,
            plan,
        }
    }

    /// Returns the processes of this run.
    pub fn mesh(&self) -> &Arc<Mesh> {
        self.parameters.mesh()
    }

    /// Samples `samples` conversations for each of `prompts`. Each process samples a part of the prompts, and
    /// then receives all results. Returns `None` if `stop` returned true.
    ///
    /// # Errors
    /// When [`Rollout::sample_groups`] fails, or when a rank does not reply in time.
    pub fn sample_groups(
        &self,
        engine: &Engine,
        plan: &RolloutPlan,
        prompts: &[Prompt],
        samples: usize,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        if let Some(agent) = &self.agent {
            let kept = match plan.purpose {
                Purpose::Sampling => EpisodeTrajectories::All,
                _ => EpisodeTrajectories::OneEach(&|_, _| ()),
            };
            return agent.sample_groups(engine, plan, (prompts, samples), kept, progress, stop);
        }
        let (mesh, rollout) = (self.mesh(), self.rollout(engine, plan));
        let (rank, ranks) = (mesh.rank(), mesh.ranks());
        if ranks == 1 {
            return rollout.sample_groups(prompts, samples, progress, stop);
        }
        let local_prompts = &prompts[prompts.len() * rank / ranks..prompts.len() * (rank + 1) / ranks];
        let local = rollout.sample_groups(local_prompts, samples, progress, stop)?;
        let all: Vec<Option<Rollouts>> = mesh.all_gather_records("rollouts", &local)?;
        Ok(all.into_iter().collect::<Option<Vec<_>>>().map(Rollouts::concat))
    }

    /// Samples `rollout.step_tokens_max` tokens of each unfinished trajectory of `groups`. Each process
    /// samples a part of the groups, and then receives all results. Returns `None` if `stop` returned true.
    ///
    /// # Errors
    /// The errors of [`Self::sample_groups`].
    pub fn sample_in_progress(
        &self,
        engine: &Engine,
        plan: &RolloutPlan,
        groups: Vec<GroupInProgress>,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Vec<GroupInProgress>>> {
        let (mesh, rollout) = (self.mesh(), self.rollout(engine, plan));
        let (rank, ranks, count) = (mesh.rank(), mesh.ranks(), groups.len());
        let own = count * rank / ranks..count * (rank + 1) / ranks;
        let local: Vec<GroupInProgress> = groups.into_iter().take(own.end).skip(own.start).collect();
        let prompt = |group: &GroupInProgress| Prompt {
            index: group.prompt,
            problem: self.task.training_problem(plan.seed, group.prompt),
        };
        let prompts: Vec<Prompt> = local.iter().map(prompt).collect();
        let limits = (plan.settings.samples_per_prompt, plan.settings.step_tokens_max);
        let local = rollout.sample_in_progress(&prompts, local, limits, progress, stop)?;
        if ranks == 1 {
            return Ok(local);
        }
        let all: Vec<Option<Vec<GroupInProgress>>> = mesh.all_gather_records("rollouts", &local)?;
        Ok(all.into_iter().collect::<Option<Vec<_>>>().map(|parts| parts.concat()))
    }

    /// Samples as [`Self::sample_groups`] does, on this process alone, and passes each trajectory to
    /// `finished`. An agent's episodes give one trajectory each, when the rollout ends.
    ///
    /// # Errors
    /// The errors of [`Self::sample_groups`].
    pub fn sample_with_observer(
        &self,
        engine: &Engine,
        plan: &RolloutPlan,
        (prompts, samples): (&[Prompt], usize),
        progress: &(dyn Fn(RolloutProgress) + Sync),
        finished: &Observer<'_>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        let Some(agent) = &self.agent else {
            let rollout = self.rollout(engine, plan);
            return rollout.sample_with_observer(prompts, samples, progress, finished, stop);
        };
        let kept = EpisodeTrajectories::OneEach(finished);
        agent.sample_groups(engine, plan, (prompts, samples), kept, progress, stop)
    }

    /// Returns a message about dead workers of the Python tool, if any.
    pub fn dead_worker_warning(&self) -> Option<String> {
        self.interpreter.as_ref()?.dead_worker_warning()
    }

    /// Describes the sandbox of the Python tool, for the run folder. `None` without a tool.
    pub fn sandbox_description(&self) -> Option<String> {
        self.interpreter.as_ref().map(|i| i.sandbox_description())
    }
}
