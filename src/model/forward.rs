//! The forward pass: the same code for rollout and training, whatever is in the batch.
//!
//! `x += attention(norm(x)); x += experts(norm(x))` a layer, then a norm and the head. How keys are found is
//! an [`Attend`]: packed sequences in training, a KV cache in rollout. Everything else does not know which it is.

use super::cache::SequenceCache;
use super::config::{Config, LayerType};
use super::perturb::{RouterNoise, round_mantissa};
use super::weights::{LayerWeights, WeightSource};
use crate::ops::{self, experts::Dispatch, rope::Rotation, sink_attention::Attention};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// What an arm changes in a forward. The default changes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardOptions {
    /// False leaves the sinks out of the softmax.
    pub sinks: bool,
    /// False gives the sinks no gradient.
    pub sink_gradient: bool,
    /// Noise on the router logits, before experts are chosen and weighed.
    pub router_noise: Option<RouterNoise>,
    /// Mantissa bits kept of the residual stream and of what the norms give; without gradient. `None`: all.
    pub mantissa_bits: Option<u32>,
}

impl Default for ForwardOptions {
    fn default() -> Self {
        Self { sinks: true, sink_gradient: true, router_noise: None, mantissa_bits: None }
    }
}

impl ForwardOptions {
    fn round(&self, x: Tensor) -> Result<Tensor> {
        self.mantissa_bits.map_or(Ok(x.clone()), |bits| round_mantissa(&x, bits))
    }
}

/// The maths of one architecture; it holds no weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub config: Config,
    table: Arc<ops::rope::RopeTable>,
}

/// What a layer hands on.
pub struct LayerOutput {
    /// `[T, H]`.
    pub hidden: Tensor,
    /// The chosen experts, `[T][K]`.
    pub routes: Arc<Vec<u16>>,
    /// `[T, E]`.
    pub router_logits: Tensor,
}

impl Model {
    /// The model for sequences of up to `context_tokens_max` positions.
    pub fn new(config: Config, context_tokens_max: usize) -> Self {
        let table = Arc::new(super::rope::table(&config.rope, config.head_dim, context_tokens_max));
        Self { config, table }
    }

    /// The same with YaRN's frequencies but without its factor on cosine and sine: a mistake to recognise others by.
    pub fn without_attention_factor(config: Config, context_tokens_max: usize) -> Self {
        let frequencies = super::rope::frequencies(&config.rope, config.head_dim);
        let table = Arc::new(ops::rope::RopeTable::new(&frequencies, context_tokens_max, 1.0));
        Self { config, table }
    }

    /// Positions a sequence may have.
    pub fn context_tokens_max(&self) -> usize {
        self.table.positions()
    }

    /// The rotation of rows at `positions`.
    pub fn rotation(&self, positions: Vec<u32>) -> Rotation {
        Rotation { table: self.table.clone(), positions: Arc::new(positions) }
    }

    fn attention(&self, layer: usize, options: ForwardOptions) -> Attention {
        let c = &self.config;
        Attention {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            window: (c.layer_types[layer] == LayerType::Sliding).then_some(c.sliding_window),
            sinks: options.sinks,
            sink_gradient: options.sink_gradient,
        }
    }

    /// Layer `index` on `x [T, H]`. `replay` gives the experts instead of the router's own choice, `[T][K]`.
    ///
    /// # Errors
    /// When shapes disagree.
    #[allow(clippy::too_many_arguments)]
    pub fn layer(
        &self,
        index: usize,
        weights: &LayerWeights,
        x: &Tensor,
        rotation: &Rotation,
        attend: &mut dyn Attend,
        options: ForwardOptions,
        replay: Option<&Arc<Vec<u16>>>,
    ) -> Result<LayerOutput> {
        let x = options.round((x + self.attention_block(index, weights, x, rotation, attend, options)?)?)?;
        let h = options.round(ops::rms_norm(&x, &weights.post_attention_norm, self.config.rms_norm_eps)?)?;
        let top_k = self.config.num_experts_per_tok;
        let mut router_logits = ops::linear(&h, &weights.router.weight, &weights.router.bias)?;
        if let Some(noise) = &options.router_noise {
            router_logits = noise.add(&router_logits, index, &rotation.positions)?;
        }
        let routes = match replay {
            Some(routes) => routes.clone(),
            None => Arc::new(ops::route(&router_logits, top_k)?),
        };
        let mixed = self.experts_block(weights, &h, &router_logits, &routes)?;
        Ok(LayerOutput { hidden: options.round((x + mixed)?)?, routes, router_logits })
    }

