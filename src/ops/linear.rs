//! The linear layer: `y = x · W + b` with `x [T, in]`, `W [in, out]` contiguous, `b [out]` optional.
//!
//! Backward pass: `dx = dy · Wᵀ`, `dW = xᵀ · dy`, `db = Σ_t dy_t` in token order. On a GPU `x` and `W` are
//! bf16. `b` and the gradients of trainable parameters are f32.

use super::buffer::{buffer, zeros};
use super::cpu::{add_values, change, for_each_row, host_values};
use super::cuda::{add_bias_gradient, add_weight_gradient, product_forward, product_input_gradient};
use super::graph::{apply, contiguous, is_tracked};
use super::operation::{DeviceArgument, HostArgument, Operation, first_input_gradient};
use super::parameter::{GradientTarget, Parameter};
use super::product::{
    GemmConfig, GemmThreads, Precision, StridedMatrix, backward_product, forward_product_by_copy, product,
};
use super::tiles::panels::Bf16Copies;
use candle_core::{CpuStorage, CudaStorage, DType, Result, Shape, Tensor, bail};
use rayon::prelude::*;

/// Where the rows of each expert begin: all rows have one matrix here.
const ONE_MATRIX: Option<&Tensor> = None;

/// Computes the linear layer. Differentiable in all inputs; gradients are computed only for trainable inputs.
///
/// # Errors
/// When shapes disagree.
pub fn linear(x: &Tensor, weight: &Parameter, bias: Option<&Parameter>) -> Result<Tensor> {
    apply_linear(x, weight, bias, weight.precision(), x.dtype())
}

/// Computes the linear layer in f32, even if the precision of the weight is lower. On a GPU the output is f32
/// too. Router logits and values of a critic need this precision.
///
/// # Errors
/// When shapes disagree.
pub fn linear_f32(x: &Tensor, weight: &Parameter, bias: Option<&Parameter>) -> Result<Tensor> {
    apply_linear(x, weight, bias, Precision::F32, DType::F32)
}

fn apply_linear(
    x: &Tensor,
    weight: &Parameter,
    bias: Option<&Parameter>,
    precision: Precision,
    out: DType,
) -> Result<Tensor> {
    let w = weight.values();
    let ((_, k), (rows, n)) = (x.dims2()?, w.dims2()?);
    let b = bias.map(Parameter::values);
    if k != rows || b.is_some_and(|b| b.dims() != [n]) {
        bail!("linear: x {:?}, weight {:?}, bias {:?}", x.dims(), w.dims(), b.map(Tensor::dims));
    }
    let x = contiguous(x)?;
    let copies = weight.bf16_copies().cloned();
    let (weight, bias) = (weight.gradient(), bias.and_then(Parameter::gradient));
    let op = Linear { weight, bias, copies, means: GemmThreads::Pool.with_precision(precision), out };
    if let Some(b) = b { apply([&x, w, b], op) } else { apply([&x, w], op) }
}

const OP: &str = "linear";

/// A linear layer and the sinks of its gradients.
struct Linear {
    weight: Option<GradientTarget>,
    bias: Option<GradientTarget>,
    copies: Option<Bf16Copies>,
    means: GemmConfig,
    /// The output type on a GPU.
    out: DType,
}

/// Inputs: `x`, the weight and an optional bias.
impl<const N: usize> Operation<N> for Linear {
    const NAME: &'static str = OP;

    fn cpu(&self, inputs: [HostArgument; N]) -> Result<(CpuStorage, Shape)> {
        let (x, w, b) = (inputs[0], inputs[1], inputs.get(2));
        let ((m, k), (_, n)) = (x.shape().dims2()?, w.shape().dims2()?);
        let mut out = if let Some(b) = b { repeat_row(b.values()?, m) } else { buffer(m * n) };
        let w = (w.values()?, self.copies.as_ref(), 0);
        forward_product_by_copy(self.means, &mut out, x.values()?, w, (m, k, n), b.is_some());
        Ok((CpuStorage::F32(out), Shape::from((m, n))))
    }

