//! In-place updates of weights on the GPU. Values are f32, except 8-bit codes and the bf16 weights of the
//! forward pass.

use super::arguments::{Op, output};
use super::launch::{Addresses, kernel_params, launch};
use crate::ops::adamw_8bit::{BLOCK, Moment};
use crate::ops::argument::Argument;
use crate::ops::optimizer::AdamW;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DeviceRepr};
use candle_core::{DType, Result, Tensor};
use half::bf16;

const OP: Op = Op("optimizer");
const ADAMW: Kernel = kernel("optimizer_adamw", "optimizer", 256, 0);
const SGD: Kernel = Kernel { function: "optimizer_sgd", ..ADAMW };
const MOMENTUM: Kernel = Kernel { function: "optimizer_momentum", ..ADAMW };
const SCALE: Kernel = Kernel { function: "optimizer_scale", ..ADAMW };
const ROUND: Kernel = Kernel { function: "optimizer_round_to_bf16", ..ADAMW };
const SQUARES: Kernel =
    Kernel { function: "optimizer_squares", shared_bytes: 256 * size_of::<f64>(), ..ADAMW };
const SUM: Kernel =
    Kernel { function: "optimizer_sum", threads: 1024, shared_bytes: 1024 * size_of::<f64>(), ..ADAMW };
/// Updates weights by AdamW with 8-bit moments. Shared memory has both code maps.
const ADAMW_8BIT: Kernel = kernel("adamw_8bit", "adamw_8bit", 256, 2 * 2 * 256 * size_of::<f32>());
/// Number of values per thread.
const VALUES: usize = 4;
/// Number of values whose squares one thread block adds.
const CHUNK: usize = 8192;
/// Number of 8-bit code blocks that one thread block updates: four per warp, eight warps.
const CODE_BLOCKS: usize = 4 * 256 / 32;

kernel_params! {
    /// `AdamWStep` of `kernels/optimizer.cuh`.
    struct Step {
        shrink: f32,
        one_minus_beta1: f32,
        beta2: f32,
        one_minus_beta2: f32,
        rate: f32,
        root_correction: f32,
        eps: f32,
    }

    /// `AdamW` of `kernels/optimizer.cuh`.
    struct AdamWParams {
        weights: u64,
        first: u64,
        second: u64,
        gradient: u64,
        count: i64,
        step: Step,
    }

    /// `Sgd` of `kernels/optimizer.cuh`.
    struct SgdParams {
        weights: u64,
        gradient: u64,
        count: i64,
        shrink: f32,
        rate: f32,
    }

    /// `Momentum` of `kernels/optimizer.cuh`.
    struct MomentumParams {
        buffer: u64,
        gradient: u64,
        count: i64,
        momentum: f32,
    }

    /// `Scale` of `kernels/optimizer.cuh`.
    struct ScaleParams {
        x: u64,
        count: i64,
        factor: f32,
    }

    /// `RoundToBf16` of `kernels/optimizer.cuh`.
    struct RoundParams {
        x: u64,
        out: u64,
        count: i64,
    }

    /// `SumOfSquares` of `kernels/optimizer.cuh`.
    struct SumParams {
        x: u64,
        parts: u64,
        sum: u64,
        count: i64,
    }

    /// `AdamW8Bit` of `kernels/optimizer.cuh`.
    struct AdamW8BitParams {
        maps: u64,
        weights: u64,
        first_codes: u64,
        first_scales: u64,
        second_codes: u64,
        second_scales: u64,
        gradient: u64,
        count: i64,
        step: Step,
    }
}

impl From<&AdamW> for Step {
    fn from(step: &AdamW) -> Self {
        let AdamW { shrink, one_minus_beta1, beta2, one_minus_beta2, rate, root_correction, eps } = *step;
        Self { shrink, one_minus_beta1, beta2, one_minus_beta2, rate, root_correction, eps }
    }
}

