//! The one forward pass through the layers, and the head.
//!
//! Rollout, training, recomputation and every comparison use it. They differ in how rows find their keys
//! ([`Rows`]), in where weights come from ([`Weights`]) and in what they keep of a layer. A pass that keeps
//! nothing holds one layer in memory at a time.

use super::attention::CachedAttention;
use super::cache::SequenceCache;
use super::forward::{ForwardOptions, Model, Rows};
use super::layer::{LayerOutput, LayerPass};
use super::weights::Weights;
use crate::ops::{self, logits::Logits, logits::SamplingParameters};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// A model with its weights and its forward options.
#[derive(Clone, Copy)]
pub struct DecoderStack<'a> {
    pub model: &'a Model,
    pub weights: &'a Weights,
    pub forward: ForwardOptions,
}

/// A callback for each layer: it gets the layer's index, its input `[T, H]` and its output.
pub type LayerCallback<'a> = &'a mut dyn FnMut(usize, &Tensor, &LayerOutput) -> Result<()>;

/// Keeps nothing of a layer: the callback of passes that need no activations.
pub fn keep_nothing(_: usize, _: &Tensor, _: &LayerOutput) -> Result<()> {
    Ok(())
}

impl DecoderStack<'_> {
    /// Returns hidden states `[T, H]` after the last layer.
    ///
    /// # Errors
    /// When the rows do not fit the model, or `keep` fails.
    pub fn forward(&self, tokens: &Arc<Vec<u32>>, rows: &mut Rows, keep: LayerCallback) -> Result<Tensor> {
        self.run_layers(self.embed(tokens)?, rows, keep)
    }

    /// Does [`Self::forward`] from the first layer's input `x [T, H]` on.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn run_layers(&self, mut x: Tensor, rows: &mut Rows, keep: LayerCallback) -> Result<Tensor> {
        let layers = self.model.config.num_hidden_layers;
        for index in 0..layers {
            let next = Some(index + 1).filter(|&next| next < layers);
            let output = self.run_layer(index, next, &x, rows)?;
            keep(index, &x, &output)?;
            x = output.hidden;
        }
        Ok(x)
    }

    /// Takes this rank through a pass in which it has no rows, where ranks make passes together
    /// ([`Weights::mesh`]).
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn forward_without_rows(&self) -> Result<()> {
        let layers = self.model.config.num_hidden_layers;
        (0..layers).try_for_each(|index| {
            let next = Some(index + 1).filter(|&next| next < layers);
            let layer = self.weights.layer(index, next)?;
            layer.experts().map_or(Ok(()), |experts| experts.serve(self.model, &self.forward))
        })
    }

    /// Returns the first layer's input, `[T, H]`.
    ///
    /// # Errors
    /// When a token is not below `V`.
    pub fn embed(&self, tokens: &Arc<Vec<u32>>) -> Result<Tensor> {
        self.weights.embed(tokens)
    }

    /// Runs layer `index`; `next` is the layer that the pass needs afterwards.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn run_layer(
        &self,
        index: usize,
        next: Option<usize>,
        x: &Tensor,
        rows: &mut Rows,
    ) -> Result<LayerOutput> {
        let layer = self.weights.layer(index, next)?;
        layer.forward(x, &mut LayerPass { model: self.model, index, options: &self.forward, rows })
    }

    /// Returns hidden states `[T, H]` of new tokens of cached sequences. `tokens` holds `counts[i]` ids for
    /// each `caches[i]`, concatenated.
    ///
    /// # Errors
    /// When a sequence would exceed the context, or `keep` fails.
    pub fn forward_cached(
        &self,
        tokens: Vec<u32>,
        caches: &mut [&mut SequenceCache],
        counts: &[usize],
        keep: LayerCallback,
    ) -> Result<Tensor> {
        let mut positions = Vec::with_capacity(tokens.len());
        for (cache, &count) in caches.iter().zip(counts) {
            positions.extend((cache.len()..cache.len() + count).map(|p| p as u32));
        }
        let rotation = self.model.rotation(positions);
        let attend = &mut CachedAttention { caches, counts };
        self.forward(&Arc::new(tokens), &mut Rows { rotation, attend, replay: None }, keep)
    }

    /// Returns rows `rows` of `hidden [T, H]` after the final norm, `[R, H]`: the head's input.
    ///
    /// # Errors
    /// When a row does not exist.
    pub fn final_norm_rows(&self, hidden: &Tensor, rows: &Arc<Vec<u32>>) -> Result<Tensor> {
        self.model.norm(&ops::select_rows(hidden, rows)?, self.weights.final_norm())
    }

    /// Returns the head's output for `normed [R, H]`: log-probabilities and entropies of `targets` at
    /// `temperature`, `[2, R]`. A critic returns values, `[1, R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn head(&self, normed: &Tensor, targets: &Arc<Vec<u32>>, temperature: f64) -> Result<Tensor> {
        self.weights.head(normed, targets, temperature)
    }

    /// Returns the logits of `normed [R, H]`, for a sampler.
    ///
    /// # Errors
    /// When the model is a critic, which has no LM head.
    pub fn logits(&self, normed: &Tensor, sampling: &SamplingParameters) -> Result<Logits> {
        self.weights.logits(normed, sampling)
    }
}
