//! Opening a GPU.

use super::kernel_set;
use crate::panics::catch_panic;
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
    set_pool_attribute(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
}

/// What this process has of a GPU's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// What tensors lie in, and the most since [`forget_memory_peaks`].
    pub used: u64,
    pub used_max: u64,
    /// With what was freed and is kept, and the most of it.
    pub reserved: u64,
    pub reserved_max: u64,
}

/// # Errors
/// The driver's.
pub fn device_memory(device: &CudaDevice) -> Result<DeviceMemory> {
    let [used, used_max, reserved, reserved_max] = [
        CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    ]
    .map(|attribute| pool_attribute(device, attribute));
    let (used, reserved) = (used?, reserved?);
    // A mark that was put back to zero may stay there until more is taken.
    Ok(DeviceMemory {
        used,
        used_max: used_max?.max(used),
        reserved,
        reserved_max: reserved_max?.max(reserved),
    })
}

/// The next peaks are those from here on.
///
/// # Errors
/// The driver's.
pub fn forget_memory_peaks(device: &CudaDevice) -> Result<()> {
    set_pool_attribute(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)?;
    set_pool_attribute(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0)
}

/// Bytes that tensors can still have: what nothing takes, and what is kept for them.
///
/// # Errors
/// The driver's.
pub fn free_memory(device: &CudaDevice) -> Result<u64> {
    let kept = device_memory(device)?;
    let (free, _) = device.cuda_stream().context().mem_get_info().w()?;
    Ok(free as u64 + kept.reserved - kept.used)
}

/// Gives what was freed and kept back to the driver.
///
/// # Errors
/// The driver's.
pub(super) fn give_back_unused(device: &Device) -> Result<()> {
    let stream = device.as_cuda_device()?.cuda_stream();
    stream.synchronize().w()?;
    // SAFETY: the device is an open context's, and the pool its own.
    unsafe { mem_pool::trim_to(get_default_mem_pool(stream.context().cu_device()).w()?, 0) }.w()
}

fn pool_attribute(device: &CudaDevice, attribute: CUmemPool_attribute) -> Result<u64> {
    let context = device.cuda_stream().context().clone();
    let mut value = 0u64;
    // SAFETY: the device is an open context's, the pool is its own, and the attribute is a number of 64 bits.
    unsafe {
        let pool = get_default_mem_pool(context.cu_device()).w()?;
        mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()).w()?;
    }
    Ok(value)
}

fn set_pool_attribute(device: &CudaDevice, attribute: CUmemPool_attribute, mut value: u64) -> Result<()> {
    let context = device.cuda_stream().context().clone();
    // SAFETY: as above.
    unsafe {
        let pool = get_default_mem_pool(context.cu_device()).w()?;
        mem_pool::set_attribute(pool, attribute, (&raw mut value).cast()).w()
    }
}

/// GPUs that this process sees; none where their driver is missing.
pub fn gpu_count() -> usize {
    catch_panic(CudaContext::device_count).ok().and_then(|count| count.ok()).unwrap_or(0) as usize
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
    let device = catch_panic(|| open(ordinal))
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
    use candle_core::{DType, Tensor};

    #[test]
    fn what_is_freed_is_kept() {
        let device = open(0).unwrap();
        let gpu = device.as_cuda_device().unwrap();
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        assert_eq!(pool_attribute(gpu, threshold).unwrap(), u64::MAX);
    }

    /// Other tests use the pool at the same time.
    #[test]
    fn memory_is_counted() {
        const BYTES: u64 = 16 << 20;
        let device = open(0).unwrap();
        let gpu = device.as_cuda_device().unwrap();
        forget_memory_peaks(gpu).unwrap();
        let held = Tensor::zeros(BYTES as usize / 4, DType::F32, &device).unwrap();
        let DeviceMemory { used, used_max, reserved, reserved_max } = device_memory(gpu).unwrap();
        drop(held);
        assert!(used >= BYTES && used_max >= used && reserved >= used && reserved_max >= used_max);
        assert!(free_memory(gpu).unwrap() >= BYTES);
    }
}
