//! The SwiGLU of GPT-OSS on the GPU, with `x [R, 2I]` and `y [R, I]` in bf16.

use super::arguments::{Op, VECTOR, output, tensor};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Result, Shape, Tensor};
use half::bf16;

const OP: Op = Op("swiglu");
const FORWARD: Kernel = kernel("swiglu_forward", "swiglu", 256, 0);
const BACKWARD: Kernel = Kernel { function: "swiglu_backward", ..FORWARD };

kernel_params! {
    /// `Swiglu` of `kernels/row_ops.cuh`.
    struct Params {
        x: u64,
        dy: u64,
        out: u64,
        pairs: i64,
        limit: f32,
        alpha: f32,
    }
}

/// Runs `kernel` on all pairs. The kernel writes `out_elements` elements.
fn run(
    kernel: &Kernel,
    device: &CudaDevice,
    x: &CudaView<bf16>,
    dy: Option<&CudaView<bf16>>,
    out_elements: usize,
    (limit, alpha): (f32, f32),
) -> Result<CudaSlice<bf16>> {
    let mut out = output::<bf16>(device, out_elements)?;
    let pairs = x.len() / 2;
    // SAFETY: all buffers outlive the launch. Per pair, `x` has two numbers, `dy` has one, and `out` has
    // one or two.
    unsafe {
        launch(device, &[(kernel, pairs.div_ceil(kernel.threads * VECTOR))], |at| Params {
            x: at.read(x),
            dy: dy.map_or(0, |dy| at.read(dy)),
            out: at.write(&mut out),
            pairs: pairs as i64,
            limit,
            alpha,
        })?
    };
    Ok(out)
}

/// Returns `y`.
pub(in crate::ops) fn swiglu_forward(
    x: DeviceArgument,
    limit: f32,
    alpha: f32,
) -> Result<(CudaStorage, Shape)> {
    let (rows, width) = x.1.shape().dims2()?;
    let (x, device) = OP.input("x", x, &[rows, width])?;
    let half = width / 2;
    let out = run(&FORWARD, device, &x, None, rows * half, (limit, alpha))?;
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((rows, half))))
}

/// Returns the gradient of `x` for `dy`.
pub(in crate::ops) fn swiglu_backward(x: &Tensor, dy: &Tensor, limit: f32, alpha: f32) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let opened = [x, dy].map(Tensor::storage_and_layout);
    let (x, device) = OP.open_tensor("x", &opened[0], &[rows, width])?;
    let (dy, _) = OP.open_tensor("the output's gradient", &opened[1], &[rows, width / 2])?;
    let dx = run(&BACKWARD, device, &x, Some(&dy), rows * width, (limit, alpha))?;
    Ok(tensor(dx, device, (rows, width)))
}
