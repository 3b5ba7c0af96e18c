//! What a command needs, opened and checked before any work: everything but the weights.

mod fit;
mod load;

use crate::bad_input;
use crate::checkpoint::peft::holds_adapter;
use crate::dist::{Mesh, PackedWeights, RolloutWeights};
use crate::harmony::Message;
use crate::interpreter::{self, Interpreter};
use crate::metrics::Console;
use crate::model::config::{Config, Form};
use crate::model::split_rows::heads_split;
use crate::ops::mxfp4;
use crate::ops::threads::Threads;
use crate::recipe::{Plan, Recipe};
use crate::rollout::{PromptLimits, preamble};
use crate::run::adapter::RunAdapter;
use crate::run::device::{ComputePlace, choose};
use crate::run::family::foreign_keys;
use crate::run::freeze::{critic_trainable, trainable};
use crate::run::memory::{Intent, OtherWeights, Subject};
use crate::run::source::{ModelSource, unverified};
use crate::tasks::{self, Problem, Task, TaskHost};
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;

/// Everything that a plan names, opened and checked; of the weights only the headers are read.
pub struct Preflight {
    pub plan: Plan,
    intent: Intent,
    /// The processes that make the run together.
    mesh: Arc<Mesh>,
    /// How many processes memory is planned for.
    processes: usize,
    /// What of the learning weights each of them holds while it samples.
    rollout_weights: RolloutWeights,
    /// What of the packed ones.
    packed_weights: PackedWeights,
    threads: Threads,
    place: ComputePlace,
    /// Of how many sequences a GPU holds keys and values.
    gpu_sequences: Option<usize>,
    pub(super) source: ModelSource,
    /// Which of the model's own tensors learn, in the first stage.
    trainable: Vec<bool>,
    critic_trainable: Option<Vec<bool>>,
    adapter: Option<RunAdapter>,
    pub task: Box<dyn Task>,
    interpreter: Option<Box<dyn Interpreter>>,
    preamble: Vec<Message>,
    /// Whether the layers stay on disk.
    streamed: bool,
}

impl Preflight {
    /// Opens everything the plan names. Nothing is written, and no weights are read.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with every mistake found, each with its place and remedy.
    pub fn open(plan: Plan, intent: Intent, console: &Console) -> Result<Self> {
        Self::open_at(plan, intent, &Mesh::single(), None, console)
    }

    /// The same for a run of the processes of `mesh`, which may go on from `checkpoint`, that says where an adapter's base is.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_at(
        mut plan: Plan,
        intent: Intent,
        mesh: &Arc<Mesh>,
        checkpoint: Option<&Path>,
        console: &Console,
    ) -> Result<Self> {
        let threads = Threads::shared(plan.recipe.parallel.threads, mesh.ranks_on_cores())?;
        let mut mistakes = Mistakes(vec![]);
        let host =
            TaskHost { validation_problems_max: plan.recipe.eval.problems_max, console: console.clone() };
        let source = mistakes.note(match checkpoint.filter(|folder| holds_adapter(folder)) {
            Some(folder) => ModelSource::from_adapter(folder, plan.recipe.model.path.as_deref())
                .map(|source| source.held_for(&plan.recipe)),
            None => ModelSource::open(&plan.recipe),
        });
        let task = mistakes.note(tasks::build(&plan.recipe.task, &host));
        let adapter = source.as_ref().and_then(|s| {
            let found = s.adapter.as_ref().map(|adapter| &adapter.lora);
            mistakes.note(RunAdapter::of(&plan, &s.config, found, intent.learns()))
        });
        let trainable = source.as_ref().zip(adapter.as_ref()).and_then(|(s, adapter)| match adapter {
            Some(adapter) if !adapter.after_cold_start => Some(vec![false; s.specs().len()]),
            Some(adapter) => {
                let all = [&s.specs()[..], &adapter.specs].concat();
                mistakes.note(trainable(&plan, &all)).map(|all| all[..s.specs().len()].to_vec())
            }
            None => mistakes.note(trainable(&plan, &s.specs())),
        });
        let critic_trainable = source.as_ref().zip(adapter.as_ref()).and_then(|(s, adapter)| {
            let factors = adapter.as_ref().map(|adapter| &adapter.specs[..]);
            mistakes.note(critic_trainable(&plan, &s.config, factors))
        });
        let interpreter = match &task {
            Some(task) if task.uses_python() => {
                mistakes.note(open_interpreter(&plan.recipe, threads.count(), mesh.ranks_on_host()).map(Some))
            }
            _ => Some(None),
        };
        if let Some(source) = &source {
            mistakes.note(check_budgets(&plan, &source.config));
            mistakes.note(check_heads(&plan, &source.config));
            mistakes.0.extend(foreign_keys(&plan, source.config.family));
        }
        let compares_changed = intent == Intent::CheckMismatch(OtherWeights::Changed);
        let place = source.as_ref().map(|s| choose(&mut plan, &s.config, mesh, compares_changed));
        let place = place.and_then(|place| place.map_err(|why| mistakes.0.extend(why)).ok());
        let (
            Some(source),
            Some(place),
            Some(task),
            Some(trainable),
            Some(critic_trainable),
            Some(interpreter),
        ) = (source, place, task, trainable, critic_trainable, interpreter)
        else {
            return Err(mistakes.into_error());
        };
        if !mistakes.0.is_empty() {
            return Err(mistakes.into_error());
        }
        if let Some(folder) = &source.lacks_weights {
            plan.warnings.push(format!("{} holds no weights; they are drawn at random", folder.display()));
        }
        if let Some(folder) = &source.unverified {
            plan.warnings.push(unverified(folder));
        }
        if let Some(confinement) = interpreter.as_ref().map(|i| i.confinement())
            && confinement.contains("NOT SANDBOXED")
        {
            plan.warnings
                .push(format!("THE PYTHON TOOL IS {confinement}: code from the model has your own rights"));
        }
        let preamble = preamble(&source.chat, &plan.recipe.harmony, task.uses_python());
        Ok(Self {
            plan,
            intent,
            mesh: mesh.clone(),
            processes: mesh.ranks(),
            rollout_weights: RolloutWeights::Whole,
            packed_weights: PackedWeights::Whole,
            threads,
            gpu_sequences: place.available.is_some().then_some(1),
            place,
            source,
            trainable,
            critic_trainable,
            adapter: adapter.flatten(),
            task,
            interpreter,
            preamble,
            streamed: false,
        })
    }

    /// The first training problem.
    pub fn first_problem(&self) -> Problem {
        self.task.training_problem(self.plan.recipe.train.seed, 0)
    }

    /// The prompt of `problem` as the model reads it, and its length in tokens.
    ///
    /// # Errors
    /// When the tokenizer cannot write it; [`crate::error::BadInput`] for one that is too long.
    pub fn prompt(&self, problem: &Problem) -> Result<(String, usize)> {
        let limits = PromptLimits {
            chat: &self.source.chat,
            preamble: &self.preamble,
            prompt_tokens_max: self.plan.recipe.rollout.prompt_tokens_max,
            context_tokens_max: self.source.config.max_position_embeddings,
        };
        let tokens = limits.tokens(problem)?;
        Ok((self.source.chat.vocabulary().decode(&tokens), tokens.len()))
    }

    /// What memory is planned from.
    pub fn subject(&self) -> Subject<'_> {
        self.subject_of(self.intent)
    }

    /// The same for another command.
    pub fn subject_of(&self, intent: Intent) -> Subject<'_> {
        Subject {
            intent,
            recipe: &self.plan.recipe,
            config: &self.source.config,
            forms: &self.source.forms,
            trainable: self.trainable.clone(),
            critic_trainable: self.critic_trainable.clone(),
            adapter: self.adapter.as_ref().map(RunAdapter::part),
            uses_python: self.interpreter.is_some(),
            threads: self.threads.count(),
            streamed: self.streamed,
            processes: self.processes,
            rollout_weights: self.rollout_weights,
            packed_weights: self.packed_weights,
            gpu_sequences: self.gpu_sequences,
        }
    }
}

