//! `rloss serve RECIPE|RUN|FOLDER`: OpenAI's HTTP interface to a model.

use crate::actor::batch_runner::runs_in_parallel;
use crate::agents::TOKEN_VARIABLE;
use crate::bad_input;
use crate::checkpoint::{BASE_FOLDER, BaseModel, ModelFiles};
use crate::commands::arguments::{name_of, recipe_help};
use crate::commands::chat::{open_model, print_warnings};
use crate::metrics::Console;
use crate::model::config::WeightFormat;
use crate::ops::threads::Threads;
use crate::run::memory::{AvailableMemory, ModelCommand, PassShape, gigabytes, remaining_memory};
use crate::run::sampling::Sampling;
use crate::run::signals::StopFlag;
use crate::run::startup::{Started, start};
use crate::serve::{self, Access, SecondApi, ServeSettings};
use crate::tinker::{self, Door, Store, TinkerSettings};
use crate::user_key::random_bytes;
use anyhow::{Context, Result};
use clap::Args;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `rloss serve`.
#[derive(Args, Debug, Clone)]
pub struct ServeArgs {
    #[arg(help = format!("A model folder or a GGUF file, or one of these: {}", recipe_help()))]
    recipe: PathBuf,
    /// Replace a recipe's value, such as --set eval.temperature=0
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Port; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Address to listen on. Any address but a loopback one needs a token in RLOSS_SERVE_TOKEN
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
    /// The model's name in requests [default: the name of the folder or recipe]
    #[arg(long)]
    name: Option<String>,
    /// Maximum samples that wait or are being sampled; further requests get status 429
    #[arg(long, default_value_t = 256)]
    queue: usize,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    trust: bool,
    /// Also serve the Tinker API, which trains adapters of the model
    #[arg(long)]
    train: bool,
    /// Maximum adapters in training, of all clients together. The memory of rank 32 is planned for each
    #[arg(long, default_value_t = 8, requires = "train", value_parser = clap::value_parser!(u16).range(1..=256))]
    adapters: u16,
    /// Folder of the saved weights
    #[arg(long, default_value = "tinker-store", requires = "train")]
    store: PathBuf,
    /// Seed of adapters and samples whose request has none
    #[arg(long, default_value_t = 0, requires = "train")]
    seed: u64,
    /// Maximum datums of a forward_backward request; clients send larger batches in several requests
    #[arg(long, value_name = "DATUMS", default_value_t = 1024, requires = "train", value_parser = clap::value_parser!(u16).range(1..=1024))]
    chunk: u16,
}

/// The recipe for a model folder or a GGUF file.
const MODEL_RECIPE: &str = "task.name = \"arithmetic_single\"
rollout = { turns_max = 1, prompt_tokens_max = 8192, response_tokens_max = 1024 }
";

/// The recipe for a model folder or a GGUF file whose adapters are trained. A pass needs memory for the
/// logits of a whole sequence.
const TRAINED_MODEL_RECIPE: &str = "task.name = \"arithmetic_single\"
rollout = { turns_max = 1, prompt_tokens_max = 3072, response_tokens_max = 1024 }
";

