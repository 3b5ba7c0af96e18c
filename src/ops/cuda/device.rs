//! Opening a GPU.

use super::kernel_set;
use crate::panics::caught;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{Device, Error, Result};

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

/// GPUs that this process sees; none where their driver is missing.
pub fn gpu_count() -> usize {
    caught(CudaContext::device_count).ok().and_then(|count| count.ok()).unwrap_or(0) as usize
}

/// A GPU that the kernels run on.
pub struct Gpu {
    pub device: Device,
    pub name: String,
    /// Bytes of its memory that nothing takes.
    pub free_bytes: u64,
}

const DRIVER: &str = "an NVIDIA driver of release 580 or newer must be loaded (nvidia-smi shows it), and its \
                      libcuda.so.1 come before the toolkit's stub on LD_LIBRARY_PATH";

/// The GPU `ordinal`, if every op runs on it.
///
/// # Errors
/// Why it cannot be used, and the remedy, in a line.
pub fn usable(ordinal: usize) -> Result<Gpu> {
    let refused = |why: &str| {
        // A backtrace may follow.
        let why = why.lines().next().unwrap_or_default();
        Error::Msg(format!("GPU {ordinal} cannot be used: {why}; {DRIVER}"))
    };
    // The CUDA library panics where a library that it wants is missing.
    let device = caught(|| open(ordinal))
        .map_err(|_| refused("a CUDA library is missing"))?
        .map_err(|error| refused(&error.to_string()))?;
    kernel_set(device.as_cuda_device()?)?;
    let context = device.as_cuda_device()?.cuda_stream().context().clone();
    let (name, free_bytes) = (context.name().w()?, context.mem_get_info().w()?.0 as u64);
    Ok(Gpu { device, name, free_bytes })
}
