//! One layer's tensors by what they do. A projection multiplies; whether it is dense, packed or adapted is its own business.

use super::expert_ranks::ExpertRanks;
use crate::ops::head_matrix::HeadMatrix;
use crate::ops::logits::{Logits, Sampling};
use crate::ops::packed::{PackedMatrix, packed_grouped_linear, packed_linear};
use crate::ops::product::Precision;
use crate::ops::{self, Dispatch, Parameter};
use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use std::sync::Arc;

/// A matrix that the forward multiplies by.
#[derive(Clone)]
pub enum Projection {
    /// `[in, out]` and a bias `[out]`, or one of each an expert: `[E, in, out]` and `[E, out]`.
    Dense { weight: Parameter, bias: Option<Parameter> },
    /// The same shapes, packed: the products' bits are those of the decoded matrix.
    Packed { weight: Arc<PackedMatrix>, bias: Option<Parameter> },
    /// Any of them with an adapter beside it; the two are never merged.
    Adapted { base: Box<Projection>, adapter: Adapter },
}

/// The two factors of a matrix's low-rank correction: `scale · A · B`.
#[derive(Clone)]
pub struct Adapter {
    /// `[in, r]`, or `[E, in, r]`.
    pub a: Parameter,
    /// `[r, out]`, or `[E, r, out]`.
    pub b: Parameter,
    pub scale: f32,
}

impl Adapter {
    /// `y` with the correction of what gave it from `x` added.
    fn add_to(&self, y: &Tensor, x: &Tensor, plan: Option<&Dispatch>) -> Result<Tensor> {
        Ok(ops::add_low_rank(y, x, [&self.a, &self.b], self.scale, plan)?)
    }
}

impl Projection {
    /// Multiplies so on a CPU, where it is dense.
    fn multiply_in(&mut self, precision: Precision) {
        match self {
            Projection::Dense { weight, .. } => *weight = weight.clone().multiplying(precision),
            Projection::Packed { .. } => {}
            Projection::Adapted { base, .. } => base.multiply_in(precision),
        }
    }

    /// The same, multiplying so on a CPU, where it is dense.
    pub fn multiplying(mut self, precision: Precision) -> Self {
        self.multiply_in(precision);
        self
    }

    /// The same, not learning.
    pub fn without_gradient(&self) -> Self {
        match self {
            Projection::Dense { weight, bias } => Projection::Dense {
                weight: weight.without_gradient(),
                bias: bias.as_ref().map(Parameter::without_gradient),
            },
            Projection::Packed { weight, bias } => Projection::Packed {
                weight: weight.clone(),
                bias: bias.as_ref().map(Parameter::without_gradient),
            },
            Projection::Adapted { base, adapter: Adapter { a, b, scale } } => Projection::Adapted {
                base: Box::new(base.without_gradient()),
                adapter: Adapter { a: a.without_gradient(), b: b.without_gradient(), scale: *scale },
            },
        }
    }

    /// `x [T, in]` → `[T, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Projection::Dense { weight, bias } => Ok(ops::linear(x, weight, bias.as_ref())?),
            Projection::Packed { weight, bias } => Ok(packed_linear(x, weight, bias.as_ref())?),
            Projection::Adapted { base, adapter } => adapter.add_to(&base.apply(x)?, x, None),
        }
    }

    /// The same with sums that stay f32 on every device, for what is decided by them.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn apply_f32(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Projection::Dense { weight, bias } => Ok(ops::linear_f32(x, weight, bias.as_ref())?),
            Projection::Packed { weight, bias } => Ok(packed_linear(x, weight, bias.as_ref())?),
            Projection::Adapted { base, adapter } => adapter.add_to(&base.apply_f32(x)?, x, None),
        }
    }

    /// Each row by its expert's matrix: `x [T·K, in]`, sorted by `plan`, → `[T·K, out]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn apply_grouped(&self, x: &Tensor, plan: &Dispatch) -> Result<Tensor> {
        match self {
            Projection::Dense { weight, bias } => {
                let bias = bias.as_ref().context("experts have biases")?;
                Ok(ops::grouped_linear(x, weight, bias, plan)?)
            }
            Projection::Packed { weight, bias } => {
                let bias = bias.as_ref().context("experts have biases")?;
                Ok(packed_grouped_linear(x, weight, bias, plan)?)
            }
            Projection::Adapted { base, adapter } => {
                adapter.add_to(&base.apply_grouped(x, plan)?, x, Some(plan))
            }
        }
    }

    /// As the language model's head: log-probabilities and entropies of `targets` after `h [R, H]`, `[2, R]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn log_prob_and_entropy(
        &self,
        h: &Tensor,
        targets: &Arc<Vec<u32>>,
        temperature: f64,
    ) -> Result<Tensor> {
        Ok(ops::log_prob_and_entropy(h, &self.head_matrix()?, targets, temperature)?)
    }

    /// As the language model's head: the logits of `h [R, H]`, as a sampler reads them.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn logits(&self, h: &Tensor, sampling: &Sampling) -> Result<Logits> {
        Ok(ops::logits(h, &self.head_matrix()?, sampling)?)
    }

    /// The matrix alone: the language model's head has no bias.
    fn head_matrix(&self) -> Result<HeadMatrix> {
        Ok(match self {
            Projection::Dense { weight, .. } => HeadMatrix::Plain(weight.clone()),
            Projection::Packed { weight, .. } => HeadMatrix::Packed(weight.clone()),
            Projection::Adapted { .. } => bail!("no adapter reaches the head"),
        })
    }
}

