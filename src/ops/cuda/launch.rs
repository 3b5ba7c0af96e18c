//! Kernel launches, and the device addresses of their arguments.

use super::modules::function;
use crate::ops::sink_attention::kernels::{Kernel, KernelSet, kernel_sets};
use crate::ops::sink_attention::plan::check_device;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

/// Declares kernel arguments that are passed by value: structs of numbers with the layout of the kernels'
/// structs.
macro_rules! kernel_params {
    ($($(#[doc = $doc:literal])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Default)]
        #[repr(C)]
        struct $name {
            $($field: $type,)*
        }

        // SAFETY: the struct has only numbers, with the layout of the kernel's struct.
        unsafe impl candle_core::cuda_backend::cudarc::driver::DeviceRepr for $name {}
    )*};
}

pub(super) use kernel_params;

/// Returns the kernel set of this device for heads of `head_dim`. The choice depends on nothing else, so a
/// run never mixes two sets.
///
/// # Errors
/// When the kernels do not run on this device, or do not support this head size.
pub fn kernel_set(device: &CudaDevice, head_dim: usize) -> Result<&'static KernelSet> {
    let context = device.cuda_stream().context().clone();
    check_device(&context.name().w()?, context.compute_capability().w()?)?;
    match kernel_sets(head_dim) {
        Some([first, _]) => Ok(first),
        None => bail!("sink_attention: no kernels for heads of {head_dim}"),
    }
}

/// Launches `kernel` with one argument.
///
/// # Safety
/// `argument` must be the parameter struct of the kernel. Its addresses must point to live memory that is
/// valid for all reads and writes of `blocks` blocks.
pub(super) unsafe fn launch<A: DeviceRepr>(
    device: &CudaDevice,
    kernel: &Kernel,
    argument: &A,
    blocks: usize,
) -> Result<()> {
    let function = function(device, kernel)?;
    let stream = device.cuda_stream();
    let config = LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (kernel.threads as u32, 1, 1),
        shared_mem_bytes: kernel.shared_bytes as u32,
    };
    let mut builder = stream.launch_builder(&function);
    builder.arg(argument);
    // SAFETY: guaranteed by the caller.
    unsafe { builder.launch(config) }.w()?;
    Ok(())
}

/// Holds the addresses of a launch's arguments. Drop this value after the launch. On a device from
/// [`super::open`], later uses of the memory then wait for the launch.
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
