//! A user's own task: a program that gives problems, continues conversations and grades them. It communicates
//! in JSON lines.
//!
//! docs/TASKS.md defines the protocol. Only `command/protocol.rs` parses the program's answers. An answer
//! must not depend on earlier requests: several processes share the requests, and a process is restarted
//! after a failure.

mod protocol;

use super::process::ProcessPool;
use super::{
    Problem, Reward, Task, TaskContext, TaskEntry, TaskSettings, Transcript, ValidationSet, clip_reply,
};
use crate::bad_input;
use crate::chat::function_name;
use crate::harmony::Message;
use crate::metrics::Console;
use anyhow::{Result, bail};
use protocol::{ProgramReply, REQUEST_ID, TaskDescription, VERSION, with_request};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "command",
    meaning: "Your own task: a program that gives problems and rewards as JSON lines, see TASKS.md.",
    reads_files: false,
    data: "",
    columns: &[],
    reward_min: 0.0,
    keys: &["command", "command_timeout_s", "command_processes", "command_output_chars_max"],
    make: |settings, context| Ok(Box::new(CommandTask::start(settings, context)?)),
};

/// Number of attempts to get a problem during a run. If all of them fail, the problem counts as failed. For a
/// problem that is requested at the start, there is only one attempt.
const PROBLEM_ATTEMPTS: usize = 3;
/// Default of `task.command_timeout_s`.
pub(super) const TIMEOUT_S: f64 = 60.0;
/// Default of `task.command_processes`.
pub(super) const PROCESSES: usize = 4;
/// Default of `task.command_output_chars_max`.
pub(super) const OUTPUT_CHARS_MAX: usize = 4096;
/// A key in [`Problem::answer`]. It marks a placeholder for a problem that the program failed to give. The
/// value of the key is the error.
const FAILURE_KEY: &str = "rloss: task_failed";

/// The task `command`.
pub struct CommandTask {
    description: TaskDescription,
    validation: Vec<ValidationSet>,
    program: Program,
    output_chars_max: usize,
    console: Console,
}

impl CommandTask {
    /// Starts the program and asks it for its description and its held-out problems.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the program does not start or violates the protocol.
    pub fn start(settings: &TaskSettings, context: &TaskContext) -> Result<Self> {
        let (command, console) = (&settings.command, context.console.clone());
        let processes = settings.command_processes.unwrap_or(PROCESSES);
        let timeout = Duration::try_from_secs_f64(settings.command_timeout_s.unwrap_or(TIMEOUT_S))
            .map_err(|e| bad_input!("task.command_timeout_s: {e}; give seconds above 0"))?;
        let wrong = |what: anyhow::Error| {
            bad_input!(
                "task.command: {}: {what:#}; the program must answer as docs/TASKS.md says{}",
                command.join(" "),
                missing_files(command)
            )
        };
        let pool = ProcessPool::new(command.clone(), processes, timeout);
        let program = Program { pool, ids: AtomicU64::new(0) };
        let request = json!({ "request": "describe", "version": VERSION });
        let description = program.ask(request, TaskDescription::read).map_err(wrong)?;
        let count = description.validation_problems;
        let mut task = Self {
            description,
            validation: vec![],
            program,
            output_chars_max: settings.command_output_chars_max.unwrap_or(OUTPUT_CHARS_MAX),
            console,
        };
        let count = count.min(context.validation_problems_max as u64);
        let problems = (0..count).map(|index| task.problem(("validation", 0, index), 1));
        let problems = problems.collect::<Result<Vec<_>>>().map_err(wrong)?;
        if !problems.is_empty() {
            task.validation = vec![ValidationSet { name: task.description.name.clone(), problems }];
        }
        task.problem(("train", 0, 0), 1).map_err(wrong)?;
        Ok(task)
    }

    /// Requests a problem, up to `attempts` times.
    fn problem(&self, (split, seed, index): (&str, u64, u64), attempts: usize) -> Result<Problem> {
        let request = json!({ "request": "problem", "split": split, "seed": seed, "index": index });
        let default_id = format!("{}/{split}/{index}", self.description.name);
        let read = |reply: ProgramReply| reply.problem(&default_id);
        let mut problem = self.program.ask(request.clone(), read);
        for _ in 1..attempts {
            if problem.is_ok() {
                break;
            }
            problem = self.program.ask(request.clone(), read);
        }
        problem
    }

