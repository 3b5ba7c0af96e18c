//! Reward functions in a Python file, in the form of TRL or of verl's `compute_score`, and rows of files.
//!
//! `python/host.py` runs the functions, one trajectory a call, in several processes. The functions' failures
//! are failures of the trajectory, not rewards.

use super::columns::Question;
use super::process::ProcessPool;
use super::rows::{EpochOrder, refuse_overlap};
use super::{
    Problem, Reward, RewardFailure, Task, TaskContext, TaskEntry, TaskSettings, Transcript, ValidationSet,
    command,
};
use crate::bad_input;
use crate::harmony::{Message, Role};
use crate::metrics::Console;
use crate::random::Purpose;
use crate::settings::closest_word;
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "python",
    meaning: "Your own reward functions: a Python file in the form of TRL or verl, and files of rows, see TASKS.md.",
    reads_files: true,
    data: "",
    columns: &["prompt"],
    reward_min: 0.0,
    keys: &["columns", "file", "rewards", "success", "command", "command_timeout_s", "command_processes"],
    make: |settings, context| Ok(Box::new(PythonTask::start(settings, context)?)),
};

/// Default of `task.command` for this task.
pub(super) const PYTHON: &str = "python3";
/// The program that runs the functions.
const HOST: &str = include_str!("python/host.py");
/// The name of verl's function, which needs no `task.rewards`.
const COMPUTE_SCORE: &str = "compute_score";
/// An example row for messages.
const EXAMPLE: &str = r#"{"prompt": "...", "any other column of your functions": "..."}"#;

/// A row: its prompt, and all its values, which the functions get.
struct Row {
    prompt: Question,
    values: Value,
}

impl Row {
    fn read(row: &Value) -> Result<Self, String> {
        Ok(Self { prompt: Question::read(row, "prompt")?, values: row.clone() })
    }

    fn problem(&self, id: String) -> Problem {
        Problem {
            id,
            messages: self.prompt.messages(|text| Message::user(text)),
            answer: self.values.clone(),
        }
    }
}

/// The task `python`.
pub struct PythonTask {
    train: Vec<Row>,
    order: EpochOrder,
    validation: Vec<ValidationSet>,
    pool: ProcessPool,
    /// The weight of each function. One function without a weight has 1.
    weights: BTreeMap<String, f32>,
    /// The functions that must all return more than 0 for a success.
    success: Vec<String>,
    steps: u64,
    console: Console,
}

impl PythonTask {
    /// Reads the files, starts a process and checks that the file has the functions.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the file and every broken row, and for a Python file that cannot be
    /// loaded or lacks a function.
    pub fn start(settings: &TaskSettings, context: &TaskContext) -> Result<Self> {
        let (train_file, train) = settings.training_rows(context, EXAMPLE, Row::read)?;
        let mut validation = vec![];
        if settings.validation_file.is_some() && context.reads_held_out {
            let (file, rows) = settings.held_out_rows(context, EXAMPLE, Row::read)?;
            let held_out = rows.iter().zip(1..).map(|(row, number)| (number, row.prompt.text()));
            refuse_overlap((train_file, train.iter().map(|row| row.prompt.text())), (file, held_out))?;
            let problems = rows.iter().enumerate();
            let problems = problems.map(|(i, row)| row.problem(format!("python/validation/{i}"))).collect();
            validation.push(ValidationSet { name: "python".to_owned(), problems });
        }
        let file = settings.file.as_deref().ok_or_else(|| bad_input!("task.file: missing"))?;
        let file_text = file.to_str().ok_or_else(|| bad_input!("task.file: a path must be UTF-8"))?;
        let host = ["-c", HOST, file_text].map(str::to_owned);
        let names = settings.rewards.keys().cloned();
        let command = settings.command.iter().cloned().chain(host).chain(names).collect();
        let timeout = Duration::try_from_secs_f64(settings.command_timeout_s.unwrap_or(command::TIMEOUT_S))
            .map_err(|e| bad_input!("task.command_timeout_s: {e}; give seconds above 0"))?;
        let processes = settings.command_processes.unwrap_or(command::PROCESSES);
        let pool = ProcessPool::new(command, processes, timeout);
        let weights = weights(&pool, file, &settings.rewards)?;
        let success = success(&weights, &settings.success)?;
        if settings.success.is_empty() && success.len() > 1 {
            context.console.print(&format!(
                "note: an answer is a success if {} all return more than 0; task.success = [\"NAME\"] names others",
                success.join(", ")
            ));
        }
        Ok(Self {
            order: EpochOrder::new(train.len(), Purpose::Shuffle),
            train,
            validation,
            pool,
            weights,
            success,
            steps: context.steps,
            console: context.console.clone(),
        })
    }

