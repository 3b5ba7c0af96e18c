//! A second stream of a GPU, on which sampling runs beside an update.

use super::arguments::from_storage;
use super::device::open;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Storage, Tensor, TensorId, bail};
use half::bf16;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// A GPU that is opened a second time, with a stream of its own. Work on both streams runs at the same time.
/// Tensors of one stream must not be used on the other, except through this value.
pub struct SecondStream {
    first: Device,
    second: Device,
    /// The tensors of the first stream whose memory the second stream reads too, with their aliases.
    shared: Mutex<HashMap<TensorId, Alias>>,
}

/// A tensor, and a tensor of the second stream with the same memory.
struct Alias {
    /// It owns the memory.
    original: Tensor,
    alias: Tensor,
}

impl SecondStream {
    /// Opens the GPU `first` a second time.
    ///
    /// # Errors
    /// When the driver fails, or `first` is not a GPU.
    pub fn open(first: &Device) -> Result<Self> {
        let ordinal = first.as_cuda_device()?.cuda_stream().context().ordinal();
        Ok(Self { first: first.clone(), second: open(ordinal)?, shared: Mutex::default() })
    }

    /// Returns the device whose work runs on the second stream.
    pub fn device(&self) -> &Device {
        &self.second
    }

    /// Calls `f`, which gives tensors to the second stream with [`Self::copy`] and [`Self::share`]. The
    /// second stream waits for the earlier work of the first. Later work of the first stream waits for the
    /// copies. The host does not wait.
    ///
    /// # Errors
    /// Errors of `f`, and when the driver fails.
    pub fn hand_over<R>(&self, f: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        let [first, second] = [&self.first, &self.second].map(|device| device.as_cuda_device());
        let (first, second) = (first?.cuda_stream(), second?.cuda_stream());
        second.join(&first).w()?;
        let result = f();
        // The tensors record only their last read, which may be one on the first stream. So an update could
        // overwrite what is not copied yet.
        first.join(&second).w()?;
        result
    }

    /// Returns a copy of `tensor` on the second stream.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn copy(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.detach().to_device(&self.second)?.detach())
    }

    /// Returns a tensor of the second stream with the memory of `tensor`, which nobody may change any more.
    /// The memory lives as long as this value.
    ///
    /// # Errors
    /// When `tensor` is not contiguous, or its type is none of a model's weights.
    pub fn share(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = shared.get(&tensor.id()) {
            return Ok(found.alias.clone());
        }
        let device = self.second.as_cuda_device()?;
        let alias = {
            let (storage, layout) = tensor.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { bail!("a shared tensor must be on the GPU") };
            let is_whole = layout.is_contiguous() && layout.start_offset() == 0;
            if !is_whole {
                bail!("a shared tensor must be contiguous and start its memory");
            }
            let elements = layout.shape().elem_count();
            let storage = match &storage.slice {
                CudaStorageSlice::BF16(slice) => alias::<bf16>(device, slice, elements)?,
                CudaStorageSlice::F32(slice) => alias::<f32>(device, slice, elements)?,
                CudaStorageSlice::U8(slice) => alias::<u8>(device, slice, elements)?,
                _ => bail!("tensors of {:?} are not shared", storage.dtype()),
            };
            from_storage(storage, tensor.shape())
        };
        shared.insert(tensor.id(), Alias { original: tensor.clone(), alias: alias.clone() });
        Ok(alias)
    }
}

/// Returns a storage of `device` over the first `elements` of `slice`. It must not free them.
fn alias<T: CudaDType + DeviceRepr>(
    device: &CudaDevice,
    slice: &CudaSlice<T>,
    elements: usize,
) -> Result<CudaStorage> {
    if elements > slice.len() {
        bail!("{elements} elements of a storage of {}", slice.len());
    }
    let stream = device.cuda_stream();
    // The guard records a read by the second stream. Nobody changes the memory, so nothing waits for it.
    let (address, _read) = slice.device_ptr(&stream);
    // SAFETY: `slice` has so many elements. `SecondStream` keeps `slice` and takes the address out of the new
    // slice before this is dropped.
    let alias = unsafe { stream.upgrade_device_ptr::<T>(address, elements) };
    Ok(CudaStorage::wrap_cuda_slice(alias, device.clone()))
}

