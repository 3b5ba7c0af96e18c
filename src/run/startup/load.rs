//! Starts a command: opens everything, checks the memory, reads or initializes the weights.

use super::Startup;
use super::model::Trainables;
use crate::actor::{Actor, Execution};
use crate::agents::AgentSession;
use crate::bad_input;
use crate::chat::Chat;
use crate::checkpoint::BaseFiles;
use crate::dist::{Mesh, PackedWeightPlacement};
use crate::metrics::Console;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::recipe::{Plan, Recipe};
use crate::run::environment::Environment;
use crate::run::loaded::LoadedModel;
use crate::run::memory::{ModelCommand, SecondWeights, available_memory, min_over_processes};
use crate::run::source::{Placement, reading_note};
use crate::run::teacher::TeacherModel;
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;

/// A command that is ready to run its model.
pub struct Started {
    pub loaded: LoadedModel,
    /// Samplings beside an update share it.
    pub environment: Arc<Environment>,
    pub resources: Resources,
}

/// The device and the memory of a command, as startup chose them.
pub struct Resources {
    /// Name of the device that computes.
    pub device_name: String,
    /// The memory plan as text.
    pub memory_plan: String,
    /// Whether two samplings of training may be in flight.
    pub two_samplings: bool,
}

/// Opens everything that the recipe names, and reads the weights if there is enough memory. Writes nothing.
/// `console` shows the progress, and later failures of a task's program.
///
/// # Errors
/// [`crate::error::BadInput`] with all mistakes, each with its location and remedy.
pub fn start(plan: Plan, command: ModelCommand, console: &Console) -> Result<Started> {
    start_on_mesh(plan, command, &Mesh::single(), None, console)
}

/// Opens everything as [`start`] does, for a run on the processes of `mesh`. `checkpoint` is the checkpoint
/// to resume from, if any.
///
/// # Errors
/// The errors of [`start`].
pub fn start_on_mesh(
    plan: Plan,
    command: ModelCommand,
    mesh: &Arc<Mesh>,
    checkpoint: Option<&Path>,
    console: &Console,
) -> Result<Started> {
    // The collective call comes first, because the code below may fail on only one process.
    let local = available_memory().map(|memory| memory.process_share(mesh.ranks_on_host));
    let available = min_over_processes(mesh, local)?;
    // This line is printed first, because reading the first weights may take a minute.
    if let Some(model) = reading_note(&plan.recipe) {
        console.print(&model);
    }
    let mut startup = Startup::open_for(plan, command, (mesh, checkpoint), None, console)?;
    startup.check_memory(available)?;
    startup.load(console)
}

impl Startup {
    /// Reads the weights, or initializes them randomly. Starts the server of an agent.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file is damaged.
    pub fn load(self, console: &Console) -> Result<Started> {
        let input = self.memory_plan_input();
        let memory_plan = input.to_text();
        let cache_capacity = input.cache_capacity(self.choices.gpu_sequences.unwrap_or(1));
        let (prefix_tokens_max, recompute_layers) = (input.prefix_tokens_max(), input.recomputes_layers());
        let trains_adapter = self.command.trains() && self.trainables.adapter.is_some();
        let base_files = match self.source.folder.as_ref().filter(|_| trains_adapter) {
            Some(folder) => self.source.weights.as_ref().map(|_| BaseFiles::of(folder)).transpose()?,
            None => None,
        };
        let parameters = self.read_parameters(console)?;
        let Self { mut environment, command, mesh, threads, compute_device, source, .. } = self;
        let recipe = &environment.plan.recipe;
        let teacher = match self.teacher {
            Some(teacher) => threads.run_on_all(|| teacher.load(recipe, &mesh, console))?,
            None => None,
        };
        let execution = Arc::new(Execution {
            threads,
            recompute_layers,
            micro_batch_tokens: recipe.train.micro_batch_tokens,
            cache_capacity,
            prefix_tokens_max,
            rollout_weights: self.placement.rollout_weights,
        });
        let actor = |model: Model, parameters| Actor::new(Arc::new(model), parameters, execution.clone());
        let teacher = teacher
            .map(|(model, parameters, digest)| TeacherModel { actor: actor(model, parameters), digest });
        let Trainables { policy, critic, adapter } = self.trainables;
        let (mut parameters, mut trainable, mut base) = (parameters, policy, None);
        if let Some(adapter) = adapter.as_ref().filter(|adapter| !adapter.factors.after_cold_start) {
            trainable = adapter.trainable_flags(trainable.len());
            if parameters.adapter().is_none() {
                adapter.attach(&mut parameters, recipe.train.seed)?;
            }
            if command.trains() {
                base = source.base()?;
            }
        }
        environment.agent = open_agent(recipe, command, mesh.ranks(), &environment.chat, console)?;
        let (random_weights, context) = (source.weights.is_none(), source.config.max_position_embeddings);
        let model = execution.threads.run_on_all(|| Model::new(source.config, context));
        let loaded = LoadedModel {
            actor: actor(model, parameters),
            companions: source.companions,
            random_weights,
            trainable,
            critic_trainable: critic,
            adapter,
            base,
            base_files,
            teacher,
        };
        let (device_name, two_samplings) = (compute_device.name, self.choices.two_samplings);
        let resources = Resources { device_name, memory_plan, two_samplings };
        Ok(Started { loaded, environment: Arc::new(environment), resources })
    }

    /// Reads the policy's weights, or initializes them.
    fn read_parameters(&self, console: &Console) -> Result<Parameters> {
        let placement = match (self.placement.layers_on_demand, self.placement.packed_weights) {
            (true, _) => Placement::OnDisk,
            (false, PackedWeightPlacement::Sharded) if self.command.trains() => Placement::Sharded,
            _ => Placement::Replicated,
        };
        let (recipe, trainable) = (self.environment.recipe(), &self.trainables.policy);
        let backend = (&self.mesh, &self.compute_device.device);
        self.threads.run_on_all(|| {
            self.source.parameters(recipe, trainable, self.command, backend, placement, console)
        })
    }
}

/// Starts the server for an agent's program, if the recipe has one and the command plays its episodes.
///
/// # Errors
/// [`crate::error::BadInput`] for a command or a number of processes that no agent can serve, and the errors
/// of [`AgentSession::open`].
fn open_agent(
    recipe: &Recipe,
    command: ModelCommand,
    processes: usize,
    chat: &Chat,
    console: &Console,
) -> Result<Option<AgentSession>> {
    let trains_on_samples = recipe.train.steps > 0 && recipe.train.trajectories.is_none();
    let plays = match command {
        ModelCommand::Train => trains_on_samples,
        ModelCommand::Rollout | ModelCommand::Eval => true,
        ModelCommand::CheckMismatch(SecondWeights::Rounded(_)) if recipe.task.is_agent() => {
            return Err(bad_input!(
                "task.name: check-mismatch plays no episodes of an agent; compare a file of them with --against, or set another \
                 task"
            ));
        }
        ModelCommand::Chat | ModelCommand::Serve | ModelCommand::CheckMismatch(_) => false,
    };
    if !recipe.task.is_agent() || !plays {
        return Ok(None);
    }
    if processes > 1 {
        return Err(bad_input!(
            "task.name: an agent's episodes are played by one process, and this run has {processes}; start it with one"
        ));
    }
    AgentSession::open(&recipe.task, chat, &recipe.chat, console).map(Some)
}
