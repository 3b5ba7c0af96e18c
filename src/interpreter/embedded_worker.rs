//! The embedded interpreter's worker. It confines itself, then serves one call after the other.
//!
//! The worker keeps nothing between calls: the parent sends the trajectory's variables with each call. So any
//! worker can serve any trajectory, and a failure of one trajectory does not affect other trajectories.

use super::FRAME_BYTES_MAX;
use super::output::OutputClipper;
use super::{confinement_error, frames, sandbox};
use crate::trajectory::CallOutcome;
use anyhow::{Context, Result, ensure};
use monty::{Dump, MontyRepl, Session, SessionRef};
use monty_types::{CompileOptions, ExcType, MontyException, MontyObject, PrintWriter, PrintWriterCallback};
use monty_types::{ResourceLimits, ResourceTracker};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The first message that a worker reads.
#[derive(Debug, Serialize, Deserialize)]
pub struct WorkerHello {
    pub parent_id: u32,
    pub memory_bytes: u64,
    pub time_limit_s: f64,
    pub output_chars_max: usize,
    pub keep_state: bool,
    pub state_bytes_max: usize,
    pub dangerously_allow_unsandboxed: bool,
}

/// The first message that a worker writes.
#[derive(Debug, Serialize, Deserialize)]
pub enum StartupReply {
    /// The active confinement.
    Ready(String),
    /// The worker cannot be confined; holds the reason.
    Refused(String),
}

/// State of the variables after a call. It is the second byte of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateChange {
    /// The variables do not change. State was not requested, or the effects of the call were undone.
    Unchanged = 0,
    /// The next frame holds the new variables.
    Replaced = 1,
    /// The variables are lost. They are too large, or cannot be stored.
    Lost = 2,
}

/// Stack size. The parser and the interpreter have recursion limits far below it.
const STACK_BYTES: usize = 16 << 20;
const HELLO_BYTES_MAX: usize = 4096;

/// Runs a worker until its end. Returns the exit code.
pub fn main() -> i32 {
    // A panic is a bug of the interpreter or an impossible allocation. The parent sees the death of the
    // worker and this message.
    std::panic::set_hook(Box::new(|panic| drop(writeln!(std::io::stderr(), "{panic}"))));
    let Ok((input, output)) = take_pipes() else { return 1 };
    let served = std::thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(move || serve(input, output))
        .map(|thread| thread.join());
    if let Ok(Ok(Ok(()))) = served { 0 } else { 1 }
}

/// Moves the two pipes from the standard streams to other descriptors. The standard streams become
/// `/dev/null`.
fn take_pipes() -> Result<(File, File)> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let duplicate_above_stdio = |stream: i32| -> Result<File> {
        // SAFETY: dup and dup2 on descriptors that this process owns. Only the File owns the new descriptor.
        unsafe {
            let copy = libc::dup(stream);
            ensure!(copy >= 0 && libc::dup2(null.as_raw_fd(), stream) >= 0, "dup");
            Ok(File::from(OwnedFd::from_raw_fd(copy)))
        }
    };
    Ok((duplicate_above_stdio(libc::STDIN_FILENO)?, duplicate_above_stdio(libc::STDOUT_FILENO)?))
}

fn serve(mut input: File, mut output: File) -> Result<()> {
    let hello: WorkerHello = serde_json::from_slice(&frames::read(&mut input, HELLO_BYTES_MAX)?)?;
    let first_unused = 1 + output.as_raw_fd().max(input.as_raw_fd());
    let confined = sandbox::confine_worker(hello.parent_id, hello.memory_bytes, first_unused);
    let startup_reply = match confined {
        Ok(active) => StartupReply::Ready(active),
        Err(e) if hello.dangerously_allow_unsandboxed => {
            StartupReply::Ready(format!("NOT SANDBOXED ({e:#})"))
        }
        Err(e) => StartupReply::Refused(confinement_error(&e)),
    };
    frames::write(&mut output, &serde_json::to_vec(&startup_reply)?)?;
    if matches!(startup_reply, StartupReply::Refused(_)) {
        return Ok(());
    }
    // The parent ends the worker by closing the pipe, which makes the read fail.
    while let Ok(code) = frames::read(&mut input, FRAME_BYTES_MAX) {
        let state = frames::read(&mut input, FRAME_BYTES_MAX)?;
        let result = run(&String::from_utf8_lossy(&code), &state, &hello);
        let mut head = vec![result.outcome as u8, result.state_change as u8];
        head.extend_from_slice(result.text.as_bytes());
        frames::write(&mut output, &head)?;
        frames::write(&mut output, &result.state)?;
    }
    Ok(())
}

