//! Continuous batching: each forward pass takes all tokens that are ready, of prompts and conversations
//! together.
//!
//! A conversation that has ended or waits for its tool leaves the batch before the next forward, and
//! another enters. The samples of a group share one prefill. Their caches are clones of the prompt's, and
//! their first tokens are drawn from one row of logits.

use super::Rollout;
use super::conversation::{Conversation, NextAction};
use super::queue::{Queue, RefillResult};
use super::sampler::TokenSource;
use crate::dist::Mesh;
use crate::interpreter::SessionId;
use crate::model::cache::SequenceCache;
use crate::model::decode::Decoder;
use crate::ops::logits::{Logits, SampledToken, SamplingParameters, logits_rows_max};
use crate::ops::threads::with_spinning_threads;
use anyhow::{Result, anyhow};
use candle_core::Tensor;
use std::sync::Arc;
use std::thread::Scope;

/// Tokens per forward. Decode has priority; long prompts take the rest, so they are fed in chunks.
pub const FORWARD_TOKENS_MAX: usize = 1024;

/// A prompt whose prefill is in progress, for its whole group.
pub(super) struct PromptWork {
    index: usize,
    cache: SequenceCache,
    routes: Vec<Vec<u16>>,
}

impl PromptWork {
    pub(super) fn new(index: usize, cache: SequenceCache) -> Self {
        Self { index, cache, routes: Vec::new() }
    }
}

/// A conversation and its cache. Tokens beyond the cache's length are not fed yet.
pub(super) struct SampleWork<'a> {
    pub(super) conversation: Conversation<'a>,
    cache: SequenceCache,
    /// Index among all trajectories of the rollout.
    pub(super) trajectory_index: usize,
    /// Whether it has its own KV-cache slot. Until it decodes it uses its prompt's slot.
    pub(super) has_slot: bool,
    samples: usize,
}

impl SampleWork<'_> {
    /// Returns the index of its group.
    pub(super) fn group(&self) -> usize {
        self.trajectory_index / self.samples
    }
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

    fn record_experts(&mut self, routes: Vec<u16>) {
        match self {
            Work::Prompt(prompt) => prompt.routes.push(routes),
            Work::Sample(sample) => sample.conversation.record_experts(routes),
        }
    }
}

/// The part of a batch that one forward pass takes: `counts[i]` tokens of entry `i`; 0 if the entry must
/// wait.
struct ForwardInputs {
    tokens: Vec<u32>,
    counts: Vec<usize>,
    /// Entries whose tokens are all fed by this forward, and the row of each one's last token.
    complete: Vec<usize>,
    rows: Vec<u32>,
}

/// One decoding loop with its own batch.
pub(super) struct Engine<'e, 'a> {
    rollout: &'e Rollout<'e>,
    source: &'e dyn TokenSource,
    queue: &'e Queue<'a>,
    batch: Vec<Work<'a>>,
    /// Feeds a batch when every entry has a single token and no layer state is kept.
    decoder: Option<Decoder>,
    sampled: u64,
}