    fn grade(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        let messages = chat_messages(transcript.messages);
        let request = json!({
            "request": "reward",
            "rewards": self.weights.keys().collect::<Vec<_>>(),
            "row": problem.answer,
            "prompt": problem.answer.get("prompt").unwrap_or(&Value::Null),
            "conversational": problem.answer.get("prompt").is_some_and(Value::is_array),
            "text": text(&messages),
            "messages": messages,
            "completion_ids": transcript.completion_ids,
            "step": transcript.step,
            "steps": self.steps,
        });
        let of_process = |error: anyhow::Error| {
            // Only the one function can have ended the process.
            let names = if self.weights.len() == 1 { self.weights.keys().cloned().collect() } else { vec![] };
            error.context(RewardFailure { names })
        };
        let reply = self.pool.ask(&request, Ok).map_err(of_process);
        let reply = reply.inspect_err(|error| self.report(problem, "", error))?;
        let traceback = reply["traceback"].as_str().unwrap_or_default();
        self.read_rewards(&reply).inspect_err(|error| self.report(problem, traceback, error))
    }

    /// Reads the rewards of a reply.
    ///
    /// # Errors
    /// [`RewardFailure`] when a function failed, or all returned `None`.
    fn read_rewards(&self, reply: &Value) -> Result<Reward> {
        if let Some(failed) = reply["failed"].as_object().filter(|failed| !failed.is_empty()) {
            let reasons: Vec<String> =
                failed.iter().map(|(name, why)| format!("{name}: {}", why.as_str().unwrap_or("?"))).collect();
            let names = failed.keys().cloned().collect();
            return Err(anyhow!("{}", reasons.join("; ")).context(RewardFailure { names }));
        }
        let named = reply["rewards"].as_object().context("the answer has no rewards")?;
        let named: BTreeMap<String, f32> =
            named.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()? as f32))).collect();
        if named.is_empty() {
            let names = self.weights.keys().cloned().collect();
            return Err(anyhow!("every function returned None").context(RewardFailure { names }));
        }
        let value = named.iter().map(|(name, value)| self.weights.get(name).unwrap_or(&0.0) * value).sum();
        let success = reply["success"].as_bool().unwrap_or_else(|| self.succeeds(&named));
        let named = if self.weights.len() == 1 { BTreeMap::new() } else { named };
        Ok(Reward { value, success, named })
    }

    /// Counts a failure, and prints the first ones, each after its traceback.
    fn report(&self, problem: &Problem, traceback: &str, error: &anyhow::Error) {
        let text = format!("task.file: problem {}: {error:#}", problem.id);
        if !self.console.report_failure_after(traceback, &text) {
            self.pool.discard_failures();
        }
    }

    /// Returns whether the rewards that decide are all above 0, and there is one. A function that returned
    /// `None` has no reward.
    fn succeeds(&self, named: &BTreeMap<String, f32>) -> bool {
        let lowest = self.success.iter().filter_map(|name| named.get(name).copied()).reduce(f32::min);
        lowest.is_some_and(|lowest| lowest > 0.0)
    }
}

/// Returns the functions that decide on success: those that are `named`, or of the largest weight.
fn success(weights: &BTreeMap<String, f32>, named: &[String]) -> Result<Vec<String>> {
    if let Some(name) = named.iter().find(|name| !weights.contains_key(*name)) {
        let known: Vec<&str> = weights.keys().map(String::as_str).collect();
        return Err(bad_input!(
            "task.success names `{name}`, which is no reward; the rewards are {}",
            known.join(", ")
        ));
    }
    if !named.is_empty() {
        return Ok(named.to_vec());
    }
    let largest = weights.values().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    Ok(weights.iter().filter(|(_, weight)| **weight == largest).map(|(name, _)| name.clone()).collect())
}

