//! The records that pass from rollout to training: plain data.
//!
//! A trajectory of the arithmetic task, one cell a token (`mask` 1 = sampled by the policy):
//!
//! ```text
//! tokens  <|start|>user<|message|>7 boxes…<|end|><|start|>assistant  to=python…7*12-5<|call|>  <|start|>python…79<|end|><|start|>assistant  <|channel|>final<|message|>79<|return|>
//! mask    0 0 0 0 … 0 0 0                                            1 1 1 … 1                 0 0 … 0                                      1 1 1 1 1
//! logprob 0 0 0 0 … 0 0 0                                            -0.1 -0.7 …               0 0 … 0                                      -0.2 …
//! turns   ─ prompt, `prompt_tokens` long ──────────────────────────┘ └ turns[0]: call answered ┘ (inserted, masked)                         └ turns[1]
//! ```

use crate::harmony::Message;
use crate::metrics::Phase;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// How a trajectory ended. Counted in the metrics as `outcome/<snake_case name>`; nothing is skipped in silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The policy ended its answer with a stop token.
    Finished,
    /// The sampled-token budget or the context ran out.
    TruncatedLength,
    /// One more tool call than turns allowed.
    TurnsExhausted,
    /// The last turn could not be parsed and no reply could be given.
    Malformed,
    /// The task's own process failed to grade or continue the trajectory; the reward is then 0.
    TaskFailed,
}

impl Outcome {
    pub const ALL: [Outcome; 5] = [
        Outcome::Finished,
        Outcome::TruncatedLength,
        Outcome::TurnsExhausted,
        Outcome::Malformed,
        Outcome::TaskFailed,
    ];

    /// The name used in metrics and files.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Finished => "finished",
            Outcome::TruncatedLength => "truncated_length",
            Outcome::TurnsExhausted => "turns_exhausted",
            Outcome::Malformed => "malformed",
            Outcome::TaskFailed => "task_failed",
        }
    }
}

/// What became of one tool call. Counted in the metrics as `tool/<snake_case name>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// The code ran and its output went back to the model.
    Answered,
    /// The code raised an exception (a syntax error included); its message went back.
    Raised,
    /// The interpreter's own time limit ended the code.
    TimeLimit,
    /// The parent killed the worker by wall clock: the run is no longer reproducible.
    ToolTimeout,
    /// The code asked for more memory than allowed.
    MemoryLimit,
    /// The worker process died.
    WorkerDied,
    /// The header or content could not be read as a call.
    MalformedCall,
    /// The call names a recipient that does not exist.
    UnknownRecipient,
}

impl CallOutcome {
    pub const ALL: [CallOutcome; 8] = [
        CallOutcome::Answered,
        CallOutcome::Raised,
        CallOutcome::TimeLimit,
        CallOutcome::ToolTimeout,
        CallOutcome::MemoryLimit,
        CallOutcome::WorkerDied,
        CallOutcome::MalformedCall,
        CallOutcome::UnknownRecipient,
    ];

    /// The name used in metrics and files.
    pub fn name(self) -> &'static str {
        match self {
            CallOutcome::Answered => "answered",
            CallOutcome::Raised => "raised",
            CallOutcome::TimeLimit => "time_limit",
            CallOutcome::ToolTimeout => "tool_timeout",
            CallOutcome::MemoryLimit => "memory_limit",
            CallOutcome::WorkerDied => "worker_died",
            CallOutcome::MalformedCall => "malformed_call",
            CallOutcome::UnknownRecipient => "unknown_recipient",
        }
    }
}

/// One stretch of sampled tokens, and what its tool calls, if any, came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// First sampled token's index in [`Trajectory::tokens`].
    pub start: usize,
    /// One past the last sampled token.
    pub end: usize,
    /// What became of the tool calls that the turn ended in, malformed ones included, in their order; a call that was not run,
    /// for want of turns or tokens to answer it in, is none.
    #[serde(default, alias = "call", deserialize_with = "one_or_several")]
    pub calls: Vec<CallOutcome>,
}

/// Trajectories once held one call a turn, or null.
fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<CallOutcome>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Calls {
        Several(Vec<CallOutcome>),
        One(Option<CallOutcome>),
    }
    Ok(match Calls::deserialize(deserializer)? {
        Calls::Several(calls) => calls,
        Calls::One(call) => call.into_iter().collect(),
    })
}

/// One sampled conversation. All per-token vectors have the length of `tokens`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// Training step, or evaluation's step.
    pub step: u64,
    /// Index of the prompt within the step.
    pub prompt: u64,
    /// Index of the sample within its group.
    pub sample: u64,
    /// The task's own name of the problem.
    pub problem_id: String,
    /// Prompt, sampled tokens and inserted text, as token ids: never re-tokenised.
    pub tokens: Vec<u32>,
    /// Length of the prompt: `tokens[..prompt_tokens]`.
    pub prompt_tokens: usize,
    /// True where the policy sampled the token.
    pub mask: Vec<bool>,
    /// Log-probability of the sampled token under the distribution sampled from; 0 where `mask` is false.
    pub logprobs: Vec<f32>,
    /// Experts chosen for the token at each layer, `[tokens][layers × top_k]`, when kept; empty otherwise. The last
    /// token, which is never fed, has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Vec<u16>>,
    pub turns: Vec<Turn>,
    pub outcome: Outcome,
    pub reward: f32,
    /// Whether the answer was right, whatever the reward's shape.
    pub success: bool,
    /// Seconds spent in tool calls.
    #[serde(default)]
    pub tool_s: f64,
}

impl Trajectory {
    /// Number of tokens sampled by the policy.
    pub fn sampled_tokens(&self) -> usize {
        self.mask.iter().filter(|&&m| m).count()
    }

    /// Whether something other than the policy spoiled it: the task's program failed, or a worker of the tool died.
    pub fn failed(&self) -> bool {
        let died = |turn: &Turn| turn.calls.contains(&CallOutcome::WorkerDied);
        self.outcome == Outcome::TaskFailed || self.turns.iter().any(died)
    }
}

/// The samples of one prompt: what group advantages are computed over.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub trajectories: Vec<Trajectory>,
    /// One more sample of the prompt, greedy: its reward is a baseline, and it is not trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy: Option<Trajectory>,
}

/// One line of `trajectories/*.jsonl`: the record and the conversation as a person reads it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrajectoryRow {
    /// `rl` or `eval`, as in `metrics.jsonl`.
    pub phase: Phase,
    #[serde(flatten)]
    pub trajectory: Trajectory,
    /// The whole conversation, the prompt included.
    pub messages: Vec<Message>,
    /// The right answer in the task's own form, where it gives one.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub answer: Value,
    /// What the step learned from its tokens, where it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<TokenFigures>,
}

/// What a training step knows of a trajectory's tokens: one value a token in each, 0 where the mask is false.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenFigures {
    pub advantages: Vec<f32>,
    /// Log-probability in training, before the first update, less that at sampling; absent where none was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gaps: Option<Vec<f32>>,
}
