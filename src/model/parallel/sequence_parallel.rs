//! Sequence parallelism (DeepSpeed Ulysses): the rows of a micro-batch are split over several ranks.
//!
//! All ops except attention compute each row independently, so each rank computes a contiguous range of rows.
//! Before attention, an all-to-all exchange gives each rank all rows of some heads. After attention, the
//! reverse exchange gives each rank all heads of its rows. So a row has the same bits as in one process. The
//! backward pass runs the exchanges in reverse. If there are fewer key-value heads than ranks, several ranks
//! share a head. The gradient of a shared head is the sum of the gradients of these ranks, in rank order.
//!
//! On GPUs the exchanges run between the memories of the GPUs, and the host does not wait for them. GPUs that
//! share a head gather its queries in the backward pass, and each computes the gradients of some keys. So
//! these have the bits of one GPU too: a sum of rounded sums would not.

use super::device_exchange::{exchange_parts, gather_values};
use super::sharded_layers::to_op_error;
use crate::dist::serialization::{f32_bytes, f32_values};
use crate::dist::{Mesh, replicate};
use crate::model::attention::{AttentionInputs, AttentionMode};
use crate::ops::SequenceRows;
use crate::ops::cpu::host_values;
use crate::ops::cuda::{pack_heads, unpack_heads};
use crate::ops::graph::{apply, apply_without_gradient, contiguous, reshape, slice};
use crate::ops::head_parts::HeadSplit;
use crate::ops::operation::{DeviceArgument, HostArgument, InputGradients, Operation};
use crate::ops::sink_attention::{Attention, KeySharing, sink_attention_with_shared_keys};
use anyhow::{Result, ensure};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, Device, Shape, Storage, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The rows of one micro-batch, split over ranks.
pub struct SequenceShards {
    mesh: Arc<Mesh>,
    /// The ranks that share the rows, in the order of their ranges.
    group: Vec<usize>,
    /// The index of this rank in the group.
    pub group_index: usize,
    /// The range of rows of each rank.
    pub ranges: Vec<Range<usize>>,
}

impl SequenceShards {
    /// Splits `rows` rows evenly over the ranks of this rank's sequence group.
    ///
    /// # Errors
    /// When there are fewer rows than ranks.
    pub fn new(mesh: &Arc<Mesh>, rows: usize) -> Result<Self> {
        let (group, group_index) = (mesh.sequence_group(), mesh.sequence_rank());
        let ranks = group.len();
        ensure!(rows >= ranks, "a micro-batch of {rows} rows cannot be split over {ranks} processes");
        let ranges = (0..ranks).map(|i| rows * i / ranks..rows * (i + 1) / ranks).collect();
        Ok(Self { mesh: mesh.clone(), group, group_index, ranges })
    }

    /// Returns the range of rows of this rank.
    pub fn local_range(&self) -> Range<usize> {
        self.ranges[self.group_index].clone()
    }

    fn rows(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Sends `parts[i]` to rank `i` of the group. Returns the values received from each rank, `lengths[i]`
    /// values from rank `i`.
    fn exchange(&self, what: &str, parts: Vec<Vec<f32>>, lengths: &[usize]) -> Result<Vec<Vec<f32>>> {
        let parts = parts.iter().map(|part| Arc::new(f32_bytes(part).to_vec())).collect();
        let bytes: Vec<usize> = lengths.iter().map(|length| length * size_of::<f32>()).collect();
        let received = self.mesh.start(what, &self.group, parts, &bytes)?.wait()?;
        Ok(received.iter().map(|bytes| f32_values(bytes).collect()).collect())
    }

    /// Returns the number of values of each rank, for rows of `width` values.
    fn lengths(&self, width: usize) -> Vec<usize> {
        self.ranges.iter().map(|range| range.len() * width).collect()
    }

    /// Gathers the values of all ranks. Rank `i` of the group has `lengths[i]` values.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn gather(&self, what: &str, own: &[f32], lengths: &[usize]) -> Result<Vec<Vec<f32>>> {
        self.exchange(what, vec![own.to_vec(); self.group.len()], lengths)
    }

