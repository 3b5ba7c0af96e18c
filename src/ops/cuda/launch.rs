//! Loading and launching kernels; the device's address of what they read and write.

use crate::ops::sink_attention::kernels::{KERNEL_SETS, Kernel, KernelSet};
use crate::ops::sink_attention::plan::check_device;
use candle_core::cuda_backend::cudarc::driver::sys::{CUevent_flags, CUfunction_attribute};
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};
use std::sync::Arc;

mod ptx {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

/// Shared memory that a block gets without asking.
const SHARED_BYTES_UNASKED: usize = 48 << 10;

/// The PTX of a file of `kernels/`.
fn ptx(file: &str) -> Result<&'static str> {
    Ok(match file {
        "sink_attention_forward" => ptx::SINK_ATTENTION_FORWARD,
        "sink_attention_forward_hopper" => ptx::SINK_ATTENTION_FORWARD_HOPPER,
        "sink_attention_backward_hopper" => ptx::SINK_ATTENTION_BACKWARD_HOPPER,
        "sink_attention_backward" => ptx::SINK_ATTENTION_BACKWARD,
        "primitive_checks" => ptx::PRIMITIVE_CHECKS,
        _ => bail!("no kernel file {file}"),
    })
}

/// The kernels of every forward and backward on this device: a function of the device alone, so that no run mixes two.
///
/// # Errors
/// When the kernels do not run on it.
pub fn kernel_set(device: &CudaDevice) -> Result<&'static KernelSet> {
    let stream = device.cuda_stream();
    let context = stream.context();
    check_device(&context.name().w()?, context.compute_capability().w()?)?;
    Ok(&KERNEL_SETS[0])
}

/// Launches `kernel` with one argument.
///
/// # Safety
/// `argument` must be what the kernel takes, with addresses of live memory that the kernel may read and write as far as
/// it does with `blocks` blocks.
pub(super) unsafe fn launch<A: DeviceRepr>(
    device: &CudaDevice,
    kernel: &Kernel,
    argument: &A,
    blocks: usize,
) -> Result<()> {
    let function = device.get_or_load_custom_func(kernel.function, kernel.file, ptx(kernel.file)?)?;
    if kernel.shared_bytes > SHARED_BYTES_UNASKED {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, kernel.shared_bytes as i32).w()?;
    }
    let config = LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (kernel.threads as u32, 1, 1),
        shared_mem_bytes: kernel.shared_bytes as u32,
    };
    let mut builder = function.builder();
    builder.arg(argument);
    // SAFETY: the caller's promise.
    unsafe { builder.launch(config) }.w()?;
    Ok(())
}

/// Addresses for a launch. Dropped after it, it orders what other streams do with the memory behind it.
pub(super) struct Addresses<'a> {
    stream: &'a CudaStream,
    guards: Vec<SyncOnDrop<'a>>,
}

impl<'a> Addresses<'a> {
    pub(super) fn new(stream: &'a CudaStream) -> Self {
        Self { stream, guards: vec![] }
    }

    pub(super) fn read<T>(&mut self, memory: &'a impl DevicePtr<T>) -> u64 {
        let (address, guard) = memory.device_ptr(self.stream);
        self.guards.push(guard);
        address
    }

    pub(super) fn write<T>(&mut self, memory: &'a mut impl DevicePtrMut<T>) -> u64 {
        let (address, guard) = memory.device_ptr_mut(self.stream);
        self.guards.push(guard);
        address
    }
}

/// Time on the device between two places of its stream.
pub struct Timer {
    stream: Arc<CudaStream>,
    start: CudaEvent,
}

impl Timer {
    /// Starts after all work given to the device so far.
    ///
    /// # Errors
    /// The driver's.
    pub fn start(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?;
        Ok(Self { stream, start })
    }

    /// Milliseconds that the work since then took.
    ///
    /// # Errors
    /// The driver's, those of the work included.
    pub fn milliseconds(self) -> Result<f32> {
        let end = self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?;
        self.start.elapsed_ms(&end).w()
    }
}
