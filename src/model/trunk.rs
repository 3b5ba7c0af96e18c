//! The one walk through the layers, and what reads its end.
//!
//! Rollout, training, recomputation and every comparison walk here. They differ in how rows find their keys ([`Rows`]), in
//! where weights come from ([`WeightSource`]) and in what they keep of a layer; a pass that keeps nothing holds one layer at
//! a time.

use super::attend::CachedAttention;
use super::cache::SequenceCache;
use super::forward::{ForwardOptions, LayerOutput, Model, Rows};
use super::weights::{Head, WeightSource};
use crate::ops::graph::reshape;
use crate::ops::{self, logits::Logits, logits::Sampling};
use anyhow::{Result, bail};
use candle_core::Tensor;
use std::sync::Arc;

/// A model, its weights, and what is changed in the forward.
#[derive(Clone, Copy)]
pub struct Trunk<'a> {
    pub model: &'a Model,
    pub weights: &'a dyn WeightSource,
    pub forward: ForwardOptions,
}

/// What a walk keeps: called with a layer's index, its input `[T, H]` and what it gave.
pub type Keep<'a> = &'a mut dyn FnMut(usize, &Tensor, &LayerOutput) -> Result<()>;

/// Keeps nothing of a layer.
pub fn nothing(_: usize, _: &Tensor, _: &LayerOutput) -> Result<()> {
    Ok(())
}

impl Trunk<'_> {
    /// Hidden states `[T, H]` after the last layer.
    ///
    /// # Errors
    /// When the rows do not fit the model, and those of `keep`.
    pub fn walk(&self, tokens: &Arc<Vec<u32>>, rows: &mut Rows, keep: Keep) -> Result<Tensor> {
        self.layers(self.embed(tokens)?, rows, keep)
    }

    /// The same of what enters the first layer, `x [T, H]`.
    ///
    /// # Errors
    /// As there.
    pub fn layers(&self, mut x: Tensor, rows: &mut Rows, keep: Keep) -> Result<Tensor> {
        for index in 0..self.model.config.num_hidden_layers {
            let output = self.layer(index, &x, rows)?;
            keep(index, &x, &output)?;
            x = output.hidden;
        }
        Ok(x)
    }

    /// This rank's part of a walk that others make and it has no rows for, where [`WeightSource::walked_by`] several ranks.
    ///
    /// # Errors
    /// When a rank does not come in time.
    pub fn pass_by(&self) -> Result<()> {
        (0..self.model.config.num_hidden_layers)
            .try_for_each(|index| self.model.pass_by(&self.weights.layer(index)?, &self.forward))
    }

    /// What enters the first layer, `[T, H]`.
    ///
    /// # Errors
    /// When a token is not below `V`.
    pub fn embed(&self, tokens: &Arc<Vec<u32>>) -> Result<Tensor> {
        self.weights.embedding()?.rows(tokens)
    }

    /// Layer `index` alone.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn layer(&self, index: usize, x: &Tensor, rows: &mut Rows) -> Result<LayerOutput> {
        self.model.layer(index, &self.weights.layer(index)?, x, rows, &self.forward)
    }

    /// Hidden states `[T, H]` for new tokens of cached sequences: `tokens` holds `counts[i]` ids of `caches[i]`, one after
    /// the other.
    ///
    /// # Errors
    /// When a sequence would outgrow the context, and those of `keep`.
    pub fn feed(
        &self,
        tokens: Vec<u32>,
        caches: &mut [&mut SequenceCache],
        counts: &[usize],
        keep: Keep,
    ) -> Result<Tensor> {
        let mut positions = Vec::with_capacity(tokens.len());
        for (cache, &count) in caches.iter().zip(counts) {
            positions.extend((cache.len()..cache.len() + count).map(|p| p as u32));
        }
        let rotation = self.model.rotation(positions);
        let attend = &mut CachedAttention { caches, counts };
        self.walk(&Arc::new(tokens), &mut Rows { rotation, attend, replay: None }, keep)
    }

    /// Rows `rows` of `hidden [T, H]` after the last norm, `[R, H]`: what the head reads.
    ///
    /// # Errors
    /// When a row does not exist.
    pub fn normed(&self, hidden: &Tensor, rows: &Arc<Vec<u32>>) -> Result<Tensor> {
        self.model.norm(&ops::select_rows(hidden, rows)?, &self.weights.final_norm()?)
    }

    /// What the head gives for `normed [R, H]`: log-probabilities and entropies of `targets` at `temperature`, `[2, R]`;
    /// under a value head values, `[1, R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn head(&self, normed: &Tensor, targets: &Arc<Vec<u32>>, temperature: f64) -> Result<Tensor> {
        Ok(match self.weights.head()? {
            Head::LanguageModel(head) => head.log_prob_and_entropy(normed, targets, temperature)?,
            Head::Value(head) => reshape(&head.apply_f32(normed)?, (1, targets.len()))?,
        })
    }

    /// The logits of `normed [R, H]`, as a sampler reads them.
    ///
    /// # Errors
    /// When the model has no head over a vocabulary.
    pub fn logits(&self, normed: &Tensor, sampling: &Sampling) -> Result<Logits> {
        match self.weights.head()? {
            Head::LanguageModel(head) => head.logits(normed, sampling),
            Head::Value(_) => bail!("a critic has no head over the vocabulary"),
        }
    }
}
