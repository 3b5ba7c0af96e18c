//! Sequence parallelism (DeepSpeed Ulysses): the rows of a micro-batch are split over several ranks.
//!
//! All ops except attention compute each row independently, so each rank computes a contiguous range of rows.
//! Before attention, an all-to-all exchange gives each rank all rows of some heads. After attention, the
//! reverse exchange gives each rank all heads of its rows. So a row has the same bits as in one process. The
//! backward pass runs the exchanges in reverse. If there are fewer key-value heads than ranks, several ranks
//! share a head. The gradient of a shared head is the sum of the gradients of these ranks, in rank order.

use super::attention::{AttentionInputs, AttentionMode};
use super::sharded_layers::to_op_error;
use crate::dist::serialization::{f32_bytes, f32_values};
use crate::dist::{Mesh, replicate};
use crate::ops::cpu::host_values;
use crate::ops::graph::{apply, contiguous, reshape, slice};
use crate::ops::operation::{HostArgument, Operation};
use crate::ops::{self, SequenceRows, sink_attention::Attention};
use anyhow::{Context, Result, ensure};
use candle_core::{CpuStorage, Device, Shape, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The rows of one micro-batch, split over ranks.
pub struct SequenceShards {
    mesh: Arc<Mesh>,
    /// The ranks that share the rows, in the order of their ranges.
    group: Vec<usize>,
    /// The index of this rank in the group.
    group_index: usize,
    /// The range of rows of each rank.
    ranges: Vec<Range<usize>>,
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

    /// Returns the range of rows of each rank.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Returns the index of this rank in the group.
    pub fn group_index(&self) -> usize {
        self.group_index
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
    pub fn gather_routed_experts(&self, routed_experts: &Tensor) -> Result<Tensor> {
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

    /// Exchanges rows for heads. `x [t, H, D]` has all heads of the rows of this rank. Returns all rows of
    /// the heads of this rank, `[T, h, D]`.
    fn to_heads(&self, x: &[f32], heads: &Heads, dim: usize) -> Result<Vec<f32>> {
        let part = |of: &Vec<usize>| -> Vec<f32> {
            let rows = x.chunks_exact(heads.count * dim);
            rows.flat_map(|row| of.iter().flat_map(|&h| row[h * dim..(h + 1) * dim].iter().copied()))
                .collect()
        };
        let own = heads.of_rank[self.group_index].len();
        let lengths: Vec<usize> = self.ranges.iter().map(|range| range.len() * own * dim).collect();
        Ok(self.exchange("heads", heads.of_rank.iter().map(part).collect(), &lengths)?.concat())
    }

    /// Exchanges heads for rows. `x [T, h, D]` has all rows of the heads of this rank. Returns all heads of
    /// the rows of this rank, `[t, H, D]`. For a head that several ranks share, returns the sum of their
    /// values in rank order.
    fn to_rows(&self, x: &[f32], heads: &Heads, dim: usize) -> Result<Vec<f32>> {
        let own = heads.of_rank[self.group_index].len() * dim;
        let parts = self.ranges.iter().map(|range| x[range.start * own..range.end * own].to_vec()).collect();
        let rows = self.local_range().len();
        let lengths: Vec<usize> = heads.of_rank.iter().map(|of| rows * of.len() * dim).collect();
        let received = self.exchange("rows", parts, &lengths)?;
        let mut out = vec![0f32; rows * heads.count * dim];
        let mut written = vec![false; heads.count];
        for (part, of) in received.iter().zip(&heads.of_rank) {
            for (i, &head) in of.iter().enumerate() {
                for row in 0..rows {
                    let from = &part[(row * of.len() + i) * dim..][..dim];
                    let to = &mut out[(row * heads.count + head) * dim..][..dim];
                    match written[head] {
                        false => to.copy_from_slice(from),
                        true => to.iter_mut().zip(from).for_each(|(sum, x)| *sum += x),
                    }
                }
                written[head] = true;
            }
        }
        Ok(out)
    }
}

/// The heads of each rank.
#[derive(Clone)]
struct Heads {
    /// The total number of heads.
    count: usize,
    /// The heads of each rank, by rank.
    of_rank: Vec<Vec<usize>>,
}

impl Heads {
    /// Splits `count` heads evenly over `ranks`. Either number must divide the other. If there are fewer
    /// heads than ranks, several ranks share a head.
    fn even(count: usize, ranks: usize) -> Self {
        let of = |rank: usize| match count >= ranks {
            true => (rank * count / ranks..(rank + 1) * count / ranks).collect(),
            false => vec![rank * count / ranks],
        };
        Self { count, of_rank: (0..ranks).map(of).collect() }
    }

    /// Returns the heads of keys, followed by the same heads of values.
    fn keys_and_values(self) -> Self {
        let both =
            |of: Vec<usize>| of.iter().copied().chain(of.iter().map(|head| self.count + head)).collect();
        Self { count: 2 * self.count, of_rank: self.of_rank.into_iter().map(both).collect() }
    }
}

/// Returns the reason why heads cannot be split over `ranks` processes; `None` if they can be split.
pub fn head_split_error(heads: usize, kv_heads: usize, ranks: usize) -> Option<String> {
    let divides = |a: usize, b: usize| b != 0 && a.is_multiple_of(b);
    (!divides(heads, ranks)).then(|| format!("does not divide the {heads} attention heads")).or_else(|| {
        let fits = divides(kv_heads, ranks) || divides(ranks, kv_heads);
        (!fits).then(|| format!("neither divides the {kv_heads} key-value heads nor is a multiple of them"))
    })
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
        let ranks = self.split.group.len();
        let q_heads = Heads::even(heads, ranks);
        let kv_of = Heads::even(kv_heads, ranks);
        let of_rank = |heads: &Heads| heads.of_rank[self.split.group_index].clone();
        let (own, own_kv) = (of_rank(&q_heads), of_rank(&kv_of));
        let first = *own.first().context("a rank without heads")?;
        let (all, t) = (self.split.rows(), self.split.local_range().len());
        let op =
            |heads: &Heads, to_heads| MoveHeads { split: self.split.clone(), heads: heads.clone(), to_heads };
        let q = apply([&contiguous(&q)?], op(&q_heads, true))?;
        let kv = reshape(&kv, (t, 2 * kv_heads, head_dim))?;
        let kv = apply([&contiguous(&kv)?], op(&kv_of.keys_and_values(), true))?;
        let kv = reshape(&kv, (all, 2, own_kv.len(), head_dim))?;
        let sinks = slice(&sinks, first..first + own.len())?;
        let part = Attention { heads: own.len(), kv_heads: own_kv.len(), ..attention };
        let output = ops::sink_attention(&q, &kv, &sinks, &self.sequence_rows, part)?;
        let output = reshape(&output, (all, own.len(), head_dim))?;
        let output = apply([&contiguous(&output)?], op(&q_heads, false))?;
        Ok(reshape(&output, (t, heads * head_dim))?)
    }
}

/// Exchanges rows for heads ([`SequenceShards::to_heads`]) or heads for rows ([`SequenceShards::to_rows`]).
/// The backward pass of either exchange is the other one.
struct MoveHeads {
    split: Arc<SequenceShards>,
    heads: Heads,
    to_heads: bool,
}

impl MoveHeads {
    fn exchange(&self, x: &[f32], dim: usize, to_heads: bool) -> candle_core::Result<(Vec<f32>, Shape)> {
        let (split, heads) = (&self.split, &self.heads);
        let (values, shape) = match to_heads {
            true => {
                (split.to_heads(x, heads, dim), (split.rows(), heads.of_rank[split.group_index].len(), dim))
            }
            false => (split.to_rows(x, heads, dim), (split.local_range().len(), heads.count, dim)),
        };
        Ok((values.map_err(to_op_error)?, Shape::from(shape)))
    }
}

impl Operation<1> for MoveHeads {
    const NAME: &'static str = "move_heads";

    fn cpu(&self, [x]: [HostArgument; 1]) -> candle_core::Result<(CpuStorage, Shape)> {
        let (_, _, dim) = x.shape().dims3()?;
        let (out, shape) = self.exchange(x.values()?, dim, self.to_heads)?;
        Ok((CpuStorage::F32(out), shape))
    }

    fn backward(
        &self,
        [x]: [&Tensor; 1],
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 1]> {
        let (out, shape) = self.exchange(&host_values(grad)?, x.dim(2)?, !self.to_heads)?;
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
        let lengths: Vec<usize> = self.split.ranges.iter().map(|range| range.len() * width).collect();
        let all = self.split.gather("router logits", x.values()?, &lengths).map_err(to_op_error)?;
        Ok((CpuStorage::F32(all.concat()), Shape::from((self.split.rows(), width))))
    }

    fn backward(
        &self,
        [_]: [&Tensor; 1],
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 1]> {
        let own = self.split.local_range();
        Ok([Some(grad.narrow(0, own.start, own.len())?.contiguous()?)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_go_round_in_stretches_and_few_key_value_heads_are_on_several_ranks() {
        assert_eq!(Heads::even(4, 2).of_rank, [[0, 1], [2, 3]]);
        assert_eq!(Heads::even(2, 4).of_rank, [[0], [0], [1], [1]]);
        assert_eq!(Heads::even(2, 4).keys_and_values().of_rank, [[0, 2], [0, 2], [1, 3], [1, 3]]);
        assert_eq!(head_split_error(64, 8, 16), None);
        assert!(head_split_error(12, 2, 8).unwrap().contains("12 attention heads"));
        assert!(head_split_error(12, 4, 6).unwrap().contains("4 key-value heads"));
    }
}
