//! Continuous batching: each forward takes whatever is ready, prompts and sequences mixed.
//!
//! A sequence that has ended leaves the batch before the next forward, and another enters. The samples of a
//! request share one prefill. Their caches are clones of the prompt's, and their first tokens are drawn from
//! one row of logits.

use super::draw::{draw_tokens, scores};
use super::prefix_cache::{BlockKey, extend_keys};
use super::queue::RefillResult;
use super::request::{
    Completion, Continuation, EngineRequest, FinishReason, NewToken, SampleRequest, TokenScores,
};
use super::{Client, Engine, EngineLimits, FORWARD_TOKENS_MAX, PanicGuard};
use crate::dist::Mesh;
use crate::model::cache::{CacheBlock, CacheCapacity, SequenceCache};
use crate::model::decode::Decoder;
use crate::ops::kv_cache::BLOCK;
use crate::ops::logits::{Logits, SampledToken, SamplingParameters, sampled_rows_max};
use crate::ops::threads::with_spinning_threads;
use anyhow::Result;
use candle_core::Tensor;
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The parts of a request that its sequences need.
pub(super) struct SequenceOptions {
    sampling: SamplingParameters,
    stop_tokens: Vec<u32>,
    top_log_probs: Option<usize>,
    keep_routed_experts: bool,
    pub(super) keep_token_sets: bool,
    pub(super) keep_sequence: bool,
}

/// A prompt whose prefill is in progress, for all samples of its request.
pub(super) struct Prefill {
    group: u64,
    request: EngineRequest,
    cache: SequenceCache,
    /// Keys of the prompt's whole blocks; empty if prefixes are not kept.
    keys: Vec<BlockKey>,
    routed_experts: Vec<Vec<u16>>,
    scores: Vec<TokenScores>,
}

impl Prefill {
    pub(super) fn new(
        group: u64,
        request: EngineRequest,
        cache: SequenceCache,
        keeps_prefixes: bool,
    ) -> Self {
        let mut keys = Vec::new();
        if keeps_prefixes {
            extend_keys(&mut keys, &request.tokens);
        }
        Self { group, request, cache, keys, routed_experts: Vec::new(), scores: Vec::new() }
    }

