//! Decoder layers: the trait that the layers of each family implement, and the blocks of a layer.

use super::attention::AttentionInputs;
use super::config::LayerType;
use super::forward::{ForwardOptions, Model, Rows};
use super::matrix::{LayerTensors, Matrix};
use super::parallel::expert_exchange::PassRows;
use super::parallel::expert_parallel::ExpertParallel;
use super::parallel::{ExpertOutputs, RoutedRows};
use crate::ops::fused::{SelectedExperts, select_experts};
use crate::ops::graph::add;
use crate::ops::{self, Dispatch, Parameter, sink_attention};
use anyhow::Result;
use candle_core::Tensor;
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
    /// The rows of all ranks, if GPUs exchange rows of experts.
    pub expert_rows: Option<&'a PassRows>,
}

impl LayerPass<'_, '_> {
    /// Returns the RMS norm `[T, H]` of rows `x [T, H]`, rounded as the options say.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn norm(&self, x: &Tensor, weight: &Parameter) -> Result<Tensor> {
        self.options.round(self.model.norm(x, weight)?)
    }

    /// Returns the residual stream `x [T, H]` plus `output [T, H]`, the output of attention, and the RMS norm
    /// of the sum.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn add_and_norm(&self, x: &Tensor, output: &Tensor, weight: &Parameter) -> Result<[Tensor; 2]> {
        if self.options.mantissa_bits.is_none() {
            return Ok(ops::fused::add_and_norm(x, output, weight, self.model.config.rms_norm_eps)?);
        }
        let sum = self.options.round(add(x, output)?)?;
        let normed = self.norm(&sum, weight)?;
        Ok([sum, normed])
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
        self.attend(self.project(h)?, pass)
    }

    /// Returns queries `[T, Q]`, keys `[T, K]` and values `[T, K]` of normed rows `h [T, H]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn project(&self, h: &Tensor) -> Result<[Tensor; 3]> {
        Matrix::matmul_each([&self.q, &self.k, &self.v], h)
    }

    /// Returns the output `[T, H]` of attention for queries `q [T, Q]`, keys `k [T, K]` and values `v [T,
    /// K]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn attend(&self, [q, k, v]: [Tensor; 3], pass: &mut LayerPass) -> Result<Tensor> {
        let inputs = AttentionInputs {
            qkv: [&q, &k, &v],
            rotation: &pass.rows.rotation,
            sinks: self.sinks.as_ref().map(Parameter::graph_tensor).transpose()?,
            attention: self.shape(pass.model, pass.index, pass.options),
        };
        self.o.matmul(&pass.rows.attention.attend(pass.index, inputs)?)
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
    /// Returns the outputs `[T·K, H]` of tokens `h [T, H]`, sorted by `plan`.
    ///
    /// # Errors
    /// When shapes disagree.
    fn forward(&self, h: &Tensor, plan: &Dispatch, model: &Model, options: &ForwardOptions)
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
    /// Returns the residual stream `x [T, H]` plus the weighted sum of the expert outputs for normed rows `h
    /// [T, H]`, and the decision of the router.
    ///
    /// # Errors
    /// When shapes disagree, or a rank does not respond in time.
    pub fn forward(&self, x: &Tensor, h: &Tensor, pass: &LayerPass) -> Result<LayerOutput> {
        let (options, rows) = (pass.options, &pass.rows);
        let mut router_logits = self.router.matmul_f32(h)?;
        if let Some(noise) = options.router_noise {
            router_logits = ops::router_noise(&router_logits, noise, pass.index, &rows.rotation.positions)?;
        }
        let replay = rows.replay.and_then(|layers| layers.get(pass.index));
        let SelectedExperts { routed_experts, plan, weights } = select(&router_logits, replay, pass)?;
        let mlp = |x: &Tensor, plan: &Dispatch| self.mlp.forward(x, plan, pass.model, options);
        let own = RoutedRows { h, routed_experts: &routed_experts, plan: &plan };
        let outputs = match &self.expert_parallel {
            Some(parallel) => parallel.outputs(pass.expert_rows, &own, &mlp)?,
            None => ExpertOutputs::Sorted(mlp(h, &plan)?),
        };
        let sum = outputs.combine_and_add(&weights, &plan, x)?;
        let hidden = options.round(sum)?;
        Ok(LayerOutput { hidden, routing: Some(Routing { routed_experts, plan, router_logits }) })
    }

    /// Takes part in a pass in which this rank has no rows. Computes the expert outputs for rows of other
    /// ranks. `expert_rows` has the rows of all ranks, if GPUs exchange them.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn serve(
        &self,
        model: &Model,
        options: &ForwardOptions,
        expert_rows: Option<&PassRows>,
    ) -> Result<()> {
        let mlp = |x: &Tensor, plan: &Dispatch| self.mlp.forward(x, plan, model, options);
        self.expert_parallel.as_ref().map_or(Ok(()), |parallel| parallel.serve(expert_rows, &mlp))
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

/// Returns the experts of each token, from `router_logits [T, E]` or from `replay [T, K]`.
fn select(router_logits: &Tensor, replay: Option<&Tensor>, pass: &LayerPass) -> Result<SelectedExperts> {
    let (config, before_top_k) = (&pass.model.config, pass.options.softmax_before_top_k);
    if replay.is_none() && !before_top_k {
        return Ok(select_experts(router_logits, config.num_experts_per_tok)?);
    }
    let routed_experts = match replay {
        Some(replay) => replay.clone(),
        None => ops::route(router_logits, config.num_experts_per_tok)?,
    };
    let plan = Dispatch::new(&routed_experts, config.num_local_experts)?;
    let weights = match before_top_k {
        true => full_softmax_weights(router_logits, &routed_experts)?,
        false => ops::top_k_softmax(router_logits, &routed_experts)?,
    };
    Ok(SelectedExperts { routed_experts, plan, weights })
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
    /// Builds the MLP from the matrices `gate_proj`, `up_proj` and `down_proj` of `module`, which have no
    /// biases.
    ///
    /// # Errors
    /// When a matrix is missing.
    pub fn from_tensors(tensors: &LayerTensors, module: &str) -> Result<Self> {
        let matrix = |name: &str| tensors.linear_without_bias(&format!("{module}.{name}"));
        Ok(Self { gate: matrix("gate_proj")?, up: matrix("up_proj")?, down: matrix("down_proj")? })
    }

    /// Returns the residual stream `x [T, H]` plus the output of the MLP for normed rows `h [T, H]`, rounded
    /// as the options say.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn forward(&self, x: &Tensor, h: &Tensor, options: &ForwardOptions) -> Result<Tensor> {
        let [gate, up] = Matrix::matmul_each([&self.gate, &self.up], h)?;
        options.round(self.down.matmul_and_add(&ops::silu_and_mul(&gate, &up)?, x)?)
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

/// The MLPs of experts: each matrix is one tensor for all experts.
impl ExpertMlp for SwigluMlp {
    fn forward(&self, h: &Tensor, plan: &Dispatch, _: &Model, _: &ForwardOptions) -> Result<Tensor> {
        let x = ops::dispatch(h, plan)?;
        let (gate, up) = (self.gate.grouped_matmul(&x, plan)?, self.up.grouped_matmul(&x, plan)?);
        self.down.grouped_matmul(&ops::silu_and_mul(&gate, &up)?, plan)
    }

    fn without_gradient(&self) -> Arc<dyn ExpertMlp> {
        Arc::new(self.without_gradient())
    }
}
