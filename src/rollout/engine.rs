//! Continuous batching: one forward after the other over whatever is ready, prompts and conversations mixed.
//!
//! A conversation that ended or waits for its tool leaves the batch before the next forward, and another enters. The
//! samples of a group share one prefill: their caches are clones of the prompt's, their first tokens are drawn from the
//! same row of logits.

use super::Rollout;
use super::conversation::{Conversation, Next};
use super::queue::Queue;
use super::sampler::{Row, TokenSource};
use crate::interpreter::SessionId;
use crate::model::cache::SequenceCache;
use crate::model::config::Config;
use crate::model::forward::forward_cached;
use crate::model::weights::WeightSource;
use crate::ops;
use crate::ops::cpu::{buffer, for_each_row_pair};
use crate::ops::log_prob::row_stats;
use anyhow::{Result, anyhow};
use candle_core::Tensor;
use std::sync::Arc;
use std::thread::Scope;

/// Tokens of a forward. Decode goes first; long prompts take what is left, so they arrive in pieces.
const FORWARD_TOKENS_MAX: usize = 1024;
/// Logits kept at a time, in values: 64 MiB.
const LOGITS_MAX: usize = 1 << 24;

/// A prompt on its way into the cache, for its whole group.
pub(super) struct PromptWork {
    index: usize,
    cache: SequenceCache,
    routes: Vec<Vec<u16>>,
}

impl PromptWork {
    pub(super) fn new(index: usize, config: &Config) -> Self {
        Self { index, cache: SequenceCache::new(config), routes: Vec::new() }
    }
}

/// A conversation and its cache. Tokens past the cache's length are yet to be fed.
pub(super) struct SampleWork<'a> {
    pub(super) conversation: Conversation<'a>,
    cache: SequenceCache,
    /// Index among all trajectories of the rollout.
    pub(super) place: usize,
}

/// An entry of an engine's batch.
pub(super) enum Work<'a> {
    Prompt(Box<PromptWork>),
    Sample(Box<SampleWork<'a>>),
}

impl Work<'_> {
    fn cache(&mut self) -> &mut SequenceCache {
        match self {
            Work::Prompt(prompt) => &mut prompt.cache,
            Work::Sample(sample) => &mut sample.cache,
        }
    }

    fn fed(&mut self, routes: Vec<u16>) {
        match self {
            Work::Prompt(prompt) => prompt.routes.push(routes),
            Work::Sample(sample) => sample.conversation.fed(routes),
        }
    }
}

/// The part of a batch that a forward takes: `counts[i]` tokens of entry `i`, 0 where it has to wait.
struct Feed {
    tokens: Vec<u32>,
    counts: Vec<usize>,
    /// Entries whose tokens are all fed then, and the row of each one's last token.
    complete: Vec<usize>,
    rows: Vec<u32>,
}

/// One decoding loop over a batch of its own.
pub(super) struct Engine<'e, 'a> {
    rollout: &'e Rollout<'e>,
    source: &'e dyn TokenSource,
    queue: &'e Queue<'a>,
    batch: Vec<Work<'a>>,
    sampled: u64,
}

impl<'e, 'a> Engine<'e, 'a> {
    pub(super) fn new(rollout: &'e Rollout<'e>, source: &'e dyn TokenSource, queue: &'e Queue<'a>) -> Self {
        Self { rollout, source, queue, batch: Vec::new(), sampled: 0 }
    }

    /// Works until the rollout is over. A failure, a panic included, ends it for all engines.
    pub(super) fn run(mut self, scope: &'e Scope<'e, '_>) {
        let _guard = PanicGuard(self.queue);
        while self.queue.refill(&mut self.batch, std::mem::take(&mut self.sampled)) {
            if let Err(error) = self.step(scope) {
                self.queue.fail(error);
                break;
            }
        }
    }

    /// One forward, and a token for every entry that is fed up to its end.
    fn step(&mut self, scope: &'e Scope<'e, '_>) -> Result<()> {
        let mut feed = self.feed();
        let hidden = self.forward(&mut feed)?;
        if feed.complete.is_empty() {
            return Ok(());
        }
        let rows = ops::embedding::select_rows(&hidden, &Arc::new(feed.rows))?;
        let weights = self.rollout.weights;
        let normed = self.rollout.model.final_norm(weights, &rows)?;
        let head = weights.lm_head()?;
        let vocabulary = head.dim(1)?;

        let mut complete = feed.complete.into_iter().peekable();
        let (done, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.batch)
            .into_iter()
            .enumerate()
            .partition(|(index, _)| complete.next_if_eq(index).is_some());
        self.batch = waiting.into_iter().map(|(_, work)| work).collect();

        let mut done = done.into_iter().map(|(_, work)| work);
        let mut start = 0;
        while done.len() > 0 {
            let count = done.len().min((LOGITS_MAX / vocabulary).max(8));
            let (z, stats) = self.logits(&normed.narrow(0, start, count)?, &head)?;
            let log_sums = stats.chunks_exact(2).map(|pair| pair[0]);
            for (work, (z, log_sum_exp)) in
                done.by_ref().take(count).zip(z.chunks_exact(vocabulary).zip(log_sums))
            {
                self.draw(scope, work, Row { z, log_sum_exp })?;
            }
            start += count;
        }
        Ok(())
    }

