//! Opens a GPU and reports its memory.

use super::kernel_set;
use super::modules::load_kernels;
use crate::ops::sink_attention::kernels::HEAD_DIMS;
use crate::panics::catch_panic;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::cudarc::driver::result::device::get_default_mem_pool;
use candle_core::cuda_backend::cudarc::driver::result::mem_pool;
use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Error, Result};

/// Opens GPU `ordinal` with one stream for all threads. Tensors may be created, used and dropped on any OS
/// thread.
///
/// `Device::new_cuda` would give every OS thread its own stream, and work on different streams has no order.
/// A second thread could then read a tensor before it was written. The process keeps the memory that it
/// frees. All kernels are loaded.
///
/// # Errors
/// When the driver fails.
pub fn open(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    keep_freed_memory(device.as_cuda_device()?)?;
    load_kernels(device.as_cuda_device()?)?;
    Ok(device)
}

/// Keeps freed memory in the process. By default, freed memory returns to the driver whenever the process
/// waits for the GPU.
fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    set_pool_attribute(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
}

/// The memory of this process on a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Memory of tensors.
    pub used: u64,
    /// Maximum of `used` since [`reset_memory_peaks`].
    pub used_max: u64,
    /// Memory that the allocator holds: memory of tensors, and freed memory that it keeps.
    pub reserved: u64,
    /// Maximum of `reserved` since [`reset_memory_peaks`].
    pub reserved_max: u64,
}

/// Returns the memory of this process on `device`.
///
/// # Errors
/// When the driver fails.
pub fn device_memory(device: &CudaDevice) -> Result<DeviceMemory> {
    let [used, used_max, reserved, reserved_max] = [
        CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    ]
    .map(|attribute| pool_attribute(device, attribute));
    let (used, reserved) = (used?, reserved?);
    // After a reset, the driver may report a maximum of zero until more memory is allocated.
    Ok(DeviceMemory {
        used,
        used_max: used_max?.max(used),
        reserved,
        reserved_max: reserved_max?.max(reserved),
    })
}

/// Resets the maxima that [`device_memory`] returns.
///
/// # Errors
/// When the driver fails.
pub fn reset_memory_peaks(device: &CudaDevice) -> Result<()> {
    set_pool_attribute(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)?;
    set_pool_attribute(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0)
}

/// Returns the memory for new tensors, in bytes: free memory of the GPU, and freed memory that the process
/// keeps.
///
/// # Errors
/// When the driver fails.
pub fn free_memory(device: &CudaDevice) -> Result<u64> {
    let kept = device_memory(device)?;
    let (free, _) = device.cuda_stream().context().mem_get_info().w()?;
    Ok(free as u64 + kept.reserved - kept.used)
}

/// Releases all freed memory that the process keeps. The driver gets it back.
///
/// # Errors
/// When the driver fails.
pub(super) fn release_unused(device: &Device) -> Result<()> {
    let stream = device.as_cuda_device()?.cuda_stream();
    stream.synchronize().w()?;
    // SAFETY: the device belongs to an open context, and the pool belongs to the device.
    unsafe { mem_pool::trim_to(get_default_mem_pool(stream.context().cu_device()).w()?, 0) }.w()
}

fn pool_attribute(device: &CudaDevice, attribute: CUmemPool_attribute) -> Result<u64> {
    let context = device.cuda_stream().context().clone();
    let mut value = 0u64;
    // SAFETY: the device belongs to an open context, and the pool belongs to the device. The attribute is a
    // 64-bit number.
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

/// Returns the number of GPUs that are visible to this process; 0 without a driver.
pub fn gpu_count() -> usize {
    catch_panic(CudaContext::device_count).ok().and_then(|count| count.ok()).unwrap_or(0) as usize
}

/// A GPU that supports every op.
pub struct Gpu {
    pub device: Device,
    pub name: String,
    /// Free memory, in bytes.
    pub free_bytes: u64,
}

const DRIVER: &str = "an NVIDIA driver of release 580 or newer must be loaded (nvidia-smi shows it), and its \
                      libcuda.so.1 must come before the toolkit's stub on LD_LIBRARY_PATH";

/// Opens GPU `ordinal` and checks that every op runs on it.
///
/// # Errors
/// When the GPU cannot be used. The message is one line with the reason and the remedy.
pub fn open_gpu(ordinal: usize) -> Result<Gpu> {
    let refused = |why: &str| {
        // The text may have a backtrace after its first line.
        let why = why.lines().next().unwrap_or_default();
        Error::Msg(format!("GPU {ordinal} cannot be used: {why}; {DRIVER}"))
    };
    // The CUDA bindings (cudarc) panic when a CUDA library is missing.
    let device = catch_panic(|| open(ordinal))
        .map_err(|_| refused("a CUDA library is missing"))?
        .map_err(|error| refused(&error.to_string()))?;
    kernel_set(device.as_cuda_device()?, HEAD_DIMS[0])?;
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

    /// Other tests use the memory pool at the same time, so the test checks only bounds.
    #[test]
    fn memory_is_counted() {
        const BYTES: u64 = 16 << 20;
        let device = open(0).unwrap();
        let gpu = device.as_cuda_device().unwrap();
        reset_memory_peaks(gpu).unwrap();
        let held = Tensor::zeros(BYTES as usize / 4, DType::F32, &device).unwrap();
        let DeviceMemory { used, used_max, reserved, reserved_max } = device_memory(gpu).unwrap();
        drop(held);
        assert!(used >= BYTES && used_max >= used && reserved >= used && reserved_max >= used_max);
        assert!(free_memory(gpu).unwrap() >= BYTES);
    }
}
