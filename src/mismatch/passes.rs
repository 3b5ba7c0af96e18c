//! Forward passes over given tokens, kept open: log-probabilities, expert choices and hidden states of every layer.

use crate::model::cache::SequenceCache;
use crate::model::forward::{ForwardOptions, Model, PackedAttention, forward_cached};
use crate::model::weights::{Resident, WeightSource};
use crate::ops;
use crate::ops::log_prob::{inverse, row_stats};
use crate::ops::threads::Threads;
use crate::train::batch::MicroBatch;
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Logits kept at a time, in values: 64 MiB.
const LOGITS_MAX: usize = 1 << 24;

/// One way to compute: a model, its weights, and what is changed in the forward.
#[derive(Clone, Copy)]
pub struct Path<'a> {
    pub model: &'a Model,
    pub weights: &'a Resident,
    pub forward: ForwardOptions,
}

/// What a packed forward gives.
pub struct Trace {
    /// After the last norm, of the rows that predict a target, `[R, H]`.
    pub normed: Tensor,
    /// Experts chosen, `[layers]` of `[T][K]`.
    pub routes: Vec<Arc<Vec<u16>>>,
    /// Output of each layer, `[T, H]`.
    pub hidden: Vec<Tensor>,
}

impl Path<'_> {
    /// The forward of whole sequences: the training forward's ops in its order.
    ///
    /// # Errors
    /// When the batch does not fit the model.
    pub fn trace(&self, batch: &MicroBatch) -> Result<Trace> {
        let Path { model, weights, forward } = *self;
        let rotation = model.rotation(batch.positions.clone());
        let mut attend = PackedAttention { cu_seqlens: batch.cu_seqlens.clone() };
        let mut x = ops::embedding(&weights.embedding()?, &batch.tokens)?;
        let (mut routes, mut hidden) = (vec![], vec![]);
        for index in 0..model.config.num_hidden_layers {
            let layer = weights.layer(index)?;
            let output = model.layer(index, &layer, &x, &rotation, &mut attend, forward, None)?;
            x = output.hidden;
            hidden.push(x.clone());
            routes.push(output.routes);
        }
        let rows = ops::embedding::select_rows(&x, &batch.rows)?;
        Ok(Trace { normed: model.final_norm(weights, &rows)?, routes, hidden })
    }

    /// Log-probabilities of the batch's targets from `normed`, `[R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn log_probs(&self, normed: &Tensor, batch: &MicroBatch, temperature: f64) -> Result<Vec<f32>> {
        let head = self.weights.lm_head()?;
        Ok(ops::log_prob_and_entropy(normed, &head, &batch.targets, temperature)?.get(0)?.to_vec1()?)
    }

    /// The forward's log-probabilities of all batches' targets, batch after batch.
    ///
    /// # Errors
    /// When a batch does not fit the model.
    pub fn all_log_probs(
        &self,
        threads: &Threads,
        batches: &[MicroBatch],
        temperature: f64,
    ) -> Result<Vec<f32>> {
        let one = |batch: &MicroBatch| self.log_probs(&self.trace(batch)?.normed, batch, temperature);
        let found: Vec<Vec<f32>> = threads.wide(|| batches.iter().map(one).collect::<Result<_>>())?;
        Ok(found.concat())
    }

    /// Log-probability of every token but the first of each sequence, the prompt in one piece, as a rollout's prefill.
    ///
    /// # Errors
    /// When a sequence does not fit the model.
    pub fn prefill(&self, sequences: &[&[u32]], temperature: f64) -> Result<Vec<Vec<f32>>> {
        let one = |tokens: &&[u32]| {
            let (inputs, targets) = (tokens.len().saturating_sub(1), tokens.get(1..).unwrap_or(&[]));
            if inputs == 0 {
                return Ok(vec![]);
            }
            let mut cache = SequenceCache::new(&self.model.config);
            let fed = tokens[..inputs].to_vec();
            let (x, _) =
                forward_cached(self.model, self.weights, fed, &mut [&mut cache], &[inputs], self.forward)?;
            self.sampler_log_probs(&x, targets, temperature)
        };
        sequences.iter().map(one).collect()
    }

    /// The same, a token at a time, all sequences in one decode batch that they leave as they end.
    ///
    /// # Errors
    /// When a sequence does not fit the model.
    pub fn decode(&self, sequences: &[&[u32]], temperature: f64) -> Result<Vec<Vec<f32>>> {
        let mut caches = vec![SequenceCache::new(&self.model.config); sequences.len()];
        let mut log_probs = vec![vec![]; sequences.len()];
        let longest = sequences.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        for position in 1..longest {
            let alive = |index: &usize| sequences[*index].len() > position;
            let indices: Vec<usize> = (0..sequences.len()).filter(alive).collect();
            let fed = indices.iter().map(|&i| sequences[i][position - 1]).collect();
            let targets: Vec<u32> = indices.iter().map(|&i| sequences[i][position]).collect();
            let mut batch: Vec<&mut SequenceCache> = caches
                .iter_mut()
                .zip(sequences)
                .filter(|(_, tokens)| tokens.len() > position)
                .map(|(cache, _)| cache)
                .collect();
            let counts = vec![1; indices.len()];
            let (x, _) = forward_cached(self.model, self.weights, fed, &mut batch, &counts, self.forward)?;
            let found = self.sampler_log_probs(&x, &targets, temperature)?;
            indices.iter().zip(found).for_each(|(&i, log_prob)| log_probs[i].push(log_prob));
        }
        Ok(log_probs)
    }

    /// Log-probabilities as the sampler takes them, of `targets` after the rows of `x [R, H]`.
    fn sampler_log_probs(&self, x: &Tensor, targets: &[u32], temperature: f64) -> Result<Vec<f32>> {
        let normed = self.model.final_norm(self.weights, x)?;
        let head = self.weights.lm_head()?;
        let vocabulary = head.dim(1)?;
        let rows_max = (LOGITS_MAX / vocabulary).max(1);
        let mut log_probs = Vec::with_capacity(targets.len());
        for (chunk, targets) in targets.chunks(rows_max).enumerate() {
            let mut z = ops::logits(&normed.narrow(0, chunk * rows_max, targets.len())?, &head)?;
            for (row, &target) in z.chunks_exact_mut(vocabulary).zip(targets) {
                let stats = row_stats(row, inverse(temperature));
                log_probs.push(row[target as usize] - stats.log_sum_exp);
            }
        }
        Ok(log_probs)
    }
}
