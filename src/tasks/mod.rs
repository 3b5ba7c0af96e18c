//! A task: prompts, environment turns, reward.

pub mod answer;
pub mod boxed_answer;
mod generated_task;
pub mod instructions;
pub mod number;
mod process;
pub mod rows;
mod settings;

pub use arithmetic::{Arithmetic, VALIDATION_PROBLEMS};
pub use arithmetic_single::ArithmeticSingle;
pub use command::CommandTask;
pub use format_rules::FormatRules;
pub use gsm8k::Gsm8k;
pub use retool::Retool;
pub use settings::{TaskContext, TaskSettings};
pub use verify_if::VerifyIf;

use crate::harmony::Message;
use crate::settings::registered;
use crate::trajectory::Outcome;
use anyhow::Result;
use std::collections::BTreeMap;

/// A prompt with the data that its grader needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Stable name, such as `gsm8k/test/17`; written into trajectories.
    pub id: String,
    /// The conversation's first messages (user, or developer and user); the system message is the recipe's.
    pub messages: Vec<Message>,
    /// The reference answer in the task's own format.
    pub answer: serde_json::Value,
}

/// A finished conversation, the input of a grader.
#[derive(Debug, Clone)]
pub struct Transcript<'a> {
    /// The assistant's and tools' messages after the prompt, in order.
    pub messages: &'a [Message],
    pub outcome: Outcome,
    /// Number of answered tool calls, whatever the answer.
    pub calls_answered: usize,
}

impl Transcript<'_> {
    /// Returns the text of the last `final` message, if there is one.
    pub fn final_text(&self) -> Option<&str> {
        let last = self.messages.iter().rfind(|m| m.channel.as_deref() == Some("final"))?;
        Some(&last.content)
    }
}

/// A grader's verdict.
#[derive(Debug, Clone, PartialEq)]
pub struct Reward {
    /// The reward for training.
    pub value: f32,
    /// Whether the answer is right, for evaluation.
    pub success: bool,
    /// Named rewards, whose weighted sum is the value; empty for a task with one reward.
    pub named: BTreeMap<String, f32>,
}

impl Reward {
    /// Returns a reward without named ones.
    pub const fn new(value: f32, success: bool) -> Self {
        Self { value, success, named: BTreeMap::new() }
    }
}

/// A named set of held-out problems.
#[derive(Debug, Clone)]
pub struct ValidationSet {
    /// Name in metrics: `val-core/<name>/acc/mean@<k>`.
    pub name: String,
    pub problems: Vec<Problem>,
}

/// A supervised example for SFT warm-up: a whole conversation, trained on its assistant tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Demonstration {
    pub messages: Vec<Message>,
}

/// A source of problems and their grader. Deterministic: depends on its files, the seed and the index.
pub trait Task: Send + Sync {
    /// Returns the task's name in metrics.
    fn name(&self) -> &str;

    /// Returns training problem number `index` of an endless stream. Files are reshuffled in each epoch by
    /// `seed`.
    fn training_problem(&self, seed: u64, index: u64) -> Problem;

    /// Returns the held-out problems, never used in training.
    fn validation_sets(&self) -> &[ValidationSet];

    /// Returns true when the model may call the Python tool.
    fn uses_python(&self) -> bool;

    /// Returns demonstration number `index` for SFT warm-up; `None` for tasks that generate none.
    fn demonstration(&self, _seed: u64, _index: u64) -> Option<Demonstration> {
        None
    }

    /// Returns held-out demonstration number `index` for the held-out loss, never trained on; `None` past
    /// the last one.
    fn held_out_demonstration(&self, _index: u64) -> Option<Demonstration> {
        None
    }

    /// Returns the user's next message after the assistant's answer, in conversations with several user
    /// turns.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory ends as [`Outcome::TaskFailed`].
    fn next_user_message(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Option<Message>> {
        Ok(None)
    }

    /// Returns the tools of every problem besides the Python tool, as functions in OpenAI's form. The prompt
    /// declares them.
    fn tools(&self) -> &[serde_json::Value] {
        &[]
    }

    /// Returns true when the task has tools besides the Python tool, declared or not.
    fn answers_calls(&self) -> bool {
        false
    }

    /// Answers the call at the end of `transcript`; `None` when there is no such tool. Called only for
    /// tasks that [answer calls](Self::answers_calls); may take long.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory ends as [`Outcome::TaskFailed`].
    fn tool_reply(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Option<String>> {
        Ok(None)
    }

    /// Returns the answer of a finished conversation for majority@k; by default its final message.
    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        let text = transcript.final_text()?.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Returns true when two texts of [`Self::answer_text`] are the same answer.
    fn same_answer(&self, a: &str, b: &str) -> bool {
        a == b
    }

    /// Returns true when [`Self::next_user_message`] and [`Self::reward`] may take long, like a process's
    /// answers. They then run in parallel to decoding.
    fn may_take_long(&self) -> bool {
        false
    }

    /// Grades a finished conversation.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory is counted as [`Outcome::TaskFailed`].
    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward>;
}

/// A task's entry in the registry.
#[derive(Debug)]
pub struct TaskEntry {
    pub name: &'static str,
    /// Description for the recipe reference.
    pub meaning: &'static str,
    /// Whether its problems are read from `task.train_file` and `task.validation_file`.
    pub reads_files: bool,
    /// Argument of `rloss fetch` for its recipe's files; empty if there are none.
    pub data: &'static str,
    /// Whether a wrong answer has a negative reward.
    pub has_negative_rewards: bool,
    /// The other keys of `[task]` that it reads; all other keys are refused.
    pub keys: &'static [&'static str],
    /// Reads and checks its files, and starts its processes.
    pub make: fn(&TaskSettings, &TaskContext) -> Result<Box<dyn Task>>,
}

registered! {
    /// The tasks, in the order of the recipe's page. A new one is a file of this folder and its line here.
    pub struct TaskName(TaskEntry) default arithmetic;
    mod arithmetic;
    mod arithmetic_single;
    mod format_rules;
    pub mod gsm8k;
    pub mod retool;
    pub mod verify_if;
    mod command;
}

/// Builds the task of `settings`; reads and checks its files.
///
/// # Errors
/// [`crate::error::BadInput`] for a missing file key and broken rows.
pub fn build(settings: &TaskSettings, host: &TaskContext) -> Result<Box<dyn Task>> {
    (settings.name.make)(settings, host)
}
