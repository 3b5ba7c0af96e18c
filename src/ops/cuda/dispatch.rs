//! Dispatch of tokens to experts on the GPU, and the weighted sum of expert outputs. Rows are bf16, weights
//! f32, and the plan u32.

use super::arguments::{Op, from_storage, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaStorage;
use candle_core::{DType, Result, Shape, Tensor, bail};
use half::bf16;

/// Number of routed experts that one block sorts.
const CHUNK: usize = 256;
const SORT_COUNT: Kernel = kernel("sort_count", "dispatch", 128, CHUNK * 4);
const SORT_PLACE: Kernel = kernel("sort_place", "dispatch", 1024, 1024 * 4);
const SORT_SCATTER: Kernel = Kernel { function: "sort_scatter", ..SORT_COUNT };
const DISPATCH_FORWARD: Kernel = kernel("dispatch_forward", "dispatch", 128, 128 / 32 * 4);
const DISPATCH_BACKWARD: Kernel = Kernel { function: "dispatch_backward", ..DISPATCH_FORWARD };
const COMBINE_FORWARD: Kernel = Kernel { function: "combine_forward", ..DISPATCH_FORWARD };
const COMBINE_BACKWARD: Kernel = Kernel { function: "combine_backward", ..DISPATCH_FORWARD };

kernel_params! {
    /// `SortRoutes` of `kernels/dispatch.cuh`.
    struct SortParams {
        routes: u64,
        counts: u64,
        row_of: u64,
        token_of: u64,
        starts: u64,
        pairs: i32,
        experts: i32,
        top_k: i32,
    }

    /// `Dispatch` of `kernels/dispatch.cuh`.
    struct Params {
        x: u64,
        dy: u64,
        weights: u64,
        rows: u64,
        out: u64,
        dweights: u64,
        width: i32,
        top_k: i32,
        residual: u64,
    }
}

/// Computes the plan of [`crate::ops::Dispatch`] for the routed experts `routes [T, K]`. The plan has the
/// shape `[2·T·K + experts + 1]`. Routed experts must be below `experts`. They are not checked, because a
/// check would wait for the GPU.
pub(in crate::ops) fn sort_by_expert(routes: DeviceArgument, experts: usize) -> Result<(CudaStorage, Shape)> {
    const OP: Op = Op("sort_by_expert");
    let (tokens, top_k) = routes.1.shape().dims2()?;
    let (view, device) = OP.input::<u32>("the routes", routes, &[tokens, top_k])?;
    let pairs = tokens * top_k;
    if pairs > i32::MAX as usize {
        bail!("dispatch: {tokens} tokens with {top_k} slots are not supported on a GPU; use smaller batches");
    }
    let len = 2 * pairs + experts + 1;
    let mut plan = device.alloc_zeros::<u32>(len)?;
    if pairs > 0 {
        let chunks = pairs.div_ceil(CHUNK);
        let mut counts = output::<u32>(device, chunks * experts)?;
        let kernels = [(&SORT_COUNT, chunks), (&SORT_PLACE, 1), (&SORT_SCATTER, chunks)];
        let pair_bytes = (pairs * size_of::<u32>()) as u64;
        // SAFETY: all buffers outlive the launches, each launch fills the input of the next, and `plan` has
        // space for its three parts.
        unsafe {
            launch(device, &kernels, |at| {
                let row_of = at.write(&mut plan);
                SortParams {
                    routes: at.read(&view),
                    counts: at.write(&mut counts),
                    row_of,
                    token_of: row_of + pair_bytes,
                    starts: row_of + 2 * pair_bytes,
                    pairs: pairs as i32,
                    experts: experts as i32,
                    top_k: top_k as i32,
                }
            })?;
        }
    }
    Ok((CudaStorage::wrap_cuda_slice(plan, device.clone()), Shape::from(len)))
}

/// The inputs of a kernel.
struct Operands<'a> {
    x: DeviceArgument<'a>,
    weights: Option<DeviceArgument<'a>>,
    /// Indices of the rows of `x` that the kernel reads.
    rows: &'a Tensor,
    top_k: usize,
    residual: Option<DeviceArgument<'a>>,
}

