//! Low-rank corrections on the GPU, `y + s · (x · A) · B`, computed by the product kernels. Factors, rows and
//! `u = s · x · A` are bf16. The second product adds `y` to its sums, and rounds once to the type of `y`.

use super::arguments::{Op, from_storage};
use super::product::{
    Epilogue, add_weight_gradient, product_input_gradient, product_with_epilogue, scaled_input_gradient,
};
use crate::ops::graph::is_tracked;
use crate::ops::operation::DeviceArgument;
use crate::ops::parameter::GradientTarget;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor};

const OP: Op = Op("low rank");

/// Returns `u [T, r]`.
fn project_down(
    x: DeviceArgument,
    a: &Tensor,
    scale: f32,
    starts: Option<&Tensor>,
) -> Result<(CudaStorage, Shape)> {
    let opened = a.storage_and_layout();
    let a = OP.gpu_storage("the first factor", &opened, DType::BF16, a.dims())?;
    product_with_epilogue(OP, x, a, starts, &Epilogue { scale, ..Epilogue::default() }, DType::BF16)
}

/// Computes `y + s · (x · A) · B` in the type of `y`, bf16 or f32.
pub(in crate::ops) fn low_rank_forward(
    y: DeviceArgument,
    x: DeviceArgument,
    [a, b]: [&Tensor; 2],
    scale: f32,
    starts: Option<&Tensor>,
) -> Result<(CudaStorage, Shape)> {
    let (u, shape) = project_down(x, a, scale, starts)?;
    let opened = b.storage_and_layout();
    let b = OP.gpu_storage("the second factor", &opened, DType::BF16, b.dims())?;
    let finish = Epilogue { addend: Some(y), ..Epilogue::default() };
    product_with_epilogue(OP, (&u, &Layout::contiguous(shape)), b, starts, &finish, y.0.dtype())
}

/// Adds the gradients of trainable factors for bf16 `dy`. Returns `dx` if an earlier layer is trainable.
pub(in crate::ops) fn low_rank_backward(
    [x, dy]: [&Tensor; 2],
    [a, b]: [&Tensor; 2],
    [da, db]: [Option<&GradientTarget>; 2],
    scale: f32,
    starts: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let du = scaled_input_gradient(OP.0, dy, b, starts, scale)?;
    if let Some(da) = da {
        da.add(|sum| add_weight_gradient(OP.0, sum, x, &du, starts))?;
    }
    if let Some(db) = db {
        let opened = x.storage_and_layout();
        let (u, shape) =
            project_down(OP.gpu_storage("x", &opened, DType::BF16, x.dims())?, a, scale, starts)?;
        let u = from_storage(u, shape);
        db.add(|sum| add_weight_gradient(OP.0, sum, &u, dy, starts))?;
    }
    is_tracked(x).then(|| product_input_gradient(OP.0, &du, a, starts)).transpose()
}