/// Attention's tensors.
#[derive(Clone)]
pub struct AttentionWeights {
    pub q: Projection,
    pub k: Projection,
    pub v: Projection,
    pub o: Projection,
    /// `[N]`; none in a family without sinks.
    pub sinks: Option<Parameter>,
}

/// The experts' tensors.
#[derive(Clone)]
pub struct Experts {
    pub router: Projection,
    /// To `2I`, gate and up interleaved.
    pub gate_up: Projection,
    pub down: Projection,
    /// Where rows travel to the rank that holds their expert: `gate_up` and `down` are then those of this rank's experts.
    pub ranks: Option<Arc<ExpertRanks>>,
}

/// The plain gated unit's tensors: `down(silu(gate(x)) · up(x))`.
#[derive(Clone)]
pub struct Gated {
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
}

/// What follows attention.
#[derive(Clone)]
pub enum FeedForward {
    Experts(Experts),
    Gated(Gated),
}

/// The tensors of one layer, in working layout.
#[derive(Clone)]
pub struct Layer {
    pub input_norm: Parameter,
    pub attention: AttentionWeights,
    pub post_attention_norm: Parameter,
    pub feed_forward: FeedForward,
}

impl Layer {
    /// The same, whose dense products a CPU makes so. A router's stay f32.
    pub fn multiplying(mut self, precision: Precision) -> Self {
        let AttentionWeights { q, k, v, o, .. } = &mut self.attention;
        let feed_forward = match &mut self.feed_forward {
            FeedForward::Experts(Experts { gate_up, down, .. }) => vec![gate_up, down],
            FeedForward::Gated(Gated { gate, up, down }) => vec![gate, up, down],
        };
        [q, k, v, o].into_iter().chain(feed_forward).for_each(|projection| projection.multiply_in(precision));
        self
    }

    /// The same, not learning.
    pub fn without_gradient(&self) -> Self {
        let AttentionWeights { q, k, v, o, sinks } = &self.attention;
        Self {
            input_norm: self.input_norm.without_gradient(),
            attention: AttentionWeights {
                q: q.without_gradient(),
                k: k.without_gradient(),
                v: v.without_gradient(),
                o: o.without_gradient(),
                sinks: sinks.as_ref().map(Parameter::without_gradient),
            },
            post_attention_norm: self.post_attention_norm.without_gradient(),
            feed_forward: match &self.feed_forward {
                FeedForward::Experts(Experts { router, gate_up, down, ranks }) => {
                    FeedForward::Experts(Experts {
                        router: router.without_gradient(),
                        gate_up: gate_up.without_gradient(),
                        down: down.without_gradient(),
                        ranks: ranks.clone(),
                    })
                }
                FeedForward::Gated(Gated { gate, up, down }) => FeedForward::Gated(Gated {
                    gate: gate.without_gradient(),
                    up: up.without_gradient(),
                    down: down.without_gradient(),
                }),
            },
        }
    }
}
