//! Exchanges between the memories of several GPUs, beside the stream that computes: weights are gathered from
//! shards, gradients are added to shards, and rows are exchanged for attention heads. No value passes the
//! host.
//!
//! The memory is allocated on the stream that computes. An exchange begins when the work before its start
//! has ended: what made its values, and the uses of a tensor that had the same memory before. The stream
//! waits for the end of the exchange before it reads or frees the memory.

use super::sharded_layers::{GatherPart, to_op_error};
use crate::dist::{
    DeviceExchange, DeviceGather, DevicePart, Mesh, PendingDeviceExchange, first_shard_rank, shard_length,
    shard_range,
};
use crate::ops::cuda::{ExchangeMemory, GatherMemory, address_of, record_event, wait_for_event};
use crate::ops::operation::{DeviceArgument, HostArgument, InputGradients, Operation};
use crate::ops::optimizer::add_on_device;
use crate::ops::parameter::Parameter;
use crate::ops::weight::Weight;
use anyhow::{Context, Result, bail};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, DType, Device, Shape, Storage, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A running exchange. It must be dropped before the memory that it reads and writes.
struct RunningExchange {
    device: Device,
    /// `None` after the stream was made to wait.
    pending: Option<PendingDeviceExchange>,
}

impl RunningExchange {
    /// Starts an exchange after all earlier work on `device`.
    fn start(
        mesh: &Mesh,
        name: &str,
        device: &Device,
        gathers: Vec<DeviceGather>,
        [send, receive]: [Vec<DevicePart>; 2],
    ) -> Result<Self> {
        let ready = record_event(device)?;
        let exchange = DeviceExchange { name: name.to_owned(), gathers, send, receive, ready };
        Ok(Self { device: device.clone(), pending: Some(mesh.start_on_device(exchange)?) })
    }

    /// Makes later work on the GPU wait for the exchange.
    fn wait(&mut self) -> Result<()> {
        if let Some(pending) = self.pending.take() {
            wait_for_event(&self.device, &*pending.posted()?)?;
        }
        Ok(())
    }
}

/// The memory is freed after this. Without the wait, the exchange could still write to it.
impl Drop for RunningExchange {
    fn drop(&mut self) {
        // If the exchange was not enqueued, nothing writes to the memory.
        let _ = self.wait();
    }
}

/// Tensors that are gathered on the GPU, while the exchange runs.
pub(crate) struct PendingDeviceGather {
    exchange: RunningExchange,
    /// For each sharded part, its values with the shape of the tensor. Undefined until the exchange ends.
    gathered: Vec<Tensor>,
}

impl PendingDeviceGather {
    /// Starts to gather the sharded tensors of `parts`.
    ///
    /// # Errors
    /// When memory runs out, or the connection has ended.
    pub fn start(mesh: &Mesh, name: &str, parts: &[GatherPart], device: &Device) -> Result<Self> {
        let (rank, ranks) = (mesh.rank(), mesh.ranks());
        let (mut gathered, mut gathers, mut send, mut receive) = (vec![], vec![], vec![], vec![]);
        for part in parts.iter().filter(|part| part.stored.is_sharded) {
            let Weight::Dense(own) = part.stored.weight(&part.spec)? else {
                bail!("{}: packed shards are not gathered on GPUs", part.spec.name)
            };
            if part.spec.is_sharded_by_expert(mesh.sharding()) {
                let memory = expert_memory(mesh, part, own.values())?;
                let group = mesh.all_ranks();
                send.extend(with_others(mesh, &group, &memory.sent));
                receive.extend(with_others(mesh, &group, &memory.received));
                gathered.push(variable(memory.values, part.spec.working_shape()));
                continue;
            }
            let count = part.spec.element_count();
            let length = shard_length(count, ranks);
            let GatherMemory { values, address, part_bytes } =
                GatherMemory::new(own.values(), length, rank, ranks)?;
            let first = first_shard_rank(count, part.index, ranks) * length;
            gathered.push(values.narrow(0, first, count)?.reshape(part.spec.working_shape())?);
            gathers.push(DeviceGather { address, part_bytes });
        }
        let exchange = RunningExchange::start(mesh, name, device, gathers, [send, receive])?;
        Ok(Self { exchange, gathered })
    }

    /// Returns the weights of `parts`, which later work on the GPU may read.
    ///
    /// # Errors
    /// When an exchange has failed.
    pub fn finish(mut self, parts: &[GatherPart]) -> Result<Vec<Weight>> {
        self.exchange.wait()?;
        let mut gathered = self.gathered.into_iter();
        let weight = |part: &GatherPart| match (part.stored.is_sharded, part.stored.weight(&part.spec)?) {
            (true, Weight::Dense(own)) => {
                let values =
                    gathered.next().with_context(|| format!("{} was not gathered", part.spec.name))?;
                Ok(Weight::Dense(Parameter::variable(&values).with_precision(own.precision())))
            }
            _ => part.stored.whole_weight(&part.spec).cloned(),
        };
        parts.iter().map(weight).collect()
    }
}