    /// Sends a request about a conversation and parses the answer with `read`. The console shows the first
    /// failures.
    fn ask_about<T>(
        &self,
        request: &str,
        problem: &Problem,
        transcript: &Transcript,
        read: impl Fn(ProgramReply) -> Result<T>,
    ) -> Result<T> {
        if let Some(why) = problem.answer.get(FAILURE_KEY) {
            bail!("the program did not give the problem: {why}");
        }
        let mut request = json!({
            "request": request,
            "id": problem.id,
            "prompt": problem.messages,
            "answer": problem.answer,
            "messages": transcript.messages,
            "outcome": transcript.outcome.name(),
            "calls_answered": transcript.calls_answered,
        });
        if request["request"] == "call"
            && let Some(Message { recipient: Some(name), content, .. }) = transcript.messages.last()
        {
            let name = function_name(name);
            request["call"] = json!({ "name": name, "arguments": content });
        }
        self.program.ask(request, read).inspect_err(|error| self.warn(&problem.id, error))
    }

    fn warn(&self, id: &str, error: &anyhow::Error) {
        if !self.console.report_failure(&format!("task.command: problem {id}: {error:#}")) {
            self.program.pool.discard_failures();
        }
    }

    /// Returns the string or null under `content` in the answer to `request`.
    fn content(&self, request: &str, problem: &Problem, transcript: &Transcript) -> Result<Option<String>> {
        self.ask_about(request, problem, transcript, |reply| reply.content())
    }
}

/// Returns a note on words of `command` that look like relative paths to files, but do not exist.
pub(super) fn missing_files(command: &[String]) -> String {
    let is_missing = |(index, word): &(usize, &String)| {
        let path = Path::new(word);
        let named = word.contains('/')
            || *index > 0
                && path
                    .extension()
                    .is_some_and(|kind| kind.to_string_lossy().chars().all(char::is_alphabetic));
        named
            && path.is_relative()
            && !word.starts_with('-')
            && !word.contains(char::is_whitespace)
            && !path.exists()
    };
    let missing: Vec<&str> =
        command.iter().enumerate().filter(is_missing).map(|(_, word)| word.as_str()).collect();
    let folder = std::env::current_dir().unwrap_or_default();
    match missing.is_empty() {
        true => String::new(),
        false => format!(
            "; no file {} in {}, the working directory, to which paths are relative",
            missing.join(", "),
            folder.display()
        ),
    }
}

/// The program's processes and the counter for the requests' ids.
struct Program {
    pool: ProcessPool,
    ids: AtomicU64,
}

impl Program {
    /// Sends a request and parses the program's answer with `read`. An error includes the request. After a
    /// wrong answer the process is ended, because its later answers may belong to the wrong requests.
    fn ask<T>(&self, mut request: Value, read: impl Fn(ProgramReply) -> Result<T>) -> Result<T> {
        // The ids are unique, because the factor is odd. They are not consecutive, so a program that counts
        // instead of repeating the id is detected.
        let id = self.ids.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        request[REQUEST_ID] = format!("{id:016x}").into();
        let answer = self.pool.ask(&request, |answer| match ProgramReply::new(&request, answer)? {
            Ok(reply) => read(reply).map(Ok),
            Err(failure) => Ok(Err(failure)),
        });
        answer.and_then(|answer| answer).map_err(|error| with_request(error, &request))
    }
}

impl Task for CommandTask {
    fn name(&self) -> &str {
        &self.description.name
    }

    /// Returns a problem. If the program does not give the problem, its trajectories count as failed.
    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        self.problem(("train", seed, index), PROBLEM_ATTEMPTS).unwrap_or_else(|error| {
            let id = format!("{}/train/{index}", self.description.name);
            self.warn(&id, &error);
            Problem {
                id,
                messages: vec![Message::user("")],
                answer: json!({ FAILURE_KEY: format!("{error:#}") }),
            }
        })
    }

    fn reward_weights(&self) -> BTreeMap<String, f32> {
        self.description.rewards.clone()
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn uses_python(&self) -> bool {
        self.description.uses_python
    }

    fn may_take_long(&self) -> bool {
        true
    }

    fn tools(&self) -> &[Value] {
        &self.description.tools
    }

    fn answers_calls(&self) -> bool {
        self.description.has_function_tools
    }

    fn reply_chars_max(&self) -> Option<usize> {
        self.answers_calls().then_some(self.output_chars_max)
    }

    fn tool_reply(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<String>> {
        let reply = self.content("call", problem, transcript)?;
        Ok(reply.map(|text| clip_reply(&text, self.output_chars_max)))
    }

    fn next_user_message(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<Message>> {
        if !self.description.has_user_turns {
            return Ok(None);
        }
        Ok(self.content("turn", problem, transcript)?.map(Message::user))
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        self.ask_about("reward", problem, transcript, |reply| reply.reward(&self.description.rewards))
    }
}