    /// What the next forward takes: the single tokens of decode, then pieces of what is longer.
    fn feed(&self) -> Feed {
        let pending: Vec<&[u32]> = self.batch.iter().map(|work| self.pending(work)).collect();
        let decode = pending.iter().filter(|tokens| tokens.len() == 1).count();
        let mut room = FORWARD_TOKENS_MAX.saturating_sub(decode).max(1);
        let mut feed = Feed { tokens: vec![], counts: vec![], complete: vec![], rows: vec![] };
        for (index, tokens) in pending.into_iter().enumerate() {
            let count = if tokens.len() == 1 { 1 } else { tokens.len().min(room) };
            if tokens.len() > 1 {
                room -= count;
            }
            feed.tokens.extend_from_slice(&tokens[..count]);
            feed.counts.push(count);
            if count == tokens.len() {
                feed.complete.push(index);
                feed.rows.push(feed.tokens.len() as u32 - 1);
            }
        }
        feed
    }

    /// The tokens of an entry that are not in its cache.
    fn pending<'w>(&'w self, work: &'w Work) -> &'w [u32] {
        let (tokens, fed) = match work {
            Work::Prompt(prompt) => (&self.queue.prompts[prompt.index].tokens, prompt.cache.len()),
            Work::Sample(sample) => (&sample.conversation.tokens, sample.cache.len()),
        };
        &tokens[fed..]
    }

    /// Hidden states `[T, H]` of the feed's tokens, which are in their caches then.
    fn forward(&mut self, feed: &mut Feed) -> Result<Tensor> {
        let Rollout { model, weights, settings, .. } = *self.rollout;
        let fed = || feed.counts.iter().copied().filter(|&count| count > 0);
        let counts: Vec<usize> = fed().collect();
        let taking = self.batch.iter_mut().zip(&feed.counts).filter(|(_, count)| **count > 0);
        let mut taking: Vec<&mut Work> = taking.map(|(work, _)| work).collect();
        let mut caches: Vec<_> = taking.iter_mut().map(|work| work.cache()).collect();
        let tokens = std::mem::take(&mut feed.tokens);
        let (hidden, routes) =
            forward_cached(model, weights, tokens, &mut caches, &counts, settings.forward)?;
        if settings.keep_routes {
            let top_k = model.config.num_experts_per_tok;
            let mut token = 0;
            for (work, count) in taking.into_iter().zip(counts) {
                for t in token..token + count {
                    let of_layer = |layer: &Arc<Vec<u16>>| layer[t * top_k..(t + 1) * top_k].to_vec();
                    work.fed(routes.iter().flat_map(of_layer).collect());
                }
                token += count;
            }
        }
        Ok(hidden)
    }

    /// Logits over the temperature, `[R][V]`, and `(log Σ e^z, entropy)` of each row.
    fn logits(&self, normed: &Tensor, head: &Tensor) -> Result<(Vec<f32>, Vec<f32>)> {
        let mut z = ops::logits(normed, head)?;
        let vocabulary = head.dim(1)?;
        let mut stats = buffer(2 * normed.dim(0)?);
        let inverse_temperature = self.source.inverse_temperature();
        for_each_row_pair((&mut z, vocabulary), (&mut stats, 2), 4 * vocabulary, |_, z, pair| {
            let row = row_stats(z, inverse_temperature);
            (pair[0], pair[1]) = (row.log_sum_exp, row.entropy);
        });
        Ok((z, stats))
    }

    /// Draws the next token of a conversation, or the first tokens of a group, from `row`.
    fn draw(&mut self, scope: &'e Scope<'e, '_>, work: Work<'a>, row: Row) -> Result<()> {
        match work {
            Work::Sample(mut sample) => {
                self.sampled += 1;
                match sample.conversation.draw(self.source, row)? {
                    Next::Sample => self.batch.push(Work::Sample(sample)),
                    next => self.queue.hand_on(scope, sample, next),
                }
            }
            Work::Prompt(prompt) => {
                let samples = self.queue.samples;
                for sample in 0..samples {
                    let place = prompt.index * samples + sample;
                    let mut sample = Box::new(SampleWork {
                        conversation: Conversation::new(
                            self.queue.rules,
                            &self.queue.prompts[prompt.index],
                            sample as u64,
                            SessionId(place as u64),
                            prompt.routes.clone(),
                        ),
                        cache: prompt.cache.clone(),
                        place,
                    });
                    self.sampled += 1;
                    let next = sample.conversation.draw(self.source, row)?;
                    self.queue.hand_on(scope, sample, next);
                }
            }
        }
        Ok(())
    }
}

/// Ends the rollout when its engine's thread unwinds: the other engines would wait for its conversations.
struct PanicGuard<'e, 'a>(&'e Queue<'a>);

impl Drop for PanicGuard<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(anyhow!("a rollout thread panicked; this is a bug"));
        }
    }
}