/// Returns memory for all experts of `part`. Ranks may have different numbers of them, so each rank sends its
/// own to every other rank.
fn expert_memory(mesh: &Mesh, part: &GatherPart, own: &Tensor) -> Result<ExchangeMemory> {
    let length = |rank: usize| part.spec.shard_range(part.index, rank, mesh.sharding()).len();
    let lengths: Vec<usize> = (0..mesh.ranks()).map(length).collect();
    let send = vec![0..lengths[mesh.rank()]; mesh.ranks()];
    let (storage, _) = own.storage_and_layout();
    Ok(ExchangeMemory::new(on_gpu(&storage)?, &send, &lengths, mesh.rank())?)
}

/// Whole gradients whose shards are sent to their ranks, while the exchange runs.
pub struct PendingDeviceSum {
    exchange: RunningExchange,
    /// For each gradient: the index of its parameter, and this rank's shard of the gradient of each rank, in
    /// rank order.
    shards: Vec<(usize, Vec<Tensor>)>,
    /// The gradients, which are sent.
    _whole: Vec<Tensor>,
}

impl PendingDeviceSum {
    /// Sends the shards of `gradients`, which are f32 tensors with the indices of their parameters.
    ///
    /// # Errors
    /// When memory runs out, or the connection has ended.
    pub fn start(mesh: &Mesh, name: &str, gradients: Vec<(usize, Tensor)>, device: &Device) -> Result<Self> {
        let (rank, ranks) = (mesh.rank(), mesh.ranks());
        let (mut send, mut receive, mut shards) = (vec![], vec![], vec![]);
        for (parameter, gradient) in &gradients {
            let gradient = gradient.flatten_all()?;
            let count = gradient.elem_count();
            let own = shard_range(count, *parameter, rank, ranks);
            let mut shards_of_ranks = vec![];
            for other in 0..ranks {
                let range = shard_range(count, *parameter, other, ranks);
                if other == rank {
                    shards_of_ranks.push(gradient.narrow(0, own.start, own.len())?);
                    continue;
                }
                if !range.is_empty() {
                    let part = gradient.narrow(0, range.start, range.len())?;
                    send.push(device_part(other, &part)?);
                }
                let received = Tensor::zeros(own.len(), DType::F32, device)?;
                if !own.is_empty() {
                    receive.push(device_part(other, &received)?);
                }
                shards_of_ranks.push(received);
            }
            shards.push((*parameter, shards_of_ranks));
        }
        let exchange = RunningExchange::start(mesh, name, device, vec![], [send, receive])?;
        Ok(Self { exchange, shards, _whole: gradients.into_iter().map(|(_, whole)| whole).collect() })
    }

    /// Adds the shards of all ranks to the shard `sum_of(parameter)` of each gradient, in rank order.
    ///
    /// # Errors
    /// When an exchange has failed, or a parameter has no sum.
    pub fn add_to<'a>(mut self, sum_of: impl Fn(usize) -> Option<&'a Tensor>) -> Result<()> {
        self.exchange.wait()?;
        for (parameter, shards) in &self.shards {
            let sum =
                sum_of(*parameter).with_context(|| format!("parameter {parameter} is not trainable"))?;
            shards.iter().try_for_each(|shard| add_on_device(sum, shard))?;
        }
        Ok(())
    }
}

/// Adds the f32 values of each of `buffers` over all ranks of `mesh`, in rank order. Each buffer has an
/// index, which is equal on every rank. Afterwards every rank has the sums.
///
/// # Errors
/// When memory runs out, or an exchange has failed.
pub fn sum_on_devices(mesh: &Mesh, name: &str, buffers: &[(usize, &Tensor)]) -> Result<()> {
    let (rank, ranks) = (mesh.rank(), mesh.ranks());
    let Some((_, first)) = buffers.first() else { return Ok(()) };
    let device = first.device();
    let flat = |(index, buffer): &(usize, &Tensor)| Ok((*index, buffer.flatten_all()?));
    let buffers = buffers.iter().map(flat).collect::<Result<Vec<_>>>()?;
    let range = |index: usize, x: &Tensor, rank| shard_range(x.elem_count(), index, rank, ranks);
    let sum = |(index, buffer): &(usize, Tensor)| {
        Ok((*index, Tensor::zeros(range(*index, buffer, rank).len(), DType::F32, device)?))
    };
    let sums = buffers.iter().map(sum).collect::<Result<Vec<_>>>()?;
    let of = |index: usize| sums.iter().find(|(other, _)| *other == index).map(|(_, sum)| sum);
    PendingDeviceSum::start(mesh, name, buffers.clone(), device)?.add_to(of)?;
    // The sums of the other ranks arrive where they belong.
    let (mut send, mut receive) = (vec![], vec![]);
    for ((index, buffer), (_, sum)) in buffers.iter().zip(&sums) {
        let own = range(*index, buffer, rank);
        if !own.is_empty() {
            buffer.slice_set(sum, 0, own.start)?;
        }
        for other in (0..ranks).filter(|other| *other != rank) {
            if !own.is_empty() {
                send.push(device_part(other, sum)?);
            }
            let range = range(*index, buffer, other);
            if !range.is_empty() {
                receive.push(device_part(other, &buffer.narrow(0, range.start, range.len())?)?);
            }
        }
    }
    RunningExchange::start(mesh, name, device, vec![], [send, receive])?.wait()
}

