//! Opening a GPU.

use super::kernel_set;
use candle_core::cuda_backend::WrapErr;
use candle_core::{Device, Result};

/// The GPU `ordinal`, with a stream of its own: tensors may be made, used and dropped on any OS thread.
///
/// `Device::new_cuda` would give every OS thread its own stream, with no order between them: a tensor used on a second
/// thread could be read before it was written.
///
/// # Errors
/// The driver's.
pub fn open(ordinal: usize) -> Result<Device> {
    Device::new_cuda_with_stream(ordinal)
}

/// The name of a GPU, and the bytes of its memory that nothing takes.
///
/// # Errors
/// When the kernels do not run on it.
pub fn name_and_free_bytes(device: &Device) -> Result<(String, u64)> {
    let device = device.as_cuda_device()?;
    kernel_set(device)?;
    let context = device.cuda_stream().context().clone();
    Ok((context.name().w()?, context.mem_get_info().w()?.0 as u64))
}
