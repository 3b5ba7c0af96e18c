//! The only forward pass through the layers, and the head.
//!
//! Rollout, training, recomputation and all comparisons use this forward pass. They differ in how rows find
//! their keys ([`Rows`]), in the source of the weights ([`Weights`]), and in the activations that they keep.
//! A pass that keeps no activations has those of one layer in memory at a time.

use super::attention::CachedAttention;
use super::cache::SequenceCache;
use super::forward::{ForwardOptions, Model, Rows};
use super::layer::{Experts, LayerOutput, LayerPass};
use super::parallel::expert_exchange::PassRows;
use super::weights::Weights;
use crate::ops;
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

/// A callback that runs after each layer. Its arguments are the index of the layer, the input `[T, H]` and
/// the output.
pub type LayerCallback<'a> = &'a mut dyn FnMut(usize, &Tensor, &LayerOutput) -> Result<()>;

/// Keeps nothing. This is the [`LayerCallback`] of passes that need no activations.
pub fn keep_nothing(_: usize, _: &Tensor, _: &LayerOutput) -> Result<()> {
    Ok(())
}

impl DecoderStack<'_> {
    /// Returns hidden states `[T, H]` after the last layer.
    ///
    /// # Errors
    /// When the rows do not fit the model, or `keep` fails.
    pub fn forward(&self, tokens: &Arc<Vec<u32>>, rows: &mut Rows, keep: LayerCallback) -> Result<Tensor> {
        self.run_layers(self.weights.embed(tokens)?, rows, keep)
    }

    /// Runs all layers on the input `x [T, H]` of the first layer. Returns hidden states `[T, H]`.
    ///
    /// # Errors
    /// Errors of [`Self::forward`].
    pub fn run_layers(&self, mut x: Tensor, rows: &mut Rows, keep: LayerCallback) -> Result<Tensor> {
        let layers = self.model.config.num_hidden_layers;
        let pass = self.weights.start_pass(x.dim(0)?, self.model.config.num_experts_per_tok)?;
        for index in 0..layers {
            let next = Some(index + 1).filter(|&next| next < layers);
            let output = self.run_layer(index, next, &x, rows, pass.as_ref())?;
            keep(index, &x, &output)?;
            x = output.hidden;
        }
        Ok(x)
    }

    /// Runs this rank's part of a pass in which this rank has no rows. Needed when all ranks run each pass
    /// together ([`Weights::mesh`]).
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn forward_without_rows(&self) -> Result<()> {
        let layers = self.model.config.num_hidden_layers;
        let pass = self.weights.start_pass(0, self.model.config.num_experts_per_tok)?;
        (0..layers).try_for_each(|index| {
            let next = Some(index + 1).filter(|&next| next < layers);
            let layer = self.weights.layer(index, next)?;
            let serve = |experts: &Experts| experts.serve(self.model, &self.forward, pass.as_ref());
            layer.experts().map_or(Ok(()), serve)
        })
    }

    /// Runs layer `index` on `x [T, H]`. `next` is the layer that the pass needs afterwards.
    /// `expert_rows` has the rows of all ranks, if GPUs exchange them.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn run_layer(
        &self,
        index: usize,
        next: Option<usize>,
        x: &Tensor,
        rows: &mut Rows,
        expert_rows: Option<&PassRows>,
    ) -> Result<LayerOutput> {
        let layer = self.weights.layer(index, next)?;
        let options = &self.forward;
        layer.forward(x, &mut LayerPass { model: self.model, index, options, rows, expert_rows })
    }

    /// Returns hidden states `[T, H]` of new tokens of cached sequences. `tokens` is the concatenation of the
    /// new ids of all sequences: `counts[i]` ids for `caches[i]`.
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
        let attention = &mut CachedAttention::new(caches, counts);
        self.forward(&Arc::new(tokens), &mut Rows { rotation, attention, replay: None }, keep)
    }

    /// Returns the input of the head, `[R, H]`: rows `rows` of `hidden [T, H]` after the final norm.
    ///
    /// # Errors
    /// When a row does not exist.
    pub fn final_norm_rows(&self, hidden: &Tensor, rows: &Arc<Vec<u32>>) -> Result<Tensor> {
        self.model.norm(&ops::select_rows(hidden, rows)?, &self.weights.final_norm)
    }
}
