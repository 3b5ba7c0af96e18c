//! Runs the machine's own Python through fork servers. Each call, or each trajectory, has its own confined
//! process.

mod host;
mod launcher;
mod resources;
mod server;
mod snippet;

use super::process::Spawner;
use super::worker_deaths;
use super::{
    Interpreter, InterpreterSettings, InterpreterState, Reply, SessionId, lock, output, reply, startup_error,
};
use crate::metrics::Console;
use crate::pool::Pool;
use crate::trajectory::CallOutcome;
use anyhow::{Context, Result};
use host::HostPython;
use server::Server;
use snippet::{CallLimits, SnippetProcess};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use launcher::main as launcher_main;
pub use server::LAUNCHER_ARGUMENT;

/// CPython with its installed packages. It has up to [`InterpreterSettings::workers`] confined fork servers;
/// each serves one call at a time.
///
/// Dropping it kills all servers. The death of the parent kills them too, whatever its cause.
pub struct CPython {
    settings: InterpreterSettings,
    program: PathBuf,
    host: HostPython,
    confinement: String,
    /// Live trajectories. Used only with [`InterpreterState::Trajectory`].
    sessions: Mutex<HashMap<SessionId, LiveSession>>,
    console: Console,
    // Declared, and so dropped, before the spawner: the end of the spawner's thread kills the servers.
    pool: Pool<Arc<Server>>,
    spawner: Spawner,
}

/// The state of a trajectory between its calls.
struct LiveSession {
    /// `None` after the process was idle for too long.
    snippet: Option<SnippetProcess>,
    used: Instant,
}

impl CPython {
    /// Starts the first server, a process of `program` (this binary), and runs a snippet. This proves that
    /// the machine can confine the server. Up to `sessions_max` trajectories are live at the same time.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a setting is out of range, Python is not found, a module to preload is
    /// missing, or the kernel cannot confine a worker and
    /// [`InterpreterSettings::dangerously_allow_unsandboxed`] is false. Any other error when the server
    /// cannot be started.
    pub fn new(settings: InterpreterSettings, program: PathBuf, sessions_max: usize) -> Result<Self> {
        settings.check()?;
        resources::probe_pidfds()?;
        if settings.state == InterpreterState::Trajectory {
            resources::raise_file_limit(sessions_max)?;
        }
        let host = HostPython::find(Path::new(&settings.python))?;
        let spawner = Spawner::new().context("starting the thread that spawns interpreter workers")?;
        let (first, confinement) =
            Server::start(&settings, &host, &program, &spawner).map_err(startup_error)?;
        let python = Self {
            pool: Pool::new(vec![Arc::new(first)], settings.workers),
            settings,
            program,
            host,
            confinement,
            sessions: Mutex::default(),
            console: Console::silent(),
            spawner,
        };
        let reply = python.call(SessionId(u64::MAX), "1 + 1");
        python.close(SessionId(u64::MAX));
        anyhow::ensure!(
            (reply.outcome, reply.text.as_str()) == (CallOutcome::Answered, "2"),
            "{}: the first snippet, 1 + 1, failed with {:?}: {}",
            python.host.executable.display(),
            reply.outcome,
            reply.text
        );
        Ok(python)
    }

    /// Returns the interpreter with a console that reports dead workers.
    pub fn reporting_to(self, console: &Console) -> Self {
        Self { console: console.clone(), ..self }
    }

