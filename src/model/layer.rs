//! Decoder layers: the trait that the layers of each family implement, and the blocks of a layer.

use super::config::LayerType;
use super::expert_parallel::ExpertParallel;
use super::forward::{ForwardOptions, Model, Rows};
use super::matrix::{LayerTensors, Matrix};
use crate::ops::graph::add;
use crate::ops::{self, Dispatch, Parameter, sink_attention};
use anyhow::Result;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// One decoder layer. Rollout and training use the same code.
pub trait Layer: Send + Sync {
    /// Returns the output of the layer for the input `x [T, H]`.
    ///
    /// # Errors
    /// When shapes disagree.
    fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<LayerOutput>;

    /// Returns the attention of the layer.
    fn attention(&self) -> &AttentionWeights;

    /// Returns the experts, if the layer has any.
    fn experts(&self) -> Option<&Experts> {
        None
    }

    /// Returns the layer without gradients.
    fn without_gradient(&self) -> Arc<dyn Layer>;
}

/// The arguments of one layer's forward pass.
pub struct LayerPass<'a, 'b> {
    pub model: &'a Model,
    pub index: usize,
    pub options: &'a ForwardOptions,
    pub rows: &'a mut Rows<'b>,
}

impl LayerPass<'_, '_> {
    /// Returns the RMS norm `[T, H]` of rows `x [T, H]`, rounded as the options say.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn norm(&self, x: &Tensor, weight: &Parameter) -> Result<Tensor> {
        self.options.round(self.model.norm(x, weight)?)
    }

    /// Returns the residual stream `x [T, H]` plus `output [T, H]`, the output of attention or of an MLP.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn add_residual(&self, x: &Tensor, output: &Tensor) -> Result<Tensor> {
        self.options.round(add(x, output)?)
    }
}

/// The output of a layer.
pub struct LayerOutput {
    /// `[T, H]`.
    pub hidden: Tensor,
    /// The decision of the router; `None` in a layer without experts.
    pub routing: Option<Routing>,
}

impl LayerOutput {
    /// Returns the routed experts, u32 `[T, K]`; `None` in a layer without experts.
    pub fn routed_experts(&self) -> Option<Tensor> {
        self.routing.as_ref().map(|routing| routing.routed_experts.clone())
    }
}

/// The decision of a router.
pub struct Routing {
    /// The routed experts, u32 `[T, K]`.
    pub routed_experts: Tensor,
    /// The dispatch plan, which sorts rows by expert.
    pub plan: Dispatch,
    /// `[T, E]`.
    pub router_logits: Tensor,
}

/// Grouped-query attention with rotary embedding.
#[derive(Clone)]
pub struct AttentionWeights {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub o: Matrix,
    /// `[N]`; `None` in a family without sinks.
    pub sinks: Option<Parameter>,
}

impl AttentionWeights {
    /// Returns the shape and options of attention in layer `index`.
    pub fn shape(&self, model: &Model, index: usize, options: &ForwardOptions) -> sink_attention::Attention {
        let c = &model.config;
        sink_attention::Attention {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            window: (c.layer_types[index] == LayerType::Sliding).then_some(c.sliding_window),
            sinks: options.sinks && self.sinks.is_some(),
            sink_gradient: options.sink_gradient,
        }
    }

    /// Returns the output `[T, H]` of attention for normed rows `h [T, H]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn forward(&self, h: &Tensor, pass: &mut LayerPass) -> Result<Tensor> {
        self.attend([self.q.matmul(h)?, self.k.matmul(h)?, self.v.matmul(h)?], pass)
    }

    /// Returns the output `[T, H]` of attention for queries `q [T, Q]`, keys `k [T, K]` and values `v [T,
    /// K]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn attend(&self, [q, k, v]: [Tensor; 3], pass: &mut LayerPass) -> Result<Tensor> {
        let shape = self.shape(pass.model, pass.index, pass.options);
        let rotation = &pass.rows.rotation;
        let q = ops::rope(&q, shape.heads, rotation)?;
        let kv = ops::rope_keys_with_values(&k, &v, shape.kv_heads, rotation)?;
        let sinks = match &self.sinks {
            Some(sinks) => sinks.graph_tensor()?,
            // The op ignores these zeros, because `shape.sinks` is false.
            None => Tensor::zeros(shape.heads, DType::F32, q.device())?,
        };
        let output = pass.rows.attention.attend(pass.index, &q, &kv, &sinks, shape)?;
        self.o.matmul(&output)
    }

    /// Returns the attention without gradients.
    pub fn without_gradient(&self) -> Self {
        Self {
            q: self.q.without_gradient(),
            k: self.k.without_gradient(),
            v: self.v.without_gradient(),
            o: self.o.without_gradient(),
            sinks: self.sinks.as_ref().map(Parameter::without_gradient),
        }
    }
}