    fn cuda(&self, inputs: [DeviceArgument; N]) -> Result<(CudaStorage, Shape)> {
        product_forward(OP, inputs[0], inputs[1], inputs.get(2).copied(), ONE_MATRIX, self.out)
    }

    fn backward(&self, inputs: [&Tensor; N], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        self.input_gradient(inputs[0], inputs[1], grad).map(first_input_gradient)
    }
}

impl Linear {
    /// Adds the gradients of trainable parameters. Returns `dx` if an earlier layer is trainable.
    fn input_gradient(&self, x: &Tensor, w: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let ((m, k), (_, n)) = (x.dims2()?, w.dims2()?);
        if x.device().is_cuda() {
            return self.backward_on_device(x, w, &to_bf16(grad)?);
        }
        let dy = host_values(grad)?;
        let dx = if is_tracked(x) {
            let mut dx = buffer(m * k);
            backward_product(self.means, &mut dx, &dy, &host_values(w)?, (m, n, k));
            Some(Tensor::from_vec(dx, (m, k), x.device())?)
        } else {
            None
        };
        if let Some(weight) = &self.weight {
            let xs = host_values(x)?;
            weight.add(|dw| {
                let (x, dy) = (StridedMatrix::column_major(&xs, k), StridedMatrix::row_major(&dy, n));
                if n == 1 {
                    // The column is summed before it is added. The `gemm` crate would add the product of each
                    // row to the previous value, and this value would then affect the rounding.
                    let mut column = buffer(k);
                    product(self.means, &mut column, x, dy, (k, m, n), false);
                    return add_values(dw, &column);
                }
                change(dw, |dw| product(self.means, dw, x, dy, (k, m, n), true))
            })?;
        }
        if let Some(bias) = &self.bias {
            let sums = sum_rows(GemmThreads::Pool, &dy, n);
            bias.add(|db| add_values(db, &sums))?;
        }
        Ok(dx)
    }

    fn backward_on_device(&self, x: &Tensor, w: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dx = is_tracked(x).then(|| product_input_gradient(OP, dy, w, ONE_MATRIX)).transpose()?;
        if let Some(weight) = &self.weight {
            weight.add(|dw| add_weight_gradient(OP, dw, x, dy, ONE_MATRIX))?;
        }
        if let Some(bias) = &self.bias {
            bias.add(|db| add_bias_gradient(OP, db, dy, ONE_MATRIX))?;
        }
        Ok(dx)
    }
}

/// Converts a gradient to bf16, the input type of products on a GPU.
pub(super) fn to_bf16(gradient: &Tensor) -> Result<Tensor> {
    // On a GPU candle cannot convert an empty tensor.
    match gradient.elem_count() {
        0 => Tensor::zeros(gradient.shape(), DType::BF16, gradient.device()),
        _ => gradient.to_dtype(DType::BF16),
    }
}

/// Returns `rows` copies of `row`. A layer adds its product to copies of its bias.
pub(super) fn repeat_row(row: &[f32], rows: usize) -> Vec<f32> {
    let mut out = buffer(row.len() * rows);
    for_each_row(&mut out, row.len(), row.len(), |_, out| out.copy_from_slice(row));
    out
}

/// Returns the sum of each column, added in row order.
pub(super) fn sum_rows(spread: GemmThreads, values: &[f32], width: usize) -> Vec<f32> {
    let mut sums = zeros(width);
    let columns = width.div_ceil(spread.threads(values.len())).max(1);
    let add = |(part, sums): (usize, &mut [f32])| {
        for row in values.chunks_exact(width) {
            sums.iter_mut().zip(&row[part * columns..]).for_each(|(sum, &x)| *sum += x);
        }
    };
    if columns < width {
        sums.par_chunks_mut(columns).enumerate().for_each(add);
    } else {
        sums.chunks_mut(columns).enumerate().for_each(add);
    }
    sums
}