/// Returns the note for the reply to a call whose effects on variables are not kept.
pub fn lost_state_note(keep_state: bool) -> &'static str {
    if keep_state { " Variables are as they were before this call." } else { "" }
}

struct CallResult {
    outcome: CallOutcome,
    text: String,
    state_change: StateChange,
    state: Vec<u8>,
}

/// Runs one snippet with the variables of `state`: a stored session, or nothing.
fn run(code: &str, state: &[u8], hello: &WorkerHello) -> CallResult {
    let mut clip = OutputClipper::new(hello.output_chars_max);
    let Ok(mut session) = load(state) else {
        return CallResult {
            outcome: CallOutcome::WorkerDied,
            text: "InterpreterError: the stored variables cannot be read.".into(),
            state_change: StateChange::Lost,
            state: Vec::new(),
        };
    };
    let limit = Duration::from_secs_f64(hello.time_limit_s);
    session.tracker_mut().set_max_duration(limit);
    let result = session.feed_run(code, Vec::new(), PrintWriter::Callback(&mut ClippedWriter(&mut clip)));
    if is_time_limit(&result, session.tracker().elapsed() > limit) {
        // The speed of the machine decides how far the code got before the timeout. A reply must not depend
        // on that speed, so neither the code's output nor its effects are kept.
        let text = format!(
            "TimeoutError: the code ran longer than {} s and was stopped.{}",
            hello.time_limit_s,
            lost_state_note(hello.keep_state)
        );
        return CallResult {
            outcome: CallOutcome::TimeLimit,
            text,
            state_change: StateChange::Unchanged,
            state: Vec::new(),
        };
    }
    let outcome = match result {
        Ok(MontyObject::None) => CallOutcome::Answered,
        Ok(value) => {
            push_line(&mut clip, &value.py_repr());
            CallOutcome::Answered
        }
        Err(exception) => {
            push_line(&mut clip, &exception.summary());
            CallOutcome::Raised
        }
    };
    if clip.is_empty() {
        clip.push("(no output: use print() to see a value)");
    }
    let (state_change, state) =
        match hello.keep_state.then(|| monty::dump("session", None, SessionRef::Idle(&session))) {
            None => (StateChange::Unchanged, Vec::new()),
            Some(Ok(state)) if state.len() <= hello.state_bytes_max => (StateChange::Replaced, state),
            Some(_) => (StateChange::Lost, Vec::new()),
        };
    CallResult { outcome, text: clip.finish(), state_change, state }
}

fn load(state: &[u8]) -> Result<MontyRepl> {
    if state.is_empty() {
        let tracker = ResourceTracker::new(ResourceLimits::default());
        return Ok(MontyRepl::new("session", tracker, CompileOptions::default()));
    }
    let dump = Dump::load(state).ok().context("the stored session is invalid")?;
    match dump.state {
        Session::Idle(session) => Ok(*session),
        _ => anyhow::bail!("the stored session is not idle"),
    }
}

fn is_time_limit(result: &Result<MontyObject, MontyException>, over: bool) -> bool {
    over && result.as_ref().is_err_and(|e| e.exc_type() == ExcType::TimeoutError)
}

fn push_line(clip: &mut OutputClipper, text: &str) {
    if clip.is_mid_line() {
        clip.push("\n");
    }
    clip.push(text);
}

/// Sends printed text to an [`OutputClipper`].
struct ClippedWriter<'a>(&'a mut OutputClipper);

impl PrintWriterCallback for ClippedWriter<'_> {
    fn stdout_write(&mut self, output: Cow<'_, str>) -> Result<(), MontyException> {
        self.0.push(&output);
        Ok(())
    }

    fn stdout_push(&mut self, end: char) -> Result<(), MontyException> {
        self.0.push(end.encode_utf8(&mut [0; 4]));
        Ok(())
    }
}
