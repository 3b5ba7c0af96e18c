//! What every command that runs a model needs, opened and checked before any work: the preflight.

use super::family::foreign_keys;
use super::freeze::{critic_trainable, trainable};
use crate::bad_input;
use crate::chat::Chat;
use crate::error::BadInput;
use crate::harmony::Message;
use crate::interpreter::{self, CPython, Embedded, Interpreter};
use crate::metrics::Console;
use crate::model::config::{Config, Rope};
use crate::model::forward::{ForwardOptions, Model};
use crate::model::init::{InitSettings, init};
use crate::model::load::{load, weights_present};
use crate::model::mxfp4;
use crate::model::names::ParameterSpec;
use crate::model::parameters::Parameters;
use crate::model::policy_view::PolicyView;
use crate::model::save::Companions;
use crate::ops::threads::Threads;
use crate::recipe::model::Tokenizer;
use crate::recipe::{Architecture, Dtype, InterpreterKind, Plan, Recipe, SavedDtype};
use crate::rollout::{Prompt, Rollout, RolloutSettings, preamble};
use crate::tasks::{Task, TaskSettings};
use crate::train::checkpoint;
use crate::train::supervised::Rendering;
use anyhow::{Result, bail};
use half::bf16;
use std::path::{Path, PathBuf};

/// A model with its conversations, task and tool, ready to run.
pub struct Workbench {
    pub plan: Plan,
    pub threads: Threads,
    /// Its tokenizer, and how its conversations are written.
    pub chat: Chat,
    /// Tokenizer files and the like that travel with a checkpoint.
    pub companions: Companions,
    pub model: Model,
    pub parameters: Parameters,
    /// Which parameters `train.freeze` leaves learning.
    pub trainable: Vec<bool>,
    /// Which parameters `critic.freeze` leaves learning; present where the recipe has a critic.
    pub critic_trainable: Option<Vec<bool>>,
    pub task: Box<dyn Task>,
    /// Present for tasks that use it.
    pub interpreter: Option<Box<dyn Interpreter>>,
    /// System and developer messages in front of every prompt.
    pub preamble: Vec<Message>,
}

impl Workbench {
    /// Opens everything the plan names. Nothing is written; what a task's own program fails at later is told on `console`.
    ///
    /// # Errors
    /// [`BadInput`] with every mistake found, each with its place and remedy.
    pub fn open(mut plan: Plan, console: &Console) -> Result<Self> {
        let threads = Threads::new(plan.recipe.parallel.threads)?;
        let mut mistakes = Mistakes(vec![]);
        let source = mistakes.note(ModelSource::open(&plan.recipe));
        let task = mistakes.note(crate::tasks::build(&task_settings(&plan.recipe, console)));
        let trainable = source.as_ref().and_then(|s| mistakes.note(trainable(&plan, &s.specs())));
        let critic_trainable =
            source.as_ref().and_then(|s| mistakes.note(critic_trainable(&plan, &s.config)));
        let interpreter = match &task {
            Some(task) if task.uses_python() => {
                mistakes.note(open_interpreter(&plan.recipe, threads.count()).map(Some))
            }
            _ => Some(None),
        };
        if let Some(source) = &source {
            mistakes.note(check_budgets(&plan, &source.config));
            mistakes.0.extend(foreign_keys(&plan, source.config.family));
        }
        let (Some(source), Some(task), Some(trainable), Some(critic_trainable), Some(interpreter), true) =
            (source, task, trainable, critic_trainable, interpreter, mistakes.0.is_empty())
        else {
            return Err(mistakes.into_error());
        };
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
        let parameters = source.parameters(&plan.recipe)?;
        let context = source.config.max_position_embeddings;
        Ok(Self {
            model: Model::new(source.config, context),
            chat: source.chat,
            companions: source.companions,
            plan,
            threads,
            parameters,
            trainable,
            critic_trainable,
            task,
            interpreter,
            preamble,
        })
    }

    /// Refuses a plan, of the same model, with keys that mean nothing to its family.
    ///
    /// # Errors
    /// [`BadInput`] with every such key.
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

    /// Other weights of the same architecture: a Hugging Face folder, a checkpoint, or a run's last one.
    ///
    /// # Errors
    /// [`BadInput`] when there are none, or of another architecture.
    pub fn weights_of(&self, folder: &Path) -> Result<Parameters> {
        let source = ModelSource::from_folder(&model_folder(folder)?)?;
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
        source.parameters(self.recipe())
    }

    /// What the arms change in the training forward.
    pub fn training_forward(&self) -> ForwardOptions {
        ForwardOptions::training(&self.recipe().arms, self.recipe().train.seed)
    }