/// Sends the values `send[i]` of `from` to rank `group[i]`, and receives `lengths[i]` values from that rank.
/// Returns the received values in the group's order, with this rank's own part among them. Later work on the
/// GPU may read them.
///
/// # Errors
/// When memory runs out, or an exchange has failed.
pub(super) fn exchange_parts(
    mesh: &Mesh,
    name: &str,
    group: &[usize],
    from: &CudaStorage,
    send: &[Range<usize>],
    lengths: &[usize],
) -> Result<CudaStorage> {
    let own = group.iter().position(|&rank| rank == mesh.rank()).context("this rank is not in the group")?;
    let memories = vec![ExchangeMemory::new(from, send, lengths, own)?];
    start_exchange(mesh, name, group, &Device::Cuda(from.device().clone()), &memories)?.wait()?;
    memories.into_iter().next().map(|memory| memory.values).context("no values")
}

/// Gathers `values` of the ranks of `group`, which all have the same numbers of values. Returns, for each of
/// `values`, the values of all ranks in the group's order. Later work on the GPU may read them.
///
/// # Errors
/// When memory runs out, or an exchange has failed.
pub(super) fn gather_values(
    mesh: &Mesh,
    name: &str,
    group: &[usize],
    values: &[DeviceArgument],
) -> Result<Vec<CudaStorage>> {
    let own = group.iter().position(|&rank| rank == mesh.rank()).context("this rank is not in the group")?;
    let memory = |(from, layout): &DeviceArgument| {
        let (start, count) = (layout.start_offset(), layout.shape().elem_count());
        let (send, lengths) = (vec![start..start + count; group.len()], vec![count; group.len()]);
        Ok(ExchangeMemory::new(from, &send, &lengths, own)?)
    };
    let memories = values.iter().map(memory).collect::<Result<Vec<_>>>()?;
    let device = values.first().context("no values")?.0.device();
    start_exchange(mesh, name, group, &Device::Cuda(device.clone()), &memories)?.wait()?;
    Ok(memories.into_iter().map(|memory| memory.values).collect())
}

/// Gathers the rows of each tensor of `values`, `[t, W]`, on all ranks. Rank r has `counts[r]` rows. Returns
/// the rows of all ranks, in rank order. Later work on the GPU may read them.
///
/// # Errors
/// When memory runs out, or an exchange has failed.
pub(super) fn gather_rows<const N: usize>(
    mesh: &Mesh,
    name: &str,
    values: [&Tensor; N],
    counts: &[usize],
) -> Result<[Tensor; N]> {
    let opened = values.map(Tensor::storage_and_layout);
    let (mut memories, mut shapes) = (vec![], vec![]);
    for (storage, layout) in &opened {
        let (rows, width) = layout.shape().dims2()?;
        let own = layout.start_offset()..layout.start_offset() + rows * width;
        let lengths: Vec<usize> = counts.iter().map(|count| count * width).collect();
        let send = vec![own; counts.len()];
        memories.push(ExchangeMemory::new(on_gpu(storage)?, &send, &lengths, mesh.rank())?);
        shapes.push((counts.iter().sum::<usize>(), width));
    }
    let device = values.first().context("no values")?.device();
    start_exchange(mesh, name, &mesh.all_ranks(), device, &memories)?.wait()?;
    let gathered = memories.into_iter().map(|memory| memory.values);
    let tensors: Vec<Tensor> = gathered.zip(shapes).map(|(x, shape)| tensor(x, shape)).collect();
    <[Tensor; N]>::try_from(tensors).ok().context("a tensor was not gathered")
}

