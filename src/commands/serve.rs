//! `rloss serve RECIPE|RUN|FOLDER`: OpenAI's HTTP interface to a model.

use crate::bad_input;
use crate::commands::arguments::{name_of, recipe_help};
use crate::commands::chat::open_model;
use crate::error::EXIT_SUCCESS;
use crate::metrics::Console;
use crate::ops::logits::SamplingParameters;
use crate::run::memory::ModelCommand;
use crate::run::sampling::Sampling;
use crate::run::signals::StopFlag;
use crate::run::startup::{Started, start};
use crate::serve::{self, ServeSettings};
use anyhow::{Context, Result};
use clap::Args;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;

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
}

/// The environment variable with the token.
const TOKEN_VARIABLE: &str = "RLOSS_SERVE_TOKEN";

/// The recipe for a model folder or a GGUF file.
const MODEL_RECIPE: &str = "task.name = \"arithmetic_single\"
rollout = { turns_max = 1, prompt_tokens_max = 8192, response_tokens_max = 1024 }
";

/// Serves until a signal, then finishes open answers. A second signal ends the program at once.
///
/// # Errors
/// [`crate::error::BadInput`] for a model that cannot be opened, for an address that is not available, and
/// for an address that is not a loopback one if there is no token.
pub fn run(args: &ServeArgs) -> Result<u8> {
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
    let opened = open_model(("rloss serve", &args.recipe, MODEL_RECIPE), &args.sets, args.trust, &console)?;
    let (plan, step) = opened;
    let started = start(plan, ModelCommand::Serve, &console)?;
    let Started { loaded, environment, .. } = &started;
    environment.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    let recipe = environment.recipe();
    if recipe.model.path.is_none() {
        console.print("warning: this recipe's model is random and untrained; name a run's folder");
    }
    let sampling = Sampling { actor: &loaded.actor, environment };
    let engine = sampling.engine(sampling.policy_without_ablations()?, step, &recipe.rollout)?;
    let eval = &recipe.eval;
    let longest = recipe.rollout.prompt_tokens_max + recipe.rollout.response_tokens_max;
    let settings = ServeSettings {
        engine: &engine,
        chat: &environment.chat,
        system_prompt: &recipe.chat,
        model_name: args.name.clone().unwrap_or_else(|| name_of(&args.recipe)),
        sampling: SamplingParameters {
            temperature: eval.temperature,
            top_p: eval.top_p,
            top_k: eval.top_k,
            min_p: eval.min_p,
        },
        answer_tokens_max: recipe.rollout.response_tokens_max,
        tokens_max: longest.min(loaded.actor.model.context_tokens_max()),
        open_samples_max: args.queue,
        address,
        token,
        nonce: nonce()?,
    };
    let stop = StopFlag::listen()?;
    let notice = console.clone();
    stop.on_request(move || notice.print("stopping after the open answers; a second signal stops at once"))?;
    console.print(&format!("serving {:?} at http://{address}/v1", settings.model_name));
    serve::run(&listener, settings, &|| stop.is_requested())?;
    Ok(EXIT_SUCCESS)
}

/// Returns a random number.
fn nonce() -> Result<u64> {
    let mut bytes = [0; 8];
    let mut source = std::fs::File::open("/dev/urandom").context("opening /dev/urandom")?;
    source.read_exact(&mut bytes).context("reading /dev/urandom")?;
    Ok(u64::from_le_bytes(bytes))
}
