//! What a command needs, opened and checked before any work: everything but the weights.

use super::family::foreign_keys;
use super::freeze::{critic_trainable, trainable};
use super::memory::{Available, Intent, MemoryPlan, Subject, gigabytes};
use super::workbench::Workbench;
use crate::bad_input;
use crate::chat::Chat;
use crate::error::BadInput;
use crate::harmony::Message;
use crate::interpreter::{self, CPython, Embedded, Interpreter};
use crate::metrics::Console;
use crate::model::config::{Config, Form, Rope};
use crate::model::forward::Model;
use crate::model::held::Loaded;
use crate::model::init::{InitSettings, init};
use crate::model::layers_in_turn::{LayersInTurn, TensorStore};
use crate::model::load::{ModelFolder, weights_present};
use crate::model::names::{ParameterSpec, parameter_specs};
use crate::model::parameters::Parameters;
use crate::model::rounding::WeightRounding;
use crate::model::save::Companions;
use crate::ops::mxfp4;
use crate::ops::threads::Threads;
use crate::recipe::model::Tokenizer;
use crate::recipe::{Architecture, Dtype, InterpreterKind, Plan, Recipe, SavedDtype};
use crate::rollout::preamble;
use crate::tasks::{Problem, Task, TaskSettings};
use crate::train::checkpoint;
use anyhow::{Result, bail};
use half::bf16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Reading less than this takes no time worth showing.
const SHOWN_MEGABYTES: u64 = 256;

/// Everything that a plan names, opened and checked; of the weights only the headers are read.
pub struct Preflight {
    pub plan: Plan,
    intent: Intent,
    threads: Threads,
    source: ModelSource,
    trainable: Vec<bool>,
    critic_trainable: Option<Vec<bool>>,
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
    /// [`BadInput`] with every mistake found, each with its place and remedy.
    pub fn open(mut plan: Plan, intent: Intent, console: &Console) -> Result<Self> {
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
        let preamble = preamble(&source.chat, &plan.recipe.harmony, task.uses_python());
        let streamed = false;
        Ok(Self {
            plan,
            intent,
            threads,
            source,
            trainable,
            critic_trainable,
            task,
            interpreter,
            preamble,
            streamed,
        })
    }

    /// The first training problem.
    pub fn first_problem(&self) -> Problem {
        self.task.training_problem(self.plan.recipe.train.seed, 0)
    }

    /// The prompt of `problem` as the model reads it, and its length in tokens.
    ///
    /// # Errors
    /// When the tokenizer cannot write it.
    pub fn prompt(&self, problem: &Problem) -> Result<(String, usize)> {
        let messages = [&self.preamble[..], &problem.messages].concat();
        let tokens = self.source.chat.prompt(&messages)?;
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
            uses_python: self.interpreter.is_some(),
            threads: self.threads.count(),
            streamed: self.streamed,
        }
    }

    /// Refuses what does not fit into `available` memory, and warns of what hardly does. Where the command can do with a layer at
    /// a time, a model that is too large stays on disk, which is said with what it costs.
    ///
    /// # Errors
    /// [`BadInput`] that names the keys which would help.
    pub fn admit(&mut self, available: Option<&Available>) -> Result<()> {
        let whole = MemoryPlan::new(&self.subject()).peak_bytes();
        if available.is_some_and(|available| whole > available.bytes)
            && self.intent.streams()
            && let Some(files) = &self.source.weights
        {
            self.streamed = true;
            self.plan.warnings.push(said_of_streaming(whole, files, &self.source.config)?);
        }
        let subject = self.subject();
        let warning = MemoryPlan::new(&subject).admit(available, &subject.remedies())?;
        self.plan.warnings.extend(warning);
        Ok(())
    }

    /// Reads or draws the weights.
    ///
    /// # Errors
    /// [`BadInput`] when a file is damaged.
    pub fn load(self, console: &Console) -> Result<Workbench> {
        let source = self.source;
        let (recipe, trainable) = (&self.plan.recipe, &self.trainable);
        let read = || source.parameters(recipe, trainable, self.intent, self.streamed, console);
        let parameters = self.threads.wide(read)?;
        let context = source.config.max_position_embeddings;
        Ok(Workbench {
            model: Model::new(source.config, context),
            chat: source.chat,
            companions: source.companions,
            plan: self.plan,
            threads: self.threads,
            parameters,
            trainable: self.trainable,
            critic_trainable: self.critic_trainable,
            task: self.task,
            interpreter: self.interpreter,
            preamble: self.preamble,
        })
    }
}

/// What a model that stays on disk costs, from the time that its first layer takes.
fn said_of_streaming(needed: u64, files: &Arc<ModelFolder>, config: &Config) -> Result<String> {
    let store = TensorStore::Folder(files.clone());
    let stored = LayersInTurn { store, config: config.clone(), changes: vec![] };
    let begun = Instant::now();
    stored.layer(0)?;
    let seconds = begun.elapsed().as_secs_f64() * config.num_hidden_layers as f64;
    Ok(format!(
        "{} of memory are needed with all weights; each layer is read from disk whenever it is its turn, about \
         {seconds:.1} s a forward",
        gigabytes(needed)
    ))
}

