//! Agents that somebody else wrote (`task.name = "agent"`): the run serves its policy while it trains, a
//! program plays episodes against OpenAI's interface and gives each one's reward, and the run learns from
//! exactly the tokens that were sampled.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | the session of a run, and one rollout |
//! | `board.rs` | the episodes of the rollout: waiting, open, finished |
//! | `episode.rs` | one open episode: requests, and answers up to their delivery |
//! | `trace.rs` | the trajectories of one episode |
//! | `server.rs` | the HTTP interface |
//! | `program.rs` | the user's program |
//!
//! The HTTP server lives as long as the run, an engine only as long as a rollout. Between rollouts, requests
//! for an episode wait.

mod board;
mod episode;
mod program;
mod server;
mod trace;

use crate::bad_input;
use crate::chat::{Chat, SystemPromptSettings};
use crate::engine::{Client, Completion, Engine, NewToken};
use crate::harmony::Message;
use crate::http::{self, HttpLimits};
use crate::metrics::Console;
use crate::panics::lock;
use crate::rollout::{EpisodeCounts, Observer, Prompt, RolloutPlan, RolloutProgress, Rollouts};
use crate::serve::{Access, Metrics, REQUEST_BYTES_MAX};
use crate::tasks::TaskSettings;
use crate::trajectory::{Group, Outcome, Trajectory};
use crate::user_key::random_bytes;
use anyhow::{Context, Error, Result, anyhow};
use board::{Board, Command, EpisodeResult, RoundPlan};
use program::{Program, ProgramOutput};
use server::Server;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The environment variable with the token of a server that other machines reach.
pub const TOKEN_VARIABLE: &str = "RLOSS_SERVE_TOKEN";
/// The environment variable of the program with the address of the episodes.
const EPISODES_VARIABLE: &str = "RLOSS_EPISODES";

/// If this many connections are open, a new one closes an idle one. At most twice as many are open.
const CONNECTIONS_MAX: usize = 1024;
/// Maximum bytes of a request's body.
const BODY_BYTES_MAX: usize = 16 << 20;
/// Interval at which a rollout looks at its program, at time limits and at a stop.
const TICK: Duration = Duration::from_millis(50);
/// Time for the program to end after the last episode.
const END_WAIT: Duration = Duration::from_secs(5);
/// Number of starts in a row without a finished episode after which the run ends.
const FRUITLESS_STARTS_MAX: u64 = 3;

/// Which trajectories of a rollout are returned.
#[derive(Clone, Copy)]
pub enum EpisodeTrajectories<'a> {
    /// Every trajectory of every episode that did not fail, for training.
    All,
    /// One for each episode: its newest trajectory, or one without tokens if the episode failed. The observer
    /// gets those of the rewarded episodes even if the rollout fails or is stopped.
    OneEach(&'a Observer<'a>),
}

/// The server and the program of a run.
pub struct AgentSession {
    server: Arc<Server>,
    output: Arc<Mutex<ProgramOutput>>,
    /// `None` if the user starts the program elsewhere.
    program: Mutex<Option<Program>>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    console: Console,
}

/// Binds the address of `task.serve_on`.
///
/// # Errors
/// [`crate::error::BadInput`] for an address that is not available, and for one that other machines reach if
/// there is no token.
fn bind(settings: &TaskSettings, has_token: bool) -> Result<TcpListener> {
    let local = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    let address = settings.serve_address().map_err(|why| bad_input!("task.serve_on: {why}"))?;
    if settings.command.is_empty() && !has_token {
        return Err(bad_input!(
            "task.command: missing; name the agent's program, or start it yourself and set {TOKEN_VARIABLE} to a secret \
             token for both"
        ));
    }
    let address = address.unwrap_or(local);
    if !address.ip().is_loopback() && !has_token {
        return Err(bad_input!(
            "task.serve_on: everyone who can reach {address} could use the model and give rewards; set {TOKEN_VARIABLE} to a \
             secret token, or leave the key out"
        ));
    }
    TcpListener::bind(address).map_err(|error| {
        bad_input!(
            "task.serve_on: {address} is not available: {error}; name another port, or 0 for a free one"
        )
    })
}