/// Serves until a signal, then finishes open answers. A second signal ends the program at once.
///
/// # Errors
/// [`crate::error::BadInput`] for a model that cannot be opened, for an address that is not available, and
/// for an address that is not a loopback one if there is no token.
pub fn run(args: &ServeArgs) -> Result<()> {
    let token = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.trim().is_empty());
    if !args.address.is_loopback() && token.is_none() {
        return Err(bad_input!(
            "--address {}: everyone who can reach this address could use the model; set {TOKEN_VARIABLE} to a secret token, or \
             leave --address out",
            args.address
        ));
    }
    let address = SocketAddr::new(args.address, args.port);
    let listener = TcpListener::bind(address).map_err(|error| {
        bad_input!("{address} is not available: {error}; name another port with --port, or 0 for a free one")
    })?;
    let address = listener.local_addr().context("the server's address")?;
    let console = Console::plain();
    let usual = if args.train { TRAINED_MODEL_RECIPE } else { MODEL_RECIPE };
    let opened = open_model(("rloss serve", &args.recipe, usual), &args.sets, args.trust, &console)?;
    let (plan, step) = opened;
    let started = start(plan, ModelCommand::Serve, &console)?;
    let Started { loaded, environment, .. } = &started;
    print_warnings(environment, &console);
    let recipe = environment.recipe();
    let sampling = Sampling { actor: &loaded.actor, environment };
    let engine = sampling.engine(sampling.policy_without_ablations()?, step, &recipe.rollout)?;
    let model_name = args.name.clone().unwrap_or_else(|| name_of(&args.recipe));
    let tokens_max = longest_sequence(&started);
    let base = if args.train { Some(training_base(args, &started)?) } else { None };
    let door = base.as_ref().map(|base| open_door(args, &started, base, (&model_name, tokens_max)));
    let door = door.transpose()?;
    let settings = ServeSettings {
        engine: &engine,
        chat: &environment.chat,
        system_prompt: &recipe.chat,
        model_name,
        sampling: environment.evaluation_rollout(step).settings.sampling(),
        answer_tokens_max: recipe.rollout.response_tokens_max,
        tokens_max,
        open_samples_max: args.queue,
        access: Access { address, token },
        nonce: random_bytes().map(u64::from_le_bytes).context("random bytes for a seed")?,
        tell: &|line| console.print(line),
        second: door.as_ref().map(|door| door as &dyn SecondApi),
    };
    let stop = StopFlag::listen()?;
    let notice = console.clone();
    stop.on_request(move || notice.print("stopping after the open answers; a second signal stops at once"))?;
    console.print(&format!("serving {:?} at http://{address}/v1", settings.model_name));
    if args.train {
        let store = std::path::absolute(&args.store)?;
        console.print(&format!(
            "training at TINKER_BASE_URL=http://{address}; Ctrl-C stops, and keeps the weights that clients saved in {}",
            store.display()
        ));
    }
    serve::run(&listener, settings, &|| stop.is_requested())
}

/// Returns the maximum number of tokens of a prompt with its answer.
fn longest_sequence(started: &Started) -> usize {
    let rollout = &started.environment.recipe().rollout;
    let longest = rollout.prompt_tokens_max + rollout.response_tokens_max;
    longest.min(started.loaded.actor.model.context_tokens_max())
}

/// Returns the base of adapters, as their folders name it. A model that is in no folder is written into the
/// store.
///
/// # Errors
/// [`crate::error::BadInput`] for a model that cannot be trained here, and if the memory does not suffice.
fn training_base(args: &ServeArgs, started: &Started) -> Result<BaseModel> {
    let (loaded, recipe) = (&started.loaded, started.environment.recipe());
    let actor = &loaded.actor;
    if actor.parameters.adapter().is_some() {
        return Err(bad_input!(
            "--train: this model has an adapter already; merge it with `rloss export --merged`, and serve the result"
        ));
    }
    if actor.parameters.device().is_cuda() {
        return Err(bad_input!("--train: adapters of the head need a CPU; add --set device=cpu"));
    }
    check_memory(args, started)?;
    if let Some(path) = &recipe.model.path {
        return BaseModel::from_folder(path);
    }
    let folder = args.store.join(BASE_FOLDER);
    let format = if recipe.model.dtype.is_bf16() { WeightFormat::Bf16 } else { WeightFormat::F32 };
    let files = ModelFiles { config: loaded.config(), format, companions: &loaded.companions, base: None };
    std::fs::create_dir_all(&args.store).map_err(|e| {
        bad_input!("{}: cannot be made: {e}; name another with --store", args.store.display())
    })?;
    actor.save(&folder, &files, false)?;
    BaseModel::from_folder(&folder)
}

