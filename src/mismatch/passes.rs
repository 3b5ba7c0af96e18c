//! Forward passes over given tokens. They return log-probabilities, or the output of each layer.

use crate::actor::micro_batch::MicroBatch;
use crate::model::attention::PackedAttention;
use crate::model::cache::{CacheCapacity, CacheFactory, SequenceCache};
use crate::model::decoder_stack;
use crate::model::forward::Rows;
use crate::model::policy_view::PolicyView;
use crate::ops::log_prob::HeadTargets;
use crate::ops::logits::{SamplingParameters, sampled_rows_max};
use crate::ops::threads::Threads;
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Forward passes over given tokens.
impl PolicyView<'_> {
    /// Returns the head's input after the forward pass over whole sequences, `[R, H]`. The ops are those of
    /// the training forward pass, in the same order. Calls `on_layer` with the output of each layer.
    ///
    /// # Errors
    /// When the batch does not fit the model, or `on_layer` fails.
    pub fn head_input(&self, batch: &MicroBatch, on_layer: decoder_stack::LayerCallback) -> Result<Tensor> {
        let attention = &mut PackedAttention { sequence_rows: batch.sequence_rows.clone() };
        let rotation = self.model.rotation(batch.positions.clone());
        let stack = self.decoder_stack();
        let last = stack.forward(&batch.tokens, &mut Rows { rotation, attention, replay: None }, on_layer)?;
        stack.final_norm_rows(&last, &batch.rows)
    }

    /// Returns the log-probabilities of the batch's targets, `[R]`, computed from the head's input `normed`.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn log_probs(&self, normed: &Tensor, batch: &MicroBatch, temperature: f64) -> Result<Vec<f32>> {
        let MicroBatch { targets, kept_tokens, .. } = batch;
        let targets =
            HeadTargets { tokens: targets, kept: kept_tokens.as_ref(), skips_zero_gradients: false };
        let head = self.weights.head(normed, targets, temperature)?;
        Ok(head.get(0)?.to_vec1()?)
    }

    /// Returns the log-probabilities of all batches' targets, in order. Calls `on_tokens` after each layer
    /// with [`Self::layer_tokens`] of the batch.
    ///
    /// # Errors
    /// When a batch does not fit the model.
    pub fn all_log_probs(
        &self,
        threads: &Threads,
        batches: &[MicroBatch],
        temperature: f64,
        on_tokens: &(dyn Fn(f64) + Sync),
    ) -> Result<Vec<f32>> {
        let one = |batch: &MicroBatch| {
            let share = self.layer_tokens(batch);
            let normed = self.head_input(batch, &mut |_, _, _| {
                on_tokens(share);
                Ok(())
            })?;
            self.log_probs(&normed, batch, temperature)
        };
        let log_probs: Vec<Vec<f32>> =
            threads.run_on_all(|| batches.iter().map(one).collect::<Result<_>>())?;
        Ok(log_probs.concat())
    }

    /// Returns the tokens of the batch divided by the number of layers, for the progress display.
    pub fn layer_tokens(&self, batch: &MicroBatch) -> f64 {
        batch.tokens.len() as f64 / self.model.config.num_hidden_layers.max(1) as f64
    }

    /// Returns the log-probability of every token except the first of each sequence. Each prompt is read in
    /// one forward pass, as in a rollout's prefill.
    ///
    /// # Errors
    /// When a sequence does not fit the model.
    pub fn prefill(&self, sequences: &[&[u32]], temperature: f64) -> Result<Vec<Vec<f32>>> {
        let one = |tokens: &&[u32]| {
            let (inputs, targets) = (tokens.len().saturating_sub(1), tokens.get(1..).unwrap_or(&[]));
            if inputs == 0 {
                return Ok(vec![]);
            }
            let mut cache = self.caches(1, inputs, inputs)?.sequence();
            let input_ids = tokens[..inputs].to_vec();
            let (stack, keep) = (self.decoder_stack(), &mut decoder_stack::keep_nothing);
            let x = stack.forward_cached(input_ids, &mut [&mut cache], &[inputs], keep)?;
            sampler_log_probs(self, &x, targets, temperature)
        };
        sequences.iter().map(one).collect()
    }

    /// Returns the log-probability of every token except the first of each sequence. All sequences are
    /// decoded one token at a time in one batch, and leave the batch when they end. Calls `on_forward` with
    /// the number of tokens of each forward pass.
    ///
    /// # Errors
    /// When a sequence does not fit the model.
    pub fn decode(
        &self,
        sequences: &[&[u32]],
        temperature: f64,
        on_forward: &(dyn Fn(usize) + Sync),
    ) -> Result<Vec<Vec<f32>>> {
        let mut log_probs = vec![vec![]; sequences.len()];
        let longest = sequences.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        let caches = self.caches(sequences.len(), longest, sequences.len())?;
        let mut caches: Vec<SequenceCache> = sequences.iter().map(|_| caches.sequence()).collect();
        for position in 1..longest {
            let has_token = |index: &usize| sequences[*index].len() > position;
            let indices: Vec<usize> = (0..sequences.len()).filter(has_token).collect();
            let tokens = indices.iter().map(|&i| sequences[i][position - 1]).collect();
            let targets: Vec<u32> = indices.iter().map(|&i| sequences[i][position]).collect();
            let all = caches.iter_mut().zip(sequences);
            let mut batch: Vec<&mut SequenceCache> =
                all.filter(|(_, tokens)| tokens.len() > position).map(|(cache, _)| cache).collect();
            let counts = vec![1; indices.len()];
            let (stack, keep) = (self.decoder_stack(), &mut decoder_stack::keep_nothing);
            let x = stack.forward_cached(tokens, &mut batch, &counts, keep)?;
            let step_log_probs = sampler_log_probs(self, &x, &targets, temperature)?;
            on_forward(indices.len());
            indices.iter().zip(step_log_probs).for_each(|(&i, log_prob)| log_probs[i].push(log_prob));
        }
        Ok(log_probs)
    }

    /// Allocates KV caches for `sequences` sequences.
    fn caches(&self, sequences: usize, tokens: usize, fed_tokens_max: usize) -> Result<CacheFactory> {
        let capacity = CacheCapacity { sequences, tokens, fed_tokens_max };
        CacheFactory::new(&self.model.config, self.weights.device(), capacity)
    }
}

/// Returns the log-probabilities of `targets` that the rows of `x [R, H]` predict, computed as the sampler
/// computes them.
fn sampler_log_probs(policy: &PolicyView, x: &Tensor, targets: &[u32], temperature: f64) -> Result<Vec<f32>> {
    let (stack, sampling) = (policy.decoder_stack(), SamplingParameters::with_temperature(temperature));
    let rows_max = sampled_rows_max(policy.model.config.vocab_size, policy.weights.device());
    let mut log_probs = Vec::with_capacity(targets.len());
    for (chunk, targets) in targets.chunks(rows_max).enumerate() {
        let first = (chunk * rows_max) as u32;
        let rows = Arc::new((first..first + targets.len() as u32).collect());
        let logits = policy.weights.logits(&stack.final_norm_rows(x, &rows)?, &sampling)?;
        let pairs: Vec<(usize, u32)> = targets.iter().copied().enumerate().collect();
        log_probs.extend(logits.log_probs(&sampling, &pairs)?);
    }
    Ok(log_probs)
}
