//! Memory that several GPUs fill together, and the order of its uses on two streams.

use super::arguments::{Op, output};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Result, Storage, Tensor, WithDType, bail};
use half::bf16;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

const OP: Op = Op("gather");

/// A tensor of `ranks` parts of equal length, and its address. One part has the values of this process.
pub struct GatherMemory {
    /// `[ranks · part]`. It is a variable, so that the graph records ops on it.
    pub values: Tensor,
    pub address: u64,
    pub part_bytes: usize,
}

impl GatherMemory {
    /// Allocates `ranks` parts of `part` values and copies `own` to part `rank`. The other parts are
    /// undefined until the exchange has ended. `own` has at most `part` values, in bf16 or f32.
    ///
    /// # Errors
    /// When memory runs out, or `own` is not on a GPU.
    pub fn new(own: &Tensor, part: usize, rank: usize, ranks: usize) -> Result<Self> {
        let (storage, layout) = own.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("a shard that is gathered must be on the GPU") };
        match own.dtype() {
            DType::BF16 => Self::copy::<bf16>(storage, layout, part, rank, ranks),
            DType::F32 => Self::copy::<f32>(storage, layout, part, rank, ranks),
            dtype => bail!("shards of {dtype:?} are not gathered on a GPU"),
        }
    }

    fn copy<T: CudaDType + WithDType + DeviceRepr>(
        storage: &CudaStorage,
        layout: &Layout,
        part: usize,
        rank: usize,
        ranks: usize,
    ) -> Result<Self> {
        let (own, device): (_, &CudaDevice) = OP.input::<T>("the shard", (storage, layout), layout.dims())?;
        let mut memory = output::<T>(device, ranks * part)?;
        if !own.is_empty() {
            device.memcpy_dtod(&own, &mut memory.slice_mut(rank * part..rank * part + own.len()))?;
        }
        let (address, part_bytes) = {
            let stream = device.cuda_stream();
            let (address, _read) = memory.device_ptr(&stream);
            (address, part * size_of::<T>())
        };
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(memory, device.clone()));
        let values = Tensor::from_storage(storage, ranks * part, BackpropOp::none(), true);
        Ok(Self { values, address, part_bytes })
    }
}

/// The parts that one rank sends to the ranks of a group, and memory for the parts that it receives. A part
/// is an address and a number of bytes.
pub struct ExchangeMemory {
    /// The received parts, one after the other. They are undefined until the exchange has ended, except this
    /// rank's own part.
    pub values: CudaStorage,
    /// Parts of the caller's memory.
    pub sent: Vec<(u64, usize)>,
    /// Parts of `values`.
    pub received: Vec<(u64, usize)>,
}

impl ExchangeMemory {
    /// Allocates memory for parts of `lengths` values, and copies the own part, `send[own]` of `from`, to its
    /// place. `from` has values in bf16, f32 or u32.
    ///
    /// # Errors
    /// When memory runs out, or a part is not in `from`.
    pub fn new(from: &CudaStorage, send: &[Range<usize>], lengths: &[usize], own: usize) -> Result<Self> {
        match from.dtype() {
            DType::BF16 => Self::allocate::<bf16>(from, send, lengths, own),
            DType::F32 => Self::allocate::<f32>(from, send, lengths, own),
            DType::U32 => Self::allocate::<u32>(from, send, lengths, own),
            dtype => bail!("values of {dtype:?} are not exchanged between GPUs"),
        }
    }

    fn allocate<T: CudaDType + DeviceRepr>(
        from: &CudaStorage,
        send: &[Range<usize>],
        lengths: &[usize],
        own: usize,
    ) -> Result<Self> {
        let (device, from) = (from.device(), from.as_cuda_slice::<T>()?);
        let mut memory = output::<T>(device, lengths.iter().sum())?;
        let own_start: usize = lengths[..own].iter().sum();
        let mut own_place = memory.slice_mut(own_start..own_start + lengths[own]);
        match from.try_slice(send[own].clone()) {
            _ if send[own].is_empty() && lengths[own] == 0 => {}
            Some(part) if part.len() == lengths[own] => device.memcpy_dtod(&part, &mut own_place)?,
            _ => bail!("{} values for the own part, {:?} of {}", lengths[own], send[own], from.len()),
        }
        if send.iter().any(|part| part.end > from.len()) {
            bail!("a part of {send:?} is not among {} values", from.len());
        }
        let stream = device.cuda_stream();
        let bytes = |values: usize| values * size_of::<T>();
        let part = |base: u64, part: &Range<usize>| (base + bytes(part.start) as u64, bytes(part.len()));
        let sent = {
            let (base, _read) = from.device_ptr(&stream);
            send.iter().map(|range| part(base, range)).collect()
        };
        let received = {
            let (base, _read) = memory.device_ptr(&stream);
            let ends = lengths.iter().scan(0, |end, length| {
                *end += length;
                Some(*end)
            });
            ends.zip(lengths).map(|(end, length)| part(base, &(end - length..end))).collect()
        };
        Ok(Self { values: CudaStorage::wrap_cuda_slice(memory, device.clone()), sent, received })
    }
}