/// Collects [`crate::error::BadInput`]; any other error is one too, but keeps its own words.
pub(super) struct Mistakes(pub(super) Vec<String>);

impl Mistakes {
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(format!("{error:#}"))).ok()
    }

    /// All of them in one, in the form of a recipe's mistakes.
    pub(super) fn into_error(self) -> anyhow::Error {
        match self.0.as_slice() {
            [only] => bad_input!("{only}"),
            all => bad_input!("{} mistakes:\n  {}", all.len(), all.join("\n  ")),
        }
    }
}

/// The recipe's budgets against what the model can hold.
fn check_budgets(plan: &Plan, config: &Config) -> Result<()> {
    let context = config.max_position_embeddings;
    let response = plan.recipe.rollout.response_tokens_max;
    if response >= context {
        let what = format!("{response} sampled tokens do not fit the model's context of {context}; lower it");
        return Err(plan.mistake("rollout.response_tokens_max", what).into());
    }
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let blocks = hidden % mxfp4::BLOCK == 0 && intermediate % mxfp4::BLOCK == 0;
    if plan.recipe.checkpoint.dtype == Form::Mxfp4 && !blocks {
        let what = format!(
            "MXFP4 holds blocks of {}, but hidden_size = {hidden} and intermediate_size = {intermediate}; save \"bf16\"",
            mxfp4::BLOCK
        );
        return Err(plan.mistake("checkpoint.dtype", what).into());
    }
    Ok(())
}

/// Whether attention's heads can be split over the processes that share a sequence.
fn check_heads(plan: &Plan, config: &Config) -> Result<()> {
    let sequence = plan.recipe.parallel.sequence;
    match heads_split(config.num_attention_heads, config.num_key_value_heads, sequence) {
        None => Ok(()),
        Some(why) => {
            let what = format!("{sequence} {why}; write a divisor, or 1");
            Err(plan.mistake("parallel.sequence", what).into())
        }
    }
}

/// The tool, whose workers of one machine are divided among the `processes` on it.
fn open_interpreter(recipe: &Recipe, threads: usize, processes: usize) -> Result<Box<dyn Interpreter>> {
    let mut settings = recipe.interpreter.clone();
    settings.workers = match settings.workers {
        0 => threads,
        workers => workers.div_ceil(processes),
    };
    let (rollout, eval) = (&recipe.rollout, &recipe.eval);
    let sessions_max = (rollout.prompts_per_step * rollout.samples_per_prompt)
        .max(eval.problems_max.saturating_mul(eval.samples));
    interpreter::open(settings, sessions_max)
}
