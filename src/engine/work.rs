//! The entries of a worker's batch: prompts whose prefill is in progress, and sequences.

use super::prefix_cache::{BlockKey, extend_keys};
use super::request::{Continuation, EngineRequest, FinishReason, NewToken, SampleRequest, TokenScores};
use super::{Client, PolicyVersion};
use crate::model::cache::{CacheBlock, SequenceCache};
use crate::ops::kv_cache::BLOCK;
use crate::ops::logits::SamplingParameters;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

/// The part that a prompt and its sequences have in common: the tokens, and what was read of them.
#[derive(Clone)]
pub(super) struct Reading {
    pub(super) group: u64,
    pub(super) version: PolicyVersion,
    /// The request, without its tokens and samples.
    pub(super) options: Arc<EngineRequest>,
    pub(super) tokens: Vec<u32>,
    pub(super) cache: SequenceCache,
    /// Keys of the whole blocks of a prompt, and of those in the cache of a sequence; empty if prefixes are
    /// not kept.
    pub(super) keys: Vec<BlockKey>,
    /// Routed experts of the tokens read since the request or its last continuation.
    pub(super) routed_experts: Vec<Vec<u16>>,
    pub(super) prompt_scores: Vec<TokenScores>,
}

impl Reading {
    /// Returns the tokens that are not in the cache.
    pub(super) fn pending(&self) -> &[u32] {
        &self.tokens[self.cache.len()..]
    }

    /// Returns the keys of all whole blocks in the cache, and the blocks that were filled since the last
    /// call. The last key is the key of the last filled block.
    pub(super) fn filled_blocks(&mut self) -> (&[BlockKey], Vec<CacheBlock>) {
        let (blocks, read) = (self.cache.take_filled(), self.cache.len());
        if !blocks.is_empty() {
            extend_keys(&mut self.keys, self.version.id(), &self.tokens[..read]);
        }
        (&self.keys[..self.keys.len().min(read / BLOCK)], blocks)
    }
}

/// A prompt whose prefill is in progress, for all samples of its request.
pub(super) struct Prefill {
    pub(super) reading: Reading,
    pub(super) samples: Vec<SampleRequest>,
}

impl Prefill {
    pub(super) fn new(
        group: u64,
        version: PolicyVersion,
        mut request: EngineRequest,
        cache: SequenceCache,
        keeps_prefixes: bool,
    ) -> Self {
        let (tokens, samples) = (std::mem::take(&mut request.tokens), std::mem::take(&mut request.samples));
        let mut keys = Vec::new();
        if keeps_prefixes {
            extend_keys(&mut keys, version.id(), &tokens);
        }
        let (options, routed_experts, prompt_scores) = (Arc::new(request), Vec::new(), Vec::new());
        let reading = Reading { group, version, options, tokens, cache, keys, routed_experts, prompt_scores };
        Self { reading, samples }
    }

    /// Returns the keys of the prompt's blocks that may be reused from other requests. The last token is
    /// always read, because the first new token is drawn from its row.
    pub(super) fn reusable_keys(&self) -> &[BlockKey] {
        let Reading { options, tokens, keys, .. } = &self.reading;
        // Scores and routed experts exist only for tokens that pass through the model.
        let needs_rows = options.prompt_log_probs.is_some() || options.keep_routed_experts;
        let blocks = if needs_rows { 0 } else { (tokens.len() - 1) / BLOCK };
        &keys[..blocks.min(keys.len())]
    }

    /// Returns the ids of its samples.
    pub(super) fn ids(&self) -> impl Iterator<Item = u64> {
        self.samples.iter().map(|sample| sample.id)
    }

    /// Returns one sequence per sample. The prompt was read, or all its samples are cancelled.
    pub(super) fn into_sequences(self) -> impl Iterator<Item = Box<Sequence>> {
        let Self { reading, samples } = self;
        samples.into_iter().map(move |SampleRequest { id, random, forced }| {
            let (new_tokens, new_tokens_max) = (Vec::new(), reading.options.new_tokens_max);
            let (reading, has_slot) = (reading.clone(), false);
            Box::new(Sequence { reading, id, has_slot, random, forced, new_tokens, new_tokens_max })
        })
    }
}

/// A sample and its cache. Tokens beyond the cache's length are not read yet.
pub(super) struct Sequence {
    pub(super) reading: Reading,
    pub(super) id: u64,
    /// Whether it has its own KV-cache slot. Until it decodes it uses its prompt's slot.
    pub(super) has_slot: bool,
    pub(super) random: ChaCha8Rng,
    forced: Vec<u32>,
    /// Tokens drawn since the request or its last continuation.
    pub(super) new_tokens: Vec<NewToken>,
    new_tokens_max: usize,
}

impl Sequence {
    /// Appends tokens to read, and sets what to draw after them.
    pub(super) fn extend(&mut self, continuation: Continuation) {
        let Continuation { tokens, sample: SampleRequest { random, forced, .. }, new_tokens_max } =
            continuation;
        self.reading.tokens.extend(tokens);
        (self.random, self.forced, self.new_tokens_max) = (random, forced, new_tokens_max);
    }

    /// Returns its length in tokens, unread ones included.
    pub(super) fn len(&self) -> usize {
        self.reading.tokens.len()
    }

    /// Returns the forced token at the next position, if there is one.
    pub(super) fn next_forced(&self) -> Option<u32> {
        self.forced.get(self.new_tokens.len()).copied()
    }

    /// Appends a token. Returns the finish reason if the sample ends with this token.
    pub(super) fn push(&mut self, token: NewToken, client: &dyn Client) -> Option<FinishReason> {
        self.reading.tokens.push(token.id);
        let goes_on = client.token(self.id, &token);
        let stops = self.reading.options.stop_tokens.contains(&token.id);
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
            Work::Prefill(prefill) => prefill.samples.len(),
            Work::Sequence(_) => 1,
        }
    }

    pub(super) fn reading(&self) -> &Reading {
        match self {
            Work::Prefill(prefill) => &prefill.reading,
            Work::Sequence(sequence) => &sequence.reading,
        }
    }

    pub(super) fn reading_mut(&mut self) -> &mut Reading {
        match self {
            Work::Prefill(prefill) => &mut prefill.reading,
            Work::Sequence(sequence) => &mut sequence.reading,
        }
    }

    /// Returns the version of the weights.
    pub(super) fn version(&self) -> &PolicyVersion {
        &self.reading().version
    }

    pub(super) fn sampling(&self) -> SamplingParameters {
        self.reading().options.sampling
    }
}
