//! Kernel launches, and the device addresses of their arguments.

use super::modules::function;
use crate::ops::sink_attention::kernels::{Kernel, KernelSet, kernel_sets};
use crate::ops::sink_attention::plan::check_device;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};
use std::marker::PhantomData;

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

/// Launches `kernels` one after the other, each with its number of blocks. A kernel without blocks is left
/// out. All have one argument, for which `argument` takes addresses; the memory stays locked until all are
/// launched.
///
/// # Safety
/// The argument must be the parameter struct of the kernels. Its addresses must point to live memory that is
/// valid for all reads and writes of all blocks.
pub(super) unsafe fn launch<'m, A: DeviceRepr>(
    device: &CudaDevice,
    kernels: &[(&Kernel, usize)],
    argument: impl for<'s> FnOnce(&mut Addresses<'s, 'm>) -> A,
) -> Result<()> {
    if kernels.iter().all(|&(_, blocks)| blocks == 0) {
        return Ok(());
    }
    let stream = device.cuda_stream();
    let mut at = Addresses::new(&stream);
    let argument = argument(&mut at);
    for &(kernel, blocks) in kernels.iter().filter(|(_, blocks)| *blocks > 0) {
        let function = function(device, kernel)?;
        let config = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (kernel.threads as u32, 1, 1),
            shared_mem_bytes: kernel.shared_bytes as u32,
        };
        let mut builder = stream.launch_builder(&function);
        builder.arg(&argument);
        // SAFETY: guaranteed by the caller.
        unsafe { builder.launch(config) }.w()?;
    }
    Ok(())
}

/// The addresses of a launch's arguments in memory that lives for `'m`. On a device from [`super::open`],
/// later uses of the memory wait for the launches before this value is dropped.
pub(super) struct Addresses<'s, 'm: 's> {
    stream: &'s CudaStream,
    guards: Vec<SyncOnDrop<'s>>,
    memory: PhantomData<&'m ()>,
}

impl<'s, 'm> Addresses<'s, 'm> {
    pub(super) fn new(stream: &'s CudaStream) -> Self {
        Self { stream, guards: vec![], memory: PhantomData }
    }

    pub(super) fn read<T>(&mut self, memory: &'m impl DevicePtr<T>) -> u64 {
        let (address, guard) = memory.device_ptr(self.stream);
        self.guards.push(guard);
        address
    }

    pub(super) fn write<T>(&mut self, memory: &'m mut impl DevicePtrMut<T>) -> u64 {
        let (address, guard) = memory.device_ptr_mut(self.stream);
        self.guards.push(guard);
        address
    }
}