    /// Returns the keys of the prompt's blocks that may be reused from other requests. The last token is
    /// always read, because the first new token is drawn from its row.
    fn reusable_keys(&self) -> &[BlockKey] {
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
        let Self { group, request, cache, keys, routed_experts, scores } = self;
        let options = Arc::new(SequenceOptions {
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
    tokens: Vec<u32>,
    cache: SequenceCache,
    /// Keys of the whole blocks in `cache`; empty if prefixes are not kept.
    keys: Vec<BlockKey>,
    pub(super) random: ChaCha8Rng,
    forced: Vec<u32>,
    /// Tokens drawn since the request or its last continuation.
    new_tokens: Vec<NewToken>,
    new_tokens_max: usize,
    /// Routed experts of the tokens read since the request or its last continuation.
    routed_experts: Vec<Vec<u16>>,
    prompt_scores: Vec<TokenScores>,
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
    fn push(&mut self, token: NewToken, client: &dyn Client) -> Option<FinishReason> {
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

    fn cache(&mut self) -> &mut SequenceCache {
        match self {
            Work::Prefill(prefill) => &mut prefill.cache,
            Work::Sequence(sequence) => &mut sequence.cache,
        }
    }

    /// Returns the tokens that are not in the cache.
    fn pending(&self) -> &[u32] {
        let (tokens, read) = match self {
            Work::Prefill(prefill) => (&prefill.request.tokens, prefill.cache.len()),
            Work::Sequence(sequence) => (&sequence.tokens, sequence.cache.len()),
        };
        &tokens[read..]
    }

    fn sampling(&self) -> SamplingParameters {
        match self {
            Work::Prefill(prefill) => prefill.request.sampling,
            Work::Sequence(sequence) => sequence.options.sampling,
        }
    }

    /// Returns the list that collects routed experts; `None` if they are not kept.
    fn routed_experts(&mut self) -> Option<&mut Vec<Vec<u16>>> {
        let (keeps, experts) = match self {
            Work::Prefill(prefill) => (prefill.request.keep_routed_experts, &mut prefill.routed_experts),
            Work::Sequence(sequence) => (sequence.options.keep_routed_experts, &mut sequence.routed_experts),
        };
        keeps.then_some(experts)
    }

    /// Returns the keys of all whole blocks in the cache, and the blocks that were filled since the last
    /// call. The last key is the key of the last filled block.
    fn filled_blocks(&mut self) -> (&[BlockKey], Vec<CacheBlock>) {
        let (tokens, keys, cache) = match self {
            Work::Prefill(prefill) => (&prefill.request.tokens, &mut prefill.keys, &mut prefill.cache),
            Work::Sequence(sequence) => (&sequence.tokens, &mut sequence.keys, &mut sequence.cache),
        };
        let blocks = cache.take_filled();
        if !blocks.is_empty() {
            extend_keys(keys, &tokens[..cache.len()]);
        }
        (&keys[..keys.len().min(cache.len() / BLOCK)], blocks)
    }
}

/// The part of a batch that one forward takes: `counts[i]` tokens of entry `i`, 0 if it has to wait.
struct ForwardInputs {
    tokens: Vec<u32>,
    counts: Vec<usize>,
    /// Entries whose tokens are all fed by this forward, and the row of each one's last token.
    complete: Vec<(usize, u32)>,
    /// Prompts whose tokens are scored: the entry, its first row, and for each row the token that follows.
    scored: Vec<(usize, u32, Vec<u32>)>,
}

impl ForwardInputs {
    /// Replaces each row by `rows[row]`, after a forward of one token per entry that moved rows.
    fn move_rows(&mut self, rows: &[u32]) {
        let complete = self.complete.iter_mut().map(|(_, row)| row);
        let scored = self.scored.iter_mut().map(|(_, first, _)| first);
        complete.chain(scored).for_each(|row| *row = rows[*row as usize]);
    }
}

/// One decoding loop with its own batch.
pub(super) struct Worker<'e, 'm> {
    engine: &'e Engine<'m>,
    client: &'e dyn Client,
    batch: Vec<Work>,
    /// Decodes with CUDA graphs. Used if every entry feeds one token and no routed experts are kept.
    decoder: Option<Decoder>,
    sampled: u64,
}

impl<'e, 'm> Worker<'e, 'm> {
    pub(super) fn new(engine: &'e Engine<'m>, client: &'e dyn Client) -> Self {
        let EngineLimits { cuda_graphs, sequences_max, cache_capacity, .. } = engine.limits;
        let sequences = sequences_max.min(cache_capacity.sequences);
        let capacity = CacheCapacity { sequences, ..cache_capacity };
        let decoder = if cuda_graphs { Decoder::new(&engine.policy.decoder_stack(), capacity) } else { None };
        Self { engine, client, batch: Vec::new(), decoder, sampled: 0 }
    }

    /// Works until the client ends the work. A failure or a panic ends all workers.
    pub(super) fn run(mut self) {
        let _guard = PanicGuard(self.engine);
        while self.engine.refill(self.client, &mut self.batch, std::mem::take(&mut self.sampled)) {
            if let Err(error) = self.step() {
                self.engine.fail(error);
                break;
            }
        }
    }

    /// Works like [`Self::run`] when the ranks of `mesh` run every forward together. A rank without work
    /// takes part with no tokens. Ends once the client of every rank has ended the work.
    pub(super) fn run_on_mesh(mut self, mesh: &Mesh) {
        let _guard = PanicGuard(self.engine);
        loop {
            match self.step_on_mesh(mesh) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.engine.fail(error);
                    break;
                }
            }
        }
    }

    /// Runs one forward on all ranks, if any has work. Returns whether to continue.
    fn step_on_mesh(&mut self, mesh: &Mesh) -> Result<bool> {
        let sampled = std::mem::take(&mut self.sampled);
        let result = self.engine.try_refill(self.client, &mut self.batch, sampled);
        if result == RefillResult::Failure {
            return Ok(false);
        }
        let results = mesh.all_gather_byte("who samples", result as u8)?;
        let any = |kind: RefillResult| results.contains(&(kind as u8));
        match (any(RefillResult::Work), result) {
            (true, RefillResult::Work) => self.step()?,
            (true, _) => self.engine.policy.decoder_stack().forward_without_rows()?,
            (false, RefillResult::Nothing) => self.engine.wait_for_work(),
            (false, _) => {}
        }
        Ok(any(RefillResult::Work) || any(RefillResult::Nothing))
    }

    /// Runs one forward, and draws a token for every entry that is fed completely.
    fn step(&mut self) -> Result<()> {
        let device = self.engine.policy.weights.device();
        let _pass = self.engine.start_pass();
        with_spinning_threads(device, || self.forward_and_draw())
    }

    fn forward_and_draw(&mut self) -> Result<()> {
        self.reuse_prefixes();
        let mut feed = self.select_tokens();
        let hidden = self.forward(&mut feed)?;
        self.keep_prefixes();
        for (index, first, targets) in std::mem::take(&mut feed.scored) {
            self.score_prompt(&hidden, index, first, &targets)?;
        }
        let mut complete = feed.complete.into_iter().peekable();
        let mut done: Vec<(Work, u32)> = vec![];
        let mut waiting = vec![];
        for (index, work) in std::mem::take(&mut self.batch).into_iter().enumerate() {
            match complete.next_if(|(done, _)| *done == index) {
                Some((_, row)) => done.push((work, row)),
                None => waiting.push(work),
            }
        }
        self.batch = waiting;
        // Logits are divided by the temperature, so entries share a head product only if their sampling
        // parameters are equal.
        while let Some(sampling) = done.first().map(|(work, _)| work.sampling()) {
            let (same, others) = done.into_iter().partition(|(work, _)| work.sampling() == sampling);
            self.draw_chunks(&hidden, &sampling, same)?;
            done = others;
        }
        Ok(())
    }

    /// Draws the next tokens of the entries in `done`, each with its row of `hidden`.
    fn draw_chunks(
        &mut self,
        hidden: &Tensor,
        sampling: &SamplingParameters,
        done: Vec<(Work, u32)>,
    ) -> Result<()> {
        let policy = &self.engine.policy;
        let (works, rows): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        let normed = policy.decoder_stack().final_norm_rows(hidden, &Arc::new(rows))?;
        let rows_max = sampled_rows_max(policy.model.config.vocab_size, policy.weights.device());
        let (mut works, mut start) = (works.into_iter(), 0);
        while works.len() > 0 {
            let count = works.len().min(rows_max);
            let ready: Vec<Work> = works.by_ref().take(count).collect();
            self.draw(&normed.narrow(0, start, count)?, sampling, ready)?;
            start += count;
        }
        Ok(())
    }

    /// Appends to each prompt's cache the blocks that are kept from other requests.
    fn reuse_prefixes(&mut self) {
        let Some(mut prefixes) = self.engine.prefixes() else { return };
        let mut reused = 0;
        for work in &mut self.batch {
            if let Work::Prefill(prefill) = work {
                let count = prefill.reusable_keys().len();
                let tokens = &prefill.request.tokens;
                reused += prefixes.extend(&prefill.keys[..count], tokens, &mut prefill.cache);
            }
        }
        self.engine.prefill.reused.fetch_add(reused as u64, Ordering::Relaxed);
    }

    /// Keeps the blocks that the last forward filled, for later requests.
    fn keep_prefixes(&mut self) {
        let Some(mut prefixes) = self.engine.prefixes() else { return };
        for work in &mut self.batch {
            let (keys, blocks) = work.filled_blocks();
            if !blocks.is_empty() {
                prefixes.insert(keys, keys.len() - blocks.len(), blocks);
            }
        }
    }

    /// Selects the tokens of the next forward: first the single tokens of decode, then chunks of longer
    /// inputs. A prompt waits if its next block is read in this forward for another prompt.
    fn select_tokens(&self) -> ForwardInputs {
        let pending: Vec<&[u32]> = self.batch.iter().map(Work::pending).collect();
        let decode = pending.iter().filter(|tokens| tokens.len() == 1).count();
        let mut prefilled = 0;
        let mut token_budget = FORWARD_TOKENS_MAX.saturating_sub(decode).max(1);
        let mut feed = ForwardInputs { tokens: vec![], counts: vec![], complete: vec![], scored: vec![] };
        let mut being_read: HashSet<&BlockKey> = HashSet::new();
        for (index, tokens) in pending.into_iter().enumerate() {
            let mut count = if tokens.len() == 1 { 1 } else { tokens.len().min(token_budget) };
            if let Work::Prefill(prefill) = &self.batch[index] {
                let read = prefill.cache.len();
                let next = prefill.reusable_keys().get(read / BLOCK).filter(|_| read.is_multiple_of(BLOCK));
                if next.is_some_and(|next| being_read.contains(next)) {
                    count = 0;
                }
                let blocks = read / BLOCK..(read + count).div_ceil(BLOCK).min(prefill.keys.len());
                being_read.extend(prefill.keys.get(blocks).unwrap_or_default());
                prefilled += count;
            }
            if tokens.len() > 1 {
                token_budget -= count;
            }
            if let Work::Prefill(prefill) = &self.batch[index]
                && prefill.request.prompt_log_probs.is_some()
                && count > 0
                && tokens.len() > 1
            {
                let targets = tokens[1..].iter().take(count).copied().collect();
                feed.scored.push((index, feed.tokens.len() as u32, targets));
            }
            feed.tokens.extend_from_slice(&tokens[..count]);
            feed.counts.push(count);
            if count == tokens.len() {
                feed.complete.push((index, feed.tokens.len() as u32 - 1));
            }
        }
        self.engine.prefill.read.fetch_add(prefilled as u64, Ordering::Relaxed);
        feed
    }

    /// Runs the forward, which appends the tokens of `feed` to the caches. Returns hidden states `[T, H]`.
    fn forward(&mut self, feed: &mut ForwardInputs) -> Result<Tensor> {
        let policy = &self.engine.policy;
        let fed = || feed.counts.iter().copied().filter(|&count| count > 0);
        let counts: Vec<usize> = fed().collect();
        let fed_entries = self.batch.iter_mut().zip(&feed.counts).filter(|(_, count)| **count > 0);
        let mut fed_entries: Vec<&mut Work> = fed_entries.map(|(work, _)| work).collect();
        let keeps_routed_experts = fed_entries.iter_mut().any(|work| work.routed_experts().is_some());
        let mut caches: Vec<_> = fed_entries.iter_mut().map(|work| work.cache()).collect();
        let tokens = std::mem::take(&mut feed.tokens);
        if let Some(decoder) = &mut self.decoder
            && !keeps_routed_experts
            && counts.iter().all(|&count| count == 1)
        {
            let (hidden, rows) = decoder.decode_step(&policy.decoder_stack(), &tokens, &mut caches)?;
            feed.move_rows(&rows);
            return Ok(hidden);
        }
        let mut layers: Vec<Vec<u32>> = vec![];
        let hidden =
            policy.decoder_stack().forward_cached(tokens, &mut caches, &counts, &mut |_, _, output| {
                if let (true, Some(layer)) = (keeps_routed_experts, output.routed_experts()) {
                    layers.push(layer.flatten_all()?.to_vec1()?);
                }
                Ok(())
            })?;
        if keeps_routed_experts {
            let top_k = policy.model.config.num_experts_per_tok;
            let mut token = 0;
            for (work, count) in fed_entries.into_iter().zip(counts) {
                if let Some(kept) = work.routed_experts() {
                    for t in token..token + count {
                        let experts = layers.iter().flat_map(|layer| &layer[t * top_k..(t + 1) * top_k]);
                        kept.push(experts.map(|&expert| expert as u16).collect());
                    }
                }
                token += count;
            }
        }
        Ok(hidden)
    }

    /// Scores the prompt of entry `index`: `targets[i]` is the token after row `first + i`.
    fn score_prompt(&mut self, hidden: &Tensor, index: usize, first: u32, targets: &[u32]) -> Result<()> {
        let policy = &self.engine.policy;
        let rows_max = sampled_rows_max(policy.model.config.vocab_size, policy.weights.device());
        let Work::Prefill(prefill) = &mut self.batch[index] else { return Ok(()) };
        let top = prefill.request.prompt_log_probs.unwrap_or_default();
        let raw = SamplingParameters::with_temperature(1.0);
        for (chunk, targets) in targets.chunks(rows_max).enumerate() {
            let start = first + (chunk * rows_max) as u32;
            let rows = Arc::new((start..start + targets.len() as u32).collect::<Vec<_>>());
            let normed = policy.decoder_stack().final_norm_rows(hidden, &rows)?;
            let logits = policy.decoder_stack().logits(&normed, &raw)?;
            let tokens: Vec<(usize, u32)> = targets.iter().copied().enumerate().collect();
            let rows: Vec<(usize, usize)> = (0..targets.len()).map(|row| (row, top)).collect();
            prefill.scores.extend(scores(&logits, &tokens, &rows)?);
        }
        Ok(())
    }

    /// Draws the next token of each entry in `ready`, from the rows of `normed`. For a prompt it draws the
    /// first token of each sample.
    fn draw(&mut self, normed: &Tensor, sampling: &SamplingParameters, ready: Vec<Work>) -> Result<()> {
        let engine = self.engine;
        // (row, sequence, whether its prompt was just read). The samples of a request share their prompt's
        // row.
        let mut sequences: Vec<(usize, Box<Sequence>, bool)> = vec![];
        for (row, work) in ready.into_iter().enumerate() {
            match work {
                Work::Sequence(sequence) => sequences.push((row, sequence, false)),
                Work::Prefill(prefill) if prefill.request.new_tokens_max == 0 => {
                    let ended = prefill.into_sequences();
                    ended.for_each(|sequence| engine.end(self.client, sequence, FinishReason::Length));
                }
                Work::Prefill(prefill) => {
                    sequences.extend(prefill.into_sequences().map(|sequence| (row, sequence, true)))
                }
            }
        }
        if sequences.is_empty() {
            return Ok(());
        }
        let logits = engine.policy.decoder_stack().logits(normed, sampling)?;
        let (drawn, kept) = draw_tokens(&logits, sampling, &mut sequences)?;
        let mut scores = self.score_drawn(normed, logits, sampling, &sequences, &drawn)?.into_iter();
        for (((_, mut sequence, is_new), drawn), kept) in sequences.into_iter().zip(drawn).zip(kept) {
            self.sampled += 1;
            let SampledToken { token: id, log_prob } = drawn;
            let scores = sequence.options.top_log_probs.and_then(|_| scores.next());
            match sequence.push(NewToken { id, log_prob, kept, scores }, self.client) {
                None if is_new => engine.make_ready(sequence),
                None => self.batch.push(Work::Sequence(sequence)),
                Some(reason) => engine.end(self.client, sequence, reason),
            }
        }
        Ok(())
    }

    /// Scores the drawn tokens of the sequences that ask for it.
    fn score_drawn(
        &self,
        normed: &Tensor,
        logits: Logits,
        sampling: &SamplingParameters,
        sequences: &[(usize, Box<Sequence>, bool)],
        drawn: &[SampledToken],
    ) -> Result<Vec<TokenScores>> {
        let (mut tokens, mut rows) = (vec![], vec![]);
        for ((row, sequence, _), drawn) in sequences.iter().zip(drawn) {
            if let Some(top) = sequence.options.top_log_probs {
                tokens.push((*row, drawn.token));
                rows.push((*row, top));
            }
        }
        if tokens.is_empty() {
            return Ok(vec![]);
        }
        // At temperature 1 and in greedy sampling (0) the logits are not divided.
        if [0.0, 1.0].contains(&sampling.temperature) {
            return scores(&logits, &tokens, &rows);
        }
        // The plan of a GPU's memory has room for the logits of one product.
        drop(logits);
        let raw = SamplingParameters::with_temperature(1.0);
        scores(&self.engine.policy.decoder_stack().logits(normed, &raw)?, &tokens, &rows)
    }
}

impl Engine<'_> {
    /// Ends a sample and gives its client the result.
    pub(super) fn end(&self, client: &dyn Client, mut sequence: Box<Sequence>, reason: FinishReason) {
        let id = sequence.id;
        if let Some(mut prefixes) = self.prefixes()
            && !sequence.options.keep_sequence
        {
            prefixes.keep_tail(&sequence.keys, &sequence.tokens, &sequence.cache);
        }
        let completion = Completion {
            tokens: std::mem::take(&mut sequence.new_tokens),
            finish_reason: reason,
            policy_version: self.version,
            routed_experts: std::mem::take(&mut sequence.routed_experts),
            prompt_scores: std::mem::take(&mut sequence.prompt_scores),
        };
        self.lock().end(sequence);
        client.finished(id, completion);
    }

    /// Returns the completion of a sample that was cancelled before it began.
    pub(super) fn empty_completion(&self) -> Completion {
        Completion {
            tokens: vec![],
            finish_reason: FinishReason::Cancelled,
            policy_version: self.version,
            routed_experts: vec![],
            prompt_scores: vec![],
        }
    }
}
