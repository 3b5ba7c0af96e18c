//! Records that rollout passes to training. They are plain data.
//!
//! A trajectory of the arithmetic task, with one cell per token (`mask` 1 = sampled by the policy):
//!
//! ```text
//! part     prompt                  call                      reply (masked)      answer
//! tokens   <|start|>user…<|end|>   to=python…7*12-5<|call|>  <|start|>python…    <|channel|>final…<|return|>
//!          <|start|>assistant                                <|start|>assistant
//! mask     0 0 0 … 0 0 0           1 1 1 … 1                 0 0 0 … 0 0         1 1 1 … 1
//! logprob  0 0 0 … 0 0 0           -0.1 -0.7 …               0 0 0 … 0 0         -0.2 …
//! turns    ..prompt_tokens         turns[0], with its call                       turns[1]
//! ```

use crate::harmony::Message;
use crate::metrics::Phase;
use crate::ops::token_set::TokenSet;
use crate::policy::Truncated;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use strum::{IntoStaticStr, VariantArray};

/// The outcome of a trajectory. The metrics count each outcome as `outcome/<snake_case name>`. No trajectory
/// is dropped silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr, VariantArray, Default)]
#[strum(serialize_all = "snake_case")]
pub enum Outcome {
    /// The policy ended its answer with a stop token.
    #[default]
    Finished,
    /// The trajectory reached its maximum of sampled tokens, or the end of the context.
    TruncatedLength,
    /// The last allowed turn ended in a tool call, which was not executed, or the task had a further user
    /// message after it.
    TurnsExhausted,
    /// The last turn could not be parsed, and no reply was possible.
    Malformed,
    /// The task's own process failed to grade or to continue the trajectory. The reward is the task's least.
    TaskFailed,
}

