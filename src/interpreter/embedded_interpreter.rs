//! The embedded interpreter: a pool of worker processes that run a small Python written in Rust.

use super::embedded_worker::{StartupReply, StateChange, WorkerHello, lost_state_note};
use super::process::{Process, Spawner};
use super::worker_deaths;
use super::{
    Interpreter, InterpreterSettings, InterpreterState, Reply, SessionId, lock, reply, startup_error,
};
use crate::bad_input;
use crate::metrics::Console;
use crate::pool::Pool;
use crate::trajectory::CallOutcome;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Maximum size of a stored session, in bytes. The parent stores one session per live trajectory, so this
/// value limits the parent's memory.
const STATE_BYTES_MAX: usize = 4 << 20;
/// Maximum start time. A worker starts in milliseconds. A busy machine may need longer.
const START_S_MAX: u64 = 30;
const WELCOME_BYTES_MAX: usize = 64 << 10;
/// Size of a reply's header: the outcome, and the state change of the variables.
const REPLY_HEADER_BYTES: usize = 2;

/// A Python that needs no installation. Up to [`InterpreterSettings::workers`] confined processes are started
/// on demand.
///
/// Dropping it kills all workers. The death of the parent kills them too, whatever its cause.
pub struct EmbeddedInterpreter {
    settings: InterpreterSettings,
    program: PathBuf,
    confinement: String,
    // Declared, and so dropped, before the spawner: the end of the spawner's thread kills the workers.
    pool: Pool<Process>,
    /// Stored sessions. The parent does not read them; only confined workers decode them.
    sessions: Mutex<HashMap<SessionId, Vec<u8>>>,
    console: Console,
    spawner: Spawner,
}

impl EmbeddedInterpreter {
    /// Starts the first worker, a process of `program` (this binary). This proves that the machine can
    /// confine a worker.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a limit is out of range, or the kernel cannot confine a worker and
    /// [`InterpreterSettings::dangerously_allow_unsandboxed`] is false. Any other error when the worker
    /// cannot be started.
    pub fn new(settings: InterpreterSettings, program: PathBuf) -> Result<Self> {
        settings.check()?;
        let spawner = Spawner::new().context("starting the thread that spawns interpreter workers")?;
        let (first, confinement) = start(&settings, &program, &spawner).map_err(startup_error)?;
        Ok(Self {
            pool: Pool::new(vec![first], settings.workers),
            settings,
            program,
            confinement,
            sessions: Mutex::default(),
            console: Console::silent(),
            spawner,
        })
    }

    /// Returns the interpreter with a console that reports dead workers.
    pub fn reporting_to(self, console: &Console) -> Self {
        Self { console: console.clone(), ..self }
    }

    /// Runs `code` on a free worker. A worker that fails is killed, and a later call starts another worker.
    fn run(&self, session: SessionId, code: &str) -> (CallOutcome, String) {
        let new = || start(&self.settings, &self.program, &self.spawner).map(|(worker, _)| worker);
        let mut worker = match self.pool.acquire(new) {
            Ok(worker) => worker,
            Err(error) => {
                worker_deaths::report(&self.console, &format!("{error:#}"));
                return (CallOutcome::WorkerDied, self.explain(CallOutcome::WorkerDied));
            }
        };
        let state = lock(&self.sessions).get(&session).cloned().unwrap_or_default();
        match self.exchange(&mut worker, code, &state) {
            Ok((outcome, state_change, mut text, state)) => {
                self.pool.release(worker);
                match state_change {
                    StateChange::Unchanged => {}
                    StateChange::Replaced => drop(lock(&self.sessions).insert(session, state)),
                    StateChange::Lost => {
                        self.close(session);
                        text.push_str("\n(The variables could not be kept: the next call starts afresh.)");
                    }
                }
                (outcome, text)
            }
            Err(error) => {
                let (stderr_tail, ended) = worker.kill();
                drop(worker);
                self.pool.discard();
                let outcome = match error.kind() {
                    io::ErrorKind::TimedOut => CallOutcome::ToolTimeout,
                    // The messages of a failed allocation, and of an allocation larger than Rust allows.
                    _ if ["memory allocation of", "capacity overflow"]
                        .iter()
                        .any(|w| stderr_tail.contains(w)) =>
                    {
                        CallOutcome::MemoryLimit
                    }
                    _ => {
                        worker_deaths::report(&self.console, &worker_deaths::cause(ended, &stderr_tail));
                        CallOutcome::WorkerDied
                    }
                };
                (outcome, self.explain(outcome))
            }
        }
    }

