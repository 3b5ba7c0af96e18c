//! Tensors as arguments of kernels: checks, device slices, and tensors for outputs.

use crate::ops::argument::Argument;
use crate::ops::operation::DeviceArgument;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, DType, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType, bail,
};
use std::cell::Cell;
use std::marker::PhantomData;

/// Number of bf16 elements in 16 bytes, which a thread processes per step.
pub(super) const VECTOR: usize = 8;

/// The name of an op in messages.
#[derive(Clone, Copy)]
pub(super) struct Op(pub &'static str);

impl Op {
    /// Checks the element type and the shape, and that kernels can read the layout.
    pub fn check(
        self,
        name: &str,
        (storage, layout): DeviceArgument,
        dtype: DType,
        shape: &[usize],
    ) -> Result<()> {
        Argument { op: self.0, name, dtype: storage.dtype(), layout }.check(dtype, shape)
    }

    /// Checks the row width for kernels that copy units of 16 bytes.
    pub fn check_width(self, width: usize) -> Result<()> {
        if width == 0 || !width.is_multiple_of(VECTOR) || width > i32::MAX as usize {
            bail!(
                "{}: rows of {width} values are not supported on a GPU; use a hidden size that is a multiple of {VECTOR}",
                self.0
            );
        }
        Ok(())
    }

    /// Checks a tensor and returns its storage on the GPU.
    pub fn gpu_storage<'a>(
        self,
        name: &str,
        (storage, layout): &'a (StorageRef<'_>, &Layout),
        dtype: DType,
        shape: &[usize],
    ) -> Result<DeviceArgument<'a>> {
        let Storage::Cuda(storage) = &**storage else {
            bail!("{}: {name} {:?} is not on the GPU; call to_device first", self.0, layout.dims());
        };
        self.check(name, (storage, layout), dtype, shape)?;
        Ok((storage, layout))
    }

    /// Checks an argument of a forward pass. Returns the elements and their device.
    pub fn input<'a, T: CudaDType + WithDType>(
        self,
        name: &str,
        argument: DeviceArgument<'a>,
        shape: &[usize],
    ) -> Result<(CudaView<'a, T>, &'a CudaDevice)> {
        self.check(name, argument, T::DTYPE, shape)?;
        Ok((self.view(argument.0, argument.1)?, argument.0.device()))
    }

    /// Checks a locked tensor on the GPU. Returns the elements and their device.
    pub fn open_tensor<'a, T: CudaDType + WithDType>(
        self,
        name: &str,
        opened: &'a (StorageRef<'_>, &Layout),
        shape: &[usize],
    ) -> Result<(CudaView<'a, T>, &'a CudaDevice)> {
        self.input(name, self.gpu_storage(name, opened, T::DTYPE, shape)?, shape)
    }

    /// Returns the elements of a storage that a checked layout covers.
    pub fn view<'a, T: CudaDType>(
        self,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<CudaView<'a, T>> {
        let (start, end) = (layout.start_offset(), layout.start_offset() + layout.shape().elem_count());
        let slice = storage.as_cuda_slice::<T>()?;
        match slice.try_slice(start..end) {
            Some(view) => Ok(view),
            None => bail!("{}: elements {start}..{end} are not in the storage", self.0),
        }
    }

    /// Calls `f` with the elements of a contiguous tensor on the GPU. `f` may change them in place.
    pub fn edit<T: CudaDType, R>(
        self,
        tensor: &Tensor,
        f: impl FnOnce(&CudaDevice, &mut CudaViewMut<T>) -> Result<R>,
    ) -> Result<R> {
        let edit = Edit { op: self, f: Cell::new(Some(f)), result: Cell::new(None), element: PhantomData };
        tensor.inplace_op1(&edit)?;
        match edit.result.into_inner() {
            Some(result) => Ok(result),
            None => bail!("{}: nothing was edited", self.0),
        }
    }
}

/// A closure wrapped as an op, because candle gives only ops mutable access to a storage.
struct Edit<T, F, R> {
    op: Op,
    f: Cell<Option<F>>,
    result: Cell<Option<R>>,
    element: PhantomData<T>,
}

impl<T: CudaDType, R, F: FnOnce(&CudaDevice, &mut CudaViewMut<T>) -> Result<R>> InplaceOp1 for Edit<T, F, R> {
    fn name(&self) -> &'static str {
        self.op.0
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, layout: &Layout) -> Result<()> {
        bail!("{}: {:?} is not on the GPU; call to_device first", self.op.0, layout.dims())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let device = storage.device().clone();
        let slice = storage.as_cuda_slice_mut::<T>()?;
        let elements = layout.contiguous_offsets().and_then(|(start, end)| slice.try_slice_mut(start..end));
        let (Some(mut elements), Some(f)) = (elements, self.f.take()) else {
            bail!("{}: {:?} is not contiguous; call contiguous() first", self.op.0, layout.dims())
        };
        self.result.set(Some(f(&device, &mut elements)?));
        Ok(())
    }
}

/// Allocates memory with arbitrary contents. The launch that uses it must overwrite every element.
pub(super) fn output<T: CudaDType + DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // A capture refuses allocations of no bytes, so an empty slice owns one element.
    // SAFETY: the elements are numbers, for which every bit pattern is valid.
    let memory = unsafe { device.alloc::<T>(len.max(1)) }?;
    if len > 0 {
        return Ok(memory);
    }
    let stream = device.cuda_stream();
    // SAFETY: `leak` gives up the memory, which the new slice owns from now on.
    Ok(unsafe { stream.upgrade_device_ptr(memory.leak(), 0) })
}

/// Makes a tensor from the output of a kernel.
pub(super) fn tensor<T: CudaDType>(
    slice: CudaSlice<T>,
    device: &CudaDevice,
    shape: impl Into<Shape>,
) -> Tensor {
    from_storage(CudaStorage::wrap_cuda_slice(slice, device.clone()), shape)
}

/// Makes a tensor from a storage.
pub(super) fn from_storage(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
