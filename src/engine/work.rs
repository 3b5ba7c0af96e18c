//! The entries of a worker's batch: prompts whose prefill is in progress, and sequences.

use super::prefix_cache::{BlockKey, extend_keys};
use super::request::{Continuation, EngineRequest, FinishReason, NewToken, SampleRequest, TokenScores};
use super::{Client, PolicyVersion};
use crate::model::cache::{CacheBlock, SequenceCache};
use crate::ops::kv_cache::BLOCK;
use crate::ops::logits::SamplingParameters;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// The parts of a request that its sequences need.
pub(super) struct SequenceOptions {
    pub(super) version: PolicyVersion,
    sampling: SamplingParameters,
    stop_tokens: Vec<u32>,
    pub(super) top_log_probs: Option<usize>,
    keep_routed_experts: bool,
    pub(super) keep_token_sets: bool,
    pub(super) keep_sequence: bool,
}

/// A prompt whose prefill is in progress, for all samples of its request.
pub(super) struct Prefill {
    group: u64,
    version: PolicyVersion,
    pub(super) request: EngineRequest,
    pub(super) cache: SequenceCache,
    /// Keys of the prompt's whole blocks; empty if prefixes are not kept.
    pub(super) keys: Vec<BlockKey>,
    routed_experts: Vec<Vec<u16>>,
    pub(super) scores: Vec<TokenScores>,
}

impl Prefill {
    pub(super) fn new(
        group: u64,
        version: PolicyVersion,
        request: EngineRequest,
        cache: SequenceCache,
        keeps_prefixes: bool,
    ) -> Self {
        let mut keys = Vec::new();
        if keeps_prefixes {
            extend_keys(&mut keys, version.id(), &request.tokens);
        }
        Self { group, version, request, cache, keys, routed_experts: Vec::new(), scores: Vec::new() }
    }

    /// Returns the keys of the prompt's blocks that may be reused from other requests. The last token is
    /// always read, because the first new token is drawn from its row.
    pub(super) fn reusable_keys(&self) -> &[BlockKey] {
        // Scores and routed experts exist only for tokens that pass through the model.
        let needs_rows = self.request.prompt_log_probs.is_some() || self.request.keep_routed_experts;
        let blocks = if needs_rows { 0 } else { (self.request.tokens.len() - 1) / BLOCK };
        &self.keys[..blocks.min(self.keys.len())]
    }

    /// Returns the ids of its samples.
    pub(super) fn ids(&self) -> impl Iterator<Item = u64> {
        self.request.samples.iter().map(|sample| sample.id)
    }

    /// Returns one sequence per sample. The prompt was read, or all its samples are cancelled.
    pub(super) fn into_sequences(self) -> impl Iterator<Item = Box<Sequence>> {
        let Self { group, version, request, cache, keys, routed_experts, scores } = self;
        let options = Arc::new(SequenceOptions {
            version,
            sampling: request.sampling,
            stop_tokens: request.stop_tokens,
            top_log_probs: request.top_log_probs,
            keep_routed_experts: request.keep_routed_experts,
            keep_token_sets: request.keep_token_sets,
            keep_sequence: request.keep_sequence,
        });
        request.samples.into_iter().map(move |SampleRequest { id, random, forced }| {
            Box::new(Sequence {
                id,
                group,
                has_slot: false,
                options: options.clone(),
                tokens: request.tokens.clone(),
                cache: cache.clone(),
                keys: keys.clone(),
                random,
                forced,
                new_tokens: Vec::new(),
                new_tokens_max: request.new_tokens_max,
                routed_experts: routed_experts.clone(),
                prompt_scores: scores.clone(),
            })
        })
    }
}

/// A sample and its cache. Tokens beyond the cache's length are not read yet.
pub(super) struct Sequence {
    pub(super) id: u64,
    pub(super) group: u64,
    /// Whether it has its own KV-cache slot. Until it decodes it uses its prompt's slot.
    pub(super) has_slot: bool,
    pub(super) options: Arc<SequenceOptions>,
    pub(super) tokens: Vec<u32>,
    pub(super) cache: SequenceCache,
    /// Keys of the whole blocks in `cache`; empty if prefixes are not kept.
    pub(super) keys: Vec<BlockKey>,
    pub(super) random: ChaCha8Rng,
    forced: Vec<u32>,
    /// Tokens drawn since the request or its last continuation.
    pub(super) new_tokens: Vec<NewToken>,
    new_tokens_max: usize,
    /// Routed experts of the tokens read since the request or its last continuation.
    pub(super) routed_experts: Vec<Vec<u16>>,
    pub(super) prompt_scores: Vec<TokenScores>,
}

