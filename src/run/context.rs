//! The context of every command that runs a model.

use super::adapter::RunAdapter;
use super::family::foreign_keys;
use super::memory::{Intent, available, least};
use super::preflight::{Mistakes, Preflight};
use super::source::{ModelSource, Placement, model_folder};
use crate::bad_input;
use crate::chat::Chat;
use crate::checkpoint::Base;
use crate::checkpoint::save::Companions;
use crate::dist::Mesh;
use crate::dist::RolloutWeights;
use crate::harmony::Message;
use crate::interpreter::Interpreter;
use crate::learner::examples::Rendering;
use crate::metrics::Console;
use crate::model::cache::CacheRoom;
use crate::model::config::Config;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::parameters::Parameters;
use crate::model::policy_view::PolicyView;
use crate::ops::threads::Threads;
use crate::recipe::{Plan, Recipe};
use crate::rollout::{Prompt, Rollout, RolloutPlan, RolloutProgress, Rollouts};
use crate::tasks::Task;
use anyhow::Result;
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;

/// A model with its conversations, task and tool, ready to run.
pub struct RunContext {
    pub plan: Plan,
    pub threads: Threads,
    /// Its tokenizer, and how its conversations are written.
    pub chat: Chat,
    /// Tokenizer files and the like that travel with a checkpoint.
    pub companions: Companions,
    pub model: Model,
    pub parameters: Parameters,
    /// Where it computes, in words.
    pub place: String,
    /// The plan of memory, in words.
    pub memory: String,
    /// Keys and values that a GPU holds at the same time.
    pub room: CacheRoom,
    /// The weights that each process holds while it samples.
    pub rollout_weights: RolloutWeights,
    /// The parameters that `train.freeze` leaves trainable.
    pub trainable: Vec<bool>,
    /// The parameters that `critic.freeze` leaves trainable; present where the recipe has a critic.
    pub critic_trainable: Option<Vec<bool>>,
    /// Present where an adapter is trained, or came with the model.
    pub adapter: Option<RunAdapter>,
    /// The adapter's base as checkpoints name it; `None` until a folder holds it.
    pub base: Option<Base>,
    pub task: Box<dyn Task>,
    /// Present for tasks that use it.
    pub interpreter: Option<Box<dyn Interpreter>>,
    /// System and developer messages in front of every prompt.
    pub preamble: Vec<Message>,
}

impl RunContext {
    /// Opens everything the plan names, once its memory is known to suffice. Nothing is written; reading the
    /// weights, and what a task's own program fails at later, is told on `console`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with every mistake found, each with its place and remedy.
    pub fn open(plan: Plan, intent: Intent, console: &Console) -> Result<Self> {
        Self::open_at(plan, intent, &Mesh::single(), None, console)
    }

