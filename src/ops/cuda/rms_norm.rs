//! RMS normalisation on the GPU: `x [T, H]` is bf16, `w [H]` f32.

use super::arguments::{Op, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Result, Shape, Tensor};
use half::bf16;

const OP: Op = Op("rms_norm");
/// Shared memory has two sums per warp.
const SHARED_BYTES: usize = 2 * 128 / 32 * size_of::<f32>();
const FORWARD: Kernel = kernel("rms_norm_forward", "rms_norm", 128, SHARED_BYTES);
const SUM: Kernel = Kernel { function: "sum_norm", ..FORWARD };
const BACKWARD: Kernel = Kernel { function: "rms_norm_backward", ..FORWARD };
const WEIGHT: Kernel = Kernel { function: "rms_norm_weight", shared_bytes: 0, ..FORWARD };
const WEIGHT_SUM: Kernel = Kernel { function: "rms_norm_weight_sum", ..WEIGHT };
/// Number of rows per block in the gradient of the weight.
const CHUNK_ROWS: usize = 64;

kernel_params! {
    /// `RmsNorm` of `kernels/row_ops.cuh`.
    struct Params {
        x: u64,
        weight: u64,
        dy: u64,
        out: u64,
        inverse_rms: u64,
        width: i32,
        eps: f32,
    }

    /// `SumNorm` of `kernels/row_ops.cuh`.
    struct SumParams {
        x: u64,
        y: u64,
        weight: u64,
        sum: u64,
        out: u64,
        width: i32,
        eps: f32,
    }

    /// `RmsNormWeight` of `kernels/row_ops.cuh`.
    struct WeightParams {
        x: u64,
        dy: u64,
        inverse_rms: u64,
        parts: u64,
        dweight: u64,
        rows: i64,
        width: i32,
    }
}

/// Returns `y`.
pub(in crate::ops) fn rms_norm_forward(
    x: DeviceArgument,
    weight: DeviceArgument,
    eps: f32,
) -> Result<(CudaStorage, Shape)> {
    let (rows, width) = x.1.shape().dims2()?;
    let (xs, device) = OP.input::<bf16>("x", x, &[rows, width])?;
    let (weights, _) = OP.input::<f32>("the weight", weight, &[width])?;
    OP.check_width(width)?;
    let mut out = output::<bf16>(device, rows * width)?;
    // SAFETY: all buffers outlive the launch, and each block accesses only its row.
    unsafe {
        launch(device, &[(&FORWARD, rows)], |at| Params {
            x: at.read(&xs),
            weight: at.read(&weights),
            out: at.write(&mut out),
            width: width as i32,
            eps,
            ..Params::default()
        })?
    };
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((rows, width))))
}

/// Returns `x + y` and its norm. Both have the bits of separate launches.
pub(in crate::ops) fn sum_norm([x, y, weight]: [&Tensor; 3], eps: f32) -> Result<[Tensor; 2]> {
    let (rows, width) = x.dims2()?;
    let opened = [x, y, weight].map(Tensor::storage_and_layout);
    let (x, device) = OP.open_tensor::<bf16>("x", &opened[0], &[rows, width])?;
    let (y, _) = OP.open_tensor::<bf16>("what is added to x", &opened[1], &[rows, width])?;
    let (weight, _) = OP.open_tensor::<f32>("the weight", &opened[2], &[width])?;
    OP.check_width(width)?;
    let mut sum = output::<bf16>(device, rows * width)?;
    let mut out = output::<bf16>(device, rows * width)?;
    // SAFETY: all buffers outlive the launch, and each block accesses only its row.
    unsafe {
        launch(device, &[(&SUM, rows)], |at| SumParams {
            x: at.read(&x),
            y: at.read(&y),
            weight: at.read(&weight),
            sum: at.write(&mut sum),
            out: at.write(&mut out),
            width: width as i32,
            eps,
        })?
    };
    Ok([sum, out].map(|rows_of| tensor(rows_of, device, (rows, width))))
}

/// Returns the gradient of `x` for `dy`, and the gradient of the weight if the weight is trainable.
pub(in crate::ops) fn rms_norm_backward(
    [x, weight, dy]: [&Tensor; 3],
    eps: f32,
    weight_learns: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (rows, width) = x.dims2()?;
    let opened = [x, weight, dy].map(Tensor::storage_and_layout);
    let (x, device) = OP.open_tensor::<bf16>("x", &opened[0], &[rows, width])?;
    let (weight, _) = OP.open_tensor::<f32>("the weight", &opened[1], &[width])?;
    let (dy, _) = OP.open_tensor::<bf16>("the output's gradient", &opened[2], &[rows, width])?;
    OP.check_width(width)?;
    let mut dx = output::<bf16>(device, rows * width)?;
    let mut dweight = device.alloc_zeros::<f32>(if weight_learns { width } else { 0 })?;
    let mut inverse_rms = output::<f32>(device, rows)?;
    // SAFETY: all buffers outlive the launch, and each block accesses only its row.
    unsafe {
        launch(device, &[(&BACKWARD, rows)], |at| Params {
            x: at.read(&x),
            weight: at.read(&weight),
            dy: at.read(&dy),
            out: at.write(&mut dx),
            inverse_rms: at.write(&mut inverse_rms),
            width: width as i32,
            eps,
        })?;
    }
    if weight_learns && rows > 0 {
        let chunks = rows.div_ceil(CHUNK_ROWS);
        let mut parts = output::<f32>(device, chunks * width)?;
        let blocks = chunks * (width / 2).div_ceil(WEIGHT.threads);
        let kernels = [(&WEIGHT, blocks), (&WEIGHT_SUM, width.div_ceil(WEIGHT_SUM.threads))];
        // SAFETY: all buffers outlive both launches. The first launch fills `parts`, which the second reads.
        unsafe {
            launch(device, &kernels, |at| WeightParams {
                x: at.read(&x),
                dy: at.read(&dy),
                inverse_rms: at.read(&inverse_rms),
                parts: at.write(&mut parts),
                dweight: at.write(&mut dweight),
                rows: rows as i64,
                width: width as i32,
            })?;
        }
    }
    let dweight = weight_learns.then(|| tensor(dweight, device, width));
    Ok((tensor(dx, device, (rows, width)), dweight))
}