impl AgentSession {
    /// Starts the server of a run. The program starts with the first rollout.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a wrong or unavailable address, and for a missing token.
    pub fn open(
        settings: &TaskSettings,
        chat: &Chat,
        system_prompt: &SystemPromptSettings,
        console: &Console,
    ) -> Result<Self> {
        let given = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.trim().is_empty());
        if given.as_ref().is_some_and(|token| token.contains(':')) {
            return Err(bad_input!("{TOKEN_VARIABLE}: a token must not contain a colon; choose another"));
        }
        let listener = bind(settings, given.is_some())?;
        let address = listener.local_addr().context("the server's address")?;
        let token = given.map_or_else(own_token, Ok)?;
        let timeout =
            settings.episode_timeout().map_err(|why| bad_input!("task.episode_timeout_s: {why}"))?;
        let secret = random_bytes().context("random bytes for the ids of episodes")?;
        let server = Arc::new(Server {
            board: Board::new(timeout, settings.episodes_at_once(), secret, console.clone()),
            chat: chat.clone(),
            system_prompt: system_prompt.clone(),
            access: Access { address, token: Some(token.clone()) },
            metrics: Metrics::default(),
        });
        let output = Arc::new(Mutex::new(ProgramOutput::new(console.clone())));
        let base = format!("http://{}/v1", reachable(address));
        let program = (!settings.command.is_empty()).then(|| {
            let environment = vec![
                ("OPENAI_BASE_URL", base.clone()),
                ("OPENAI_API_KEY", token),
                (EPISODES_VARIABLE, format!("{base}/episodes")),
                ("PYTHONUNBUFFERED", "1".to_owned()),
            ];
            Program::new(settings.command.clone(), environment, output.clone())
        });
        if let Some(program) = &program {
            program.check()?;
        }
        if program.is_none() {
            console.print(&format!("waiting for an agent program at {base}/episodes/next"));
        }
        let stopped = Arc::new(AtomicBool::new(false));
        let (served, is_stopped) = (server.clone(), stopped.clone());
        let limits = HttpLimits {
            connections_max: CONNECTIONS_MAX,
            body_bytes_max: BODY_BYTES_MAX,
            memory_bytes_max: REQUEST_BYTES_MAX,
        };
        let serve = move || {
            // It fails only if the socket's time limit cannot be set. Then every request fails, and is seen.
            let _ = http::serve(&listener, limits, &*served, &|| is_stopped.load(Ordering::Relaxed));
        };
        let thread = std::thread::Builder::new().name("agent-server".into()).spawn(serve);
        let thread = Some(thread.context("cannot start a thread for the agent's server")?);
        let (program, console) = (Mutex::new(program), console.clone());
        Ok(Self { server, output, program, stopped, thread, console })
    }

    /// Sends the program's output to the file at `path`. Without a file it goes to standard error.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn log_to(&self, path: PathBuf) -> Result<()> {
        lock(&self.output).log_to(path)
    }

    /// Has the program play `samples` episodes of each of `prompts` against `engine`. `progress` is called
    /// after every forward. Returns `None` if `stop` returned true.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the program cannot be started. Other errors when it ends again and
    /// again, or when a forward pass fails.
    pub fn play_episodes(
        &self,
        engine: &Engine,
        plan: &RolloutPlan,
        (prompts, samples): (&[Prompt], usize),
        kept: EpisodeTrajectories<'_>,
        progress: &(dyn Fn(RolloutProgress) + Sync),
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Rollouts>> {
        let board = &self.server.board;
        let (policy_version, context_tokens_max) = (engine.version(), engine.context_tokens_max());
        let round = RoundPlan { plan: plan.clone(), policy_version, context_tokens_max };
        board.begin_round(round, prompts, samples);
        let (is_over, is_stopped) = (AtomicBool::new(false), AtomicBool::new(false));
        let client = RoundClient { board, progress, is_over: &is_over };
        let feed = || {
            while !is_over.load(Ordering::Relaxed) {
                if let Err(error) = self.feed(engine) {
                    engine.fail(error);
                    break;
                }
                if stop() {
                    is_stopped.store(true, Ordering::Relaxed);
                }
                if board.is_round_over() || is_stopped.load(Ordering::Relaxed) {
                    break;
                }
            }
            is_over.store(true, Ordering::Relaxed);
            engine.wake();
        };
        let ran = std::thread::scope(|scope| {
            let feeder = scope.spawn(feed);
            let ran = engine.run(&client);
            is_over.store(true, Ordering::Relaxed);
            feeder
                .join()
                .map_err(|_| anyhow!("the thread of the agent's episodes panicked; this is a bug"))?;
            ran
        });
        engine.clear();
        let (results, counts) = board.end_round();
        let rollouts = collect(results, counts, prompts, samples, kept);
        if let EpisodeTrajectories::OneEach(finished) = kept {
            // After an early end, failed episodes are played again.
            let ended_early = ran.is_err() || is_stopped.load(Ordering::Relaxed);
            let is_kept = |one: &Trajectory| !ended_early || one.outcome != Outcome::TaskFailed;
            for (group, messages) in rollouts.groups.iter().zip(&rollouts.messages) {
                let all = group.trajectories.iter().zip(messages);
                all.filter(|(one, _)| is_kept(one)).for_each(|(one, messages)| finished(one, messages));
            }
        }
        ran.context("the agent's rollout")?;
        if is_stopped.load(Ordering::Relaxed) {
            return Ok(None);
        }
        progress(board.progress(0));
        Ok(Some(rollouts))
    }

    /// Gives waiting requests to the engine, and looks after the program.
    fn feed(&self, engine: &Engine) -> Result<()> {
        for command in self.server.board.take_commands(TICK) {
            match command {
                Command::Submit(request) => engine.submit(request)?,
                Command::Cancel(sample) => engine.cancel(sample),
            }
        }
        if let Some(program) = &mut *lock(&self.program) { self.keep_running(program) } else { Ok(()) }
    }

    /// Starts the program, also again after its end. Its open episodes begin again.
    fn keep_running(&self, program: &mut Program) -> Result<()> {
        let board = &self.server.board;
        let (finished, asked) = board.activity();
        if let Some(status) = program.take_ended() {
            let is_fruitless = finished == program.finished_before;
            program.fruitless_starts = if is_fruitless { program.fruitless_starts + 1 } else { 0 };
            let last = program.last_output();
            if asked == 0 || program.fruitless_starts >= FRUITLESS_STARTS_MAX {
                return Err(self.gives_up(asked, status, &last));
            }
            let text = format!(
                "the program ended ({status}) and is started again; its open episodes begin again, counted as \
                 agent/begun_again; {last}"
            );
            board.tell_once("ended", &text);
            board.begin_again();
            // Episodes that fail because the program ended are no progress.
            program.finished_before = board.activity().0;
        }
        program.start()
    }

    fn gives_up(&self, asked: u64, status: std::process::ExitStatus, last: &str) -> Error {
        let when = match asked {
            0 => "before it asked for an episode",
            _ => "again and again, without a finished episode in between",
        };
        anyhow!(
            "task.command: the program ended ({status}) {when}; correct it, then start or resume the run; {last}"
        )
    }
}

