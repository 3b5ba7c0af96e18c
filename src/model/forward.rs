//! The arguments of a forward pass besides its weights: the model, the rows, and ablations.

use super::attention::AttentionMode;
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
    /// Noise on the router logits, before experts are selected and weighted.
    pub router_noise: Option<RouterNoise>,
    /// Mantissa bits kept of the residual stream and of the norms' outputs. Rounding has no gradient.
    /// `None`: all.
    pub mantissa_bits: Option<u32>,
    /// The gain of the sigmoid in the experts. Another value reproduces a known mistake, to recognise it
    /// elsewhere.
    pub swiglu_alpha: f64,
    /// True weights the selected experts by a softmax over all experts, without renormalising: a known
    /// mistake.
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

/// The computation of one architecture, without weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub config: Config,
    table: Arc<ops::rope::RopeTable>,
}

/// The rows of a batch: their positions, and how they find their keys.
pub struct Rows<'a> {
    pub rotation: Rotation,
    pub attend: &'a mut dyn AttentionMode,
    /// Experts that replace the router's selection, `[T, K]` for each layer.
    pub replay: Option<&'a [Tensor]>,
}

impl Model {
    /// Returns the model for sequences of up to `context_tokens_max` positions.
    pub fn new(config: Config, context_tokens_max: usize) -> Self {
        let table = Arc::new(super::rope::table(&config.rope, config.head_dim, context_tokens_max));
        Self { config, table }
    }

    /// Returns the model with another RoPE table, to recognise a known mistake elsewhere. `frequencies [D /
    /// 2]` are radians per position of each pair of dimensions. `factor` multiplies cosine and sine.
    pub fn with_rope(config: Config, context_tokens_max: usize, frequencies: &[f32], factor: f64) -> Self {
        let table = Arc::new(ops::rope::RopeTable::new(frequencies, context_tokens_max, factor));
        Self { config, table }
    }

    /// Returns the most positions of a sequence.
    pub fn context_tokens_max(&self) -> usize {
        self.table.positions()
    }

    /// Returns the rotation of rows at `positions`.
    pub fn rotation(&self, positions: Vec<u32>) -> Rotation {
        Rotation::new(self.table.clone(), positions)
    }

    /// Returns the RMS norm of rows `x [R, H]`.
    pub(super) fn norm(&self, x: &Tensor, weight: &Parameter) -> Result<Tensor> {
        Ok(ops::rms_norm(x, &weight.graph_tensor()?, self.config.rms_norm_eps)?)
    }
}