impl Outcome {
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Returns the name used in metrics and files.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The outcome of one tool call. The metrics count each outcome as `tool/<snake_case name>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum CallOutcome {
    /// The code ran, and the model received its output.
    Answered,
    /// The code raised an exception or had a syntax error. The model received the message.
    Raised,
    /// The interpreter stopped the code, which ran longer than `interpreter.time_limit_s`.
    TimeLimit,
    /// The parent process killed the worker after `interpreter.wall_clock_s`. The run is then not
    /// reproducible.
    ToolTimeout,
    /// The code requested more memory than allowed.
    MemoryLimit,
    /// The worker process died.
    WorkerDied,
    /// The header or the content is not a valid call.
    MalformedCall,
    /// The call names a recipient that does not exist.
    UnknownRecipient,
}

impl CallOutcome {
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Returns the name used in metrics and files.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A contiguous range of sampled tokens, and the outcomes of its tool calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Index of the first sampled token in [`Trajectory::tokens`].
    pub start: usize,
    /// Index after the last sampled token.
    pub end: usize,
    /// Outcomes of the tool calls at the end of the turn, in order. Malformed calls are included. Calls are
    /// not included if no turns or tokens were left for their replies, because such calls do not run.
    #[serde(default, alias = "call", deserialize_with = "one_or_many")]
    pub calls: Vec<CallOutcome>,
}

/// Reads a list of outcomes. Also reads the older format, in which `call` is one outcome or null.
fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<CallOutcome>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Calls {
        Many(Vec<CallOutcome>),
        One(Option<CallOutcome>),
    }
    Ok(match Calls::deserialize(deserializer)? {
        Calls::Many(calls) => calls,
        Calls::One(call) => call.into_iter().collect(),
    })
}

/// A run of tokens that one version of the weights sampled. It ends where the next run starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRun {
    /// Index of the first token in [`Trajectory::tokens`].
    pub start: usize,
    /// Version of the weights, as in [`Trajectory::policy_version`].
    pub version: u64,
}

/// One sampled conversation. All per-token vectors have the length of `tokens`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Trajectory {
    /// Training step. For an evaluation, the step after which it runs.
    pub step: u64,
    /// Version of the weights that sampled it: the number of training steps before. If several versions
    /// sampled it, this is the last one. Absent in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_version: Option<u64>,
    /// Versions of the tokens, if several versions sampled the trajectory; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policy_versions: Vec<VersionRun>,
    /// Index of the prompt within the step.
    pub prompt: u64,
    /// Index of the sample within its group.
    pub sample: u64,
    /// Index of the trajectory within its episode. An agent that rewrites its history makes several
    /// trajectories in one episode (`task.name = "agent"`). They have one sample index and one reward.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub part: u64,
    /// Id of the problem, given by the task.
    pub problem_id: String,
    /// Ids of the prompt, the sampled tokens and the inserted text. They are never re-tokenised.
    pub tokens: Vec<u32>,
    /// Number of tokens of the prompt, which is `tokens[..prompt_tokens]`.
    pub prompt_tokens: usize,
    /// True where the policy sampled the token.
    pub mask: Vec<bool>,
    /// Log-probability of the sampled token under the sampling distribution; 0 where `mask` is false.
    #[serde(rename = "logprobs")]
    pub log_probs: Vec<f32>,
    /// The tokens that each sampled token was drawn from, `None` for other tokens; empty if sampling was not
    /// truncated. Training renormalises over these sets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept_tokens: Vec<Option<TokenSet>>,
    /// Routed experts of each token at each layer, `[tokens][layers × top_k]`; empty if they were not kept.
    /// The last token never passes through the model, so its list is empty.
    #[serde(rename = "routes", default, skip_serializing_if = "Vec::is_empty")]
    pub routed_experts: Vec<Vec<u16>>,
    pub turns: Vec<Turn>,
    pub outcome: Outcome,
    pub reward: f32,
    /// Whether the answer was right. Shaping of the reward does not change this value.
    pub success: bool,
    /// The named rewards of the task, whose weighted sum is `reward`; empty if the task has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, f32>,
    /// The named rewards that could not be computed, because a function of the task failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_rewards: Vec<String>,
    /// Whether no step trains on the trajectory, because a program, a tool or the grader failed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dropped: bool,
    /// Seconds spent in tool calls.
    #[serde(default)]
    pub tool_s: f64,
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

fn is_zero(part: &u64) -> bool {
    *part == 0
}

impl Trajectory {
    /// Returns whether this is the first trajectory of its episode.
    pub fn begins_episode(&self) -> bool {
        self.part == 0
    }

    /// Returns the number of tokens sampled by the policy.
    pub fn sampled_tokens(&self) -> usize {
        self.mask.iter().filter(|&&m| m).count()
    }

    /// Returns the version of the weights that sampled token `index`. `None` if the file did not store it.
    pub fn version_of(&self, index: usize) -> Option<u64> {
        let run = self.policy_versions.iter().rev().find(|run| run.start <= index);
        run.map(|run| run.version).or(self.policy_version)
    }

    /// Returns whether the trajectory was cut at a limit of tokens, and such ones have the reward 0.
    fn is_zeroed(&self, truncated: Truncated) -> bool {
        truncated == Truncated::Zero && self.outcome == Outcome::TruncatedLength
    }

    /// Returns the reward that training uses.
    pub fn trained_reward(&self, truncated: Truncated) -> f32 {
        if self.is_zeroed(truncated) { 0.0 } else { self.reward }
    }

    /// Returns the named reward that training uses; NaN if there is none of this name.
    pub fn trained_named_reward(&self, name: &str, truncated: Truncated) -> f32 {
        if self.is_zeroed(truncated) { 0.0 } else { self.rewards.get(name).copied().unwrap_or(f32::NAN) }
    }

    /// Returns whether something other than the policy failed: the task's program, or a worker of the tool.
    pub fn has_failure(&self) -> bool {
        let died = |turn: &Turn| turn.calls.contains(&CallOutcome::WorkerDied);
        self.outcome == Outcome::TaskFailed || self.turns.iter().any(died)
    }
}

/// Checks sets of kept tokens that were read from a file: none at all, or one entry per token, each of which
/// contains its token.
///
/// # Errors
/// The reason, which names the entry.
pub fn check_kept_tokens(kept: &[Option<TokenSet>], tokens: &[u32]) -> Result<(), String> {
    if !kept.is_empty() && kept.len() != tokens.len() {
        return Err(format!("`kept_tokens` has {} entries for {} tokens", kept.len(), tokens.len()));
    }
    let is_kept =
        |(set, token): (&Option<TokenSet>, &u32)| set.as_ref().is_none_or(|set| set.contains(*token));
    match kept.iter().zip(tokens).position(|pair| !is_kept(pair)) {
        Some(i) => Err(format!("`kept_tokens`[{i}] does not contain the sampled token {}", tokens[i])),
        None => Ok(()),
    }
}

/// The samples of one prompt. Group advantages compare their rewards.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub trajectories: Vec<Trajectory>,
    /// A greedy sample of the prompt. Its reward is a baseline. No step trains on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy: Option<Trajectory>,
}

impl Group {
    /// Returns the group without its dropped trajectories. Without any, if its greedy sample was dropped.
    pub fn kept(&self) -> Cow<'_, Group> {
        let is_dropped = |trajectory: &Trajectory| trajectory.dropped;
        if self.greedy.as_ref().is_some_and(is_dropped) {
            return Cow::Owned(Group::default());
        }
        if !self.trajectories.iter().any(is_dropped) {
            return Cow::Borrowed(self);
        }
        let kept = self.trajectories.iter().filter(|trajectory| !trajectory.dropped);
        Cow::Owned(Group { trajectories: kept.cloned().collect(), greedy: self.greedy.clone() })
    }

    /// Returns the number of episodes. It is smaller than the number of trajectories if an agent made several
    /// trajectories in one episode.
    pub fn episodes(&self) -> usize {
        self.trajectories.iter().filter(|trajectory| trajectory.begins_episode()).count()
    }
}

/// One line of `trajectories/*.jsonl`: the trajectory, and its conversation in readable form.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrajectoryRow {
    /// `rl` or `eval`, as in `metrics.jsonl`.
    pub phase: Phase,
    #[serde(flatten)]
    pub trajectory: Trajectory,
    /// The whole conversation, the prompt included.
    pub messages: Vec<Message>,
    /// The right answer in the task's format, if the task gives one.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub answer: Value,
    /// Per-token values of the training step; absent for a trajectory that no step trained on.
    #[serde(rename = "learned", skip_serializing_if = "Option::is_none")]
    pub token_stats: Option<TokenStats>,
}

impl TrajectoryRow {
    /// Reads a line. Two passes read the trajectory and the other keys: numbers that keep their digits cannot
    /// be read into a flattened struct.
    ///
    /// # Errors
    /// When the line is not JSON, or a key is missing or has another type.
    pub fn from_line(line: &[u8]) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct OtherKeys {
            phase: Phase,
            messages: Vec<Message>,
            #[serde(default)]
            answer: Value,
            #[serde(default)]
            learned: Option<TokenStats>,
        }
        let trajectory = serde_json::from_slice(line)?;
        let OtherKeys { phase, messages, answer, learned } = serde_json::from_slice(line)?;
        Ok(Self { phase, trajectory, messages, answer, token_stats: learned })
    }
}

/// Per-token values of the training step for one trajectory. Each list has one value per token, which is 0
/// where the mask is false.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenStats {
    pub advantages: Vec<f32>,
    /// Log-prob mismatch: the log-probability in training, before the first update, minus the log-probability
    /// of sampling. Absent if it was not computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_prob_diffs: Option<Vec<f32>>,
}
