//! Copies small f32 parameters into a graph on the GPU, and adds their gradients. Also copies the scalar from
//! which a backward pass starts.

use super::arguments::{Op, output};
use super::launch::{kernel_params, launch};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::kernels::{Kernel, kernel};
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Result, Shape, Tensor};

const OP: Op = Op("parameter");
const ACCUMULATE: Kernel = kernel("accumulate", "accumulate", 256, 0);

kernel_params! {
    /// `Accumulate` of `kernels/accumulate.cuh`.
    struct Params {
        x: u64,
        sum: u64,
        elements: i64,
    }
}

/// Returns a copy of `x`.
pub(in crate::ops) fn copy_argument(x: DeviceArgument) -> Result<(CudaStorage, Shape)> {
    let (values, device) = OP.input::<f32>("the values", x, x.1.dims())?;
    let mut copy = output::<f32>(device, values.len())?;
    if !values.is_empty() {
        device.memcpy_dtod(&values, &mut copy)?;
    }
    Ok((CudaStorage::wrap_cuda_slice(copy, device.clone()), x.1.shape().clone()))
}

/// Computes `sum += x` in place.
pub(in crate::ops) fn add_tensor(sum: &Tensor, x: &Tensor) -> Result<()> {
    let opened = x.storage_and_layout();
    let (x, _) = OP.open_tensor::<f32>("the gradient", &opened, sum.dims())?;
    OP.edit::<f32, ()>(sum, |device, sum| {
        // SAFETY: both buffers outlive the launch and have the number of elements in `params`.
        unsafe {
            launch(device, &[(&ACCUMULATE, x.len().div_ceil(ACCUMULATE.threads))], |at| Params {
                x: at.read(&x),
                sum: at.write(sum),
                elements: x.len() as i64,
            })
        }
    })
}