    /// The first `count` prompts of draw `round` (from 0) of training step `step` (from 1): the task's stream in order. Each
    /// step owns a stretch that suffices for every draw it may make, so its prompts depend on its number alone.
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
    /// [`BadInput`] when an arm does not fit the model.
    pub fn rollout_policy(&self) -> Result<PolicyView<'_>> {
        PolicyView::rollout(&self.model, &self.parameters, &self.recipe().arms, self.recipe().train.seed)
    }

    /// The policy as it is, for evaluation.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn plain_policy(&self) -> Result<PolicyView<'_>> {
        PolicyView::plain(&self.model, &self.parameters)
    }

    /// A rollout of `policy` with `settings`.
    pub fn rollout<'a>(&'a self, policy: &'a PolicyView<'a>, settings: &'a RolloutSettings) -> Rollout<'a> {
        Rollout {
            threads: &self.threads,
            policy,
            chat: &self.chat,
            task: self.task.as_ref(),
            interpreter: self.interpreter.as_deref(),
            settings,
        }
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

/// Collects [`BadInput`]; any other error is one too, but keeps its own words.
struct Mistakes(Vec<String>);

impl Mistakes {
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(format!("{error:#}"))).ok()
    }

    /// All of them in one, in the form of a recipe's mistakes.
    fn into_error(self) -> anyhow::Error {
        match self.0.as_slice() {
            [only] => bad_input!("{only}"),
            all => bad_input!("{} mistakes:\n  {}", all.len(), all.join("\n  ")),
        }
    }
}

/// Where the model comes from: a folder, or the recipe's own architecture.
struct ModelSource {
    config: Config,
    chat: Chat,
    companions: Companions,
    /// Folder with weights; `None` for random ones.
    weights: Option<PathBuf>,
    /// A folder that lacks weights, which is worth a warning.
    lacks_weights: Option<PathBuf>,
    /// A folder without a manifest, which is worth one too.
    unverified: Option<PathBuf>,
}

impl ModelSource {
    fn open(recipe: &Recipe) -> Result<Self> {
        match (&recipe.model.path, &recipe.model.architecture) {
            (Some(path), _) => Self::from_folder(&model_folder(path)?),
            (None, Some(architecture)) => {
                let family = architecture.model_type;
                let chat = match recipe.model.tokenizer.as_ref().unwrap_or(&Tokenizer::Embedded) {
                    Tokenizer::Embedded => family.embedded_chat()?,
                    Tokenizer::Path(path) if path.is_dir() => family.chat(&path.join("tokenizer.json"))?,
                    Tokenizer::Path(path) => family.chat(path)?,
                };
                let config = config_of(architecture, &chat);
                config.check()?;
                let companions = Companions::of(&chat);
                Ok(Self { config, chat, companions, weights: None, lacks_weights: None, unverified: None })
            }
            (None, None) => bail!("neither model.path nor model.architecture"),
        }
    }

    fn from_folder(folder: &Path) -> Result<Self> {
        let unverified = (!checkpoint::sound(folder)?).then(|| folder.to_owned());
        let config = Config::read(folder)?;
        let file = folder.join("tokenizer.json");
        let chat = config.family.chat(&file)?;
        let tokens = chat.vocabulary().vocab_size();
        if tokens > config.vocab_size {
            return Err(bad_input!(
                "{}: the tokenizer has {tokens} tokens but config.json says vocab_size = {}; use the tokenizer that belongs to this model",
                file.display(),
                config.vocab_size
            ));
        }
        let present = weights_present(folder);
        let folder = Some(folder.to_owned());
        let companions = match &folder {
            Some(folder) => Companions::read(folder, &chat)?,
            None => Companions::default(),
        };
        let (weights, lacks_weights) = if present { (folder, None) } else { (None, folder) };
        Ok(Self { config, chat, companions, weights, lacks_weights, unverified })
    }

    fn specs(&self) -> Vec<ParameterSpec> {
        crate::model::names::parameter_specs(&self.config)
    }

