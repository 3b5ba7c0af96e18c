//! One layer's tensors by what they do. A projection multiplies; whether it is dense, packed or adapted is its own business.

use crate::ops::{self, Dispatch, Parameter};
use anyhow::{Context, Result};
use candle_core::Tensor;

/// A matrix that the forward multiplies by.
#[derive(Clone)]
pub enum Projection {
    /// `[in, out]` and a bias `[out]`, or one of each an expert: `[E, in, out]` and `[E, out]`.
    Dense { weight: Parameter, bias: Option<Parameter> },
}

impl Projection {
    /// The same, not learning.
    pub fn without_gradient(&self) -> Self {
        match self {
            Projection::Dense { weight, bias } => Projection::Dense {
                weight: weight.without_gradient(),
                bias: bias.as_ref().map(Parameter::without_gradient),
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
        }
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
                FeedForward::Experts(Experts { router, gate_up, down }) => FeedForward::Experts(Experts {
                    router: router.without_gradient(),
                    gate_up: gate_up.without_gradient(),
                    down: down.without_gradient(),
                }),
                FeedForward::Gated(Gated { gate, up, down }) => FeedForward::Gated(Gated {
                    gate: gate.without_gradient(),
                    up: up.without_gradient(),
                    down: down.without_gradient(),
                }),
            },
        }
    }
}