/// Checks the element type and the shape of a tensor that is changed in place.
fn check(name: &str, x: &Tensor, dtype: DType, shape: &[usize]) -> Result<()> {
    Argument { op: OP.0, name, dtype: x.dtype(), layout: x.layout() }.check(dtype, shape)
}

/// Calls `f` with the values of `changed` and of `read`.
fn edit_by(
    (name, changed): (&str, &Tensor),
    read: &Tensor,
    f: impl FnOnce(&CudaDevice, &mut CudaViewMut<f32>, &CudaView<f32>) -> Result<()>,
) -> Result<()> {
    check(name, changed, DType::F32, changed.dims())?;
    let opened = read.storage_and_layout();
    let (values, _) = OP.open_tensor::<f32>("the gradient", &opened, changed.dims())?;
    OP.edit(changed, |device, changed| f(device, changed, &values))
}

/// Launches a kernel that processes [`VALUES`] values per thread.
///
/// # Safety
/// As for [`launch`].
unsafe fn for_each<'m, P: DeviceRepr>(
    device: &CudaDevice,
    kernel: &Kernel,
    count: usize,
    argument: impl for<'s> FnOnce(&mut Addresses<'s, 'm>) -> P,
) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { launch(device, &[(kernel, count.div_ceil(kernel.threads * VALUES))], argument) }
}

/// Updates weights by AdamW, as [`crate::ops::optimizer::adamw`] does.
pub(in crate::ops) fn adamw(
    weights: &Tensor,
    [first, second]: [&Tensor; 2],
    gradient: &Tensor,
    step: &AdamW,
) -> Result<()> {
    check("the first moment", first, DType::F32, weights.dims())?;
    check("the second moment", second, DType::F32, weights.dims())?;
    edit_by(("weights", weights), gradient, |device, weights, gradient| {
        OP.edit(first, |_, first: &mut CudaViewMut<f32>| {
            OP.edit(second, |_, second: &mut CudaViewMut<f32>| {
                let count = weights.len();
                // SAFETY: all four buffers outlive the launch and have the same number of values.
                unsafe {
                    for_each(device, &ADAMW, count, |at| AdamWParams {
                        weights: at.write(weights),
                        first: at.write(first),
                        second: at.write(second),
                        gradient: at.read(gradient),
                        count: count as i64,
                        step: step.into(),
                    })
                }
            })
        })
    })
}

/// Updates weights by SGD, as [`crate::ops::optimizer::sgd`] does.
pub(in crate::ops) fn sgd(weights: &Tensor, gradient: &Tensor, shrink: f32, rate: f32) -> Result<()> {
    edit_by(("weights", weights), gradient, |device, weights, gradient| {
        let count = weights.len();
        // SAFETY: both buffers outlive the launch and have the same number of values.
        unsafe {
            for_each(device, &SGD, count, |at| SgdParams {
                weights: at.write(weights),
                gradient: at.read(gradient),
                count: count as i64,
                shrink,
                rate,
            })
        }
    })
}

/// Updates the momentum buffer, as [`crate::ops::optimizer::update_momentum`] does.
pub(in crate::ops) fn update_momentum(buffer: &Tensor, gradient: &Tensor, momentum: f32) -> Result<()> {
    edit_by(("the buffer", buffer), gradient, |device, buffer, gradient| {
        let count = buffer.len();
        // SAFETY: both buffers outlive the launch and have the same number of values.
        unsafe {
            for_each(device, &MOMENTUM, count, |at| MomentumParams {
                buffer: at.write(buffer),
                gradient: at.read(gradient),
                count: count as i64,
                momentum,
            })
        }
    })
}

/// Multiplies `x` by `factor`, as [`crate::ops::optimizer::scale`] does.
pub(in crate::ops) fn scale(x: &Tensor, factor: f32) -> Result<()> {
    check("x", x, DType::F32, x.dims())?;
    OP.edit(x, |device, x: &mut CudaViewMut<f32>| {
        let count = x.len();
        // SAFETY: the buffer outlives the launch.
        unsafe {
            for_each(device, &SCALE, count, |at| ScaleParams { x: at.write(x), count: count as i64, factor })
        }
    })
}