/// Takes the memory out of the aliases before the originals free it. Clones of an alias are unusable then.
impl Drop for SecondStream {
    fn drop(&mut self) {
        let shared = self.shared.get_mut().unwrap_or_else(PoisonError::into_inner);
        let waited = self.second.synchronize();
        for Alias { original, alias } in std::mem::take(shared).into_values() {
            let taken = alias.inplace_op1(&TakeMemory);
            if waited.is_err() || taken.is_err() {
                // The driver has failed. Nothing is freed, so that nothing is freed twice.
                std::mem::forget((original, alias));
            }
        }
    }
}

/// Replaces the memory of a storage by other memory, and does not free the old one.
struct TakeMemory;

impl InplaceOp1 for TakeMemory {
    fn name(&self) -> &'static str {
        "take memory"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("{}: not on the GPU", self.name())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let other = CudaStorageSlice::U8(storage.device().alloc_zeros(1)?);
        match std::mem::replace(&mut storage.slice, other) {
            CudaStorageSlice::BF16(slice) => drop(slice.leak()),
            CudaStorageSlice::F32(slice) => drop(slice.leak()),
            CudaStorageSlice::U8(slice) => drop(slice.leak()),
            slice => std::mem::forget(slice),
        }
        Ok(())
    }
}

#[cfg(test)]
mod on_device {
    use super::super::optimizer::scale;
    use super::*;

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.to_vec1().unwrap()
    }

    #[test]
    fn a_copy_keeps_the_values_before_a_later_update_and_a_shared_tensor_has_those_of_its_original() {
        let device = open(0).unwrap();
        let made = |factor: f64| Tensor::arange(0f32, 5000.0, &device).unwrap().affine(factor, 1.0).unwrap();
        let (trained, frozen) = (made(2.0), made(3.0));
        let second = SecondStream::open(&device).unwrap();
        let (copied, shared) = second
            .hand_over(|| Ok((second.copy(&trained).unwrap(), second.share(&frozen).unwrap())))
            .unwrap();
        // The first stream reads the tensor, then changes it, before the copy has had its turn.
        let read = trained.affine(1.0, 0.0).unwrap();
        scale(&trained, 0.0).unwrap();
        assert!(values(&trained).iter().all(|&value| value == 0.0));
        let expected = |factor: f32| (0..5000).map(|i| i as f32 * factor + 1.0).collect::<Vec<_>>();
        assert_eq!(values(&copied.affine(1.0, 0.0).unwrap()), expected(2.0));
        assert_eq!((values(&read), values(&shared)), (expected(2.0), expected(3.0)));
        assert!(shared.device().same_device(second.device()) && copied.device().same_device(second.device()));
        // Another handover has the same alias.
        assert_eq!(second.share(&frozen).unwrap().id(), shared.id());
        drop(second);
        assert_eq!(values(&frozen), expected(3.0));
        assert!(shared.to_vec1::<f32>().is_err());
    }

    #[test]
    fn what_cannot_be_shared_is_refused() {
        let device = open(0).unwrap();
        let second = SecondStream::open(&device).unwrap();
        let matrix = Tensor::zeros((3, 4), candle_core::DType::F32, &device).unwrap();
        let refused = |tensor: &Tensor| second.share(tensor).unwrap_err().to_string();
        assert!(refused(&matrix.t().unwrap()).contains("contiguous"));
        assert!(refused(&matrix.narrow(0, 1, 2).unwrap()).contains("contiguous"));
        assert!(refused(&matrix.to_device(&Device::Cpu).unwrap()).contains("on the GPU"));
        assert!(refused(&matrix.to_dtype(candle_core::DType::I64).unwrap()).contains("not shared"));
    }
}