impl Sequence {
    /// Appends tokens to read, and sets what to draw after them.
    pub(super) fn extend(&mut self, continuation: Continuation) {
        let Continuation { tokens, sample: SampleRequest { random, forced, .. }, new_tokens_max } =
            continuation;
        self.tokens.extend(tokens);
        (self.random, self.forced, self.new_tokens_max) = (random, forced, new_tokens_max);
    }

    /// Returns its length in tokens, unread ones included.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the forced token at the next position, if there is one.
    pub(super) fn next_forced(&self) -> Option<u32> {
        self.forced.get(self.new_tokens.len()).copied()
    }

    /// Appends a token. Returns the finish reason if the sample ends with this token.
    pub(super) fn push(&mut self, token: NewToken, client: &dyn Client) -> Option<FinishReason> {
        self.tokens.push(token.id);
        let goes_on = client.token(self.id, &token);
        let stops = self.options.stop_tokens.contains(&token.id);
        self.new_tokens.push(token);
        match () {
            () if stops => Some(FinishReason::StopToken),
            () if !goes_on => Some(FinishReason::Client),
            () if self.new_tokens.len() >= self.new_tokens_max => Some(FinishReason::Length),
            () => None,
        }
    }
}

/// An entry of a worker's batch.
pub(super) enum Work {
    Prefill(Box<Prefill>),
    Sequence(Box<Sequence>),
}

impl Work {
    /// Returns the number of its samples.
    pub(super) fn samples(&self) -> usize {
        match self {
            Work::Prefill(prefill) => prefill.request.samples.len(),
            Work::Sequence(_) => 1,
        }
    }

    pub(super) fn cache(&mut self) -> &mut SequenceCache {
        match self {
            Work::Prefill(prefill) => &mut prefill.cache,
            Work::Sequence(sequence) => &mut sequence.cache,
        }
    }

    /// Returns the tokens that are not in the cache.
    pub(super) fn pending(&self) -> &[u32] {
        let (tokens, read) = match self {
            Work::Prefill(prefill) => (&prefill.request.tokens, prefill.cache.len()),
            Work::Sequence(sequence) => (&sequence.tokens, sequence.cache.len()),
        };
        &tokens[read..]
    }

    /// Returns the version of the weights.
    pub(super) fn version(&self) -> &PolicyVersion {
        match self {
            Work::Prefill(prefill) => &prefill.version,
            Work::Sequence(sequence) => &sequence.options.version,
        }
    }

    pub(super) fn sampling(&self) -> SamplingParameters {
        match self {
            Work::Prefill(prefill) => prefill.request.sampling,
            Work::Sequence(sequence) => sequence.options.sampling,
        }
    }

    /// Returns the list that collects routed experts; `None` if they are not kept.
    pub(super) fn routed_experts(&mut self) -> Option<&mut Vec<Vec<u16>>> {
        let (keeps, experts) = match self {
            Work::Prefill(prefill) => (prefill.request.keep_routed_experts, &mut prefill.routed_experts),
            Work::Sequence(sequence) => (sequence.options.keep_routed_experts, &mut sequence.routed_experts),
        };
        keeps.then_some(experts)
    }

    /// Returns the keys of all whole blocks in the cache, and the blocks that were filled since the last
    /// call. The last key is the key of the last filled block.
    pub(super) fn filled_blocks(&mut self) -> (&[BlockKey], Vec<CacheBlock>) {
        let version = self.version().id();
        let (tokens, keys, cache) = match self {
            Work::Prefill(prefill) => (&prefill.request.tokens, &mut prefill.keys, &mut prefill.cache),
            Work::Sequence(sequence) => (&sequence.tokens, &mut sequence.keys, &mut sequence.cache),
        };
        let blocks = cache.take_filled();
        if !blocks.is_empty() {
            extend_keys(keys, version, &tokens[..cache.len()]);
        }
        (&keys[..keys.len().min(cache.len() / BLOCK)], blocks)
    }
}
