//! Processes of a user's program that answer JSON lines: a bounded pool with time limits, restarts and kills.

use super::clip_reply;
use crate::pool::Pool;
use crate::process_group::{ProcessGroup, watch};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum length of an answer, which is one line, in bytes.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Maximum number of values and keys of an answer. A parsed value may need a hundred times the memory of its
/// text.
const LINE_VALUES_MAX: usize = 200_000;
/// Maximum length of the tools that a program declares, in bytes.
const TOOLS_BYTES_MAX: usize = 1 << 20;
/// Maximum number of characters of an error.
const ERROR_CHARS_MAX: usize = 2000;

/// Maximum number of bytes of standard error that are held back per request.
const HELD_BYTES_MAX: usize = 1 << 16;
/// Maximum number of bytes of standard error that are shown per request.
const SHOWN_BYTES_MAX: usize = 1 << 20;

/// Time limit for the exit of a process that has closed its output, and for its last standard error.
const END_WAIT: Duration = Duration::from_secs(1);

/// Processes of one program. Each handles one request at a time.
pub struct ProcessPool {
    command: Vec<String>,
    timeout: Duration,
    processes: Pool<Process>,
    /// Whether the standard error of failed requests is discarded.
    quiet: Arc<AtomicBool>,
}

impl ProcessPool {
    /// Returns a pool of up to `processes` processes. `command` is a program and its arguments. `timeout`
    /// limits the time of each answer.
    pub fn new(command: Vec<String>, processes: usize, timeout: Duration) -> Self {
        let quiet = Arc::new(AtomicBool::new(false));
        Self { command, timeout, processes: Pool::new(vec![], processes), quiet }
    }

    /// Discards the standard error of later requests that fail, such as tracebacks. The standard error of
    /// answered requests is still shown, after the answer.
    pub fn discard_failures(&self) {
        self.quiet.store(true, Ordering::Relaxed);
    }

    /// Returns the answer to `request`, parsed by `read`. After a failure the process is killed, and the next
    /// request starts a new one.
    ///
    /// # Errors
    /// When the program does not start, ends, takes too long, prints without a request, or answers with
    /// something other than a JSON object. Also the errors of `read`.
    pub fn ask<T>(&self, request: &Value, read: impl FnOnce(Value) -> Result<T>) -> Result<T> {
        let start = || Process::start(&self.command, &self.quiet, exchange);
        let mut process = self.processes.acquire_running(start, Process::has_ended)?;
        let answer = process.ask(format!("{request}\n"), self.timeout).and_then(read);
        let lines = process.take_stderr();
        if answer.is_ok() {
            show(&lines);
        }
        match answer {
            Ok(_) => self.processes.release(process),
            Err(_) => {
                drop(process);
                self.processes.discard();
            }
        }
        answer
    }
}

/// Writes a request to a process and reads the answer, a line.
pub(super) type Exchange = fn(&mut ChildStdin, &mut ProcessLines, &str) -> Result<String>;

/// A process, and the thread that writes to the process and reads from it.
pub(super) struct Process {
    group: ProcessGroup,
    /// Kills the process group when this process ends. Must be dropped after the process.
    _watcher: ProcessGroup,
    requests: mpsc::Sender<String>,
    answers: mpsc::Receiver<Result<String>>,
    lines: Arc<Mutex<StderrLines>>,
    /// Reads standard error.
    stderr_reader: JoinHandle<()>,
}

/// Standard error since the last answer.
#[derive(Default)]
struct StderrLines {
    /// The bytes that are not shown immediately.
    held: Vec<u8>,
    /// Number of bytes that were shown.
    shown: usize,
}

