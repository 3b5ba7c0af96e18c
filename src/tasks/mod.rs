//! A task: its prompts, the turns of its environment, and its reward.

pub mod answer;
pub mod boxed_answer;
mod columns;
mod generated_task;
pub mod instructions;
mod mcp;
pub mod number;
mod process;
pub mod rows;
mod settings;

pub use arithmetic::{Arithmetic, VALIDATION_PROBLEMS};
pub use arithmetic_single::ArithmeticSingle;
pub use columns::{propose_columns, shown_answer, with_columns};
pub use command::CommandTask;
pub use format_rules::FormatRules;
pub use gsm8k::Gsm8k;
pub use mcp::{McpSettings, McpTask, ToolsSettings, clip_reply};
pub use python::PythonTask;
pub use retool::Retool;
pub(crate) use settings::absolute_words;
pub use settings::{LongPrompts, OnFailure, TaskContext, TaskSettings};
pub use verify_if::VerifyIf;

use crate::harmony::Message;
use crate::settings::registry;
use crate::trajectory::Outcome;
use anyhow::Result;
use std::collections::BTreeMap;

/// A prompt, and the data that its grader needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Stable name, such as `gsm8k/test/17`. It is stored in trajectories.
    pub id: String,
    /// The first messages of the conversation (user, or developer and user). The system message comes from
    /// the recipe.
    pub messages: Vec<Message>,
    /// The reference answer in the task's own format.
    pub answer: serde_json::Value,
}

/// A conversation as the task sees it: a finished one for the grader, or one in progress.
#[derive(Debug, Clone)]
pub struct Transcript<'a> {
    /// The messages after the prompt, in order: of the assistant, of tools, and further ones of the user.
    pub messages: &'a [Message],
    pub outcome: Outcome,
    /// Number of tool calls that got a reply, including error replies.
    pub calls_answered: usize,
    /// The tokens after the prompt: sampled, and of replies. Empty if they are not known.
    pub completion_ids: &'a [u32],
    /// The training step.
    pub step: u64,
}

impl<'a> Transcript<'a> {
    /// Returns a transcript without calls, token ids and step.
    pub const fn new(messages: &'a [Message], outcome: Outcome) -> Self {
        Self { messages, outcome, calls_answered: 0, completion_ids: &[], step: 0 }
    }

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
    /// Named rewards; the value is their weighted sum. Empty for a task with only one reward.
    pub named: BTreeMap<String, f32>,
}

impl Reward {
    /// Returns a reward without named rewards.
    pub const fn new(value: f32, success: bool) -> Self {
        Self { value, success, named: BTreeMap::new() }
    }
}

/// The context of an error of [`Task::reward`]: the named rewards that could not be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewardFailure {
    /// Empty if the failed reward is not known.
    pub names: Vec<String>,
}

impl std::fmt::Display for RewardFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no reward")
    }
}

/// A named set of held-out problems.
#[derive(Debug, Clone)]
pub struct ValidationSet {
    /// The name in metrics: `val-core/<name>/acc/mean@<k>`.
    pub name: String,
    pub problems: Vec<Problem>,
}

/// An example for SFT warm-up: a whole conversation. The loss is over its assistant tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Demonstration {
    pub messages: Vec<Message>,
}

/// A source of problems, and their grader. Results depend only on the task's files, the seed and the index.
pub trait Task: Send + Sync {
    /// Returns the task's name in metrics.
    fn name(&self) -> &str;

    /// Returns training problem number `index` of an endless stream. Problems from files are shuffled anew in
    /// each epoch, by `seed`.
    fn training_problem(&self, seed: u64, index: u64) -> Problem;

    /// Leaves out the training problems for which `fits` returns false, if the task reads them from a file.
    /// If none would be left, leaves out none. Returns how many were left out.
    fn leave_out_training_problems(&mut self, _fits: &dyn Fn(&Problem) -> bool) -> usize {
        0
    }

    /// Returns the number of training problems of an epoch. `None` if the task generates them.
    fn training_rows(&self) -> Option<usize> {
        None
    }

    /// Returns the weights of the named rewards; empty if the task has one reward without a name.
    fn reward_weights(&self) -> BTreeMap<String, f32> {
        BTreeMap::new()
    }