/// Sends rows `send[r]` of `x [T, W]` to rank r, and receives `counts[r]` rows from it. Returns the received
/// rows, in rank order. Later work on the GPU may read them.
///
/// # Errors
/// When memory runs out, or an exchange has failed.
pub(super) fn exchange_rows(
    mesh: &Mesh,
    name: &str,
    x: &Tensor,
    send: &[Range<usize>],
    counts: &[usize],
) -> Result<Tensor> {
    let (storage, layout) = x.storage_and_layout();
    let (start, (_, width)) = (layout.start_offset(), layout.shape().dims2()?);
    let part = |rows: &Range<usize>| start + rows.start * width..start + rows.end * width;
    let parts: Vec<_> = send.iter().map(part).collect();
    let lengths: Vec<usize> = counts.iter().map(|count| count * width).collect();
    let received = exchange_parts(mesh, name, &mesh.all_ranks(), on_gpu(&storage)?, &parts, &lengths)?;
    Ok(tensor(received, (counts.iter().sum(), width)))
}

/// Sends the values `send[r]` of this rank's shard `own` to rank r, and receives `lengths[r]` values from it.
/// Returns the received values, in rank order, with the shape `shape`.
///
/// # Errors
/// When memory runs out, or an exchange has failed.
pub(crate) fn exchange_shards(
    mesh: &Mesh,
    name: &str,
    own: &Tensor,
    send: &[Range<usize>],
    lengths: &[usize],
    shape: Vec<usize>,
) -> Result<Tensor> {
    let (storage, _) = own.storage_and_layout();
    let received = exchange_parts(mesh, name, &mesh.all_ranks(), on_gpu(&storage)?, send, lengths)?;
    Ok(tensor(received, shape))
}

fn on_gpu(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("values that are exchanged must be on the GPU"),
    }
}

fn tensor(values: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(values), shape, BackpropOp::none(), false)
}

/// Returns a tensor on which the graph records ops.
fn variable(values: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(values), shape, BackpropOp::none(), true)
}

/// Sends rows of `x [T, W]` to ranks, and receives rows from them. In the backward pass, the gradient of each
/// row goes back.
pub(super) struct ExchangeRows {
    pub mesh: Arc<Mesh>,
    pub name: &'static str,
    /// Number of rows for each rank. They follow each other.
    pub sent: Vec<usize>,
    /// Number of rows from each rank.
    pub received: Vec<usize>,
}

impl ExchangeRows {
    fn exchange(&self, x: DeviceArgument, [sent, received]: [&[usize]; 2]) -> Result<(CudaStorage, Shape)> {
        let ((storage, layout), (_, width)) = (x, x.1.shape().dims2()?);
        let mut start = layout.start_offset();
        let part = |rows: &usize| {
            start += rows * width;
            start - rows * width..start
        };
        let parts: Vec<_> = sent.iter().map(part).collect();
        let lengths: Vec<usize> = received.iter().map(|rows| rows * width).collect();
        let group = self.mesh.all_ranks();
        let values = exchange_parts(&self.mesh, self.name, &group, storage, &parts, &lengths)?;
        Ok((values, (received.iter().sum(), width).into()))
    }
}

impl Operation<1> for ExchangeRows {
    const NAME: &'static str = "exchange_rows";

    fn cpu(&self, [_]: [HostArgument; 1]) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!("{}: rows of experts in host memory are exchanged without this op", self.name)
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> candle_core::Result<(CudaStorage, Shape)> {
        self.exchange(x, [&self.sent, &self.received]).map_err(to_op_error)
    }

    fn backward(&self, [_]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> InputGradients<1> {
        let grad = grad.contiguous()?;
        let (storage, layout) = grad.storage_and_layout();
        let from = on_gpu(&storage).map_err(to_op_error)?;
        let back = self.exchange((from, layout), [&self.received, &self.sent]).map_err(to_op_error)?;
        Ok([Some(tensor(back.0, back.1))])
    }
}

/// Starts to exchange the parts of `memories` with the ranks of `group`. The memories must outlive the
/// exchange.
fn start_exchange(
    mesh: &Mesh,
    name: &str,
    group: &[usize],
    device: &Device,
    memories: &[ExchangeMemory],
) -> Result<RunningExchange> {
    let parts = |parts: fn(&ExchangeMemory) -> &[(u64, usize)]| -> Vec<DevicePart> {
        memories.iter().flat_map(|memory| with_others(mesh, group, parts(memory))).collect()
    };
    let parts = [parts(|memory| &memory.sent), parts(|memory| &memory.received)];
    RunningExchange::start(mesh, name, device, vec![], parts)
}

/// Returns the `parts` for the ranks of `group` without this rank's own part. A part may be empty. It is
/// empty on both ranks.
fn with_others(mesh: &Mesh, group: &[usize], parts: &[(u64, usize)]) -> Vec<DevicePart> {
    let parts = group.iter().zip(parts).filter(|(rank, (_, bytes))| **rank != mesh.rank() && *bytes > 0);
    parts.map(|(&rank, &(address, bytes))| DevicePart { rank, address, bytes }).collect()
}

fn device_part(rank: usize, values: &Tensor) -> Result<DevicePart> {
    Ok(DevicePart { rank, address: address_of(values)?, bytes: values.elem_count() * size_of::<f32>() })
}
