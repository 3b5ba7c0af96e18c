//! One layer of the forward pass: the same code for rollout and training, whatever is in the batch.
//!
//! `x += attention(norm(x)); x += feed_forward(norm(x))`. How keys are found is an [`Attend`]: packed sequences in training, a KV
//! cache in rollout. Everything else does not know which it is. The walk over the layers is [`super::trunk`].

use super::attend::Attend;
use super::config::{Config, LayerType, SWIGLU_ALPHA};
use super::layer::{self, FeedForward, Gated, Layer};
use crate::ops::graph::add;
use crate::ops::router_noise::RouterNoise;
use crate::ops::{self, Dispatch, Parameter, rope::Rotation, sink_attention::Attention};
use anyhow::Result;
use candle_core::{DType, Tensor};
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
    /// The sigmoid's gain in the experts: another one is a mistake to recognise others by.
    pub swiglu_alpha: f64,
    /// True weighs the chosen experts by a softmax over all of them, not made to sum to 1: a mistake likewise.
    pub softmax_before_top_k: bool,
}

impl Default for ForwardOptions {
    fn default() -> Self {
        Self {
            sinks: true,
            sink_gradient: true,
            router_noise: None,
            mantissa_bits: None,
            swiglu_alpha: SWIGLU_ALPHA,
            softmax_before_top_k: false,
        }
    }
}

impl ForwardOptions {
    fn round(&self, x: Tensor) -> Result<Tensor> {
        Ok(match self.mantissa_bits {
            Some(bits) => ops::round_mantissa(&x, bits)?,
            None => x,
        })
    }
}

/// The maths of one architecture; it holds no weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub config: Config,
    table: Arc<ops::rope::RopeTable>,
}

/// The rows of a batch: where they stand and how they find their keys.
pub struct Rows<'a> {
    pub rotation: Rotation,
    pub attend: &'a mut dyn Attend,
    /// Experts to use instead of the router's own choice, `[T, K]` a layer.
    pub replay: Option<&'a [Tensor]>,
}

/// What a layer hands on.
pub struct LayerOutput {
    /// `[T, H]`.
    pub hidden: Tensor,
    /// Present where the layer has experts.
    pub routing: Option<Routing>,
}

/// What a layer's router decided.
pub struct Routing {
    /// The chosen experts, u32 `[T, K]`.
    pub routes: Tensor,
    /// The rows of each expert.
    pub plan: Dispatch,
    /// `[T, E]`.
    pub router_logits: Tensor,
}

impl LayerOutput {
    /// The chosen experts, u32 `[T, K]`, where the layer has experts.
    pub fn routes(&self) -> Option<Tensor> {
        self.routing.as_ref().map(|routing| routing.routes.clone())
    }
}

impl Model {
    /// The model for sequences of up to `context_tokens_max` positions.
    pub fn new(config: Config, context_tokens_max: usize) -> Self {
        let table = Arc::new(super::rope::table(&config.rope, config.head_dim, context_tokens_max));
        Self { config, table }
    }

    /// The same with another table of RoPE, a mistake to recognise others by: radians a position of each pair of
    /// dimensions, `[D / 2]`, and the factor on cosine and sine.
    pub fn with_rope(config: Config, context_tokens_max: usize, frequencies: &[f32], factor: f64) -> Self {
        let table = Arc::new(ops::rope::RopeTable::new(frequencies, context_tokens_max, factor));
        Self { config, table }
    }

    /// Positions a sequence may have.
    pub fn context_tokens_max(&self) -> usize {
        self.table.positions()
    }

    /// The rotation of rows at `positions`.
    pub fn rotation(&self, positions: Vec<u32>) -> Rotation {
        Rotation::new(self.table.clone(), positions)
    }

    /// Layer `index` on `x [T, H]`.
    pub(super) fn layer(
        &self,
        index: usize,
        layer: &Layer,
        x: &Tensor,
        rows: &mut Rows,
        options: &ForwardOptions,
    ) -> Result<LayerOutput> {
        let h = options.round(self.norm(x, &layer.input_norm)?)?;
        let mixed = self.attention(index, &layer.attention, &h, rows, options)?;
        let x = options.round(add(x, &mixed)?)?;
        let h = options.round(self.norm(&x, &layer.post_attention_norm)?)?;
        let (mixed, routing) = match &layer.feed_forward {
            FeedForward::Experts(experts) => {
                let (mixed, routing) = self.experts(index, experts, &h, rows, options)?;
                (mixed, Some(routing))
            }
            FeedForward::Gated(Gated { gate, up, down }) => {
                (down.apply(&ops::silu_gated(&gate.apply(&h)?, &up.apply(&h)?)?)?, None)
            }
        };
        Ok(LayerOutput { hidden: options.round(add(&x, &mixed)?)?, routing })
    }