impl Drop for AgentSession {
    fn drop(&mut self) {
        self.server.board.end_run();
        if let Some(program) = &mut *lock(&self.program) {
            program.end(END_WAIT);
        }
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.console.print("warning: agent: the server's thread panicked; this is a bug");
        }
    }
}

/// Returns a token that only this run's program gets.
///
/// # Errors
/// When the system gives no random bytes.
fn own_token() -> Result<String> {
    let bytes = random_bytes::<32>().context("random bytes for the agent's token")?;
    Ok(blake3::hash(&bytes).to_hex().chars().take(32).collect())
}

/// Returns the address under which a program on this machine reaches `address`.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip().is_unspecified() {
        true => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port()),
        false => address,
    }
}

/// The engine's client in one rollout.
struct RoundClient<'a> {
    board: &'a Board,
    progress: &'a (dyn Fn(RolloutProgress) + Sync),
    is_over: &'a AtomicBool,
}

impl Client for RoundClient<'_> {
    fn token(&self, sample: u64, token: &NewToken) -> bool {
        self.board.token(sample, token)
    }

    fn finished(&self, sample: u64, completion: Completion) {
        self.board.finish(sample, completion);
    }

    fn goes_on(&self, sampled: u64) -> bool {
        if sampled > 0 {
            (self.progress)(self.board.progress(sampled));
        }
        !self.is_over.load(Ordering::Relaxed)
    }
}

/// Returns the results of a rollout in the order of prompts, samples and parts.
fn collect(
    mut results: BTreeMap<board::Place, EpisodeResult>,
    mut counts: EpisodeCounts,
    prompts: &[Prompt],
    samples: usize,
    kept: EpisodeTrajectories<'_>,
) -> Rollouts {
    let mut rollouts = Rollouts::default();
    for (index, prompt) in prompts.iter().enumerate() {
        let (mut group, mut conversations) = (Group::default(), vec![]);
        for sample in 0..samples as u64 {
            let Some(result) = results.remove(&(index, sample)) else { continue };
            for (trajectory, messages) in trajectories(result, kept, &mut counts) {
                group.trajectories.push(trajectory);
                conversations.push(messages);
            }
        }
        rollouts.groups.push(group);
        rollouts.messages.push(conversations);
        rollouts.answers.push(prompt.problem.answer.clone());
    }
    rollouts.episodes = Some(counts);
    rollouts
}

fn trajectories(
    result: EpisodeResult,
    kept: EpisodeTrajectories<'_>,
    counts: &mut EpisodeCounts,
) -> Vec<(Trajectory, Vec<Message>)> {
    let (given, trace) = match (result.given, kept) {
        (Ok(given), _) => given,
        (Err(_), EpisodeTrajectories::All) => return vec![],
        (Err(_), EpisodeTrajectories::OneEach(_)) => return vec![(result.facts, vec![])],
    };
    counts.rewarded += 1;
    counts.answers += trace.answers() as u64;
    let (mut all, newest) = trace.into_trajectories(&result.facts);
    counts.trajectories += all.len() as u64;
    for (trajectory, _) in &mut all {
        trajectory.reward = given.value;
        trajectory.success = given.success;
        trajectory.rewards.clone_from(&given.named);
    }
    if matches!(kept, EpisodeTrajectories::OneEach(_)) {
        let mut only = all.swap_remove(newest);
        only.0.part = 0;
        all = vec![only];
    }
    all
}
