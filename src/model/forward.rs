//! The arguments of a forward pass beside its weights: the model, its rows, and what ablations change.

use super::attend::Attend;
use super::config::{Config, SWIGLU_ALPHA};
use crate::ops::router_noise::RouterNoise;
use crate::ops::{self, Parameter, rope::Rotation};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Changes that an ablation makes to a forward pass. The default changes nothing.
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
    pub(super) fn round(&self, x: Tensor) -> Result<Tensor> {
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

impl Model {
    /// The model for sequences of up to `context_tokens_max` positions.
    pub fn new(config: Config, context_tokens_max: usize) -> Self {
        let table = Arc::new(super::rope::table(&config.rope, config.head_dim, context_tokens_max));
        Self { config, table }
    }

    /// The model with another table of RoPE, a mistake to recognise others by. `frequencies [D / 2]` are radians a
    /// position of each pair of dimensions; `factor` multiplies cosine and sine.
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

    /// A norm of rows `x [R, H]`.
    pub(super) fn norm(&self, x: &Tensor, weight: &Parameter) -> Result<Tensor> {
        Ok(ops::rms_norm(x, &weight.tracked()?, self.config.rms_norm_eps)?)
    }
}