/// Checks that adapters, passes and requests fit beside the model, which is in memory already.
///
/// # Errors
/// [`crate::error::BadInput`] if they do not.
fn check_memory(args: &ServeArgs, started: &Started) -> Result<()> {
    let (actor, config) = (&started.loaded.actor, started.loaded.config());
    let execution = &actor.execution;
    let (micro_batch, longest) = (execution.micro_batch_tokens, longest_sequence(started));
    let passes =
        if runs_in_parallel(actor.parameters.bytes()) { execution.threads.count() as u64 } else { 1 };
    let one = tinker::adapter_bytes(actor, tinker::PLANNED_RANK)?;
    let adapters = u64::from(args.adapters) * one;
    let requests = (tinker::WAITING_BYTES_MAX + tinker::RESULT_BYTES_MAX) as u64;
    let needed_with = |tokens: usize, recompute_layers: bool| {
        let pass = PassShape {
            config,
            tokens,
            targets: tokens,
            has_adapter: true,
            on_gpu: false,
            teacher: None,
            sequence_ranks: 1,
        };
        adapters + passes * pass.forward_backward_bytes(recompute_layers) + requests
    };
    let needed = |tokens| needed_with(tokens, execution.recompute_layers);
    let tokens = micro_batch.max(longest);
    let Some(AvailableMemory { bytes, limit }) = remaining_memory() else { return Ok(()) };
    if needed(tokens) <= bytes {
        return Ok(());
    }
    // The number of adapters that fit if nothing else changes but `recompute_layers`.
    let adapters_max = |recompute_layers| {
        (bytes + adapters).saturating_sub(needed_with(tokens, recompute_layers)) / one.max(1)
    };
    let response = started.environment.recipe().rollout.response_tokens_max;
    let halves = std::iter::successors(Some(tokens / 2), |tokens| Some(tokens / 2));
    let mut halves = halves.take_while(|&tokens| tokens > response);
    let (now, recomputed) = (adapters_max(execution.recompute_layers), adapters_max(true));
    let mut remedies = vec![];
    if needed_with(tokens, true) <= bytes {
        remedies.push("add --set train.recompute_layers=true".to_owned());
    } else if let Some(tokens) = halves.find(|&tokens| needed(tokens) <= bytes) {
        let prompt = (longest > tokens).then(|| ("rollout.prompt_tokens_max", tokens - response));
        let batch = (micro_batch > tokens).then_some(("train.micro_batch_tokens", tokens));
        let set = |(key, tokens)| format!(" --set {key}={tokens}");
        remedies.push(format!("add{}", prompt.into_iter().chain(batch).map(set).collect::<String>()));
    } else if recomputed > now {
        remedies.push(format!("use --adapters {recomputed} and --set train.recompute_layers=true"));
    }
    if now > 0 {
        remedies.push(format!("use --adapters {now}"));
    }
    if remedies.is_empty() {
        remedies
            .push(if args.adapters > 1 { "lower --adapters" } else { "serve a smaller model" }.to_owned());
    }
    Err(bad_input!(
        "--train needs {} beside the model, of which {} are for {} adapters of rank {} and {} for passes of {tokens} \
         tokens, but {} are {limit}; {}",
        gigabytes(needed(tokens)),
        gigabytes(adapters),
        args.adapters,
        tinker::PLANNED_RANK,
        gigabytes(needed(tokens) - adapters - requests),
        gigabytes(bytes),
        remedies.join(", or "),
    ))
}

/// Opens the Tinker API of the model.
fn open_door<'a>(
    args: &ServeArgs,
    started: &'a Started,
    base: &'a BaseModel,
    (model_name, tokens_max): (&str, usize),
) -> Result<Door<'a>> {
    let (loaded, recipe) = (&started.loaded, started.environment.recipe());
    let format = if recipe.model.dtype.is_bf16() { WeightFormat::Bf16 } else { WeightFormat::F32 };
    let companions = &loaded.companions;
    let environment = started.environment.clone();
    let end_of_text = environment.chat.vocabulary().added_id(END_OF_TEXT);
    let has_tokenizer = base.path.join("tokenizer.json").is_file();
    let settings = TinkerSettings {
        base: &loaded.actor,
        files: ModelFiles { config: loaded.config(), format, companions, base: Some(base) },
        rounds_to_bf16: recipe.model.dtype.is_bf16(),
        training_threads: Arc::new(Threads::new(loaded.actor.execution.threads.count())?),
        model_name: model_name.to_owned(),
        tokenizer: if has_tokenizer { base.path.display().to_string() } else { model_name.to_owned() },
        stop_tokens: environment.chat.stop_tokens().into_iter().chain(end_of_text).collect(),
        decode: Arc::new(move |ids: &[u32]| environment.chat.vocabulary().decode(ids)),
        tokens_max,
        samples_max: args.queue,
        adapters_max: usize::from(args.adapters),
        chunk_datums: usize::from(args.chunk),
        seed: args.seed,
        secret: random_bytes().context("random bytes for the server")?,
    };
    Door::new(settings, Store::open(&args.store)?)
}

/// Ends a document in the published vocabularies.
const END_OF_TEXT: &str = "<|endoftext|>";