/// Collects [`BadInput`]; any other error is one too, but keeps its own words.
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

/// Where the model comes from: a folder, or the recipe's own architecture.
pub(super) struct ModelSource {
    pub(super) config: Config,
    chat: Chat,
    companions: Companions,
    /// The files of weights; `None` for random ones.
    pub(super) weights: Option<Arc<ModelFolder>>,
    /// A folder that lacks weights, which is worth a warning.
    lacks_weights: Option<PathBuf>,
    /// The form in which each tensor lies there; all in f32 for random ones.
    forms: Vec<Form>,
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
                let forms = vec![Form::F32; parameter_specs(&config).len()];
                Ok(Self { config, chat, companions, weights: None, lacks_weights: None, forms })
            }
            (None, None) => bail!("neither model.path nor model.architecture"),
        }
    }

    pub(super) fn from_folder(folder: &Path) -> Result<Self> {
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
        let companions = Companions::read(folder, &chat)?;
        let specs = parameter_specs(&config);
        let (weights, lacks_weights, forms) = if weights_present(folder) {
            let weights = ModelFolder::open(folder, &config)?;
            let forms = specs.iter().map(|spec| weights.form_of(spec)).collect();
            (Some(Arc::new(weights)), None, forms)
        } else {
            (None, Some(folder.to_owned()), vec![Form::F32; specs.len()])
        };
        Ok(Self { config, chat, companions, weights, lacks_weights, forms })
    }

    fn specs(&self) -> Vec<ParameterSpec> {
        parameter_specs(&self.config)
    }

    /// Bytes of all weights in memory when none learns.
    pub(super) fn resident_bytes(&self) -> u64 {
        self.specs().iter().zip(&self.forms).map(|(spec, form)| spec.resident_bytes(*form)).sum()
    }

    /// Reads or draws the weights; of those that do not learn, what lies packed on disk stays so.
    pub(super) fn parameters(
        &self,
        recipe: &Recipe,
        trainable: &[bool],
        intent: Intent,
        streamed: bool,
        console: &Console,
    ) -> Result<Parameters> {
        // What `model.dtype` makes of a tensor; packed ones have no more digits than that.
        let rounded = |mut values: Vec<f32>| {
            if recipe.model.dtype == Dtype::Bf16 {
                values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            values
        };
        let Some(folder) = &self.weights else {
            let settings = InitSettings {
                embedding_std: recipe.model.init.embedding_std,
                head_scale: recipe.model.init.head_scale,
                sink: recipe.model.init.sink,
            };
            let drawn = init(&self.config, &settings, recipe.train.seed)?;
            let drawn = drawn.into_iter().map(|(spec, values)| Ok((spec, rounded(values))));
            return Parameters::new(&self.config, drawn);
        };
        if streamed {
            let to_bf16 = WeightRounding { mxfp4: false, bits: Some(7) };
            let changes = if recipe.model.dtype == Dtype::Bf16 { vec![to_bf16.change()] } else { vec![] };
            return Parameters::with_stored_layers(&self.config, folder.clone(), changes);
        }
        let megabytes = |bytes: u64| bytes / 1_000_000;
        let specs = self.specs();
        let bytes: Vec<u64> =
            specs.iter().zip(&self.forms).map(|(spec, form)| spec.resident_bytes(*form)).collect();
        let all = megabytes(bytes.iter().sum());
        let shown = if all >= SHOWN_MEGABYTES {
            console.stage("MB read", all, 0)
        } else {
            console.inner_stage("MB read", all)
        };
        let mut read = 0;
        let found = specs.into_iter().enumerate().map(|(index, spec)| {
            let values = folder.loaded(&spec, intent.learns() && trainable[index])?;
            let before = megabytes(read);
            read += bytes[index];
            shown.advance(megabytes(read) - before, 0, &[]);
            Ok((
                spec,
                match values {
                    Loaded::Values(values) => Loaded::Values(rounded(values)),
                    packed => packed,
                },
            ))
        });
        let parameters = Parameters::loaded(&self.config, found)?;
        shown.finish();
        Ok(parameters)
    }
}

/// The folder that holds the model: `path` itself, or the last checkpoint of the run folder it is.
pub(super) fn model_folder(path: &Path) -> Result<PathBuf> {
    if path.join("config.json").is_file() {
        return Ok(path.to_owned());
    }
    match checkpoint::latest(path)? {
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
    };
    Ok(match i.kind {
        InterpreterKind::Embedded => Box::new(Embedded::new(settings)?),
        InterpreterKind::CPython => Box::new(CPython::new(settings)?),
    })
}