    /// The same for a run of the processes of `mesh`, which may go on from `checkpoint`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_at(
        plan: Plan,
        intent: Intent,
        mesh: &Arc<Mesh>,
        checkpoint: Option<&Path>,
        console: &Console,
    ) -> Result<Self> {
        // Before anything that may fail on one process alone.
        let available = least(mesh, available().map(|found| found.shared(mesh.ranks_on_host())))?;
        let mut preflight = Preflight::open_at(plan, intent, mesh, checkpoint, console)?;
        preflight.admit(available)?;
        preflight.load(console)
    }

    /// Refuses a plan, of the same model, with keys that mean nothing to its family.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with every such key.
    pub fn check_family(&self, plan: &Plan) -> Result<()> {
        let mistakes = Mistakes(foreign_keys(plan, self.model.config.family));
        if mistakes.0.is_empty() { Ok(()) } else { Err(mistakes.into_error()) }
    }

    /// The recipe, resolved.
    pub fn recipe(&self) -> &Recipe {
        &self.plan.recipe
    }

    /// How conversations become supervised examples.
    pub fn rendering(&self) -> Rendering<'_> {
        Rendering {
            chat: &self.chat,
            preamble: &self.preamble,
            context_tokens_max: self.model.context_tokens_max(),
            vocabulary: self.model.config.vocab_size,
        }
    }

    /// Other weights of the same architecture, none of which learns: a Hugging Face folder, a checkpoint, or
    /// a run's last one. They stay on disk where they do not fit beside the model's own, which is told on
    /// `console`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there are none, or of another architecture.
    pub fn weights_of(&self, folder: &Path, console: &Console) -> Result<Parameters> {
        let source = ModelSource::from_folder(&model_folder(folder)?)?.held_for(self.recipe());
        let same = Config {
            max_position_embeddings: self.model.config.max_position_embeddings,
            ..source.config.clone()
        };
        if source.weights.is_none() || same != self.model.config {
            return Err(bad_input!(
                "{}: holds no weights of this architecture; name a folder of the same model at another step",
                folder.display()
            ));
        }
        let streamed = available().is_some_and(|available| source.resident_bytes() > available.bytes);
        if streamed {
            console
                .print(&format!("warning: {}: each layer is read whenever it is its turn", folder.display()));
        }
        let none_learns = vec![false; self.trainable.len()];
        let placement = if streamed { Placement::OnDisk } else { Placement::Replicated };
        let backend = (self.mesh(), &Device::Cpu);
        source.parameters(self.recipe(), &none_learns, Intent::Eval, backend, placement, console)
    }

    /// What the arms change in the training forward.
    pub fn training_forward(&self) -> ForwardOptions {
        ForwardOptions::training(&self.recipe().arms, self.recipe().train.seed)
    }

    /// The first `count` prompts of draw `round` (from 0) of training step `step` (from 1): the task's stream
    /// in order. Each step owns a stretch that suffices for every draw it may make, so its prompts depend on
    /// its number alone.
    pub fn training_prompts(&self, step: u64, round: u64, count: usize) -> Vec<Prompt> {
        let recipe = self.recipe();
        let draws = recipe.rollout.resample_rounds_max + 1;
        let first = ((step - 1) * draws + round) * recipe.rollout.prompts_per_step as u64;
        let problem = |index| self.task.training_problem(recipe.train.seed, index);
        (first..first + count as u64).map(|index| Prompt { index, problem: problem(index) }).collect()
    }

    /// The policy that samples for training, as the arms leave it.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when an arm does not fit the model.
    pub fn rollout_policy(&self) -> Result<PolicyView<'_>> {
        let (arms, seed) = (&self.recipe().arms, self.recipe().train.seed);
        PolicyView::of_processes(&self.model, &self.parameters, Some(arms), seed, self.rollout_weights)
    }

    /// The policy as it is, for evaluation.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn plain_policy(&self) -> Result<PolicyView<'_>> {
        PolicyView::of_processes(&self.model, &self.parameters, None, 0, self.rollout_weights)
    }

    /// The training rollout of step `step`.
    pub fn training_rollout(&self, step: u64) -> RolloutPlan {
        let recipe = self.recipe();
        RolloutPlan::training(&recipe.rollout, recipe.train.seed, step)
    }

    /// The evaluation after step `step`.
    pub fn evaluation_rollout(&self, step: u64) -> RolloutPlan {
        let recipe = self.recipe();
        RolloutPlan::evaluation(&recipe.rollout, &recipe.eval, recipe.train.seed, step)
    }

    /// A rollout of `policy` by `plan`.
    pub fn rollout<'a>(&'a self, policy: &'a PolicyView<'a>, plan: &'a RolloutPlan) -> Rollout<'a> {
        Rollout {
            threads: &self.threads,
            policy,
            chat: &self.chat,
            task: self.task.as_ref(),
            interpreter: self.interpreter.as_deref(),
            preamble: &self.preamble,
            plan,
            room: self.room,
        }
    }

    /// The processes that make this run together.
    pub fn mesh(&self) -> &Arc<Mesh> {
        self.parameters.mesh()
    }

    /// `samples` conversations of each of `prompts`: every process samples its share of the prompts, and all
    /// of them get all. `None` when `stop` said so.
    ///
    /// # Errors
    /// Those of [`Rollout::groups`], and when a rank does not come in time.
    pub fn groups(
        &self,
        policy: &PolicyView,
        plan: &RolloutPlan,
        prompts: &[Prompt],
        samples: usize,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        let (mesh, rollout) = (self.mesh(), self.rollout(policy, plan));
        let (rank, ranks) = (mesh.rank(), mesh.ranks());
        if ranks == 1 {
            return rollout.groups(prompts, samples, progress, stop);
        }
        let own = &prompts[prompts.len() * rank / ranks..prompts.len() * (rank + 1) / ranks];
        let sampled = rollout.groups(own, samples, progress, stop)?;
        let all: Vec<Option<Rollouts>> = mesh.all_gather_records("rollouts", &sampled)?;
        Ok(all.into_iter().collect::<Option<Vec<_>>>().map(Rollouts::joined))
    }

    /// What the user has to hear of dead workers of the Python tool, if anything.
    pub fn dead_workers(&self) -> Option<String> {
        self.interpreter.as_ref()?.dead_workers()
    }

    /// What confines the Python tool, for the run folder; `None` without a tool.
    pub fn confinement(&self) -> Option<String> {
        self.interpreter.as_ref().map(|i| i.confinement())
    }
}
