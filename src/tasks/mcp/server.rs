//! A client of the Model Context Protocol over stdio: one JSON-RPC message a line.
//!
//! It offers no capability of a client, so a server's own requests other than `ping` get the error "method
//! not found". Notifications are ignored.

use super::super::process::{Process, ProcessLines, check_tools_size, send, show};
use super::McpSettings;
use crate::bad_input;
use crate::pool::Pool;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use std::process::ChildStdin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Revisions of the protocol that begin with `initialize`, the newest first. Their messages about tools are
/// compatible.
const REVISIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// Maximum number of pages of tools.
const PAGES_MAX: usize = 100;
/// JSON-RPC's code for a method that does not exist.
const METHOD_NOT_FOUND: i64 = -32601;
/// Maximum number of failures whose standard error is shown.
const FAILURES_SHOWN_MAX: usize = 10;

/// The answer to a request: the result, or the text of the error that the server reports.
pub(super) type Answer = Result<Value, String>;

/// Processes of a server, which share the requests.
pub(super) struct McpServer {
    command: Vec<String>,
    timeout: Duration,
    processes: Pool<Process>,
    /// Number of the next request.
    next_id: AtomicU64,
    /// Number of failures so far.
    failures: AtomicUsize,
}

impl McpServer {
    /// Returns a server without processes. They start when they are needed.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a time limit that is too long for a clock.
    pub fn new(settings: &McpSettings) -> Result<Self> {
        let timeout = Duration::try_from_secs_f64(settings.timeout_s)
            .map_err(|e| bad_input!("tools.mcp.timeout_s: {e}; give seconds above 0"))?;
        Ok(Self {
            command: settings.command.clone(),
            timeout,
            processes: Pool::new(vec![], settings.processes),
            next_id: AtomicU64::new(1),
            failures: AtomicUsize::new(0),
        })
    }

    /// Returns the server's tools as it lists them: `name`, `description`, `inputSchema`.
    ///
    /// # Errors
    /// When the server does not start, violates the protocol, or has no tools.
    pub fn list_tools(&self) -> Result<Vec<Value>> {
        let (mut tools, mut parameters) = (vec![], json!({}));
        for _ in 0..PAGES_MAX {
            let page = self.ask("tools/list", parameters)?.map_err(|text| reported("tools/list", &text))?;
            let listed = page["tools"].as_array().context("tools/list: the result has no list `tools`")?;
            tools.extend_from_slice(listed);
            check_tools_size(&tools).context("tools/list")?;
            match page["nextCursor"].as_str() {
                Some(cursor) => parameters = json!({ "cursor": cursor }),
                None if tools.is_empty() => bail!("the server has no tools"),
                None => return Ok(tools),
            }
        }
        bail!("tools/list: more than {PAGES_MAX} pages")
    }

    /// Sends a request to one of the processes. After a failure the process is killed, and its standard error
    /// is shown for the first failures. A process that has ended between two requests is replaced.
    ///
    /// # Errors
    /// When the process does not start, ends, exceeds the time limit, or violates the protocol.
    pub fn ask(&self, method: &str, parameters: Value) -> Result<Answer> {
        let mut process = self.processes.acquire_running(|| self.start(), Process::has_ended)?;
        match self.ask_process(&mut process, method, parameters) {
            Ok(answer) => {
                process.take_stderr();
                self.processes.release(process);
                Ok(answer)
            }
            Err(error) => {
                self.end(process);
                self.processes.discard();
                Err(error)
            }
        }
    }

    /// Starts a process and initializes it.
    fn start(&self) -> Result<Process> {
        let mut process = Process::start(&self.command, &Arc::new(AtomicBool::new(true)), exchange)?;
        match self.initialize(&mut process) {
            Ok(()) => Ok(process),
            Err(error) => {
                self.end(process);
                Err(error)
            }
        }
    }

    fn initialize(&self, process: &mut Process) -> Result<()> {
        let method = "initialize";
        let client = json!({ "name": "rloss", "version": env!("CARGO_PKG_VERSION") });
        let offer = json!({ "protocolVersion": REVISIONS[0], "capabilities": {}, "clientInfo": client });
        let answer = self.ask_process(process, method, offer)?.map_err(|text| reported(method, &text))?;
        let revision = answer["protocolVersion"].as_str().unwrap_or_default();
        if !REVISIONS.contains(&revision) {
            bail!("{method}: the server's revision of the protocol is {revision:?}; known: {REVISIONS:?}");
        }
        ensure!(!answer["capabilities"]["tools"].is_null(), "the server has no tools");
        let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        process.ask(format!("{initialized}\n"), self.timeout).map(drop)
    }

    fn ask_process(&self, process: &mut Process, method: &str, parameters: Value) -> Result<Answer> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let request = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": parameters });
        let mut answer =
            process.ask(format!("{request}\n"), self.timeout).map_err(|why| anyhow!("{method}: {why:#}"))?;
        if let Some(error) = answer.get("error") {
            return Ok(Err(error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned)));
        }
        match answer.get_mut("result") {
            Some(result) if result.is_object() => Ok(Ok(result.take())),
            _ => bail!("{method}: the answer has neither `error` nor `result`, an object"),
        }
    }

    /// Kills a process after a failure.
    fn end(&self, process: Process) {
        let stderr = process.end();
        if self.failures.fetch_add(1, Ordering::Relaxed) < FAILURES_SHOWN_MAX {
            show(&stderr);
        }
    }
}

/// Returns an error that the server reports.
fn reported(method: &str, text: &str) -> anyhow::Error {
    anyhow!("{method}: the server reports an error: {text}")
}

/// Sends `request` and reads lines up to its answer. Also returns a line that is no message, and an error
/// without an id. A notification has no answer; the empty object stands for it.
fn exchange(stdin: &mut ChildStdin, lines: &mut ProcessLines, request: &str) -> Result<String> {
    send(stdin, request)?;
    let asked: Value = serde_json::from_str(request)?;
    let Some(id) = asked.get("id") else { return Ok("{}".to_owned()) };
    loop {
        let line = lines.read()?;
        if line.trim().is_empty() {
            continue;
        }
        let Ok(Value::Object(message)) = serde_json::from_str(&line) else { return Ok(line) };
        match (message.get("method").and_then(Value::as_str), message.get("id")) {
            (None, Some(answered)) if answered == id => return Ok(line),
            (None, None | Some(Value::Null)) if message.contains_key("error") => return Ok(line),
            (Some(method), Some(id)) => send(stdin, &format!("{}\n", reply(method, id)))?,
            // A notification, or an answer that nobody waits for.
            _ => {}
        }
    }
}

/// Returns the answer to a request of the server.
fn reply(method: &str, id: &Value) -> Value {
    match method {
        "ping" => json!({ "jsonrpc": "2.0", "id": id, "result": {} }),
        _ => {
            let error = json!({ "code": METHOD_NOT_FOUND, "message": format!("{method} is not supported") });
            json!({ "jsonrpc": "2.0", "id": id, "error": error })
        }
    }
}