impl Process {
    /// Starts a process. `exchange` sends it a request. While `quiet` is true, standard error is held back.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub(super) fn start(command: &[String], quiet: &Arc<AtomicBool>, exchange: Exchange) -> Result<Self> {
        let command = command.to_vec();
        let lines = Arc::<Mutex<StderrLines>>::default();
        let (holds, is_quiet) = (lines.clone(), quiet.clone());
        let (sender, receiver) = mpsc::channel();
        let (requests, inbox) = mpsc::channel::<String>();
        let (outbox, answers) = mpsc::channel();
        // The kernel kills the process when the thread that started it ends. So it is started by a thread
        // that lives as long as the process.
        std::thread::Builder::new()
            .name("task-process".into())
            .spawn(move || match spawn(&command) {
                Ok((child, stdin, stdout, stderr)) => {
                    let reader = std::thread::Builder::new().name("task-stderr".into());
                    let reader = reader.spawn(move || forward(stderr, &holds, &is_quiet));
                    let started = reader.map(|reader| (child, reader)).context("cannot start a thread");
                    if sender.send(started).is_ok() {
                        serve_requests(stdin, stdout, &inbox, &outbox, exchange);
                    }
                }
                Err(error) => drop(sender.send(Err(error))),
            })
            .context("cannot start a thread")?;
        let (child, stderr_reader) = receiver.recv().context("the thread of the process has ended")??;
        let group = ProcessGroup { child };
        let watcher = watch(group.id())?;
        Ok(Self { group, _watcher: watcher, requests, answers, lines, stderr_reader })
    }

    /// Returns whether the process has ended by itself.
    pub(super) fn has_ended(&self) -> bool {
        self.group.exit_status(Duration::ZERO).is_some()
    }

    /// Returns the standard error that was held back, and removes it.
    pub(super) fn take_stderr(&self) -> Vec<u8> {
        std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner)).held
    }

    /// Kills the process. Returns the standard error that was held back.
    pub(super) fn end(self) -> Vec<u8> {
        let Self { group, lines, stderr_reader, .. } = self;
        drop(group);
        // A process that left the group may keep standard error open.
        let start = Instant::now();
        while !stderr_reader.is_finished() && start.elapsed() < END_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::mem::take(&mut *lines.lock().unwrap_or_else(PoisonError::into_inner)).held
    }

    /// Sends `request`, a line, and returns the answer.
    ///
    /// # Errors
    /// When the process ends, takes longer than `timeout`, or answers with something other than a JSON
    /// object.
    pub(super) fn ask(&mut self, request: String, timeout: Duration) -> Result<Value> {
        let ended = || anyhow!("the process has ended");
        self.requests.send(request).map_err(|_| ended())?;
        let line = match self.answers.recv_timeout(timeout) {
            Ok(line) => line.map_err(|error| self.with_end(error))?,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("no answer within {} s; the process was killed", timeout.as_secs_f64())
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(ended()),
        };
        let start = || line.chars().take(80).collect::<String>();
        let answer: Value = serde_json::from_str(&line)
            .map_err(|e| anyhow!("the answer {:?} is not JSON: {}", start(), json_error(&line, &e)))?;
        ensure!(answer.is_object(), "the answer {:?} is not a JSON object", start());
        Ok(answer)
    }

    /// Returns `error`, with the exit status of the process if the process has ended.
    fn with_end(&self, error: anyhow::Error) -> anyhow::Error {
        match self.group.exit_status(END_WAIT) {
            Some(status) => anyhow!("{error:#} ({status})"),
            None => error,
        }
    }
}

/// Returns why `line` is not JSON, and the remedy.
fn json_error(line: &str, error: &serde_json::Error) -> String {
    // The parser stopped at the first letter of the number, or after its sign.
    let rest = line.get(error.column().saturating_sub(1)..).unwrap_or_default();
    match ["NaN", "Infinity"].iter().find(|word| rest.starts_with(**word)) {
        Some(word) => {
            format!("{word} is not a number in JSON; reply with a number, or with \"error\" and the reason")
        }
        None => format!("{error}; print only answers to standard output"),
    }
}

/// Starts a program that ends when the calling thread ends, for any reason.
fn spawn(command: &[String]) -> Result<(Child, ChildStdin, ChildStdout, ChildStderr)> {
    let (program, arguments) = command.split_first().context("no program to run")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A process group of its own can be killed as a whole. It also does not receive the terminal's
        // Ctrl-C: after Ctrl-C the current step still needs the program.
        .process_group(0);
    let die_with_the_thread = || {
        // SAFETY: `prctl` with these arguments accesses no memory.
        match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec, the closure only makes this system call. It does not allocate.
    unsafe { command.pre_exec(die_with_the_thread) };
    let mut child = command.spawn().with_context(|| format!("cannot start {program:?}"))?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (stdin, stdout) = stdin.zip(stdout).context("no pipes to the process")?;
    Ok((child, stdin, stdout, stderr.context("no pipe from the process")?))
}

/// Shows a program's standard error immediately, or holds it back until the request is answered.
/// Reads all of it, but shows and holds back only the first bytes.
fn forward(mut stderr: ChildStderr, lines: &Mutex<StderrLines>, quiet: &AtomicBool) {
    let mut bytes = [0; 8192];
    while let Ok(read) = stderr.read(&mut bytes)
        && let Some(bytes) = bytes.get(..read).filter(|bytes| !bytes.is_empty())
    {
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        if quiet.load(Ordering::Relaxed) {
            let bytes_left = HELD_BYTES_MAX.saturating_sub(lines.held.len());
            lines.held.extend(bytes.iter().take(bytes_left));
            continue;
        }
        let bytes_left = SHOWN_BYTES_MAX.saturating_sub(lines.shown);
        lines.shown += bytes.len();
        drop(lines);
        show(bytes.get(..bytes_left).unwrap_or(bytes));
        if (1..=bytes.len()).contains(&bytes_left) {
            show(b"\n[... the rest of this request's standard error is not shown ...]\n");
        }
    }
}

/// Writes to standard error. Errors are ignored, so that a closed standard error does not end the run.
pub(super) fn show(bytes: &[u8]) {
    let _ = std::io::stderr().write_all(bytes);
}

/// The error of a process that ends without an answer.
const ENDED: &str = "the process ended without an answer";

/// The standard output of a process, by lines.
pub(super) struct ProcessLines(BufReader<ChildStdout>);

impl ProcessLines {
    /// Reads a line.
    ///
    /// # Errors
    /// When the process ends before the line does, or the line is too long, has too many values or is not
    /// UTF-8.
    pub(super) fn read(&mut self) -> Result<String> {
        let mut line = Vec::new();
        self.0.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).context(ENDED)?;
        if line.last() != Some(&b'\n') {
            match line.len() as u64 {
                0 => bail!("{ENDED}"),
                LINE_BYTES_MAX => bail!("the answer has more than {} MiB", LINE_BYTES_MAX >> 20),
                _ => bail!("the answer's line has no end"),
            }
        }
        ensure!(count_values(&line) <= LINE_VALUES_MAX, "the answer has more than {LINE_VALUES_MAX} values");
        String::from_utf8(line).map_err(|_| anyhow!("the answer is not UTF-8"))
    }
}

