//! A task: prompts, environment turns, reward.

pub mod instructions;

use crate::harmony::Message;
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

    /// The user's next message after the assistant's answer, for conversations of several user turns.
    fn next_user_message(&self, _problem: &Problem, _transcript: &Transcript) -> Option<Message> {
        None
    }

    /// Grades a finished conversation.
    ///
    /// # Errors
    /// When the task's own process fails; the trajectory is counted as [`Outcome::TaskFailed`].
    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward>;
}