/// Launches a kernel that writes `blocks` rows, one per thread block.
fn run(op: Op, kernel: &Kernel, operands: &Operands, blocks: usize) -> Result<CudaStorage> {
    let Operands { x, weights, rows, top_k, residual } = *operands;
    let width = x.1.shape().dims2()?.1;
    let (xs, device) = op.input::<bf16>("x", x, x.1.dims())?;
    op.check_width(width)?;
    let opened = rows.storage_and_layout();
    let (rows, _) = op.open_tensor::<u32>("the plan", &opened, rows.dims())?;
    let weights =
        weights.map(|weights| op.input::<f32>("the weights", weights, &[blocks, top_k])).transpose()?;
    let residual =
        residual.map(|added| op.input::<bf16>("the residual", added, &[blocks, width])).transpose()?;
    let mut out = output::<bf16>(device, blocks * width)?;
    // SAFETY: all buffers outlive the launch, `rows` are indices of `x`, and each block writes its own
    // row of `out`.
    unsafe {
        launch(device, &[(kernel, blocks)], |at| Params {
            x: at.read(&xs),
            weights: weights.as_ref().map_or(0, |(weights, _)| at.read(weights)),
            rows: at.read(&rows),
            out: at.write(&mut out),
            width: width as i32,
            top_k: top_k as i32,
            residual: residual.as_ref().map_or(0, |(residual, _)| at.read(residual)),
            ..Params::default()
        })?
    };
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// Returns rows `token_of [T·K]` of `x [T, H]`.
pub(in crate::ops) fn dispatch_forward(x: DeviceArgument, token_of: &Tensor) -> Result<(CudaStorage, Shape)> {
    let (rows, width) = (token_of.dim(0)?, x.1.shape().dims2()?.1);
    let operands = Operands { x, weights: None, rows: token_of, top_k: 1, residual: None };
    Ok((run(Op("dispatch"), &DISPATCH_FORWARD, &operands, rows)?, Shape::from((rows, width))))
}

/// Returns the gradient of each token, `[T, H]`: the sum of `dy [T·K, H]` over the slots of the token.
/// `row_of [T·K]` has the rows of the slots.
pub(in crate::ops) fn dispatch_backward(dy: &Tensor, row_of: &Tensor, top_k: usize) -> Result<Tensor> {
    const OP: Op = Op("dispatch");
    let (rows, width) = dy.dims2()?;
    let tokens = rows / top_k;
    let opened = dy.storage_and_layout();
    let x = OP.gpu_storage("the output's gradient", &opened, DType::BF16, &[rows, width])?;
    let operands = Operands { x, weights: None, rows: row_of, top_k, residual: None };
    let out = run(OP, &DISPATCH_BACKWARD, &operands, tokens)?;
    Ok(from_storage(out, (tokens, width)))
}

/// Returns the sum of `x [T·K, H]` over the slots of each token, weighted by `weights [T, K]`: `[T, H]`.
pub(in crate::ops) fn combine_forward(
    x: DeviceArgument,
    weights: DeviceArgument,
    row_of: &Tensor,
) -> Result<(CudaStorage, Shape)> {
    let ((tokens, top_k), width) = (weights.1.shape().dims2()?, x.1.shape().dims2()?.1);
    let operands = Operands { x, weights: Some(weights), rows: row_of, top_k, residual: None };
    Ok((run(Op("combine"), &COMBINE_FORWARD, &operands, tokens)?, Shape::from((tokens, width))))
}

/// Returns `residual [T, H]` plus the sums of [`combine_forward`], which are rounded first.
pub(in crate::ops) fn combine_and_add(
    [x, weights, residual]: [&Tensor; 3],
    row_of: &Tensor,
) -> Result<Tensor> {
    const OP: Op = Op("combine");
    let (tokens, top_k) = weights.dims2()?;
    let opened = [x, weights, residual].map(Tensor::storage_and_layout);
    let x = OP.gpu_storage("x", &opened[0], DType::BF16, x.dims())?;
    let weights = OP.gpu_storage("the weights", &opened[1], DType::F32, &[tokens, top_k])?;
    let added = OP.gpu_storage("the residual", &opened[2], DType::BF16, residual.dims())?;
    let operands = Operands { x, weights: Some(weights), rows: row_of, top_k, residual: Some(added) };
    Ok(from_storage(run(OP, &COMBINE_FORWARD, &operands, tokens)?, residual.dims()))
}

/// Returns the gradients of `x [T·K, H]` and `weights [T, K]`, given the gradient `dy [T, H]` of the weighted
/// sums.
pub(in crate::ops) fn combine_backward(
    [x, weights, dy]: [&Tensor; 3],
    row_of: &Tensor,
) -> Result<(Tensor, Tensor)> {
    const OP: Op = Op("combine");
    let ((rows, width), (tokens, top_k)) = (x.dims2()?, weights.dims2()?);
    let opened = [x, weights, dy, row_of].map(Tensor::storage_and_layout);
    let (x, device) = OP.open_tensor::<bf16>("x", &opened[0], &[tokens * top_k, width])?;
    let (weights, _) = OP.open_tensor::<f32>("the weights", &opened[1], &[tokens, top_k])?;
    let (dy, _) = OP.open_tensor::<bf16>("the output's gradient", &opened[2], &[tokens, width])?;
    let (row_of, _) = OP.open_tensor::<u32>("the plan", &opened[3], &[rows])?;
    OP.check_width(width)?;
    let mut dx = output::<bf16>(device, rows * width)?;
    let mut dweights = output::<f32>(device, rows)?;
    // SAFETY: all buffers outlive the launch, and `row_of` has every row of `x` and `dx` once.
    unsafe {
        launch(device, &[(&COMBINE_BACKWARD, rows)], |at| Params {
            x: at.read(&x),
            dy: at.read(&dy),
            weights: at.read(&weights),
            rows: at.read(&row_of),
            out: at.write(&mut dx),
            dweights: at.write(&mut dweights),
            width: width as i32,
            top_k: top_k as i32,
            residual: 0,
        })?
    };
    Ok((tensor(dx, device, (rows, width)), tensor(dweights, device, (tokens, top_k))))
}