/// Returns the number of values and keys of a JSON text, at least. Each follows one of `[{,:`.
fn count_values(line: &[u8]) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (0, false, false);
    for byte in line {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' | b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// Removes the middle of an error that has a long text of a program.
pub(super) fn shorten(text: &str) -> String {
    clip_reply(text, ERROR_CHARS_MAX).replace("\n[... ", " [... ").replace(" cut ...]\n", " cut ...] ")
}

/// Checks the size of the tools that a program declares.
///
/// # Errors
/// The number and the size of the largest tool.
pub(super) fn check_tools_size(tools: &[Value]) -> Result<()> {
    let sizes: Vec<usize> = tools.iter().map(|tool| tool.to_string().len()).collect();
    let bytes: usize = sizes.iter().sum();
    let Some((index, largest)) = sizes.iter().enumerate().max_by_key(|(_, size)| **size) else {
        return Ok(());
    };
    ensure!(
        bytes <= TOOLS_BYTES_MAX,
        "the tools have {bytes} bytes, of which tool {index} has {largest}; at most {TOOLS_BYTES_MAX} are allowed: shorten their \
         descriptions"
    );
    Ok(())
}

/// Writes `lines`, whole lines, to a process.
///
/// # Errors
/// When the process has ended.
pub(super) fn send(stdin: &mut ChildStdin, lines: &str) -> Result<()> {
    stdin.write_all(lines.as_bytes()).and_then(|()| stdin.flush()).context(ENDED)
}

/// Forwards each request and each answer until either side ends.
fn serve_requests(
    mut stdin: ChildStdin,
    stdout: ChildStdout,
    inbox: &mpsc::Receiver<String>,
    outbox: &mpsc::Sender<Result<String>>,
    exchange: Exchange,
) {
    let mut lines = ProcessLines(BufReader::new(stdout));
    while let Ok(request) = inbox.recv() {
        let answer = exchange(&mut stdin, &mut lines, &request);
        let failed = answer.is_err();
        if outbox.send(answer).is_err() {
            return;
        }
        if failed {
            // The end of this thread would kill the process before its exit status is known. So the thread
            // waits until its owner drops the process.
            let _ = inbox.recv();
            return;
        }
    }
}

/// Sends a request and reads one line, the answer. A program that prints without a request is refused.
fn exchange(stdin: &mut ChildStdin, lines: &mut ProcessLines, request: &str) -> Result<String> {
    if has_bytes(&lines.0) {
        let bytes = lines.0.fill_buf().context(ENDED)?;
        let start: String = String::from_utf8_lossy(bytes).trim_end().chars().take(80).collect();
        bail!("the program printed {start:?} without a request; print exactly one answer per request");
    }
    send(stdin, request)?;
    lines.read()
}

/// Returns whether the program has printed something that was not read yet.
fn has_bytes(lines: &BufReader<ChildStdout>) -> bool {
    let mut poll = libc::pollfd { fd: lines.get_ref().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid structure that outlives the call. A timeout of 0 does not wait.
    let ready = unsafe { libc::poll(&mut poll, 1, 0) };
    !lines.buffer().is_empty() || (ready > 0 && poll.revents & libc::POLLIN != 0)
}
