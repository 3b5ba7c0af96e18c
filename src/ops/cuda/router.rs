//! Top-k routing on the GPU. Logits and weights are f32, and expert ids are u32.

use super::arguments::{Op, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Result, Shape, Tensor};

const ROUTE_OP: Op = Op("route");
const SOFTMAX_OP: Op = Op("top_k_softmax");
const ROUTE: Kernel = kernel("route", "router", 128, 0);
const FORWARD: Kernel = Kernel { function: "top_k_softmax_forward", ..ROUTE };
const BACKWARD: Kernel = Kernel { function: "top_k_softmax_backward", ..ROUTE };
/// One block selects the experts of all tokens. Each thread keeps a sum.
const SELECT_THREADS: usize = 1024;
/// Maximum number of routes of such a block, which are in its shared memory.
const SELECT_ROUTES_MAX: usize = 8192;
/// Number of threads per token in the selection of experts.
const WARP: usize = 32;

kernel_params! {
    /// `Route` of `kernels/router.cuh`.
    struct RouteParams {
        logits: u64,
        routes: u64,
        tokens: i64,
        experts: i32,
        top_k: i32,
    }

    /// `SelectExperts` of `kernels/router.cuh`.
    struct SelectParams {
        logits: u64,
        routes: u64,
        weights: u64,
        row_of: u64,
        token_of: u64,
        starts: u64,
        tokens: i32,
        experts: i32,
        top_k: i32,
    }

    /// `TopKSoftmax` of `kernels/router.cuh`.
    struct SoftmaxParams {
        logits: u64,
        routes: u64,
        dweights: u64,
        weights: u64,
        dlogits: u64,
        tokens: i64,
        experts: i32,
        top_k: i32,
    }
}

/// Returns the `top_k` experts of each token. The caller has checked `top_k <= experts < 2^16`.
pub(in crate::ops) fn route(logits: DeviceArgument, top_k: usize) -> Result<(CudaStorage, Shape)> {
    let (tokens, experts) = logits.1.shape().dims2()?;
    let (values, device) = ROUTE_OP.input::<f32>("the logits", logits, &[tokens, experts])?;
    let mut routes = output::<u32>(device, tokens * top_k)?;
    // SAFETY: both buffers outlive the launch, and each warp accesses only the row of its token.
    unsafe {
        launch(device, &[(&ROUTE, tokens.div_ceil(ROUTE.threads / WARP))], |at| RouteParams {
            logits: at.read(&values),
            routes: at.write(&mut routes),
            tokens: tokens as i64,
            experts: experts as i32,
            top_k: top_k as i32,
        })?
    };
    Ok((CudaStorage::wrap_cuda_slice(routes, device.clone()), Shape::from((tokens, top_k))))
}

/// Returns the `top_k` experts of each token, their weights, and the plan of [`super::sort_by_expert`], from
/// one launch; `None` if there are too many tokens or experts for one block.
pub(in crate::ops) fn select_experts(logits: &Tensor, top_k: usize) -> Result<Option<[Tensor; 3]>> {
    let (tokens, experts) = logits.dims2()?;
    let pairs = tokens * top_k;
    if pairs == 0 || pairs > SELECT_ROUTES_MAX || experts > SELECT_THREADS {
        return Ok(None);
    }
    let opened = logits.storage_and_layout();
    let (logits, device) = ROUTE_OP.open_tensor::<f32>("the logits", &opened, &[tokens, experts])?;
    let (mut routes, mut weights) = (output::<u32>(device, pairs)?, output::<f32>(device, pairs)?);
    let len = 2 * pairs + experts + 1;
    let mut plan = output::<u32>(device, len)?;
    let shared_bytes = (pairs + SELECT_THREADS) * size_of::<u32>();
    let kernel = Kernel { function: "select_experts", threads: SELECT_THREADS, shared_bytes, ..ROUTE };
    // SAFETY: all buffers outlive the launch, and `plan` has space for its three parts.
    unsafe {
        launch(device, &[(&kernel, 1)], |at| {
            let (row_of, pair_bytes) = (at.write(&mut plan), (pairs * size_of::<u32>()) as u64);
            SelectParams {
                logits: at.read(&logits),
                routes: at.write(&mut routes),
                weights: at.write(&mut weights),
                row_of,
                token_of: row_of + pair_bytes,
                starts: row_of + 2 * pair_bytes,
                tokens: tokens as i32,
                experts: experts as i32,
                top_k: top_k as i32,
            }
        })?
    };
    Ok(Some([
        tensor(routes, device, (tokens, top_k)),
        tensor(weights, device, (tokens, top_k)),
        tensor(plan, device, len),
    ]))
}

/// Returns the weights of the routed experts.
pub(in crate::ops) fn top_k_softmax_forward(
    logits: DeviceArgument,
    routes: &Tensor,
) -> Result<(CudaStorage, Shape)> {
    let (tokens, experts) = logits.1.shape().dims2()?;
    let top_k = routes.dim(1)?;
    let (values, device) = SOFTMAX_OP.input::<f32>("the logits", logits, &[tokens, experts])?;
    let opened = routes.storage_and_layout();
    let (routes, _) = SOFTMAX_OP.open_tensor::<u32>("the routes", &opened, &[tokens, top_k])?;
    let mut weights = output::<f32>(device, tokens * top_k)?;
    // SAFETY: all buffers outlive the launch, and the kernel reads no logit outside a row.
    unsafe {
        launch(device, &[(&FORWARD, tokens.div_ceil(FORWARD.threads))], |at| SoftmaxParams {
            logits: at.read(&values),
            routes: at.read(&routes),
            weights: at.write(&mut weights),
            tokens: tokens as i64,
            experts: experts as i32,
            top_k: top_k as i32,
            ..SoftmaxParams::default()
        })?
    };
    Ok((CudaStorage::wrap_cuda_slice(weights, device.clone()), Shape::from((tokens, top_k))))
}

/// Returns the gradient of the logits, `[T, experts]`, given the gradient of the weights.
pub(in crate::ops) fn top_k_softmax_backward(
    weights: &Tensor,
    routes: &Tensor,
    dweights: &Tensor,
    experts: usize,
) -> Result<Tensor> {
    let (tokens, top_k) = weights.dims2()?;
    let opened = [weights, routes, dweights].map(Tensor::storage_and_layout);
    let (weights, device) = SOFTMAX_OP.open_tensor::<f32>("the weights", &opened[0], &[tokens, top_k])?;
    let (routes, _) = SOFTMAX_OP.open_tensor::<u32>("the routes", &opened[1], &[tokens, top_k])?;
    let (dweights, _) =
        SOFTMAX_OP.open_tensor::<f32>("the weights' gradient", &opened[2], &[tokens, top_k])?;
    let mut dlogits = device.alloc_zeros::<f32>(tokens * experts)?;
    // SAFETY: all buffers outlive the launch, and the kernel writes no logit outside a row.
    unsafe {
        launch(device, &[(&BACKWARD, tokens.div_ceil(BACKWARD.threads))], |at| SoftmaxParams {
            logits: 0,
            routes: at.read(&routes),
            dweights: at.read(&dweights),
            weights: at.read(&weights),
            dlogits: at.write(&mut dlogits),
            tokens: tokens as i64,
            experts: experts as i32,
            top_k: top_k as i32,
        })?
    };
    Ok(tensor(dlogits, device, (tokens, experts)))
}