    /// Returns all rows `[T, W]`, gathered from the rows `x [t, W]` of each rank. Differentiable.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn gather_rows(self: &Arc<Self>, x: &Tensor) -> Result<Tensor> {
        Ok(apply([&contiguous(x)?], GatherRows { split: self.clone() })?)
    }

    /// Returns the routed experts of all rows, `[T, K]`, gathered from `routed_experts`, u32 `[t, K]`, of
    /// each rank.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub fn gather_routed_experts(self: &Arc<Self>, routed_experts: &Tensor) -> Result<Tensor> {
        if routed_experts.device().is_cuda() {
            let gather = GatherRows { split: self.clone() };
            return Ok(apply_without_gradient(&routed_experts.contiguous()?, gather)?);
        }
        let top_k = routed_experts.dim(1)?;
        let own: Vec<u8> =
            routed_experts.flatten_all()?.to_vec1::<u32>()?.iter().flat_map(|e| e.to_le_bytes()).collect();
        let lengths: Vec<usize> = self.ranges.iter().map(|r| r.len() * top_k * size_of::<u32>()).collect();
        let parts = replicate(own, self.group.len());
        let received = self.mesh.start("routed experts", &self.group, parts, &lengths)?.wait()?.concat();
        let experts: Vec<u32> =
            received.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Tensor::from_vec(experts, (self.rows(), top_k), &Device::Cpu)?)
    }
}

/// Attention over rows that are split over ranks.
pub struct SequenceParallelAttention {
    pub split: Arc<SequenceShards>,
    /// The sequences of all rows.
    pub sequence_rows: Arc<SequenceRows>,
}

impl AttentionMode for SequenceParallelAttention {
    fn attend(&mut self, _: usize, inputs: AttentionInputs) -> Result<Tensor> {
        let ([q, kv], sinks, attention) = (inputs.rotate()?, inputs.sinks_or_zeros()?, inputs.attention);
        let Attention { heads, kv_heads, head_dim, .. } = attention;
        let split = &self.split;
        let ranks = split.group.len();
        let q_heads = HeadSplit { groups: 1, heads, head_dim, ranks };
        let kv_heads = HeadSplit { groups: 2, heads: kv_heads, head_dim, ranks };
        let (own, own_kv) = (q_heads.own_heads(), kv_heads.own_heads());
        let (all, t) = (split.rows(), split.local_range().len());
        let op = |heads: HeadSplit, to_heads| MoveHeads { split: split.clone(), heads, to_heads };
        let q = apply([&contiguous(&q)?], op(q_heads, true))?;
        let kv = reshape(&kv, (t, 2 * kv_heads.heads, head_dim))?;
        let kv = apply([&contiguous(&kv)?], op(kv_heads, true))?;
        let kv = reshape(&kv, (all, 2, own_kv, head_dim))?;
        let first = q_heads.first_head(split.group_index);
        let sinks = slice(&sinks, first..first + own)?;
        let part = Attention { heads: own, kv_heads: own_kv, ..attention };
        let sharing = SharedHead::new(split, kv_heads.heads).filter(|_| q.device().is_cuda());
        let sharing = sharing.map(|sharing| Arc::new(sharing) as Arc<dyn KeySharing>);
        let output = sink_attention_with_shared_keys(&q, &kv, &sinks, &self.sequence_rows, part, sharing)?;
        let output = reshape(&output, (all, own, head_dim))?;
        let output = apply([&contiguous(&output)?], op(q_heads, false))?;
        Ok(reshape(&output, (t, heads * head_dim))?)
    }
}

/// A key-value head that several GPUs of a sequence group share.
struct SharedHead {
    split: Arc<SequenceShards>,
    /// Their indices in the group.
    members: Range<usize>,
}

impl SharedHead {
    /// Returns the head of this rank. `None` if no other rank has it.
    fn new(split: &Arc<SequenceShards>, kv_heads: usize) -> Option<Self> {
        let sharing = split.group.len() / kv_heads;
        let first = split.group_index - split.group_index % sharing.max(1);
        (sharing > 1).then(|| Self { split: split.clone(), members: first..first + sharing })
    }
}

impl KeySharing for SharedHead {
    fn place(&self) -> (usize, usize) {
        (self.split.group_index - self.members.start, self.members.len())
    }

    fn gather(&self, values: &[DeviceArgument]) -> candle_core::Result<Vec<CudaStorage>> {
        let ranks = &self.split.group[self.members.clone()];
        gather_values(&self.split.mesh, "shared heads", ranks, values).map_err(to_op_error)
    }
}

/// Exchanges rows for heads, or heads for rows. The backward pass of either exchange is the other one.
///
/// Rows to heads: `x [t, G·N, D]` has all heads of the rows of this rank. The result `[T, G·n, D]` has all
/// rows of the heads of this rank. For a head that several ranks share, the reverse exchange returns the sum
/// of their values, in rank order.
struct MoveHeads {
    split: Arc<SequenceShards>,
    heads: HeadSplit,
    to_heads: bool,
}

impl MoveHeads {
    /// Returns the shape of the result.
    fn shape(&self, to_heads: bool) -> Shape {
        let HeadSplit { groups, heads, head_dim, .. } = self.heads;
        match to_heads {
            true => (self.split.rows(), groups * self.heads.own_heads(), head_dim).into(),
            false => (self.split.local_range().len(), groups * heads, head_dim).into(),
        }
    }

