//! A model's tensor as an argument of ops: its values, and the sink of its gradient if it is trainable.
//!
//! An op's backward adds a parameter's gradient to the sink's buffer in place; the graph gets none. A new
//! tensor of the parameter's size per micro-batch would cost more than the addition.

use super::cpu::{add_values, host_values};
use super::cuda::{add_tensor, copy_argument};
use super::graph::apply;
use super::operation::{DeviceArgument, HostArgument, Operation};
use super::product::Precision;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor};
use std::sync::Arc;

/// Receives the gradients of one pass.
pub trait GradientSink: Send + Sync {
    /// Waits for this pass's turn, then calls `add` with the gradient buffer of `parameter` (same shape).
    ///
    /// # Errors
    /// Those of `add`, or when an earlier pass failed.
    fn add(&self, parameter: usize, add: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()>;
}

/// A tensor's values, the sink of its gradient, and the precision of its products on a CPU.
#[derive(Clone)]
pub struct Parameter {
    values: Tensor,
    gradient: Option<GradientTarget>,
    precision: Precision,
}

/// The sink of one parameter's gradient.
#[derive(Clone)]
pub(super) struct GradientTarget {
    sink: Arc<dyn GradientSink>,
    parameter: usize,
}

impl Parameter {
    /// Returns a parameter without a gradient.
    pub fn constant(values: &Tensor) -> Self {
        Self { values: values.detach(), gradient: None, precision: Precision::F32 }
    }

    /// Returns a variable of the parameter store: training may change it, but it has no sink yet.
    pub fn variable(variable: &Tensor) -> Self {
        Self { values: variable.clone(), gradient: None, precision: Precision::F32 }
    }

    /// Returns a variable whose gradient goes to buffer `parameter` of `sink`.
    pub fn with_gradient_sink(variable: &Tensor, sink: Arc<dyn GradientSink>, parameter: usize) -> Self {
        Self::variable(variable).with_gradient(sink, parameter)
    }

    /// Returns the parameter without a gradient.
    pub fn without_gradient(&self) -> Self {
        Self::constant(&self.values).with_precision(self.precision)
    }

    /// Returns a parameter with these values and this precision, without a gradient.
    pub fn with_values(&self, values: &Tensor) -> Self {
        Self::constant(values).with_precision(self.precision)
    }

    /// Returns the variable with its gradient going to buffer `parameter` of `sink`.
    pub fn with_gradient(&self, sink: Arc<dyn GradientSink>, parameter: usize) -> Self {
        Self { gradient: Some(GradientTarget { sink, parameter }), ..self.clone() }
    }

    /// Sets the precision of its products on a CPU.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Returns the precision of its products on a CPU.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the values; a variable if they are trainable, so that the graph records ops on them.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Returns the sink of its gradient, for an op to keep.
    pub(super) fn gradient(&self) -> Option<GradientTarget> {
        self.gradient.clone()
    }

    /// Returns the values as a tensor of the graph, for ops that take small parameters that way. The
    /// gradient that reaches it is added to the parameter's. On a GPU both are f32.
    ///
    /// # Errors
    /// When the values are not contiguous, or a GPU does not support them.
    pub fn graph_tensor(&self) -> Result<Tensor> {
        match self.gradient() {
            None => Ok(self.values.clone()),
            Some(gradient) => apply([&self.values], Leaf { gradient }),
        }
    }
}

impl GradientTarget {
    /// Calls `add` with the gradient buffer.
    pub(super) fn add(&self, mut add: impl FnMut(&Tensor) -> Result<()>) -> Result<()> {
        self.sink.add(self.parameter, &mut add)
    }
}

/// The identity op, where a gradient leaves the graph.
struct Leaf {
    gradient: GradientTarget,
}

impl Operation<1> for Leaf {
    const NAME: &'static str = "parameter";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(x.values()?.to_vec()), x.shape().clone()))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        copy_argument(x)
    }

    fn backward(&self, [_]: [&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        if gradient.device().is_cuda() {
            self.gradient.add(|sum| add_tensor(sum, gradient))?;
            return Ok([None]);
        }
        let gradient = host_values(gradient)?;
        self.gradient.add(|sum| add_values(sum, &gradient))?;
        Ok([None])
    }
}