    fn parameters(&self, recipe: &Recipe) -> Result<Parameters> {
        // What `model.dtype` makes of a tensor.
        let working = |found: Result<(ParameterSpec, Vec<f32>)>| {
            let (spec, mut values) = found?;
            if recipe.model.dtype == Dtype::Bf16 {
                values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            Ok((spec, values))
        };
        if let Some(folder) = &self.weights {
            return Parameters::new(&self.config, load(folder, &self.config)?.map(working));
        }
        let settings = InitSettings {
            embedding_std: recipe.model.init.embedding_std,
            head_scale: recipe.model.init.head_scale,
            sink: recipe.model.init.sink,
        };
        let drawn = init(&self.config, &settings, recipe.train.seed)?;
        Parameters::new(&self.config, drawn.into_iter().map(Ok).map(working))
    }
}

/// The warning about a folder without a manifest.
pub fn unverified(folder: &Path) -> String {
    let shown = folder.display();
    format!(
        "{shown} has no manifest, so nobody can say whether its files are whole; rloss verify --accept {shown} writes one"
    )
}

/// The folder that holds the model: `path` itself, or the last checkpoint of the run folder it is.
fn model_folder(path: &Path) -> Result<PathBuf> {
    if path.join("config.json").is_file() {
        return Ok(path.to_owned());
    }
    match checkpoint::newest_folder(path)? {
        Some(folder) => Ok(folder),
        None => Err(bad_input!(
            "{}: holds neither config.json nor a run's checkpoints; set model.path to a Hugging Face folder, a checkpoint or a run folder",
            path.display()
        )),
    }
}

/// What the recipe's architecture says; keys of another family are left out.
fn config_of(a: &Architecture, chat: &Chat) -> Config {
    let (family, experts) = (a.model_type, a.model_type.has_experts());
    Config {
        family,
        vocab_size: chat.vocabulary().vocab_size(),
        hidden_size: a.hidden_size,
        num_hidden_layers: a.num_hidden_layers,
        num_attention_heads: a.num_attention_heads,
        num_key_value_heads: a.num_key_value_heads,
        head_dim: a.head_dim,
        intermediate_size: a.intermediate_size,
        num_local_experts: if experts { a.num_local_experts } else { 0 },
        num_experts_per_tok: if experts { a.num_experts_per_tok } else { 0 },
        sliding_window: if experts { a.sliding_window } else { 0 },
        layer_types: family.layer_types(a.num_hidden_layers),
        rope: Rope { theta: a.rope_theta, yarn: a.yarn.clone() },
        rms_norm_eps: a.rms_norm_eps,
        swiglu_limit: if experts { a.swiglu_limit } else { 0.0 },
        tie_word_embeddings: a.tie_word_embeddings,
        max_position_embeddings: a.max_position_embeddings,
        bos_token_id: None,
        eos_token_ids: chat.stop_tokens(),
        pad_token_id: chat.vocabulary().pad(),
    }
}

/// The recipe's budgets against what the model can hold.
fn check_budgets(plan: &Plan, config: &Config) -> Result<()> {
    let context = config.max_position_embeddings;
    let response = plan.recipe.rollout.response_tokens_max;
    if response >= context {
        let what = format!("{response} sampled tokens do not fit the model's context of {context}; lower it");
        return Err(BadInput(plan.mistake("rollout.response_tokens_max", what).to_string()).into());
    }
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let blocks = hidden % mxfp4::BLOCK == 0 && intermediate % mxfp4::BLOCK == 0;
    if plan.recipe.checkpoint.dtype == SavedDtype::Mxfp4 && !blocks {
        let what = format!(
            "MXFP4 holds blocks of {}, but hidden_size = {hidden} and intermediate_size = {intermediate}; save \"bf16\"",
            mxfp4::BLOCK
        );
        return Err(BadInput(plan.mistake("checkpoint.dtype", what).to_string()).into());
    }
    Ok(())
}

fn task_settings(recipe: &Recipe, console: &Console) -> TaskSettings {
    let task = &recipe.task;
    let defaults = TaskSettings::default();
    TaskSettings {
        name: task.name,
        train_file: task.train_file.clone(),
        validation_file: task.validation_file.clone(),
        validation_files: task.validation_files.clone(),
        train_rows_max: task.train_rows_max,
        validation_rows_max: task.validation_rows_max,
        extraction: task.extraction.unwrap_or_default(),
        answer: task.answer.unwrap_or_default(),
        prompt: task.prompt.unwrap_or_default(),
        grading: task.grading.unwrap_or_default(),
        command: task.command.clone(),
        command_timeout_s: task.command_timeout_s.unwrap_or(defaults.command_timeout_s),
        command_processes: task.command_processes.unwrap_or(defaults.command_processes),
        validation_problems: recipe.eval.problems_max,
        console: console.clone(),
    }
}

fn open_interpreter(recipe: &Recipe, threads: usize) -> Result<Box<dyn Interpreter>> {
    let i = &recipe.interpreter;
    let settings = interpreter::Settings {
        state: i.state,
        time_limit_s: i.time_limit_s,
        wall_clock_s: i.wall_clock_s,
        memory_mib: i.memory_mib as u64,
        output_chars_max: i.output_chars_max,
        workers: if i.workers == 0 { threads } else { i.workers },
        dangerously_allow_unsandboxed: i.dangerously_allow_unsandboxed,
        program: None,
        python: i.python.clone().into(),
        preload: i.preload.clone(),
        idle_s_max: i.idle_s_max,
        scratch_mib: i.scratch_mib as u64,
        sessions_max: (recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt)
            .max(recipe.eval.problems_max.saturating_mul(recipe.eval.samples)),
    };
    Ok(match i.kind {
        InterpreterKind::Embedded => Box::new(Embedded::new(settings)?),
        InterpreterKind::CPython => Box::new(CPython::new(settings)?),
    })
}