    /// Returns the held-out problems. They are never used in training.
    fn validation_sets(&self) -> &[ValidationSet];

    /// Returns whether the model may call the Python tool.
    fn uses_python(&self) -> bool {
        false
    }

    /// Returns demonstration number `index` for SFT warm-up. `None` if the task has no demonstrations.
    fn demonstration(&self, _seed: u64, _index: u64) -> Option<Demonstration> {
        None
    }

    /// Returns held-out demonstration number `index` for the held-out loss. `None` after the last one.
    /// Held-out demonstrations are never used in training.
    fn held_out_demonstration(&self, _index: u64) -> Option<Demonstration> {
        None
    }

    /// Returns the user's next message after the assistant's answer. `None` ends the conversation.
    ///
    /// # Errors
    /// When the task's own process fails. The trajectory then ends as [`Outcome::TaskFailed`].
    fn next_user_message(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Option<Message>> {
        Ok(None)
    }

    /// Returns the tools that all problems share, without the Python tool, as functions in OpenAI's format.
    /// The prompt declares them. Tools of single problems are not among them.
    fn tools(&self) -> &[serde_json::Value] {
        &[]
    }

    /// Returns whether the task has tools other than the Python tool, declared or not.
    fn answers_calls(&self) -> bool {
        false
    }

    /// Returns the maximum number of characters of a [tool's reply](Self::tool_reply). `None` if the task
    /// answers no calls.
    fn reply_chars_max(&self) -> Option<usize> {
        None
    }

    /// Answers the call at the end of `transcript`. `None` if there is no such tool. Called only for tasks
    /// that [have tools](Self::answers_calls). May be slow.
    ///
    /// # Errors
    /// When the task's own process fails. The trajectory then ends as [`Outcome::TaskFailed`].
    fn tool_reply(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Option<String>> {
        Ok(None)
    }

    /// Returns the answer of a finished conversation for majority@k. By default it is the final message.
    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        let text = transcript.final_text()?.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Returns whether two texts from [`Self::answer_text`] are the same answer.
    fn same_answer(&self, a: &str, b: &str) -> bool {
        a == b
    }

    /// Returns whether an answer is right wherever it is given. An agent's text decides nothing.
    fn answer_decides(&self) -> bool {
        true
    }

    /// Returns whether [`Self::next_user_message`] and [`Self::reward`] may be slow, for example because a
    /// process answers. If so, they run in parallel to decoding.
    fn may_take_long(&self) -> bool {
        false
    }

    /// Grades a finished conversation.
    ///
    /// # Errors
    /// When the task's own process fails. The trajectory is then counted as [`Outcome::TaskFailed`].
    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward>;
}

/// A task's entry in the registry.
#[derive(Debug)]
pub struct TaskEntry {
    pub name: &'static str,
    /// Description for the recipe reference.
    pub meaning: &'static str,
    /// Whether the task's problems are read from `task.train_file` and `task.validation_file`.
    pub reads_files: bool,
    /// Argument of `rloss fetch` that fetches the recipe's files. Empty if there is none.
    pub data: &'static str,
    /// Names of a row's question and answer, for proposals of `task.columns`. Empty if there are none.
    pub columns: &'static [&'static str],
    /// The least reward of an answer.
    pub reward_min: f32,
    /// Further keys of `[task]` that the task reads. All other keys are rejected.
    pub keys: &'static [&'static str],
    /// Reads and checks the task's files, and starts its processes.
    pub make: fn(&TaskSettings, &TaskContext) -> Result<Box<dyn Task>>,
}

registry! {
    /// The tasks, in the order of the recipe page. A new task is one file in this folder and one line here.
    pub struct TaskName(TaskEntry) default arithmetic;
    mod arithmetic;
    mod arithmetic_single;
    mod calculator;
    mod format_rules;
    pub mod gsm8k;
    pub mod retool;
    pub mod verify_if;
    mod command;
    mod python;
    mod agent;
}

/// Builds the task of `settings`: reads and checks its files.
///
/// # Errors
/// [`crate::error::BadInput`] for a missing file key, and for broken rows.
pub fn build(settings: &TaskSettings, context: &TaskContext) -> Result<Box<dyn Task>> {
    (settings.name.make)(settings, context)
}
