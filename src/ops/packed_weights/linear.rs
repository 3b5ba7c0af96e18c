//! The linear layer with a packed matrix `W`, or with one packed matrix per expert: `y = x · W + b`. Backward
//! pass: `dx = dy · Wᵀ`, and `db` if the bias is trainable.
//!
//! On a GPU `W` is MXFP4 in device memory and `x` is bf16. The result is bit for bit the product by the
//! matrix decoded to bf16.

use super::PackedMatrix;
use crate::ops::buffer::{buffer, zeros};
use crate::ops::cpu::{add_values, host_values};
use crate::ops::cuda::{add_bias_gradient, packed_forward, packed_input_gradient};
use crate::ops::experts::Dispatch;
use crate::ops::graph::{apply, contiguous, is_tracked};
use crate::ops::linear::{repeat_row, sum_rows};
use crate::ops::operation::{DeviceArgument, HostArgument, Operation, first_input_gradient};
use crate::ops::parameter::{GradientTarget, Parameter};
use crate::ops::product::GemmThreads;
use candle_core::{CpuStorage, CudaStorage, Result, Shape, Tensor, bail};
use std::ops::Range;
use std::sync::Arc;

/// Computes the linear layer: `x [T, in]`, optional `bias [out]` → `[T, out]`.
///
/// # Errors
/// When shapes disagree.
pub fn packed_linear(x: &Tensor, weight: &Arc<PackedMatrix>, bias: Option<&Parameter>) -> Result<Tensor> {
    let ((_, k), [experts, input, output]) = (x.dims2()?, weight.shape());
    if experts != 1 || k != input || bias.is_some_and(|b| b.values().dims() != [output]) {
        bail!("packed_linear: x {:?}, weight {:?}", x.dims(), weight.shape());
    }
    apply_linear(x, weight, bias, None)
}

/// Multiplies each row by the matrix of its expert: `x [T·K, in]`, sorted by `plan`, optional `bias [E, out]`
/// → `[T·K, out]`.
///
/// # Errors
/// When shapes disagree.
pub fn packed_grouped_linear(
    x: &Tensor,
    weight: &Arc<PackedMatrix>,
    bias: Option<&Parameter>,
    plan: &Dispatch,
) -> Result<Tensor> {
    let ((rows, k), [experts, input, output]) = (x.dims2()?, weight.shape());
    if rows != plan.rows() || k != input || bias.is_some_and(|b| b.values().dims() != [experts, output]) {
        bail!("packed_grouped_linear: x {:?}, weight {:?}", x.dims(), weight.shape());
    }
    if plan.expert_count() != experts {
        bail!(
            "packed_grouped_linear: weight {:?}, but the dispatch plan has {} experts",
            weight.shape(),
            plan.expert_count()
        );
    }
    apply_linear(x, weight, bias, Some(plan.clone()))
}

fn apply_linear(
    x: &Tensor,
    weight: &Arc<PackedMatrix>,
    bias: Option<&Parameter>,
    plan: Option<Dispatch>,
) -> Result<Tensor> {
    let op = PackedLinear { weight: weight.clone(), bias: bias.and_then(Parameter::gradient), plan };
    match bias {
        Some(bias) => apply([&contiguous(x)?, bias.values()], op),
        None => apply([&contiguous(x)?], op),
    }
}

struct PackedLinear {
    weight: Arc<PackedMatrix>,
    /// Receives the gradient of the bias, if the bias is trainable.
    bias: Option<GradientTarget>,
    /// The rows of each expert. If `None`, the matrix has one expert, and all rows belong to it.
    plan: Option<Dispatch>,
}

impl PackedLinear {
    /// Returns each expert that has rows, with the range of its rows.
    fn groups(&self, rows: usize) -> Result<Vec<(usize, Range<usize>)>> {
        if let Some(plan) = &self.plan { plan.groups(rows) } else { Ok(vec![(0, 0..rows)]) }
    }

    /// Returns the first row of each expert, in GPU memory.
    fn starts(&self) -> Result<Option<Tensor>> {
        self.plan.as_ref().map(Dispatch::starts).transpose()
    }
}

const OP: &str = "packed linear";

/// Inputs: `x`, and an optional bias.
impl<const N: usize> Operation<N> for PackedLinear {
    const NAME: &'static str = OP;

    fn cpu(&self, inputs: [HostArgument; N]) -> Result<(CpuStorage, Shape)> {
        let (x, b) = (inputs[0], inputs.get(1));
        let (rows, n) = (x.shape().dims2()?.0, self.weight.shape()[2]);
        let groups = self.groups(rows)?;
        let mut out = match b {
            None => buffer(rows * n),
            Some(b) => {
                let (b, mut out) = (b.values()?, Vec::with_capacity(rows * n));
                for (expert, rows) in &groups {
                    out.extend(repeat_row(&b[expert * n..(expert + 1) * n], rows.len()));
                }
                out
            }
        };
        self.weight.forward_grouped(&mut out, x.values()?, &groups, b.is_some())?;
        Ok((CpuStorage::F32(out), Shape::from((rows, n))))
    }

    fn cuda(&self, inputs: [DeviceArgument; N]) -> Result<(CudaStorage, Shape)> {
        let (x, b) = (inputs[0], inputs.get(1).copied());
        packed_forward(OP, x, &self.weight, b, self.starts()?.as_ref())
    }

    fn backward(&self, inputs: [&Tensor; N], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        let x = inputs[0];
        if let Some(bias) = &self.bias {
            if x.device().is_cuda() {
                let starts = self.starts()?;
                bias.add(|db| add_bias_gradient(OP, db, grad, starts.as_ref()))?;
            } else {
                let (dy, [experts, _, n]) = (host_values(grad)?, self.weight.shape());
                let mut sums = zeros(experts * n);
                for (expert, rows) in self.groups(x.dim(0)?)? {
                    let sum = sum_rows(GemmThreads::Pool, &dy[rows.start * n..rows.end * n], n);
                    sums[expert * n..(expert + 1) * n].copy_from_slice(&sum);
                }
                bias.add(|db| add_values(db, &sums))?;
            }
        }
        self.input_gradient(x, grad).map(first_input_gradient)
    }
}

impl PackedLinear {
    /// Computes `dx`, if an earlier layer is trainable.
    fn input_gradient(&self, x: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if !is_tracked(x) {
            return Ok(None);
        }
        if x.device().is_cuda() {
            return packed_input_gradient(OP, grad, &self.weight, self.starts()?.as_ref()).map(Some);
        }
        let ((rows, k), n) = (x.dims2()?, self.weight.shape()[2]);
        let (dy, mut dx) = (host_values(grad)?, buffer(rows * k));
        for (expert, rows) in self.groups(rows)? {
            let dy = &dy[rows.start * n..rows.end * n];
            self.weight.input_gradient(expert, &mut dx[rows.start * k..rows.end * k], dy)?;
        }
        Ok(Some(Tensor::from_vec(dx, (rows, k), x.device())?))
    }
}