/// Writes f32 `masters`, rounded to bf16, to `copy`, the weights of the forward pass.
pub(in crate::ops) fn round_into(masters: &Tensor, copy: &Tensor) -> Result<()> {
    check("the copy", copy, DType::BF16, masters.dims())?;
    let opened = masters.storage_and_layout();
    let (x, _) = OP.open_tensor::<f32>("the masters", &opened, masters.dims())?;
    OP.edit(copy, |device, copy: &mut CudaViewMut<bf16>| {
        let count = copy.len();
        // SAFETY: both buffers outlive the launch and have the same number of values.
        unsafe {
            for_each(device, &ROUND, count, |at| RoundParams {
                x: at.read(&x),
                out: at.write(copy),
                count: count as i64,
            })
        }
    })
}

/// Returns the sum of squares, as [`crate::ops::optimizer::sum_of_squares`] does. The order of the additions
/// depends only on the length.
pub(in crate::ops) fn sum_of_squares(x: &Tensor) -> Result<f64> {
    let opened = x.storage_and_layout();
    let (x, device) = OP.open_tensor::<f32>("x", &opened, x.dims())?;
    if x.is_empty() {
        return Ok(0.0);
    }
    let chunks = x.len().div_ceil(CHUNK);
    let (mut parts, mut sum) = (output::<f64>(device, chunks)?, output::<f64>(device, 1)?);
    // SAFETY: all buffers outlive both launches. The first launch fills `parts`, which the second reads.
    unsafe {
        launch(device, &[(&SQUARES, chunks), (&SUM, 1)], |at| SumParams {
            x: at.read(&x),
            parts: at.write(&mut parts),
            sum: at.write(&mut sum),
            count: x.len() as i64,
        })?
    };
    Ok(device.clone_dtoh(&sum)?[0])
}

/// Updates weights by AdamW with 8-bit moments, as [`crate::ops::adamw_8bit::adamw_8bit`] does. `maps` has
/// the code values of the first moment and the bounds between them, then those of the second moment.
pub(in crate::ops) fn adamw_8bit(
    weights: &Tensor,
    [first, second]: [Moment; 2],
    gradient: &Tensor,
    step: &AdamW,
    maps: &[[f32; 256]; 4],
) -> Result<()> {
    let blocks = weights.elem_count().div_ceil(BLOCK);
    for moment in [first, second] {
        check("codes", moment.codes, DType::U8, weights.dims())?;
        check("scales", moment.scales, DType::F32, &[blocks])?;
    }
    edit_by(("weights", weights), gradient, |device, weights, gradient| {
        edit_moment(first, |first_codes, first_scales| {
            edit_moment(second, |second_codes, second_scales| {
                let maps = device.clone_htod(maps.as_flattened())?;
                let count = weights.len() as i64;
                // SAFETY: all buffers outlive the launch. Codes, weights and gradient have the same length,
                // and there is one scale per block.
                unsafe {
                    launch(device, &[(&ADAMW_8BIT, blocks.div_ceil(CODE_BLOCKS))], |at| AdamW8BitParams {
                        maps: at.read(&maps),
                        weights: at.write(weights),
                        first_codes: at.write(first_codes),
                        first_scales: at.write(first_scales),
                        second_codes: at.write(second_codes),
                        second_scales: at.write(second_scales),
                        gradient: at.read(gradient),
                        count,
                        step: step.into(),
                    })
                }
            })
        })
    })
}

fn edit_moment(
    moment: Moment,
    f: impl FnOnce(&mut CudaViewMut<u8>, &mut CudaViewMut<f32>) -> Result<()>,
) -> Result<()> {
    OP.edit(moment.codes, |_, codes| OP.edit(moment.scales, |_, scales| f(codes, scales)))
}
