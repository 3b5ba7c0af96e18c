//! A tensor of a model as an argument of ops: its values and, if it is trainable, the sink of its gradient.
//!
//! The backward pass of an op adds the gradient of a parameter to the buffer of the sink, in place. The graph
//! gets no gradient of the parameter, because a new tensor of its size per micro-batch would cost more than
//! the addition.

use super::cpu::{add_values, host_values};
use super::cuda::{add_tensor, copy_argument};
use super::graph::apply;
use super::operation::{DeviceArgument, HostArgument, Operation};
use super::product::Precision;
use super::tiles::panels::Bf16Copies;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor};
use std::sync::Arc;

/// Receives the gradients of one pass.
pub trait GradientSink: Send + Sync {
    /// Waits until it is the turn of this pass. Then calls `add` with the gradient buffer of `parameter`,
    /// which has the shape of the parameter.
    ///
    /// # Errors
    /// Errors of `add`, and when an earlier pass failed.
    fn add(&self, parameter: usize, add: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()>;
}

/// A tensor of a model: its values, the sink of its gradient, and the precision of matrix products by it on a
/// CPU.
#[derive(Clone)]
pub struct Parameter {
    values: Tensor,
    gradient: Option<GradientTarget>,
    precision: Precision,
    bf16_copies: Option<Bf16Copies>,
}

/// The gradient buffer of one parameter: the sink that has the buffer, and the buffer's index.
#[derive(Clone)]
pub(super) struct GradientTarget {
    sink: Arc<dyn GradientSink>,
    parameter: usize,
}

impl Parameter {
    /// Returns a parameter without a gradient.
    pub fn constant(values: &Tensor) -> Self {
        Self { values: values.detach(), gradient: None, precision: Precision::F32, bf16_copies: None }
    }

    /// Returns a parameter that training may change, but that has no gradient sink yet. The parameter store
    /// has such parameters.
    pub fn variable(variable: &Tensor) -> Self {
        Self { values: variable.clone(), gradient: None, precision: Precision::F32, bf16_copies: None }
    }

    /// Returns a parameter whose gradient goes to buffer `parameter` of `sink`.
    pub fn with_gradient_sink(variable: &Tensor, sink: Arc<dyn GradientSink>, parameter: usize) -> Self {
        Self::variable(variable).with_gradient(sink, parameter)
    }

    /// Returns the parameter without a gradient.
    pub fn without_gradient(&self) -> Self {
        Self { values: self.values.detach(), gradient: None, ..self.clone() }
    }

    /// Returns a parameter with `values` and the precision of this one, without a gradient.
    pub fn with_values(&self, values: &Tensor) -> Self {
        Self::constant(values).with_precision(self.precision)
    }

    /// Returns a copy of the parameter whose gradient goes to buffer `parameter` of `sink`.
    pub fn with_gradient(&self, sink: Arc<dyn GradientSink>, parameter: usize) -> Self {
        Self { gradient: Some(GradientTarget { sink, parameter }), ..self.clone() }
    }

    /// Sets the precision of matrix products by this parameter on a CPU.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Returns the parameter with bf16 copies of its matrices, if their products are in bf16. The first
    /// product of few rows makes a copy. The values must not change as long as the parameter is used.
    pub fn with_bf16_copies(self) -> Self {
        let matrices = match self.values.dims() {
            [_, _] => 1,
            [experts, _, _] => *experts,
            _ => 0,
        };
        let has_copies =
            self.precision == Precision::Bf16Dot && self.values.device().is_cpu() && matrices > 0;
        Self { bf16_copies: if has_copies { Bf16Copies::new(matrices) } else { None }, ..self }
    }

    /// Returns the bf16 copies of the matrices, if the parameter has any.
    pub(super) fn bf16_copies(&self) -> Option<&Bf16Copies> {
        self.bf16_copies.as_ref()
    }

    /// Returns the precision of matrix products by this parameter on a CPU.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the values. Trainable values are a variable, so that the graph records ops on them.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Returns the target of the gradient. An op keeps the target for its backward pass.
    pub(super) fn gradient(&self) -> Option<GradientTarget> {
        self.gradient.clone()
    }

    /// Returns the values as a tensor of the graph, for ops whose small parameters are inputs. The gradient
    /// of this tensor is added to the gradient of the parameter. On a GPU both gradients are f32.
    ///
    /// # Errors
    /// When the values are not contiguous, or the GPU does not support their type.
    pub fn graph_tensor(&self) -> Result<Tensor> {
        match self.gradient() {
            None => Ok(self.values.clone()),
            Some(gradient) => apply([&self.values], ParameterLeaf { gradient }),
        }
    }
}

impl GradientTarget {
    /// Calls `add` with the gradient buffer of the parameter.
    pub(super) fn add(&self, mut add: impl FnMut(&Tensor) -> Result<()>) -> Result<()> {
        self.sink.add(self.parameter, &mut add)
    }
}

/// The identity op, whose backward pass moves a gradient from the graph to a sink.
struct ParameterLeaf {
    gradient: GradientTarget,
}

impl Operation<1> for ParameterLeaf {
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
