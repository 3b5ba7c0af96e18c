//! The arguments of a forward pass other than its weights: the model, the rows, and the options.

use super::attention::AttentionMode;
use super::config::{Config, SWIGLU_ALPHA};
use crate::ops::router_noise::RouterNoise;
use crate::ops::{self, Parameter, rope::Rotation};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Options of a forward pass, which ablations change. The default is the correct forward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardOptions {
    /// If false, the softmax leaves out the sinks.
    pub sinks: bool,
    /// If false, the sinks get no gradient.
    pub sink_gradient: bool,
    /// Noise on the router logits, before experts are selected and weighted.
    pub router_noise: Option<RouterNoise>,
    /// Number of mantissa bits to which the residual stream and the outputs of norms are rounded. Rounding
    /// has no gradient. `None` means no rounding.
    pub mantissa_bits: Option<u32>,
    /// The gain of the sigmoid in the experts. Other values reproduce a known bug of other implementations,
    /// so that `check-mismatch` can recognise the bug.
    pub swiglu_alpha: f64,
    /// If true, the selected experts are weighted by a softmax over all experts, without renormalising. This
    /// reproduces a known bug of other implementations.
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
        Ok(if let Some(bits) = self.mantissa_bits { ops::round_mantissa(&x, bits)? } else { x })
    }
}

/// The architecture of a model and its RoPE table, without weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub config: Config,
    table: Arc<ops::rope::RopeTable>,
}

/// The rows of a batch: their positions, their attention, and the experts to replay.
pub struct Rows<'a> {
    pub rotation: Rotation,
    /// The attention of the rows, which finds their keys and values.
    pub attention: &'a mut dyn AttentionMode,
    /// Experts that replace the selection of the router, one tensor `[T, K]` per layer.
    pub replay: Option<&'a [Tensor]>,
}

impl Model {
    /// Returns the model for sequences of at most `context_tokens_max` positions.
    pub fn new(config: Config, context_tokens_max: usize) -> Self {
        let table = Arc::new(super::rope::table(&config.rope, config.head_dim, context_tokens_max));
        Self { config, table }
    }

    /// Returns the model with another RoPE table, to recognise a known bug of another implementation.
    /// `frequencies [D / 2]` are the radians per position of each pair of dimensions. `factor` multiplies
    /// cosine and sine.
    pub fn with_rope(config: Config, context_tokens_max: usize, frequencies: &[f32], factor: f64) -> Self {
        let table = Arc::new(ops::rope::RopeTable::new(frequencies, context_tokens_max, factor));
        Self { config, table }
    }

    /// Returns whether both are clones of one model.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.table, &other.table) && self.config == other.config
    }

    /// Returns the maximum number of positions of a sequence.
    pub fn context_tokens_max(&self) -> usize {
        self.table.positions()
    }

    /// Returns the rotary embedding of rows at `positions`.
    pub fn rotation(&self, positions: Vec<u32>) -> Rotation {
        Rotation::new(self.table.clone(), positions)
    }

    /// Returns the RMS norm `[R, H]` of rows `x [R, H]`.
    pub(super) fn norm(&self, x: &Tensor, weight: &Parameter) -> Result<Tensor> {
        Ok(ops::rms_norm(x, &weight.graph_tensor()?, self.config.rms_norm_eps)?)
    }
}