    /// What attention of layer `index` is.
    pub(super) fn attention_of(
        &self,
        index: usize,
        weights: &layer::AttentionWeights,
        options: &ForwardOptions,
    ) -> Attention {
        let c = &self.config;
        Attention {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            window: (c.layer_types[index] == LayerType::Sliding).then_some(c.sliding_window),
            sinks: options.sinks && weights.sinks.is_some(),
            sink_gradient: options.sink_gradient,
        }
    }

    fn attention(
        &self,
        index: usize,
        weights: &layer::AttentionWeights,
        h: &Tensor,
        rows: &mut Rows,
        options: &ForwardOptions,
    ) -> Result<Tensor> {
        let attention = self.attention_of(index, weights, options);
        let q = ops::rope(&weights.q.apply(h)?, attention.heads, &rows.rotation)?;
        let (k, v) = (weights.k.apply(h)?, weights.v.apply(h)?);
        let kv = ops::rope_keys_with_values(&k, &v, attention.kv_heads, &rows.rotation)?;
        let sinks = match &weights.sinks {
            Some(sinks) => sinks.tracked()?,
            // Not looked at.
            None => Tensor::zeros(attention.heads, DType::F32, q.device())?,
        };
        let mixed = rows.attend.attend(index, &q, &kv, &sinks, attention)?;
        weights.o.apply(&mixed)
    }

    fn experts(
        &self,
        index: usize,
        weights: &layer::Experts,
        h: &Tensor,
        rows: &Rows,
        options: &ForwardOptions,
    ) -> Result<(Tensor, Routing)> {
        let mut router_logits = weights.router.apply_f32(h)?;
        if let Some(noise) = options.router_noise {
            router_logits = ops::router_noise(&router_logits, noise, index, &rows.rotation.positions)?;
        }
        let routes = match rows.replay.and_then(|layers| layers.get(index)) {
            Some(routes) => routes.clone(),
            None => ops::route(&router_logits, self.config.num_experts_per_tok)?,
        };
        let plan = Dispatch::new(&routes, self.config.num_local_experts)?;
        let shares = match options.softmax_before_top_k {
            true => shares_of_all(&router_logits, &routes)?,
            false => ops::top_k_softmax(&router_logits, &routes)?,
        };
        let sorted = ops::dispatch(h, &plan)?;
        let products = match &weights.ranks {
            None => self.expert_products(weights, &sorted, &plan, options)?,
            Some(ranks) => {
                ranks.products(&sorted, &plan, &|x, plan| self.expert_products(weights, x, plan, options))?
            }
        };
        let mixed = ops::combine(&products, &shares, &plan)?;
        Ok((mixed, Routing { routes, plan, router_logits }))
    }

    /// What the experts give for rows `x [T·K, H]`, sorted by `plan`.
    fn expert_products(
        &self,
        weights: &layer::Experts,
        x: &Tensor,
        plan: &Dispatch,
        options: &ForwardOptions,
    ) -> Result<Tensor> {
        let gated = weights.gate_up.apply_grouped(x, plan)?;
        let active = ops::swiglu(&gated, self.config.swiglu_limit, options.swiglu_alpha)?;
        weights.down.apply_grouped(&active, plan)
    }

    /// This rank's part of a layer for which only other ranks have rows.
    pub(super) fn pass_by(&self, layer: &Layer, options: &ForwardOptions) -> Result<()> {
        match &layer.feed_forward {
            FeedForward::Experts(experts @ layer::Experts { ranks: Some(ranks), .. }) => {
                ranks.answer(&|x, plan| self.expert_products(experts, x, plan, options))
            }
            _ => Ok(()),
        }
    }

    /// A norm of rows `x [R, H]`.
    pub(super) fn norm(&self, x: &Tensor, weight: &Parameter) -> Result<Tensor> {
        Ok(ops::rms_norm(x, &weight.tracked()?, self.config.rms_norm_eps)?)
    }
}

/// What `routes [T, K]` get of a softmax over all of `logits [T, E]`.
fn shares_of_all(logits: &Tensor, routes: &Tensor) -> Result<Tensor> {
    let (tokens, experts) = logits.dims2()?;
    let all = Tensor::arange(0, experts as u32, logits.device())?.broadcast_as((tokens, experts))?;
    Ok(ops::top_k_softmax(logits, &all)?.gather(routes, 1)?)
}
