//! A model's tensor as the ops take it: its values, and where its gradient goes if it learns.
//!
//! An op's backward adds a parameter's gradient where it belongs, in place, and gives the graph none: a fresh tensor of
//! the parameter's size for every micro-batch would cost more than the sum itself.

use super::cpu::{add_values, host_values};
use super::cuda::{add_tensor, copied};
use super::graph::apply;
use super::operation::{DeviceArgument, HostArgument, Operation};
use super::product::Precision;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor};
use std::sync::Arc;

/// Takes the gradients of one pass.
pub trait GradientSink: Send + Sync {
    /// Calls `add` with the buffer of parameter `parameter`, which has the parameter's shape, once it is this pass's turn.
    ///
    /// # Errors
    /// Those of `add`, or when a pass before this one failed.
    fn add(&self, parameter: usize, add: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()>;
}

/// Values, what takes their gradient, and how a CPU multiplies by them.
#[derive(Clone)]
pub struct Parameter {
    values: Tensor,
    gradient: Option<Gradient>,
    precision: Precision,
}

/// The way of one parameter's gradient.
#[derive(Clone)]
pub(super) struct Gradient {
    sink: Arc<dyn GradientSink>,
    parameter: usize,
}

impl Parameter {
    /// A tensor that no gradient reaches.
    pub fn frozen(values: &Tensor) -> Self {
        Self { values: values.detach(), gradient: None, precision: Precision::F32 }
    }

    /// A variable as a store holds it: training may change it, and no gradient reaches it yet.
    pub fn variable(variable: &Tensor) -> Self {
        Self { values: variable.clone(), gradient: None, precision: Precision::F32 }
    }

    /// A variable whose gradient goes to place `parameter` of `sink`.
    pub fn trained(variable: &Tensor, sink: Arc<dyn GradientSink>, parameter: usize) -> Self {
        Self::variable(variable).with_gradient(sink, parameter)
    }

    /// The same values, which no gradient reaches.
    pub fn without_gradient(&self) -> Self {
        Self::frozen(&self.values).in_precision(self.precision)
    }

    /// Other values of the same precision, which no gradient reaches.
    pub fn with_values(&self, values: &Tensor) -> Self {
        Self::frozen(values).in_precision(self.precision)
    }

    /// The same variable, whose gradient goes to place `parameter` of `sink`.
    pub fn with_gradient(&self, sink: Arc<dyn GradientSink>, parameter: usize) -> Self {
        Self { gradient: Some(Gradient { sink, parameter }), ..self.clone() }
    }

    /// The same, multiplied in `precision` on a CPU.
    pub fn in_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// How a CPU multiplies by it.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The values. A variable where they learn, so that the graph records what is computed from them.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Its gradient's way, for an op to keep.
    pub(super) fn gradient(&self) -> Option<Gradient> {
        self.gradient.clone()
    }

    /// The values as a tensor of the graph, for ops that take their small parameters so: the gradient that reaches it is
    /// added to the parameter's. On a GPU both are f32.
    ///
    /// # Errors
    /// When the values are not contiguous, or what a GPU does not take.
    pub fn tracked(&self) -> Result<Tensor> {
        match self.gradient() {
            None => Ok(self.values.clone()),
            Some(gradient) => apply([&self.values], Leaf { gradient }),
        }
    }
}

impl Gradient {
    /// Hands `add` the buffer to add to.
    pub(super) fn add(&self, mut add: impl FnMut(&Tensor) -> Result<()>) -> Result<()> {
        self.sink.add(self.parameter, &mut add)
    }
}

/// The identity, where a gradient leaves the graph.
struct Leaf {
    gradient: Gradient,
}

impl Operation<1> for Leaf {
    const NAME: &'static str = "parameter";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(x.values()?.to_vec()), x.shape().clone()))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> Result<(CudaStorage, Shape)> {
        copied(x)
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