    /// Returns the name of the exchange.
    fn name(to_heads: bool) -> &'static str {
        if to_heads { "heads" } else { "rows" }
    }

    fn exchange(&self, x: &[f32], to_heads: bool) -> Result<Vec<f32>> {
        let (split, width) = (&self.split, self.heads.part_width());
        if to_heads {
            let parts = self.heads.pack(x);
            return Ok(split.exchange(Self::name(to_heads), parts, &split.lengths(width))?.concat());
        }
        let part = |range: &Range<usize>| x[range.start * width..range.end * width].to_vec();
        let lengths = vec![split.local_range().len() * width; split.group.len()];
        let parts = split.ranges.iter().map(part).collect();
        Ok(self.heads.unpack(&split.exchange(Self::name(to_heads), parts, &lengths)?))
    }

    fn exchange_on_device(
        &self,
        (x, layout): DeviceArgument,
        to_heads: bool,
    ) -> candle_core::Result<CudaStorage> {
        let (split, width) = (&self.split, self.heads.part_width());
        let exchange = |from: &CudaStorage, parts: &[Range<usize>], lengths: &[usize]| {
            let name = Self::name(to_heads);
            exchange_parts(&split.mesh, name, &split.group, from, parts, lengths).map_err(to_op_error)
        };
        // The part of each rank with all heads of the rows of this rank.
        let length = split.local_range().len() * width;
        if to_heads {
            let parts: Vec<_> = (0..split.group.len()).map(|i| i * length..(i + 1) * length).collect();
            return exchange(&pack_heads((x, layout), &self.heads)?, &parts, &split.lengths(width));
        }
        let start = layout.start_offset();
        let part = |range: &Range<usize>| start + range.start * width..start + range.end * width;
        let parts: Vec<_> = split.ranges.iter().map(part).collect();
        let received = exchange(x, &parts, &vec![length; split.group.len()])?;
        unpack_heads(&received, length * split.group.len(), &self.heads)
    }
}

impl Operation<1> for MoveHeads {
    const NAME: &'static str = "move_heads";

    fn cpu(&self, [x]: [HostArgument; 1]) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = self.exchange(x.values()?, self.to_heads).map_err(to_op_error)?;
        Ok((CpuStorage::F32(out), self.shape(self.to_heads)))
    }

    fn cuda(&self, [x]: [DeviceArgument; 1]) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((self.exchange_on_device(x, self.to_heads)?, self.shape(self.to_heads)))
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> InputGradients<1> {
        let shape = self.shape(!self.to_heads);
        if let (Storage::Cuda(storage), layout) = (&*grad.storage_and_layout().0, grad.layout()) {
            let out = Storage::Cuda(self.exchange_on_device((storage, layout), !self.to_heads)?);
            return Ok([Some(Tensor::from_storage(out, shape, BackpropOp::none(), false))]);
        }
        let out = self.exchange(&host_values(grad)?, !self.to_heads).map_err(to_op_error)?;
        Ok([Some(Tensor::from_vec(out, shape, x.device())?)])
    }
}

/// Gathers the rows of all ranks on every rank. All ranks compute the same results from the gathered rows. So
/// the backward pass keeps only the gradient of the rows of this rank.
struct GatherRows {
    split: Arc<SequenceShards>,
}

impl Operation<1> for GatherRows {
    const NAME: &'static str = "gather_rows";

    fn cpu(&self, [x]: [HostArgument; 1]) -> candle_core::Result<(CpuStorage, Shape)> {
        let (_, width) = x.shape().dims2()?;
        let lengths = self.split.lengths(width);
        let all = self.split.gather("router logits", x.values()?, &lengths).map_err(to_op_error)?;
        Ok((CpuStorage::F32(all.concat()), Shape::from((self.split.rows(), width))))
    }

    fn cuda(&self, [(x, layout)]: [DeviceArgument; 1]) -> candle_core::Result<(CudaStorage, Shape)> {
        let (split, (_, width)) = (&self.split, layout.shape().dims2()?);
        let start = layout.start_offset();
        let own = start..start + layout.shape().elem_count();
        let parts = vec![own; split.group.len()];
        let lengths = split.lengths(width);
        let all = exchange_parts(&split.mesh, "router rows", &split.group, x, &parts, &lengths);
        Ok((all.map_err(to_op_error)?, Shape::from((split.rows(), width))))
    }

    fn backward(&self, [_]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> InputGradients<1> {
        let own = self.split.local_range();
        Ok([Some(grad.narrow(0, own.start, own.len())?.contiguous()?)])
    }
}