/// The MLPs of the experts of a layer.
pub trait ExpertMlp: Send + Sync {
    /// Returns the outputs `[R, H]` of rows `x [R, H]`, which are sorted by `plan`.
    ///
    /// # Errors
    /// When shapes disagree.
    fn forward(&self, x: &Tensor, plan: &Dispatch, model: &Model, options: &ForwardOptions)
    -> Result<Tensor>;

    /// Returns the MLPs without gradients.
    fn without_gradient(&self) -> Arc<dyn ExpertMlp>;
}

/// A router, and the MLP of each expert.
#[derive(Clone)]
pub struct Experts {
    pub router: Matrix,
    pub mlp: Arc<dyn ExpertMlp>,
    /// The placement of experts on ranks; `None` without expert parallelism. With it, `mlp` holds only the
    /// experts of this rank.
    pub expert_parallel: Option<Arc<ExpertParallel>>,
}

impl Experts {
    /// Returns the weighted sum `[T, H]` of the expert outputs for normed rows `h [T, H]`, and the decision
    /// of the router.
    ///
    /// # Errors
    /// When shapes disagree, or a rank does not respond in time.
    pub fn forward(&self, h: &Tensor, pass: &LayerPass) -> Result<(Tensor, Routing)> {
        let (config, options, rows) = (&pass.model.config, pass.options, &pass.rows);
        let mut router_logits = self.router.matmul_f32(h)?;
        if let Some(noise) = options.router_noise {
            router_logits = ops::router_noise(&router_logits, noise, pass.index, &rows.rotation.positions)?;
        }
        let routed_experts = match rows.replay.and_then(|layers| layers.get(pass.index)) {
            Some(replay) => replay.clone(),
            None => ops::route(&router_logits, config.num_experts_per_tok)?,
        };
        let plan = Dispatch::new(&routed_experts, config.num_local_experts)?;
        let expert_weights = match options.softmax_before_top_k {
            true => full_softmax_weights(&router_logits, &routed_experts)?,
            false => ops::top_k_softmax(&router_logits, &routed_experts)?,
        };
        let sorted = ops::dispatch(h, &plan)?;
        let products = match &self.expert_parallel {
            None => self.mlp.forward(&sorted, &plan, pass.model, options)?,
            Some(parallel) => {
                parallel.forward(&sorted, &plan, &|x, plan| self.mlp.forward(x, plan, pass.model, options))?
            }
        };
        let output = ops::combine(&products, &expert_weights, &plan)?;
        Ok((output, Routing { routed_experts, plan, router_logits }))
    }

    /// Takes part in a pass in which this rank has no rows. Computes the expert outputs for rows of other
    /// ranks.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn serve(&self, model: &Model, options: &ForwardOptions) -> Result<()> {
        match &self.expert_parallel {
            Some(parallel) => parallel.serve(&|x, plan| self.mlp.forward(x, plan, model, options)),
            None => Ok(()),
        }
    }

    /// Returns the experts without gradients.
    pub fn without_gradient(&self) -> Self {
        Self {
            router: self.router.without_gradient(),
            mlp: self.mlp.without_gradient(),
            expert_parallel: self.expert_parallel.clone(),
        }
    }
}

/// Returns the weights `[T, K]` of the routed experts `routes [T, K]` in a softmax over all `logits [T, E]`.
fn full_softmax_weights(logits: &Tensor, routes: &Tensor) -> Result<Tensor> {
    let (tokens, experts) = logits.dims2()?;
    let all = Tensor::arange(0, experts as u32, logits.device())?.broadcast_as((tokens, experts))?;
    Ok(ops::top_k_softmax(logits, &all)?.gather(routes, 1)?)
}

/// A SwiGLU MLP: `down(silu(gate(x)) · up(x))`.
#[derive(Clone)]
pub struct SwigluMlp {
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

impl SwigluMlp {
    /// Builds the MLP from the matrices `mlp.gate_proj`, `mlp.up_proj` and `mlp.down_proj`, which have no
    /// biases.
    ///
    /// # Errors
    /// When a matrix is missing.
    pub fn from_tensors(tensors: &LayerTensors) -> Result<Self> {
        Ok(Self {
            gate: tensors.linear_without_bias("mlp.gate_proj")?,
            up: tensors.linear_without_bias("mlp.up_proj")?,
            down: tensors.linear_without_bias("mlp.down_proj")?,
        })
    }

    /// Returns the output `[T, H]` of the MLP for normed rows `h [T, H]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn forward(&self, h: &Tensor) -> Result<Tensor> {
        self.down.matmul(&ops::silu_and_mul(&self.gate.matmul(h)?, &self.up.matmul(h)?)?)
    }

    /// Returns the MLP without gradients.
    pub fn without_gradient(&self) -> Self {
        Self {
            gate: self.gate.without_gradient(),
            up: self.up.without_gradient(),
            down: self.down.without_gradient(),
        }
    }
}
