//! Continuous batching: each forward takes whatever is ready, prompts and sequences mixed.
//!
//! A sequence that has ended leaves the batch before the next forward, and another enters. The samples of a
//! request share one prefill. Their caches are clones of the prompt's, and their first tokens are drawn from
//! one row of logits.
//!
//! Versions of the weights that differ by adapters alone share a forward: products with the base are over the
//! rows of all of them. Other versions have forwards of their own, one after the other.

use super::draw::{draw_tokens, scores};
use super::policy_version::VersionTokens;
use super::prefix_cache::BlockKey;
use super::queue::RefillResult;
use super::request::{Completion, FinishReason, NewToken, TokenScores};
use super::work::{Reading, Sequence, Work};
use super::{Client, Engine, EngineLimits, FORWARD_TOKENS_MAX, PanicGuard, PolicyVersion};
use crate::dist::Mesh;
use crate::model::cache::CacheCapacity;
use crate::model::decode::Decoder;
use crate::model::weights::Weights;
use crate::ops::kv_cache::BLOCK;
use crate::ops::logits::{Logits, SampledToken, SamplingParameters, sampled_rows_max};
use crate::ops::threads::with_spinning_threads;
use crate::panics::lock;
use anyhow::Result;
use candle_core::Tensor;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The part of a batch that one forward takes.
#[derive(Default)]
struct ForwardInputs {
    tokens: Vec<u32>,
    /// The entries with tokens, in the order of their rows, and the number of tokens of each.
    entries: Vec<(usize, usize)>,
    /// The versions of the weights, in the order of their rows.
    versions: Vec<VersionTokens>,
    /// Entries whose tokens are all fed by this forward, in the order of the batch, and the row of each one's
    /// last token.
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
    /// Decodes the engine's own version with CUDA graphs. Used if every entry feeds one token and no routed
    /// experts are kept.
    decoder: Option<Decoder>,
    /// The weights of the last forward, if it had several versions, and these versions.
    mixed: Option<(Vec<VersionTokens>, Arc<Weights>)>,
    sampled: u64,
}

