//! Opening a GPU.

use super::kernel_set;
use crate::panics::caught;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::cudarc::driver::result::device::get_default_mem_pool;
use candle_core::cuda_backend::cudarc::driver::result::mem_pool;
use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Error, Result};

/// The GPU `ordinal`, with a stream of its own: tensors may be made, used and dropped on any OS thread.
///
/// `Device::new_cuda` would give every OS thread its own stream, with no order between them: a tensor used on a second
/// thread could be read before it was written. What the process frees it keeps for itself.
///
/// # Errors
/// The driver's.
pub fn open(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    keep_freed_memory(device.as_cuda_device()?)?;
    Ok(device)
}

/// By default freed memory goes back to the driver whenever the GPU is waited for, and every step would ask for it anew.
fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    let context = device.cuda_stream().context().clone();
    let mut kept_bytes = u64::MAX;
    let value = (&raw mut kept_bytes).cast();
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device is an open context's, the pool is its own, and the attribute is a number of 64 bits.
    unsafe {
        let pool = get_default_mem_pool(context.cu_device()).w()?;
        mem_pool::set_attribute(pool, threshold, value).w()
    }
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

#[cfg(test)]
mod on_device {
    use super::*;

    #[test]
    fn what_is_freed_is_kept() {
        let device = open(0).unwrap();
        let context = device.as_cuda_device().unwrap().cuda_stream().context().clone();
        let mut kept_bytes = 0u64;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: as above.
        unsafe {
            let pool = get_default_mem_pool(context.cu_device()).unwrap();
            mem_pool::get_attribute(pool, threshold, (&raw mut kept_bytes).cast()).unwrap();
        }
        assert_eq!(kept_bytes, u64::MAX);
    }
}
