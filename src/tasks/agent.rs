//! The task `agent`: a program of the user plays whole episodes against the run's server. This file has its
//! problems; `crate::agents` plays.

use super::rows::EpochOrder;
use super::{Problem, Reward, Task, TaskContext, TaskEntry, TaskSettings, Transcript, ValidationSet};
use crate::random::Purpose;
use anyhow::{Result, bail};
use serde_json::Value;

pub(super) const ENTRY: TaskEntry = TaskEntry {
    name: "agent",
    meaning: "Your own agent: a program that plays episodes through OpenAI's interface, see AGENTS.md.",
    reads_files: false,
    data: "",
    columns: &[],
    reward_min: 0.0,
    keys: &["columns", "command", "serve_on", "episode_timeout_s", "episodes_at_once"],
    make: |settings, context| Ok(Box::new(AgentTask::load(settings, context)?)),
};

/// An example row for messages.
const EXAMPLE: &str = "{\"question\": \"...\"}; the program gets it as \"problem\"";

/// The problems of an agent: rows of a file, or numbers from which the program makes problems.
pub struct AgentTask {
    /// Empty if the program makes its problems.
    train: Vec<Value>,
    order: EpochOrder,
    validation: Vec<ValidationSet>,
}

impl AgentTask {
    /// Reads the files, if there are any.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the file and every broken row.
    pub fn load(settings: &TaskSettings, context: &TaskContext) -> Result<Self> {
        let read =
            |row: &Value| if row.is_object() { Ok(row.clone()) } else { Err("not a JSON object".to_owned()) };
        let train = match settings.train_file.as_ref().filter(|_| context.reads_training) {
            Some(file) => settings.read_rows(file, settings.train_rows_max, EXAMPLE, read)?,
            None => vec![],
        };
        let held_out = match settings.validation_file.as_ref().filter(|_| context.reads_held_out) {
            Some(file) => settings.read_rows(file, settings.validation_rows_max, EXAMPLE, read)?,
            None if context.reads_held_out => vec![Value::Null; settings.validation_rows_max.unwrap_or(0)],
            None => vec![],
        };
        let numbered = held_out.into_iter().enumerate();
        let problems: Vec<Problem> =
            numbered.map(|(index, row)| problem(format!("agent/validation/{index}"), row)).collect();
        let set = ValidationSet { name: "agent".to_owned(), problems };
        let validation = if set.problems.is_empty() { vec![] } else { vec![set] };
        Ok(Self { order: EpochOrder::new(train.len(), Purpose::Shuffle), train, validation })
    }
}

/// Returns a problem. Its prompt is the program's.
fn problem(id: String, answer: Value) -> Problem {
    Problem { id, messages: vec![], answer }
}

impl Task for AgentTask {
    fn name(&self) -> &str {
        "agent"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        let row = self.order.row(seed, index);
        match self.train.get(row) {
            Some(values) => problem(format!("agent/train/{row}"), values.clone()),
            None => problem(format!("agent/train/{index}"), Value::Null),
        }
    }

    fn training_rows(&self) -> Option<usize> {
        (!self.train.is_empty()).then_some(self.order.rows())
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    /// Returns the text of the last message, or an empty text: only the program knows what an answer is.
    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        Some(transcript.final_text().unwrap_or_default().trim().to_owned())
    }

    fn answer_decides(&self) -> bool {
        false
    }

    fn reward(&self, problem: &Problem, _transcript: &Transcript) -> Result<Reward> {
        bail!("{}: the agent's program gives the reward of its episodes", problem.id)
    }
}