impl<'e, 'm> Worker<'e, 'm> {
    pub(super) fn new(engine: &'e Engine<'m>, client: &'e dyn Client) -> Self {
        let EngineLimits { cuda_graphs, sequences_max, cache_capacity, .. } = engine.limits;
        let sequences = sequences_max.min(cache_capacity.sequences);
        let capacity = CacheCapacity { sequences, ..cache_capacity };
        let decoder =
            if cuda_graphs { Decoder::new(&engine.version.decoder_stack(), capacity) } else { None };
        Self { engine, client, batch: Vec::new(), decoder, mixed: None, sampled: 0 }
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
        while self.step_on_mesh(mesh).unwrap_or_else(|error| {
            self.engine.fail(error);
            false
        }) {}
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
            (true, _) => self.engine.version.decoder_stack().forward_without_rows()?,
            (false, RefillResult::Nothing) => self.engine.wait_for_work(),
            (false, _) => {}
        }
        Ok(any(RefillResult::Work) || any(RefillResult::Nothing))
    }

    /// Runs one forward for each part of the batch, and draws a token for every entry that is fed completely.
    fn step(&mut self) -> Result<()> {
        let device = self.engine.version.weights().device();
        let _pass = self.engine.start_pass();
        with_spinning_threads(device, || {
            let parts = self.take_parts();
            let mut batch = vec![];
            for part in parts {
                self.batch = part;
                self.forward_and_draw()?;
                batch.append(&mut self.batch);
            }
            self.batch = batch;
            Ok(())
        })
    }

    /// Takes the batch in parts: the versions of a part can share a forward.
    fn take_parts(&mut self) -> Vec<Vec<Work>> {
        let mut parts: Vec<Vec<Work>> = vec![];
        for work in std::mem::take(&mut self.batch) {
            let shares = |part: &&mut Vec<Work>| part[0].version().can_share_pass(work.version());
            match parts.iter_mut().find(shares) {
                Some(part) => part.push(work),
                None => parts.push(vec![work]),
            }
        }
        parts
    }

    /// Runs one forward of the batch, and draws tokens. Its versions share all but their adapters.
    fn forward_and_draw(&mut self) -> Result<()> {
        let Some(version) = self.batch.first().map(|work| work.version().clone()) else { return Ok(()) };
        self.reuse_prefixes();
        let mut feed = self.select_tokens();
        let hidden = self.forward(&version, &mut feed)?;
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
            self.draw_chunks(&version, &hidden, &sampling, same)?;
            done = others;
        }
        Ok(())
    }

    /// Draws the next tokens of the entries in `done`, each with its row of `hidden`. Rows of a version are
    /// consecutive, because heads may have adapters.
    fn draw_chunks(
        &mut self,
        version: &PolicyVersion,
        hidden: &Tensor,
        sampling: &SamplingParameters,
        mut done: Vec<(Work, u32)>,
    ) -> Result<()> {
        done.sort_by_key(|(work, _)| work.version().id());
        let (works, rows): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        let normed = version.decoder_stack().final_norm_rows(hidden, &Arc::new(rows))?;
        let rows_max = sampled_rows_max(version.model().config.vocab_size, version.weights().device());
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
                let Reading { keys, tokens, cache, .. } = &mut prefill.reading;
                reused += prefixes.extend(&keys[..count], tokens, cache);
            }
        }
        self.engine.prefill.reused.fetch_add(reused as u64, Ordering::Relaxed);
    }

    /// Keeps the blocks that the last forward filled, for later requests.
    fn keep_prefixes(&mut self) {
        let Some(mut prefixes) = self.engine.prefixes() else { return };
        let keeps_samples = self.client.keeps_samples();
        for work in &mut self.batch {
            if !keeps_samples && matches!(work, Work::Sequence(_)) {
                continue;
            }
            let (keys, blocks) = work.reading_mut().filled_blocks();
            if !blocks.is_empty() {
                prefixes.insert(keys, keys.len() - blocks.len(), blocks);
            }
        }
    }

    /// Selects the tokens of the next forward: first the single tokens of decode, then chunks of longer
    /// inputs. A prompt waits if its next block is read in this forward for another prompt.
    fn select_tokens(&self) -> ForwardInputs {
        let pending: Vec<&[u32]> = self.batch.iter().map(|work| work.reading().pending()).collect();
        let decode = pending.iter().filter(|tokens| tokens.len() == 1).count();
        let mut prefilled = 0;
        let mut token_budget = FORWARD_TOKENS_MAX.saturating_sub(decode).max(1);
        let mut entries: Vec<(usize, usize)> = vec![];
        let mut being_read: HashSet<&BlockKey> = HashSet::new();
        for (index, tokens) in pending.iter().enumerate() {
            let mut count = if tokens.len() == 1 { 1 } else { tokens.len().min(token_budget) };
            if let Work::Prefill(prefill) = &self.batch[index] {
                let Reading { cache, keys, .. } = &prefill.reading;
                let read = cache.len();
                let next = prefill.reusable_keys().get(read / BLOCK).filter(|_| read.is_multiple_of(BLOCK));
                if next.is_some_and(|next| being_read.contains(next)) {
                    count = 0;
                }
                let blocks = read / BLOCK..(read + count).div_ceil(BLOCK).min(keys.len());
                being_read.extend(keys.get(blocks).unwrap_or_default());
                prefilled += count;
            }
            if tokens.len() > 1 {
                token_budget -= count;
            }
            if count > 0 {
                entries.push((index, count));
            }
        }
        self.engine.prefill.read.fetch_add(prefilled as u64, Ordering::Relaxed);
        self.arrange_rows(entries, &pending)
    }

    /// Returns the inputs of a forward that takes the first `count` of the `pending` tokens of each (entry,
    /// count) in `entries`. The rows of a version are consecutive.
    fn arrange_rows(&self, mut entries: Vec<(usize, usize)>, pending: &[&[u32]]) -> ForwardInputs {
        let mut feed = ForwardInputs::default();
        entries.sort_by_key(|&(index, _)| self.batch[index].version().id());
        for &(index, count) in &entries {
            let (work, tokens) = (&self.batch[index], pending[index]);
            if let Work::Prefill(prefill) = work
                && prefill.reading.options.prompt_log_probs.is_some()
                && tokens.len() > 1
            {
                let targets = tokens[1..].iter().take(count).copied().collect();
                feed.scored.push((index, feed.tokens.len() as u32, targets));
            }
            feed.tokens.extend_from_slice(&tokens[..count]);
            if count == tokens.len() {
                feed.complete.push((index, feed.tokens.len() as u32 - 1));
            }
            match feed.versions.last_mut() {
                Some((version, tokens)) if version == work.version() => *tokens += count,
                _ => feed.versions.push((work.version().clone(), count)),
            }
        }
        feed.complete.sort_unstable();
        ForwardInputs { entries, ..feed }
    }

    /// Returns the weights of a forward whose tokens belong to `versions`.
    fn weights(&mut self, versions: &[VersionTokens]) -> Result<Arc<Weights>> {
        if let Some((of, weights)) = &self.mixed
            && of == versions
        {
            return Ok(weights.clone());
        }
        let weights = PolicyVersion::weights_by_tokens(versions)?;
        self.mixed = (versions.len() > 1).then(|| (versions.to_vec(), weights.clone()));
        Ok(weights)
    }

    /// Runs the forward, which appends the tokens of `feed` to the caches. Returns hidden states `[T, H]`.
    /// `version` is one of its versions.
    fn forward(&mut self, version: &PolicyVersion, feed: &mut ForwardInputs) -> Result<Tensor> {
        let weights = self.weights(&feed.versions)?;
        let stack = version.decoder_stack_with(&weights);
        let counts: Vec<usize> = feed.entries.iter().map(|(_, count)| *count).collect();
        let mut batch: Vec<_> = self.batch.iter_mut().map(|work| Some(work.reading_mut())).collect();
        let fed_entries = feed.entries.iter().filter_map(|&(index, _)| batch[index].take());
        let mut fed_entries: Vec<&mut Reading> = fed_entries.collect();
        let keeps_routed_experts = fed_entries.iter().any(|reading| reading.options.keep_routed_experts);
        let mut caches: Vec<_> = fed_entries.iter_mut().map(|reading| &mut reading.cache).collect();
        let tokens = std::mem::take(&mut feed.tokens);
        if let Some(decoder) = &mut self.decoder
            && *version == self.engine.version
            && !keeps_routed_experts
            && counts.iter().all(|&count| count == 1)
        {
            let (hidden, rows) = decoder.decode_step(&stack, &tokens, &mut caches)?;
            feed.move_rows(&rows);
            return Ok(hidden);
        }
        let mut layers: Vec<Vec<u32>> = vec![];
        let hidden = stack.forward_cached(tokens, &mut caches, &counts, &mut |_, _, output| {
            if let (true, Some(layer)) = (keeps_routed_experts, output.routed_experts()) {
                layers.push(layer.flatten_all()?.to_vec1()?);
            }
            Ok(())
        })?;
        if keeps_routed_experts {
            let top_k = version.model().config.num_experts_per_tok;
            let mut token = 0;
            for (reading, count) in fed_entries.into_iter().zip(counts) {
                if reading.options.keep_routed_experts {
                    for t in token..token + count {
                        let experts = layers.iter().flat_map(|layer| &layer[t * top_k..(t + 1) * top_k]);
                        reading.routed_experts.push(experts.map(|&expert| expert as u16).collect());
                    }
                }
                token += count;
            }
        }
        Ok(hidden)
    }

    /// Scores the prompt of entry `index`: `targets[i]` is the token after row `first + i`.
    fn score_prompt(&mut self, hidden: &Tensor, index: usize, first: u32, targets: &[u32]) -> Result<()> {
        let version = self.batch[index].version().clone();
        let rows_max = sampled_rows_max(version.model().config.vocab_size, version.weights().device());
        let Work::Prefill(prefill) = &mut self.batch[index] else { return Ok(()) };
        let stack = version.decoder_stack();
        let top = prefill.reading.options.prompt_log_probs.unwrap_or_default();
        let raw = SamplingParameters::with_temperature(1.0);
        for (chunk, targets) in targets.chunks(rows_max).enumerate() {
            let start = first + (chunk * rows_max) as u32;
            let rows = Arc::new((start..start + targets.len() as u32).collect::<Vec<_>>());
            let normed = stack.final_norm_rows(hidden, &rows)?;
            let logits = stack.weights.logits(&normed, &raw)?;
            let tokens: Vec<(usize, u32)> = targets.iter().copied().enumerate().collect();
            let rows: Vec<(usize, usize)> = (0..targets.len()).map(|row| (row, top)).collect();
            prefill.reading.prompt_scores.extend(scores(&logits, &tokens, &rows)?);
        }
        Ok(())
    }

    /// Draws the next token of each entry in `ready`, from the rows of `normed`. For a prompt it draws the
    /// first token of each sample.
    fn draw(&mut self, normed: &Tensor, sampling: &SamplingParameters, ready: Vec<Work>) -> Result<()> {
        let engine = self.engine;
        let mut versions: Vec<VersionTokens> = vec![];
        for work in &ready {
            match versions.last_mut() {
                Some((version, rows)) if version == work.version() => *rows += 1,
                _ => versions.push((work.version().clone(), 1)),
            }
        }
        // (row, sequence, whether its prompt was just read). The samples of a request share their prompt's
        // row.
        let mut sequences: Vec<(usize, Box<Sequence>, bool)> = vec![];
        for (row, work) in ready.into_iter().enumerate() {
            match work {
                Work::Sequence(sequence) => sequences.push((row, sequence, false)),
                Work::Prefill(prefill) if prefill.reading.options.new_tokens_max == 0 => {
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
        let logits = PolicyVersion::logits(&versions, normed, sampling)?;
        let (drawn, kept) = draw_tokens(&logits, sampling, &mut sequences)?;
        let mut scores =
            self.score_drawn(&versions, normed, logits, sampling, &sequences, &drawn)?.into_iter();
        for (((_, mut sequence, is_new), drawn), kept) in sequences.into_iter().zip(drawn).zip(kept) {
            self.sampled += 1;
            let SampledToken { token: id, log_prob } = drawn;
            let scores = sequence.reading.options.top_log_probs.and_then(|_| scores.next());
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
        versions: &[VersionTokens],
        normed: &Tensor,
        logits: Logits,
        sampling: &SamplingParameters,
        sequences: &[(usize, Box<Sequence>, bool)],
        drawn: &[SampledToken],
    ) -> Result<Vec<TokenScores>> {
        let (mut tokens, mut rows) = (vec![], vec![]);
        for ((row, sequence, _), drawn) in sequences.iter().zip(drawn) {
            if let Some(top) = sequence.reading.options.top_log_probs {
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
        scores(&PolicyVersion::logits(versions, normed, &raw)?, &tokens, &rows)
    }
}

impl Engine<'_> {
    /// Ends a sample and gives its client the result.
    pub(super) fn end(&self, client: &dyn Client, mut sequence: Box<Sequence>, reason: FinishReason) {
        let id = sequence.id;
        if let Some(mut prefixes) = self.prefixes()
            && client.keeps_samples()
            && !sequence.reading.options.keep_sequence
        {
            prefixes.keep_tail(&sequence.reading.keys, &sequence.reading.tokens, &sequence.reading.cache);
        }
        let completion = Completion {
            tokens: std::mem::take(&mut sequence.new_tokens),
            finish_reason: reason,
            policy_version: sequence.reading.version.number(),
            routed_experts: std::mem::take(&mut sequence.reading.routed_experts),
            prompt_scores: std::mem::take(&mut sequence.reading.prompt_scores),
        };
        lock(&self.queue).end(sequence);
        client.finished(id, completion);
    }
}

#[cfg(test)]
mod tests;
