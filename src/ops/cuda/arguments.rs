//! Tensors as a kernel's arguments: checked, opened, and made of what it wrote.

use crate::ops::argument::Argument;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Layout, Result, Shape, Storage, StorageRef, Tensor, bail};

/// An op by its name in messages.
#[derive(Clone, Copy)]
pub(super) struct Op(pub &'static str);

impl Op {
    /// Refuses another element type or shape, or a layout that the kernels cannot walk.
    pub fn check(
        self,
        name: &str,
        (storage, layout): (&CudaStorage, &Layout),
        dtype: DType,
        shape: &[usize],
    ) -> Result<()> {
        Argument { op: self.0, name, dtype: storage.dtype(), layout }.check(dtype, shape)
    }

    /// A tensor's storage on the GPU, checked.
    pub fn on_gpu<'a>(
        self,
        name: &str,
        (storage, layout): &'a (StorageRef<'_>, &Layout),
        dtype: DType,
        shape: &[usize],
    ) -> Result<(&'a CudaStorage, &'a Layout)> {
        let Storage::Cuda(storage) = &**storage else {
            bail!("{}: {name} {:?} is not on the GPU; call to_device first", self.0, layout.dims());
        };
        self.check(name, (storage, layout), dtype, shape)?;
        Ok((storage, layout))
    }

    /// The elements of a storage that a layout, which was checked, is over.
    pub fn view<'a, T: CudaDType>(
        self,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<CudaView<'a, T>> {
        let (start, end) = (layout.start_offset(), layout.start_offset() + layout.shape().elem_count());
        let slice = storage.as_cuda_slice::<T>()?;
        match slice.try_slice(start..end) {
            Some(view) => Ok(view),
            None => bail!("{}: elements {start}..{end} of a storage of fewer", self.0),
        }
    }
}

/// A tensor over a kernel's output.
pub(super) fn tensor<T: CudaDType>(
    slice: CudaSlice<T>,
    device: &CudaDevice,
    shape: impl Into<Shape>,
) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}