/// Asks a process for the functions of the file. Returns the weight of each that is used.
fn weights(
    pool: &ProcessPool,
    file: &Path,
    rewards: &BTreeMap<String, f64>,
) -> Result<BTreeMap<String, f32>> {
    let shown = file.display();
    let wrong = |what: String| bad_input!("task.file: {shown}: {what}");
    let reply = pool.ask(&json!({ "request": "describe" }), Ok);
    let reply = reply.map_err(|e| wrong(format!("{e:#}; task.command names the Python to run it with")))?;
    if let Some(mistake) = reply["mistake"].as_str() {
        return Err(wrong(format!("cannot be loaded: {mistake}")));
    }
    let functions: Vec<&str> =
        reply["functions"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let listed = match functions.is_empty() {
        true => "it has no function with a parameter `completions` or `solution_str`".to_owned(),
        false => format!("it has {}", functions.join(", ")),
    };
    if let Some(name) = rewards.keys().find(|name| !functions.contains(&name.as_str())) {
        let near = closest_word(name, functions.iter().copied());
        let near = near.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        return Err(wrong(format!("task.rewards names `{name}`, no function of the file{near}; {listed}")));
    }
    if !rewards.is_empty() {
        return Ok(rewards.iter().map(|(name, &weight)| (name.clone(), weight as f32)).collect());
    }
    let only = match functions[..] {
        [only] => Some(only),
        _ => functions.iter().copied().find(|name| *name == COMPUTE_SCORE),
    };
    let only = only.ok_or_else(|| {
        wrong(format!(
            "name the functions and their weights, such as task.rewards = {{ correct = 1.0 }}; {listed}"
        ))
    })?;
    Ok(BTreeMap::from([(only.to_owned(), 1.0)]))
}

/// Returns the messages after the prompt in OpenAI's form. Thoughts, as templates write them, begin the text
/// of their answer.
fn chat_messages(messages: &[Message]) -> Vec<Value> {
    let mut read: Vec<Value> = vec![];
    let mut thought = String::new();
    for (index, message) in messages.iter().enumerate() {
        match message.role {
            Role::Assistant
                if message.channel.as_deref() == Some("analysis") && message.recipient.is_none() =>
            {
                let is_last = index + 1 == messages.len();
                thought =
                    format!("<think>\n{}{}", message.content, if is_last { "" } else { "\n</think>\n\n" });
                if is_last {
                    read.push(json!({ "role": "assistant", "content": thought }));
                }
            }
            Role::Assistant => {
                let content = std::mem::take(&mut thought) + &message.content;
                let mut value = json!({ "role": "assistant", "content": content });
                if let Some(name) = &message.recipient {
                    value["recipient"] = json!(name);
                }
                read.push(value);
            }
            role => read.push(json!({ "role": role.name(), "content": message.content })),
        }
    }
    read
}

/// Returns the text of the assistant's messages.
fn text(messages: &[Value]) -> String {
    let texts = messages.iter().filter(|message| message["role"] == "assistant");
    texts.filter_map(|message| message["content"].as_str()).collect::<Vec<_>>().join("\n")
}

impl Task for PythonTask {
    fn name(&self) -> &str {
        "python"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        let row = self.order.row(seed, index);
        self.train[row].problem(format!("python/train/{row}"))
    }

    fn leave_out_training_problems(&mut self, fits: &dyn Fn(&Problem) -> bool) -> usize {
        self.order.leave_out(|row| fits(&self.train[row].problem(String::new())))
    }

    fn training_rows(&self) -> Option<usize> {
        Some(self.order.rows())
    }

    fn reward_weights(&self) -> BTreeMap<String, f32> {
        if self.weights.len() == 1 { BTreeMap::new() } else { self.weights.clone() }
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn may_take_long(&self) -> bool {
        true
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        ensure!(!self.weights.is_empty(), "{}: no reward function", problem.id);
        self.grade(problem, transcript)
    }
}