    fn attention_block(
        &self,
        index: usize,
        w: &LayerWeights,
        x: &Tensor,
        rotation: &Rotation,
        attend: &mut dyn Attend,
        options: ForwardOptions,
    ) -> Result<Tensor> {
        let attention = self.attention(index, options);
        let h = options.round(ops::rms_norm(x, &w.input_norm, self.config.rms_norm_eps)?)?;
        let q = ops::rope(&ops::linear(&h, &w.q.weight, &w.q.bias)?, attention.heads, rotation)?;
        let k = ops::linear(&h, &w.k.weight, &w.k.bias)?;
        let v = ops::linear(&h, &w.v.weight, &w.v.bias)?;
        let kv = ops::rope_keys_with_values(&k, &v, attention.kv_heads, rotation)?;
        let mixed = attend.attend(index, &q, &kv, &w.sinks, attention)?;
        Ok(ops::linear(&mixed, &w.o.weight, &w.o.bias)?)
    }

    fn experts_block(
        &self,
        w: &LayerWeights,
        h: &Tensor,
        router_logits: &Tensor,
        routes: &Arc<Vec<u16>>,
    ) -> Result<Tensor> {
        let top_k = self.config.num_experts_per_tok;
        let shares = ops::top_k_softmax(router_logits, routes, top_k)?;
        let plan = Arc::new(Dispatch::new(routes, top_k, self.config.num_local_experts));
        let rows = ops::dispatch(h, &plan)?;
        let gated = ops::grouped_linear(&rows, &w.gate_up.weight, &w.gate_up.bias, &plan)?;
        let active = ops::swiglu(&gated, self.config.swiglu_limit)?;
        let out = ops::grouped_linear(&active, &w.down.weight, &w.down.bias, &plan)?;
        Ok(ops::combine(&out, &shares, &plan)?)
    }

    /// The last norm, of rows `x [R, H]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn final_norm(&self, weights: &dyn WeightSource, x: &Tensor) -> Result<Tensor> {
        Ok(ops::rms_norm(x, &weights.final_norm()?, self.config.rms_norm_eps)?)
    }
}

/// How queries find their keys.
pub trait Attend {
    /// `q [T, N, D]`, `kv [T, 2, M, D]`, `sinks [N]` → `[T, N·D]`.
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor>;
}

/// Whole sequences, packed: training, and any forward without a cache. Differentiable.
pub struct PackedAttention {
    /// Start of each sequence, and `T`.
    pub cu_seqlens: Arc<Vec<usize>>,
}

impl Attend for PackedAttention {
    fn attend(
        &mut self,
        _: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor> {
        Ok(ops::sink_attention(q, kv, sinks, &self.cu_seqlens, attention)?)
    }
}

/// New tokens of cached sequences: prefill and decode.
pub struct CachedAttention<'a, 'b> {
    pub caches: &'a mut [&'b mut SequenceCache],
    /// New tokens of each sequence.
    pub counts: &'a [usize],
}

impl Attend for CachedAttention<'_, '_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        kv: &Tensor,
        sinks: &Tensor,
        attention: Attention,
    ) -> Result<Tensor> {
        let mut layers: Vec<_> = self.caches.iter_mut().map(|cache| cache.layer(layer)).collect();
        let out = ops::sink_attention_cached(q, kv, sinks, &mut layers, self.counts, attention)?;
        if let Some(window) = attention.window {
            layers.iter_mut().for_each(|cache| cache.forget_before(cache.len(), window));
        }
        Ok(out)
    }
}

/// Hidden states after the last layer for new tokens of cached sequences: `tokens` holds `counts[i]` ids of
/// `caches[i]`, one after the other. Returns `[T, H]` and, a layer, the experts chosen.
///
/// # Errors
/// When a sequence would outgrow the context.
pub fn forward_cached(
    model: &Model,
    weights: &dyn WeightSource,
    tokens: Vec<u32>,
    caches: &mut [&mut SequenceCache],
    counts: &[usize],
    options: ForwardOptions,
) -> Result<(Tensor, Vec<Arc<Vec<u16>>>)> {
    let mut positions = Vec::with_capacity(tokens.len());
    for (cache, &count) in caches.iter().zip(counts) {
        positions.extend((cache.len()..cache.len() + count).map(|p| p as u32));
    }
    let rotation = model.rotation(positions);
    let mut x = ops::embedding(&weights.embedding()?, &Arc::new(tokens))?;
    let mut routes = Vec::with_capacity(model.config.num_hidden_layers);
    let mut attend = CachedAttention { caches, counts };
    for index in 0..model.config.num_hidden_layers {
        let layer = weights.layer(index)?;
        let output = model.layer(index, &layer, &x, &rotation, &mut attend, options, None)?;
        x = output.hidden;
        routes.push(output.routes);
    }
    Ok((x, routes))
}
