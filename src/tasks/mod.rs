//! A task: prompts, environment turns, reward.

pub mod answer;
pub mod boxed;
pub mod instructions;
mod made_up;
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
pub use settings::{TaskHost, TaskSettings};
pub use verify_if::VerifyIf;

use crate::harmony::Message;
use crate::settings::registered;
use crate::trajectory::Outcome;
use anyhow::Result;

/// One prompt with what its grader needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Stable name, such as `gsm8k/test/17`; written into trajectories.
    pub id: String,
    /// The conversation's first messages (user, or developer and user); the system message is the recipe's.
    pub messages: Vec<Message>,
    /// The gold answer in the task's own form.
    pub answer: serde_json::Value,
}

/// A finished conversation as a grader sees it.
#[derive(Debug, Clone)]
pub struct Transcript<'a> {
    /// The assistant's and tools' messages after the prompt, in order.
    pub messages: &'a [Message],
    pub outcome: Outcome,
    /// Tool calls that were answered (whatever the answer).
    pub calls_answered: usize,
}

impl Transcript<'_> {
    /// The text of the last `final` message, if there is one.
    pub fn final_text(&self) -> Option<&str> {
        let last = self.messages.iter().rfind(|m| m.channel.as_deref() == Some("final"))?;
        Some(&last.content)
    }
}

/// A grader's verdict.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reward {
    /// What the policy is trained on.
    pub value: f32,
    /// Whether the answer is right: what evaluation counts.
    pub success: bool,
}

/// A named set of held-out problems.
#[derive(Debug, Clone)]
pub struct ValidationSet {
    /// Name in metrics: `val-core/<name>/acc/mean@<k>`.
    pub name: String,
    pub problems: Vec<Problem>,
}

/// A supervised example for the cold start: a whole conversation, of which assistant tokens are trained on.
#[derive(Debug, Clone, PartialEq)]
pub struct Demonstration {
    pub messages: Vec<Message>,
}

/// A source of problems and their grader. Deterministic: a function of its files, the seed and the index.
pub trait Task: Send + Sync {
    /// The task's name in metrics.
    fn name(&self) -> &str;

    /// Training problem number `index` of an endless stream (files are reshuffled each epoch by `seed`).
    fn training_problem(&self, seed: u64, index: u64) -> Problem;

    /// Held-out problems, never seen in training.
    fn validation_sets(&self) -> &[ValidationSet];

    /// Whether the model may call the Python tool.
    fn uses_python(&self) -> bool;

    /// Demonstration number `index` for the cold start; `None` for tasks that generate none.
    fn demonstration(&self, _seed: u64, _index: u64) -> Option<Demonstration> {
        None
    }

    /// Held-out demonstration number `index`, never trained on, for the held-out loss; `None` past the last one.
    fn held_out_demonstration(&self, _index: u64) -> Option<Demonstration> {
        None
    }

    /// The user's next message after the assistant's answer, for conversations of several user turns.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory ends as [`Outcome::TaskFailed`].
    fn next_user_message(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Option<Message>> {
        Ok(None)
    }

    /// Whether the task itself has tools beside the Python tool.
    fn answers_calls(&self) -> bool {
        false
    }

    /// The text that answers the call which ends `transcript`; `None` when there is no such tool. Asked only of tasks
    /// that [answer calls](Self::answers_calls); may take long.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory ends as [`Outcome::TaskFailed`].
    fn tool_reply(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Option<String>> {
        Ok(None)
    }

    /// The answer a finished conversation gives, as majority@k counts it; by default its final message.
    fn answer_text(&self, transcript: &Transcript) -> Option<String> {
        let text = transcript.final_text()?.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Whether two texts of [`Self::answer_text`] are the same answer.
    fn same_answer(&self, a: &str, b: &str) -> bool {
        a == b
    }

    /// Whether [`Self::next_user_message`] and [`Self::reward`] may take long, as a process's answers do: they are then asked
    /// for beside decoding.
    fn may_take_long(&self) -> bool {
        false
    }

    /// Grades a finished conversation.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory is counted as [`Outcome::TaskFailed`].
    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward>;
}

/// A task as recipes name it.
#[derive(Debug)]
pub struct TaskEntry {
    pub name: &'static str,
    /// For the recipe's page.
    pub meaning: &'static str,
    /// Whether its problems come from `task.train_file` and `task.validation_file`.
    pub reads_files: bool,
    /// What `scripts/fetch_data.sh` is asked for to have the files of its recipe; empty without files.
    pub data: &'static str,
    /// The keys of `[task]` that it reads beside those; under a task that does not read a key, the key is refused.
    pub keys: &'static [&'static str],
    /// Reads and checks its files, and starts what it runs.
    pub make: fn(&TaskSettings, &TaskHost) -> Result<Box<dyn Task>>,
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

/// The task that `settings` describe, its files read and checked.
///
/// # Errors
/// [`crate::error::BadInput`] for a missing file key and broken rows.
pub fn build(settings: &TaskSettings, host: &TaskHost) -> Result<Box<dyn Task>> {
    (settings.name.make)(settings, host)
}