/// Returns the address of a contiguous f32 tensor.
///
/// # Errors
/// When `x` is not contiguous, or not on a GPU.
pub fn address_of(x: &Tensor) -> Result<u64> {
    let opened = x.storage_and_layout();
    let (values, device) = OP.open_tensor::<f32>("the values", &opened, x.dims())?;
    let stream = device.cuda_stream();
    let (address, _read) = values.device_ptr(&stream);
    Ok(address)
}

/// Returns the event after all work that was launched on `device`.
///
/// # Errors
/// When the driver fails, or `device` is not a GPU.
pub fn record_event(device: &Device) -> Result<Arc<dyn Any + Send + Sync>> {
    Ok(Arc::new(device.as_cuda_device()?.cuda_stream().record_event(None).w()?))
}

/// Makes later work on `device` wait for `event`. The host does not wait.
///
/// # Errors
/// When the driver fails, or `event` is not an event of a GPU.
pub fn wait_for_event(device: &Device, event: &(dyn Any + Send + Sync)) -> Result<()> {
    match event.downcast_ref::<CudaEvent>() {
        Some(event) => device.as_cuda_device()?.cuda_stream().wait(event).w(),
        None => bail!("not an event of a GPU"),
    }
}

#[cfg(test)]
mod on_device {
    use super::super::open;
    use super::*;
    use crate::ops::graph::is_tracked;

    #[test]
    fn one_part_has_the_shard_and_views_are_tracked() {
        let device = open(0).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let shard = Tensor::arange(1f32, 201.0, &device).unwrap().to_dtype(dtype).unwrap();
            let memory = GatherMemory::new(&shard, 256, 2, 4).unwrap();
            assert_eq!(memory.part_bytes, 256 * dtype.size_in_bytes());
            let view = memory.values.narrow(0, 512, 200).unwrap().reshape((10, 20)).unwrap();
            assert!(is_tracked(&view) && memory.values.elem_count() == 1024);
            let found = view.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(found, (1..201).map(|i| i as f32).collect::<Vec<_>>());
        }
        // A rank without a shard has an empty one.
        let empty = Tensor::zeros(0, DType::F32, &device).unwrap();
        assert_eq!(GatherMemory::new(&empty, 256, 3, 4).unwrap().values.dims(), [1024]);
    }

    #[test]
    fn parts_follow_each_other_and_the_own_part_is_there() {
        let device = open(0).unwrap();
        for dtype in [DType::BF16, DType::F32, DType::U32] {
            let from = Tensor::arange(0u32, 12, &device).unwrap().to_dtype(dtype).unwrap();
            let (storage, _) = from.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { panic!("not on a GPU") };
            let memory = ExchangeMemory::new(storage, &[2..5, 5..7, 7..12], &[4, 2, 1], 1).unwrap();
            let bytes = dtype.size_in_bytes();
            let relative = |parts: &[(u64, usize)]| -> Vec<(usize, usize)> {
                parts
                    .iter()
                    .map(|(address, length)| ((address - parts[0].0) as usize / bytes, length / bytes))
                    .collect()
            };
            assert_eq!(relative(&memory.sent), [(0, 3), (3, 2), (5, 5)]);
            assert_eq!(relative(&memory.received), [(0, 4), (4, 2), (6, 1)]);
            let values = Tensor::from_storage(Storage::Cuda(memory.values), 7, BackpropOp::none(), false);
            let own = values.narrow(0, 4, 2).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(own.to_vec1::<f32>().unwrap(), [5.0, 6.0]);
            for (send, lengths) in [([2..5, 5..7], [4, 1]), ([2..13, 5..7], [4, 2]), ([2..5, 11..13], [4, 2])]
            {
                assert!(ExchangeMemory::new(storage, &send, &lengths, 1).is_err(), "{send:?}");
            }
        }
        // A rank without values receives those of the others, and sends empty parts.
        let none = Tensor::zeros(0, DType::F32, &device).unwrap();
        let (storage, _) = none.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { panic!("not on a GPU") };
        let memory = ExchangeMemory::new(storage, &[0..0, 0..0], &[3, 0], 1).unwrap();
        assert_eq!([memory.sent[0].1, memory.received[0].1, memory.received[1].1], [0, 12, 0]);
        let bytes = Tensor::zeros(4, DType::U8, &device).unwrap();
        let (storage, _) = bytes.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { panic!("not on a GPU") };
        assert!(ExchangeMemory::new(storage, &[0..2, 2..4], &[2, 2], 0).is_err());
    }

    #[test]
    fn an_address_is_that_of_the_view() {
        let device = open(0).unwrap();
        let values = Tensor::zeros(100, DType::F32, &device).unwrap();
        let [start, view] = [&values, &values.narrow(0, 25, 50).unwrap()].map(|x| address_of(x).unwrap());
        assert_eq!(view - start, 100);
        assert!(address_of(&values.to_dtype(DType::BF16).unwrap()).is_err());
        assert!(address_of(&values.to_device(&Device::Cpu).unwrap()).is_err());
    }

    #[test]
    fn events_are_of_a_gpu() {
        let device = open(0).unwrap();
        wait_for_event(&device, &*record_event(&device).unwrap()).unwrap();
        assert!(wait_for_event(&device, &"no event").unwrap_err().to_string().contains("not an event"));
        assert!(record_event(&Device::Cpu).is_err());
    }
}
