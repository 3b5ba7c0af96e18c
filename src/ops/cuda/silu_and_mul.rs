//! SwiGLU without clamping on the GPU: `gate`, `up` and `y` are `[R, I]` in bf16.

use super::arguments::{Op, VECTOR, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Result, Shape, Tensor};
use half::bf16;

const OP: Op = Op("silu_gated");
const FORWARD: Kernel = kernel("silu_gated_forward", "silu_gated", 256, 0);
const BACKWARD: Kernel = Kernel { function: "silu_gated_backward", ..FORWARD };

kernel_params! {
    /// `SiluGated` of `kernels/silu_gated.cuh`.
    struct Params {
        gate: u64,
        up: u64,
        dy: u64,
        out: u64,
        dup: u64,
        elements: i64,
    }
}

/// Returns `y`.
pub(in crate::ops) fn silu_and_mul_forward(
    gate: DeviceArgument,
    up: DeviceArgument,
) -> Result<(CudaStorage, Shape)> {
    let (rows, width) = gate.1.shape().dims2()?;
    let (gates, device) = OP.input::<bf16>("gate", gate, &[rows, width])?;
    let (ups, _) = OP.input::<bf16>("up", up, &[rows, width])?;
    let elements = rows * width;
    let mut out = output::<bf16>(device, elements)?;
    // SAFETY: all buffers outlive the launch and have `elements` elements.
    unsafe {
        launch(device, &[(&FORWARD, elements.div_ceil(FORWARD.threads * VECTOR))], |at| Params {
            gate: at.read(&gates),
            up: at.read(&ups),
            out: at.write(&mut out),
            elements: elements as i64,
            ..Params::default()
        })?
    };
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((rows, width))))
}

/// Returns the gradients of `gate` and `up` for `dy`.
pub(in crate::ops) fn silu_and_mul_backward([gate, up, dy]: [&Tensor; 3]) -> Result<[Tensor; 2]> {
    let (rows, width) = gate.dims2()?;
    let opened = [gate, up, dy].map(Tensor::storage_and_layout);
    let (gate, device) = OP.open_tensor::<bf16>("gate", &opened[0], &[rows, width])?;
    let (up, _) = OP.open_tensor::<bf16>("up", &opened[1], &[rows, width])?;
    let (dy, _) = OP.open_tensor::<bf16>("the output's gradient", &opened[2], &[rows, width])?;
    let elements = rows * width;
    let mut dgate = output::<bf16>(device, elements)?;
    let mut dup = output::<bf16>(device, elements)?;
    // SAFETY: all buffers outlive the launch and have `elements` elements.
    unsafe {
        launch(device, &[(&BACKWARD, elements.div_ceil(BACKWARD.threads * VECTOR))], |at| Params {
            gate: at.read(&gate),
            up: at.read(&up),
            dy: at.read(&dy),
            out: at.write(&mut dgate),
            dup: at.write(&mut dup),
            elements: elements as i64,
        })?
    };
    Ok([tensor(dgate, device, (rows, width)), tensor(dup, device, (rows, width))])
}