impl<'e, 'a> Engine<'e, 'a> {
    pub(super) fn new(rollout: &'e Rollout<'e>, source: &'e dyn TokenSource, queue: &'e Queue<'a>) -> Self {
        let settings = &rollout.plan.settings;
        let records = settings.cuda_graphs && !settings.keep_routes;
        let decoder = if records { Decoder::new(&rollout.policy.decoder_stack()) } else { None };
        Self { rollout, source, queue, batch: Vec::new(), decoder, sampled: 0 }
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

    /// Works like [`Self::run`] if the ranks of `mesh` run every forward pass together. A rank without work
    /// takes part with no tokens. Ends once no rank has work.
    pub(super) fn run_on_mesh(mut self, mesh: &Mesh, scope: &'e Scope<'e, '_>) {
        let _guard = PanicGuard(self.queue);
        loop {
            match self.step_on_mesh(mesh, scope) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.queue.fail(error);
                    break;
                }
            }
        }
    }

    /// Runs one forward pass on all ranks, if any rank has work. Returns whether to continue.
    fn step_on_mesh(&mut self, mesh: &Mesh, scope: &'e Scope<'e, '_>) -> Result<bool> {
        let result = self.queue.try_refill(&mut self.batch, std::mem::take(&mut self.sampled));
        if result == RefillResult::Failure {
            return Ok(false);
        }
        let results = mesh.all_gather_byte("who samples", result as u8)?;
        let any = |kind: RefillResult| results.contains(&(kind as u8));
        match (any(RefillResult::Work), result) {
            (true, RefillResult::Work) => self.step(scope)?,
            (true, _) => self.rollout.policy.decoder_stack().forward_without_rows()?,
            (false, RefillResult::Nothing) => self.queue.wait_for_work(),
            (false, _) => {}
        }
        Ok(any(RefillResult::Work) || any(RefillResult::Nothing))
    }

    /// Runs one forward pass, and draws a token for every entry whose tokens are all fed.
    fn step(&mut self, scope: &'e Scope<'e, '_>) -> Result<()> {
        let device = self.rollout.policy.weights.device();
        with_spinning_threads(device, || self.forward_and_draw(scope))
    }

    fn forward_and_draw(&mut self, scope: &'e Scope<'e, '_>) -> Result<()> {
        let mut feed = self.select_tokens();
        let hidden = self.forward(&mut feed)?;
        if feed.complete.is_empty() {
            return Ok(());
        }
        let policy = self.rollout.policy;
        let normed = policy.decoder_stack().final_norm_rows(&hidden, &Arc::new(feed.rows))?;
        let rows_max = logits_rows_max(policy.model.config.vocab_size);

        let mut complete = feed.complete.into_iter().peekable();
        let (done, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.batch)
            .into_iter()
            .enumerate()
            .partition(|(index, _)| complete.next_if_eq(index).is_some());
        self.batch = waiting.into_iter().map(|(_, work)| work).collect();

        let mut done = done.into_iter().map(|(_, work)| work);
        let mut start = 0;
        while done.len() > 0 {
            let count = done.len().min(rows_max);
            let ready: Vec<Work> = done.by_ref().take(count).collect();
            self.draw(scope, &normed.narrow(0, start, count)?, ready)?;
            start += count;
        }
        Ok(())
    }

    /// Selects the tokens of the next forward: first the single tokens of decode, then chunks of longer
    /// inputs.
    fn select_tokens(&self) -> ForwardInputs {
        let pending: Vec<&[u32]> = self.batch.iter().map(|work| self.pending(work)).collect();
        let decode = pending.iter().filter(|tokens| tokens.len() == 1).count();
        let mut token_budget = FORWARD_TOKENS_MAX.saturating_sub(decode).max(1);
        let mut feed = ForwardInputs { tokens: vec![], counts: vec![], complete: vec![], rows: vec![] };
        for (index, tokens) in pending.into_iter().enumerate() {
            let count = if tokens.len() == 1 { 1 } else { tokens.len().min(token_budget) };
            if tokens.len() > 1 {
                token_budget -= count;
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

    /// Returns the tokens of an entry that are not in its cache.
    fn pending<'w>(&'w self, work: &'w Work) -> &'w [u32] {
        let (tokens, fed) = match work {
            Work::Prompt(prompt) => (&self.queue.prompts[prompt.index].tokens, prompt.cache.len()),
            Work::Sample(sample) => (&sample.conversation.tokens, sample.cache.len()),
        };
        &tokens[fed..]
    }

    /// Runs the forward and returns hidden states `[T, H]` of the feed's tokens, which are then in their
    /// caches.
    fn forward(&mut self, feed: &mut ForwardInputs) -> Result<Tensor> {
        let Rollout { policy, plan, .. } = *self.rollout;
        let fed = || feed.counts.iter().copied().filter(|&count| count > 0);
        let counts: Vec<usize> = fed().collect();
        let fed_entries = self.batch.iter_mut().zip(&feed.counts).filter(|(_, count)| **count > 0);
        let mut fed_entries: Vec<&mut Work> = fed_entries.map(|(work, _)| work).collect();
        let mut caches: Vec<_> = fed_entries.iter_mut().map(|work| work.cache()).collect();
        let tokens = std::mem::take(&mut feed.tokens);
        if let Some(decoder) = &mut self.decoder
            && counts.iter().all(|&count| count == 1)
        {
            return decoder.decode_step(&policy.decoder_stack(), tokens, &mut caches);
        }
        let mut routes: Vec<Vec<u32>> = vec![];
        let hidden =
            policy.decoder_stack().forward_cached(tokens, &mut caches, &counts, &mut |_, _, output| {
                if let (true, Some(layer)) = (plan.settings.keep_routes, output.routed_experts()) {
                    routes.push(layer.flatten_all()?.to_vec1()?);
                }
                Ok(())
            })?;
        if plan.settings.keep_routes {
            let top_k = policy.model.config.num_experts_per_tok;
            let mut token = 0;
            for (work, count) in fed_entries.into_iter().zip(counts) {
                for t in token..token + count {
                    let experts = routes.iter().flat_map(|layer| &layer[t * top_k..(t + 1) * top_k]);
                    work.record_experts(experts.map(|&expert| expert as u16).collect());
                }
                token += count;
            }
        }
        Ok(hidden)
    }

    /// Draws the next token of each sample in `ready`, from the rows of `normed`. For a prompt it draws
    /// the first token of each sample of its group.
    fn draw(&mut self, scope: &'e Scope<'e, '_>, normed: &Tensor, ready: Vec<Work<'a>>) -> Result<()> {
        // The row of each sample; the samples of a group share their prompt's.
        let mut samples: Vec<(usize, Box<SampleWork<'a>>, bool)> = vec![];
        for (row, work) in ready.into_iter().enumerate() {
            match work {
                Work::Sample(sample) => samples.push((row, sample, false)),
                Work::Prompt(prompt) => {
                    samples.extend(self.start_samples(&prompt).map(|sample| (row, sample, true)))
                }
            }
        }
        let sampling = self.source.sampling();
        let logits = self.rollout.policy.decoder_stack().logits(normed, &sampling)?;
        let draws: Vec<(usize, f64)> =
            samples.iter_mut().map(|(row, sample, _)| (*row, sample.conversation.draw_uniform())).collect();
        let mut drawn = logits.draw(&sampling, &draws)?;
        self.apply_token_source(&sampling, &logits, &samples, &mut drawn)?;
        for ((_, mut sample, is_new), drawn) in samples.into_iter().zip(drawn) {
            self.sampled += 1;
            match sample.conversation.push_token(drawn) {
                NextAction::Sample if !is_new => self.batch.push(Work::Sample(sample)),
                next => self.queue.dispatch(scope, sample, next),
            }
        }
        Ok(())
    }

    /// Replaces drawn tokens by the source's own, where it has some.
    fn apply_token_source(
        &self,
        sampling: &SamplingParameters,
        logits: &Logits,
        samples: &[(usize, Box<SampleWork<'a>>, bool)],
        drawn: &mut [SampledToken],
    ) -> Result<()> {
        let (mut indices, mut tokens) = (vec![], vec![]);
        for (index, ((row, sample, _), drawn)) in samples.iter().zip(&*drawn).enumerate() {
            let token = self.source.choose(sample.conversation.position(), drawn.token)?;
            if token != drawn.token {
                indices.push(index);
                tokens.push((*row, token));
            }
        }
        let log_probs = logits.log_probs(sampling, &tokens)?;
        for ((index, (_, token)), log_prob) in indices.into_iter().zip(tokens).zip(log_probs) {
            drawn[index] = SampledToken { token, log_prob };
        }
        Ok(())
    }

    /// Returns the conversations of a prompt that is fed.
    fn start_samples(&self, prompt: &PromptWork) -> impl Iterator<Item = Box<SampleWork<'a>>> {
        let samples = self.queue.samples;
        let sample = |sample: usize| {
            let trajectory_index = prompt.index * samples + sample;
            Box::new(SampleWork {
                conversation: Conversation::new(
                    self.queue.rollout,
                    &self.queue.prompts[prompt.index],
                    sample as u64,
                    SessionId(trajectory_index as u64),
                    prompt.routes.clone(),
                ),
                cache: prompt.cache.clone(),
                trajectory_index,
                has_slot: false,
                samples,
            })
        };
        (0..samples).map(sample).collect::<Vec<_>>().into_iter()
    }
}

/// Ends the rollout when its engine's thread panics; otherwise the other engines would wait for its
/// conversations.
struct PanicGuard<'e, 'a>(&'e Queue<'a>);

impl Drop for PanicGuard<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(anyhow!("a rollout thread panicked; this is a bug"));
        }
    }
}