    /// Runs `code` in the trajectory's process or in a new one. A server that fails is killed, and a later
    /// call starts another server.
    fn run(&self, session: SessionId, code: &str) -> (CallOutcome, String) {
        let new = || {
            let (server, _) = Server::start(&self.settings, &self.host, &self.program, &self.spawner)?;
            Ok(Arc::new(server))
        };
        let server = match self.pool.acquire(new) {
            Ok(server) => server,
            Err(error) => return self.record_death(format!("{error:#}")),
        };
        self.end_idle();
        let live = lock(&self.sessions).remove(&session);
        let was_idle = live.as_ref().is_some_and(|live| live.snippet.is_none());
        let snippet = match live.and_then(|live| live.snippet) {
            Some(snippet) => Ok(snippet),
            None => SnippetProcess::start(&server),
        };
        let snippet = match snippet {
            Ok(snippet) => snippet,
            Err(error) => {
                drop(server);
                self.pool.discard();
                return self.record_death(format!("starting a snippet's process: {error}"));
            }
        };
        let (outcome, mut text) = self.run_in_process(session, snippet, code);
        self.pool.release(server);
        if was_idle {
            let idle = self.settings.idle_s_max;
            text.push_str(&format!("\n(Earlier variables were dropped: no call came for {idle} s.)"));
        }
        (outcome, text)
    }

    /// Runs `code`. Then ends the process, or keeps it for the trajectory's next call.
    fn run_in_process(
        &self,
        session: SessionId,
        mut snippet: SnippetProcess,
        code: &str,
    ) -> (CallOutcome, String) {
        let limits = CallLimits {
            cpu: Duration::from_secs_f64(self.settings.time_limit_s),
            wall: Duration::from_secs_f64(self.settings.wall_clock_s),
            output_chars_max: self.settings.output_chars_max,
        };
        let (outcome, text) = snippet.run(code.as_bytes(), limits);
        match outcome {
            CallOutcome::Answered | CallOutcome::Raised => {
                self.keep(session, snippet);
                let text = match text.is_empty() {
                    true => "(no output: use print() to see a value)".into(),
                    false => output::remove_addresses(&text),
                };
                (outcome, text)
            }
            CallOutcome::MemoryLimit => {
                self.keep(session, snippet);
                (outcome, self.settings.explain(outcome))
            }
            CallOutcome::WorkerDied => match snippet.stop() {
                Some(status) if status.code() == Some(snippet::OUT_OF_MEMORY) => {
                    (CallOutcome::MemoryLimit, self.explain(CallOutcome::MemoryLimit))
                }
                status => self.record_death(worker_deaths::cause(status, "")),
            },
            _ => (outcome, self.explain(outcome)),
        }
    }

    /// Records a call whose process died or could not start.
    fn record_death(&self, cause: String) -> (CallOutcome, String) {
        worker_deaths::report(&self.console, &cause);
        (CallOutcome::WorkerDied, self.explain(CallOutcome::WorkerDied))
    }

    fn keep(&self, session: SessionId, snippet: SnippetProcess) {
        if self.settings.state == InterpreterState::Trajectory {
            snippet.suspend();
            let live = LiveSession { snippet: Some(snippet), used: Instant::now() };
            // This happens outside the lock, because ending a process takes some time.
            let replaced = lock(&self.sessions).insert(session, live);
            drop(replaced);
        }
    }

    /// Ends the processes of trajectories that had no call for [`InterpreterSettings::idle_s_max`] seconds.
    fn end_idle(&self) {
        let idle = Duration::from_secs_f64(self.settings.idle_s_max);
        let mut sessions = lock(&self.sessions);
        let late = sessions.values_mut().filter(|live| live.used.elapsed() > idle);
        let ended: Vec<Option<SnippetProcess>> = late.map(|live| live.snippet.take()).collect();
        drop(sessions);
        drop(ended);
    }

    /// Returns the text that the model gets when the process of its code was stopped.
    fn explain(&self, outcome: CallOutcome) -> String {
        let lost = match self.settings.state {
            InterpreterState::Call => "",
            InterpreterState::Trajectory => " All variables are lost.",
        };
        self.settings.explain(outcome) + lost
    }
}

impl Interpreter for CPython {
    fn call(&self, session: SessionId, code: &str) -> Reply {
        reply(code, |code| self.run(session, code))
    }

    fn close(&self, session: SessionId) {
        let closed = lock(&self.sessions).remove(&session);
        drop(closed);
    }

    fn sandbox_description(&self) -> String {
        self.confinement.clone()
    }
}
