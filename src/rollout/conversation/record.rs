//! The record of a conversation in progress: its tokens, and the values of each.

use crate::engine::NewToken;
use crate::ops::token_set::TokenSet;
use crate::trajectory::VersionRun;

/// The tokens of a conversation so far, and the values of each. All lists have one length, except
/// `kept_tokens` if it is empty, and `routed_experts`.
pub struct TokenRecord {
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    /// True where the policy sampled the token.
    pub mask: Vec<bool>,
    pub log_probs: Vec<f32>,
    /// Whether `kept_tokens` has the tokens that each token was drawn from. Otherwise it is empty.
    pub keeps_token_sets: bool,
    pub kept_tokens: Vec<Option<TokenSet>>,
    /// Routed experts of the tokens that the model has read so far. Empty if they are not kept.
    pub routed_experts: Vec<Vec<u16>>,
    /// Versions of the weights that sampled the tokens.
    pub versions: Vec<VersionRun>,
    /// Number of tokens that the policy sampled.
    pub sampled: usize,
}

impl TokenRecord {
    /// Starts the record of a conversation with the prompt `prompt`. `version` is the version of the weights.
    pub fn new(prompt: &[u32], version: u64, keeps_token_sets: bool) -> Self {
        let prompt_tokens = prompt.len();
        Self {
            tokens: prompt.to_vec(),
            prompt_tokens,
            mask: vec![false; prompt_tokens],
            log_probs: vec![0.0; prompt_tokens],
            keeps_token_sets,
            kept_tokens: if keeps_token_sets { vec![None; prompt_tokens] } else { vec![] },
            routed_experts: vec![],
            versions: vec![VersionRun { start: prompt_tokens, version }],
            sampled: 0,
        }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Appends a sampled token.
    pub fn push(&mut self, drawn: &NewToken) {
        self.tokens.push(drawn.id);
        self.mask.push(true);
        self.log_probs.push(drawn.log_prob);
        if self.keeps_token_sets {
            self.kept_tokens.push(drawn.kept.clone());
        }
        self.sampled += 1;
    }

    /// Appends tokens that the policy did not sample.
    pub fn insert(&mut self, tokens: &[u32]) {
        self.tokens.extend(tokens);
        let len = self.len();
        self.mask.resize(len, false);
        self.log_probs.resize(len, 0.0);
        if self.keeps_token_sets {
            self.kept_tokens.resize(len, None);
        }
    }
}