    fn exchange(
        &self,
        worker: &mut Process,
        code: &str,
        state: &[u8],
    ) -> io::Result<(CallOutcome, StateChange, String, Vec<u8>)> {
        let deadline = Instant::now() + Duration::from_secs_f64(self.settings.wall_clock_s);
        worker.send(code.as_bytes(), deadline)?;
        worker.send(state, deadline)?;
        // A character has at most four bytes. The header and the mark for removed text are short.
        let text_bytes_max = self.settings.output_chars_max.saturating_mul(4).saturating_add(1024);
        let reply = worker.receive(text_bytes_max, deadline)?;
        let state = worker.receive(STATE_BYTES_MAX, deadline)?;
        let malformed = || io::Error::from(io::ErrorKind::InvalidData);
        let (head, text) = reply.split_at_checked(REPLY_HEADER_BYTES).ok_or_else(malformed)?;
        let outcome = CallOutcome::ALL.iter().copied().find(|&o| o as u8 == head[0]).ok_or_else(malformed)?;
        let state_change = [StateChange::Unchanged, StateChange::Replaced, StateChange::Lost]
            .into_iter()
            .find(|&k| k as u8 == head[1]);
        let state_change = state_change.ok_or_else(malformed)?;
        Ok((outcome, state_change, String::from_utf8_lossy(text).into_owned(), state))
    }

    /// Returns the text that the model gets when the worker could not reply.
    fn explain(&self, outcome: CallOutcome) -> String {
        self.settings.explain(outcome) + lost_state_note(self.settings.state == InterpreterState::Trajectory)
    }
}

impl Interpreter for EmbeddedInterpreter {
    fn call(&self, session: SessionId, code: &str) -> Reply {
        reply(code, |code| self.run(session, code))
    }

    fn close(&self, session: SessionId) {
        lock(&self.sessions).remove(&session);
    }

    fn sandbox_description(&self) -> String {
        self.confinement.clone()
    }
}

/// Starts a worker and waits until it is confined. Also returns the active confinement.
fn start(settings: &InterpreterSettings, program: &PathBuf, spawner: &Spawner) -> Result<(Process, String)> {
    let deadline = Instant::now() + Duration::from_secs(START_S_MAX);
    let mut command = Command::new(program);
    command.arg(super::WORKER_ARGUMENT);
    let place = || format!("starting {} as an interpreter worker", program.display());
    let mut worker = Process::start(spawner, command).with_context(place)?;
    let hello = WorkerHello {
        parent_id: std::process::id(),
        memory_bytes: settings.memory_mib << 20,
        time_limit_s: settings.time_limit_s,
        output_chars_max: settings.output_chars_max,
        keep_state: settings.state == InterpreterState::Trajectory,
        state_bytes_max: STATE_BYTES_MAX,
        dangerously_allow_unsandboxed: settings.dangerously_allow_unsandboxed,
    };
    worker.send(&serde_json::to_vec(&hello)?, deadline).with_context(place)?;
    let welcome = worker.receive(WELCOME_BYTES_MAX, deadline).with_context(place)?;
    match serde_json::from_slice(&welcome).with_context(place)? {
        StartupReply::Ready(active) => Ok((worker, active)),
        StartupReply::Refused(why) => Err(bad_input!("this machine cannot confine the Python tool: {why}")),
    }
}
