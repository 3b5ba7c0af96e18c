//! Turns a preflight into a run context: reads or initializes the weights.

use super::Preflight;
use crate::agents::AgentSession;
use crate::bad_input;
use crate::chat::Chat;
use crate::dist::PackedWeightPlacement;
use crate::metrics::Console;
use crate::model::forward::Model;
use crate::recipe::Recipe;
use crate::run::context::RunContext;
use crate::run::memory::{ModelCommand, SecondWeights};
use crate::run::source::Placement;
use anyhow::Result;

impl Preflight {
    /// Reads the weights, or initializes them randomly.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file is damaged.
    pub fn load(self, console: &Console) -> Result<RunContext> {
        let memory_plan_input = self.memory_plan_input();
        let (cache_capacity, memory) =
            (memory_plan_input.cache_capacity(self.gpu_sequences.unwrap_or(1)), memory_plan_input.to_text());
        let prefix_tokens_max = memory_plan_input.prefix_tokens_max();
        let recompute_layers = memory_plan_input.recomputes_layers();
        let source = self.source;
        let (recipe, trainable) = (&self.plan.recipe, &self.trainable);
        let placement = match (self.layers_on_demand, self.packed_weights) {
            (true, _) => Placement::OnDisk,
            (false, PackedWeightPlacement::Sharded) if self.command.trains() => Placement::Sharded,
            _ => Placement::Replicated,
        };
        let backend = (&self.mesh, &self.compute_device.device);
        let read_parameters =
            || source.parameters(recipe, trainable, self.command, backend, placement, console);
        let mut parameters = self.threads.run_on_all(read_parameters)?;
        let (teacher, teacher_prompt) = match self.teacher {
            None => (None, None),
            Some(settings) => {
                let read = || settings.load(recipe, &self.mesh, console);
                (self.threads.run_on_all(read)?, settings.prompt)
            }
        };
        let (mut trainable, mut base) = (self.trainable.clone(), None);
        if let Some(adapter) = self.adapter.as_ref().filter(|adapter| !adapter.after_cold_start) {
            trainable = adapter.trainable_flags(trainable.len());
            if parameters.adapter().is_none() {
                adapter.attach(&mut parameters, recipe.train.seed)?;
            }
            if self.command.trains() {
                base = source.base()?;
            }
        }
        let context = source.config.max_position_embeddings;
        let agent = open_agent(&self.plan.recipe, self.command, self.mesh.ranks(), &source.chat, console)?;
        Ok(RunContext {
            random_weights: source.weights.is_none(),
            model: self.threads.run_on_all(|| Model::new(source.config, context)),
            chat: source.chat,
            companions: source.companions,
            plan: self.plan,
            threads: self.threads,
            parameters,
            device_name: self.compute_device.name,
            cache_capacity,
            prefix_tokens_max,
            memory,
            recompute_layers,
            two_samplings: self.two_samplings,
            rollout_weights: self.rollout_weights,
            trainable,
            critic_trainable: self.critic_trainable,
            adapter: self.adapter,
            base,
            task: self.task,
            agent,
            interpreter: self.interpreter,
            system_prompt: self.system_prompt,
            chatml_identity: self.chatml_identity,
            sft_rows: self.sft_rows,
            teacher,
            teacher_prompt,
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
    AgentSession::open(&recipe.task, chat, &recipe.harmony, console).map(Some)
}
