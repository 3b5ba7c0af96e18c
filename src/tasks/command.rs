//! A user's own task: a program that gives problems, continues conversations and grades them over JSON lines.
//!
//! docs/TASKS.md is the protocol. What the program does with one request may not depend on the requests before it:
//! several processes run, in any order, and are started again after a failure.

use super::process::ProcessPool;
use super::{Problem, Reward, Task, TaskEntry, Transcript, ValidationSet};
use crate::bad_input;
use crate::harmony::Message;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "command",
    meaning: "Your own task: a program that gives problems and rewards over JSON lines, see TASKS.md.",
    reads_files: false,
    keys: &["command", "command_timeout_s", "command_processes"],
    make: |settings| {
        Ok(Box::new(CommandTask::start(
            settings.command.clone(),
            settings.command_processes,
            Duration::try_from_secs_f64(settings.command_timeout_s)
                .map_err(|e| bad_input!("task.command_timeout_s: {e}; give seconds above 0"))?,
            settings.validation_problems,
        )?))
    },
};

/// How often a problem is asked for before it counts as failed.
const PROBLEM_ATTEMPTS: usize = 3;
/// Failures that are told on standard error; all are counted in the metrics.
const WARNINGS_MAX: usize = 10;
/// Key of the answer of a problem that could not be had.
const FAILED: &str = "task_failed";

/// The task `command`.
pub struct CommandTask {
    name: String,
    python: bool,
    functions: bool,
    turns: bool,
    validation: Vec<ValidationSet>,
    pool: ProcessPool,
    warnings: AtomicUsize,
}

impl CommandTask {
    /// Starts `command`, asks what it offers and for at most `validation_max` held-out problems.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the program does not start or does not speak the protocol.
    pub fn start(
        command: Vec<String>,
        processes: usize,
        timeout: Duration,
        validation_max: usize,
    ) -> Result<Self> {
        let wrong = |what: anyhow::Error| {
            bad_input!(
                "task.command: {}: {what:#}; the program must answer as docs/TASKS.md says",
                command.join(" ")
            )
        };
        let pool = ProcessPool::new(command.clone(), processes, timeout);
        let described = ask(&pool, &json!({ "request": "describe" })).map_err(wrong)?;
        let flag = |key: &str| match described.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => {
                Err(wrong(anyhow::anyhow!("`{key}` of the description is {other}, not a boolean")))
            }
        };
        let name = described["name"].as_str().unwrap_or("command").to_owned();
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(wrong(anyhow::anyhow!(
                "`name` of the description is {name:?}; write letters, digits and _ only"
            )));
        }
        let count = described["validation_problems"].as_u64().unwrap_or(0);
        let mut task = Self {
            python: flag("python")?,
            functions: flag("functions")?,
            turns: flag("turns")?,
            validation: vec![],
            pool,
            warnings: AtomicUsize::new(0),
            name,
        };
        let count = count.min(validation_max as u64);
        let problems = (0..count).map(|index| task.problem("validation", 0, index));
        let problems = problems.collect::<Result<Vec<_>>>().map_err(wrong)?;
        if !problems.is_empty() {
            task.validation = vec![ValidationSet { name: task.name.clone(), problems }];
        }
        task.problem("train", 0, 0).map_err(wrong)?;
        Ok(task)
    }

    fn problem(&self, split: &str, seed: u64, index: u64) -> Result<Problem> {
        let request = json!({ "request": "problem", "split": split, "seed": seed, "index": index });
        let mut answer = ask(&self.pool, &request);
        for _ in 1..PROBLEM_ATTEMPTS {
            if answer.is_ok() {
                break;
            }
            answer = ask(&self.pool, &request);
        }
        let mut answer = answer?;
        let messages = match (answer["messages"].take(), answer["prompt"].as_str()) {
            (Value::Null, Some(prompt)) => vec![Message::user(prompt)],
            (Value::Null, None) => bail!("a problem has neither `prompt`, a text, nor `messages`"),
            (messages, _) => serde_json::from_value(messages).context("`messages` of a problem")?,
        };
        let id = match answer["id"].as_str() {
            Some(id) => id.to_owned(),
            None => format!("{}/{split}/{index}", self.name),
        };
        Ok(Problem { id, messages, answer: answer["answer"].take() })
    }

    /// A request about a conversation; the first failures are told to the user.
    fn ask_about(&self, request: &str, problem: &Problem, transcript: &Transcript) -> Result<Value> {
        if let Some(why) = problem.answer.get(FAILED) {
            bail!("the problem could not be had: {why}");
        }
        let request = json!({
            "request": request,
            "id": problem.id,
            "prompt": problem.messages,
            "answer": problem.answer,
            "messages": transcript.messages,
            "outcome": transcript.outcome.name(),
            "calls_answered": transcript.calls_answered,
        });
        ask(&self.pool, &request).inspect_err(|error| self.warn(&problem.id, error))
    }

    fn warn(&self, id: &str, error: &anyhow::Error) {
        let told = self.warnings.fetch_add(1, Ordering::Relaxed);
        if told < WARNINGS_MAX {
            let text = format!("warning: task.command: problem {id}: {error:#}");
            eprintln!("{}", text.escape_debug());
        }
        if told + 1 == WARNINGS_MAX {
            eprintln!("warning: task.command: further failures are only counted, as outcome/task_failed");
        }
    }

    /// The text or nothing under `content` of the answer to `request`.
    fn content(&self, request: &str, problem: &Problem, transcript: &Transcript) -> Result<Option<String>> {
        match self.ask_about(request, problem, transcript)?.get("content") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => bail!("`content` of the answer to `{request}` is {other}, not a text"),
        }
    }
}

/// The program's answer, which may say `error` itself.
fn ask(pool: &ProcessPool, request: &Value) -> Result<Value> {
    let answer = pool.ask(request)?;
    match answer.get("error") {
        None | Some(Value::Null) => Ok(answer),
        Some(error) => bail!("the program says: {error}"),
    }
}

impl Task for CommandTask {
    fn name(&self) -> &str {
        &self.name
    }

    /// A problem that the program fails to give becomes one whose trajectories count as failed.
    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        self.problem("train", seed, index).unwrap_or_else(|error| {
            let id = format!("{}/train/{index}", self.name);
            self.warn(&id, &error);
            Problem { id, messages: vec![Message::user("")], answer: json!({ FAILED: format!("{error:#}") }) }
        })
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn uses_python(&self) -> bool {
        self.python
    }

    fn may_take_long(&self) -> bool {
        true
    }

    fn answers_calls(&self) -> bool {
        self.functions
    }

    fn tool_reply(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<String>> {
        self.content("call", problem, transcript)
    }

    fn next_user_message(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<Message>> {
        if !self.turns {
            return Ok(None);
        }
        Ok(self.content("turn", problem, transcript)?.map(Message::user))
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let answer = self.ask_about("reward", problem, transcript)?;
        let value = answer["reward"].as_f64().map(|value| value as f32).filter(|value| value.is_finite());
        let value = value.context("`reward` of an answer is not a number")?;
        let success = match answer.get("success") {
            None => value > 0.0,
            Some(success) => success.as_bool().context("`success` of an answer is not a boolean")?,
        };
        Ok(Reward { value, success })
    }
}
