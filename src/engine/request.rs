//! Requests and completions: token ids and numbers, no message and no task.

use super::PolicyVersion;
use crate::ops::logits::{SampledToken, SamplingParameters};
use crate::ops::token_set::TokenSet;
use rand_chacha::ChaCha8Rng;

/// A prompt to read, and samples to draw after it. The samples share one prefill.
#[derive(Debug, Clone)]
pub struct EngineRequest {
    /// The version of the weights that samples; `None` means the engine's own. It stays that of kept
    /// sequences and their continuations.
    pub version: Option<PolicyVersion>,
    /// The prompt, at least one token.
    pub tokens: Vec<u32>,
    /// At least one sample. The ids are unique among the sequences of an engine.
    pub samples: Vec<SampleRequest>,
    pub sampling: SamplingParameters,
    /// Tokens that end a sample. The sample includes the token that ended it.
    pub stop_tokens: Vec<u32>,
    /// Maximum number of new tokens of a sample; 0 only reads the prompt.
    pub new_tokens_max: usize,
    /// If present, each new token is scored under the model's own distribution (temperature 1, no token
    /// removed). The value is the number of likeliest tokens in each score.
    pub top_log_probs: Option<usize>,
    /// If present, each prompt token but the first is scored in the same way.
    pub prompt_log_probs: Option<usize>,
    /// Whether to return the routed experts of each token that was read.
    pub keep_routed_experts: bool,
    /// Whether to return, with each new token, the tokens that it was drawn from.
    pub keep_token_sets: bool,
    /// Whether to keep the cache when a sample ends, for
    /// [`Engine::continue_sequence`](super::Engine::continue_sequence) or
    /// [`Engine::release`](super::Engine::release).
    pub keep_sequence: bool,
}

/// One sample of a request.
#[derive(Debug, Clone)]
pub struct SampleRequest {
    /// The client's id of the sample.
    pub id: u64,
    /// Gives one random number per token. So a token depends only on weights, request and position.
    pub random: ChaCha8Rng,
    /// The first tokens of the sample, which are scored and not drawn.
    pub forced: Vec<u32>,
}

/// More tokens for a kept sequence, and the sample to draw after them.
#[derive(Debug, Clone)]
pub struct Continuation {
    /// Tokens after the last one drawn.
    pub tokens: Vec<u32>,
    pub sample: SampleRequest,
    pub new_tokens_max: usize,
}

/// A new token.
#[derive(Debug, Clone, PartialEq)]
pub struct NewToken {
    pub id: u32,
    /// The log-probability under the distribution it was drawn from.
    pub log_prob: f32,
    /// The tokens that it was drawn from. Present if [`EngineRequest::keep_token_sets`] is set and sampling
    /// is truncated.
    pub kept: Option<TokenSet>,
    /// Present if [`EngineRequest::top_log_probs`] is.
    pub scores: Option<TokenScores>,
}

/// A token's scores under the model's own distribution.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenScores {
    pub log_prob: f32,
    /// The likeliest tokens, the most likely one first (ties: the lowest id first).
    pub top: Vec<SampledToken>,
}

/// Why a sample ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// By one of [`EngineRequest::stop_tokens`].
    StopToken,
    /// By [`EngineRequest::new_tokens_max`].
    Length,
    /// [`Client::token`](super::Client::token) returned false.
    Client,
    /// By [`Engine::cancel`](super::Engine::cancel).
    Cancelled,
}

/// The result of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    pub tokens: Vec<NewToken>,
    pub finish_reason: FinishReason,
    /// Number of the version of the weights that sampled it.
    pub policy_version: u64,
    /// Routed experts, `[tokens read] × [layers × experts per token]`, of the tokens read since the request
    /// or its last continuation. The last sampled token is not read.
    pub routed_experts: Vec<Vec<u16>>,
    /// Scores of all prompt tokens but the first; empty without [`EngineRequest::prompt_log_probs`].
    pub prompt_scores: Vec<TokenScores>,
}

impl Completion {
    /// Returns the completion of a sample that was cancelled before it began.
    pub(super) fn cancelled(policy_version: u64) -> Self {
        Self {
            tokens: vec![],
            finish_reason: FinishReason::Cancelled,
            policy_version,
            routed_experts: vec![],
            prompt_scores: vec![],
        }
    }
}
