//! Muon on several GPUs, with the bits of one GPU. No value passes the host.
//!
//! A matrix that one rank holds whole is updated there. Any other matrix has an owner. The ranks that hold
//! parts of it update the momentum of their parts and send the direction to the owner, in f32. The owner
//! orthogonalizes the whole matrix by the kernels of one GPU, and sends each part of the result back, in
//! bf16. Weights and momentum stay where they are.

use crate::dist::Sharding;
use crate::model::names::ParameterSpec;
use crate::model::parallel::device_exchange::{ExchangedParts, PendingParts};
use crate::model::parameters::Parameters;
use crate::ops::muon::{
    DEVICE_VALUES, Muon, apply_on_device, device_scratch_bytes, iteration_flop, momentum_on_device, muon,
    orthogonalize_on_device,
};
use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use std::cmp::Reverse;
use std::ops::Range;

const F32: usize = size_of::<f32>();
const BF16: usize = size_of::<half::bf16>();

/// The matrices of a tensor, as ranks hold them.
#[derive(Debug, Clone, PartialEq)]
struct ShardedMatrices {
    /// The index of the tensor.
    tensor: usize,
    /// Rows and columns of each matrix.
    shape: (usize, usize),
    /// The values that each rank holds.
    shards: Vec<Range<usize>>,
}

impl ShardedMatrices {
    fn new((tensor, spec): (usize, &ParameterSpec), sharding: Sharding) -> Option<Self> {
        let [_, rows, columns] = spec.matrix_shape()?;
        let shards = (0..sharding.ranks).map(|rank| spec.shard_range(tensor, rank, sharding)).collect();
        Some(Self { tensor, shape: (rows, columns), shards })
    }

    /// Returns the number of values of a matrix.
    fn size(&self) -> usize {
        (self.shape.0 * self.shape.1).max(1)
    }

    /// Returns the number of matrices that `rank` holds whole, and where their values are in its shard.
    fn whole(&self, rank: usize) -> (usize, Range<usize>) {
        let (shard, size) = (&self.shards[rank], self.size());
        let first = shard.start.div_ceil(size) * size;
        let count = shard.end.saturating_sub(first) / size;
        let start = first.min(shard.end) - shard.start;
        (count, start..start + count * size)
    }

    /// Returns the matrices of which several ranks hold parts. Rank 0 is their owner.
    fn split(&self) -> Vec<SplitMatrix> {
        let size = self.size();
        let values = self.shards.iter().map(|shard| shard.end).max().unwrap_or(0);
        let matrix = |first: usize| {
            let part = |shard: &Range<usize>| {
                let (start, end) = (shard.start.max(first), shard.end.min(first + size));
                if start < end { start - first..end - first } else { 0..0 }
            };
            let parts: Vec<_> = self.shards.iter().map(part).collect();
            SplitMatrix { tensor: self.tensor, first, shape: self.shape, parts, owner: 0 }
        };
        let is_split = |matrix: &SplitMatrix| matrix.parts.iter().filter(|part| !part.is_empty()).count() > 1;
        (0..values).step_by(size).map(matrix).filter(is_split).collect()
    }
}

/// A matrix of which several ranks hold parts.
#[derive(Debug, Clone, PartialEq)]
struct SplitMatrix {
    /// The index of its tensor.
    tensor: usize,
    /// The place of its first value in the tensor.
    first: usize,
    shape: (usize, usize),
    /// The values that each rank holds, of the matrix.
    parts: Vec<Range<usize>>,
    /// The rank that orthogonalizes it.
    owner: usize,
}

impl SplitMatrix {
    fn size(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    fn concerns(&self, rank: usize) -> bool {
        self.owner == rank || !self.parts[rank].is_empty()
    }

    /// Returns this rank's part of the matrix, of `x`, its shard of the tensor.
    fn part_of(&self, x: &Tensor, rank: usize, shard: &Range<usize>) -> Result<Tensor> {
        let part = &self.parts[rank];
        let start = if part.is_empty() { 0 } else { self.first + part.start - shard.start };
        Ok(x.narrow(0, start, part.len())?)
    }
}

/// Tensors whose matrices are exchanged together.
#[derive(Debug, Clone, Default)]
struct Round {
    tensors: Vec<ShardedMatrices>,
    split: Vec<SplitMatrix>,
}

impl Round {
    /// Gives each split matrix an owner: the largest first, to the rank with the least work so far. Among
    /// equals, to the rank with the largest part of it.
    fn choose_owners(mut self, ranks: usize) -> Self {
        let whole = |rank: usize| {
            let flop =
                |matrices: &ShardedMatrices| matrices.whole(rank).0 as f64 * iteration_flop(matrices.shape);
            self.tensors.iter().map(flop).sum()
        };
        let mut work: Vec<f64> = (0..ranks).map(whole).collect();
        let mut order: Vec<usize> = (0..self.split.len()).collect();
        order.sort_by(|&a, &b| {
            iteration_flop(self.split[b].shape).total_cmp(&iteration_flop(self.split[a].shape))
        });
        for index in order {
            let matrix = &mut self.split[index];
            let key = |rank: &usize| Reverse(matrix.parts[*rank].len());
            let least = (0..ranks).min_by(|a, b| work[*a].total_cmp(&work[*b]).then(key(a).cmp(&key(b))));
            matrix.owner = least.unwrap_or(0);
            work[matrix.owner] += iteration_flop(matrix.shape);
        }
        self
    }

    /// Returns the operations of `rank`.
    fn flop(&self, rank: usize) -> f64 {
        let whole =
            self.tensors.iter().map(|tensor| tensor.whole(rank).0 as f64 * iteration_flop(tensor.shape));
        let owned = self.split.iter().filter(|matrix| matrix.owner == rank);
        whole.sum::<f64>() + owned.map(|matrix| iteration_flop(matrix.shape)).sum::<f64>()
    }

    /// Returns the bytes that `rank` receives.
    fn received_bytes(&self, rank: usize) -> u64 {
        let bytes = |matrix: &SplitMatrix| match (matrix.owner == rank, matrix.parts[rank].len()) {
            (true, own) => (matrix.size() - own) * F32,
            (false, own) => own * BF16,
        };
        self.split.iter().map(|matrix| bytes(matrix) as u64).sum()
    }

    /// Returns the most bytes of GPU memory that `rank` needs temporarily.
    fn scratch_bytes(&self, rank: usize) -> u64 {
        let parts: usize = self.split.iter().map(|matrix| matrix.parts[rank].len()).sum();
        let owned: Vec<_> = self.split.iter().filter(|matrix| matrix.owner == rank).collect();
        let values: usize = owned.iter().map(|matrix| matrix.size()).sum();
        let whole = self.tensors.iter().map(|tensor| match (tensor.whole(rank).0, tensor.shape) {
            (0, _) => 0,
            (count, (rows, columns)) => device_scratch_bytes(&[count, rows, columns]),
        });
        let exchanged = (F32 * (parts + values)) as u64 + whole.max().unwrap_or(0);
        let mut done = 0;
        let products = owned.iter().map(|matrix| {
            let rest = values - done - matrix.size();
            let kept = (F32 * rest + BF16 * done) as u64;
            done += matrix.size();
            kept + device_scratch_bytes(&[matrix.shape.0, matrix.shape.1])
        });
        let products = products.max().unwrap_or(0);
        exchanged.max(products).max((BF16 * (values + parts)) as u64)
    }

    /// Updates the weights and the momentum of this rank. Every rank must call this method.
    fn update(&self, parameters: &Parameters, step: &Muon, momentum: &str) -> Result<()> {
        let (mesh, device) = (parameters.shard_mesh(), parameters.device());
        let (rank, ranks) = (mesh.rank(), mesh.ranks());
        let state = |tensor: usize| {
            let gradient = parameters.gradient(tensor).context("a tensor of Muon has no gradient")?;
            let state = parameters.state(tensor).get(momentum).context("the optimizer has no momentum")?;
            Ok::<_, anyhow::Error>([parameters.master(tensor)?, state, gradient])
        };
        let shard = |tensor: usize| {
            let matrices = self.tensors.iter().find(|matrices| matrices.tensor == tensor);
            matrices.map_or(0..0, |matrices| matrices.shards[rank].clone())
        };
        let part = |matrix: &SplitMatrix, x: &Tensor| matrix.part_of(x, rank, &shard(matrix.tensor));
        let own: Vec<_> = self.split.iter().filter(|matrix| matrix.concerns(rank)).collect();

        let directions = own.iter().map(|matrix| {
            let [_, momentum, gradient] = state(matrix.tensor)?;
            let from = momentum_on_device(&part(matrix, momentum)?, &part(matrix, gradient)?, step)?;
            let (mut send, mut lengths) = (vec![0..0; ranks], vec![0; ranks]);
            send[matrix.owner] = 0..from.elem_count();
            if matrix.owner == rank {
                lengths = matrix.parts.iter().map(Range::len).collect();
            }
            Ok(ExchangedParts { from, send, lengths })
        });
        let directions = directions.collect::<Result<_>>()?;
        let exchange = PendingParts::start(mesh, "matrices of Muon", device, directions)?;
        for matrices in &self.tensors {
            update_whole(matrices, rank, state(matrices.tensor)?, step)?;
        }
        let directions = exchange.finish()?;

        let results = own.iter().zip(directions).map(|(matrix, direction)| {
            let (mut send, mut lengths) = (vec![0..0; ranks], vec![0; ranks]);
            lengths[matrix.owner] = matrix.parts[rank].len();
            if matrix.owner != rank {
                let from = Tensor::zeros(0, DType::BF16, device)?;
                return Ok(ExchangedParts { from, send, lengths });
            }
            send.clone_from(&matrix.parts);
            Ok(ExchangedParts { from: orthogonalize_on_device(direction, matrix.shape)?, send, lengths })
        });
        let results = results.collect::<Result<_>>()?;
        let results = PendingParts::start(mesh, "updates of Muon", device, results)?.finish()?;
        for (matrix, result) in own.iter().zip(results) {
            let [weights, ..] = state(matrix.tensor)?;
            apply_on_device(&part(matrix, weights)?, &result, step, matrix.shape)?;
        }
        Ok(())
    }
}

/// Updates the matrices that this rank holds whole, as one GPU does.
fn update_whole(matrices: &ShardedMatrices, rank: usize, state: [&Tensor; 3], step: &Muon) -> Result<()> {
    let ((count, values), (rows, columns)) = (matrices.whole(rank), matrices.shape);
    if count == 0 {
        return Ok(());
    }
    let whole = |x: &Tensor| x.narrow(0, values.start, values.len())?.reshape((count, rows, columns));
    let [weights, momentum, gradient] = state.map(whole);
    Ok(muon(&weights?, &momentum?, &gradient?, step)?)
}

/// Distributes the matrices of `tensors` over the ranks of `sharding`. Each tensor has its index in the
/// store. The result is equal on every rank.
fn rounds<'a>(tensors: impl Iterator<Item = (usize, &'a ParameterSpec)>, sharding: Sharding) -> Vec<Round> {
    let matrices = tensors.filter_map(|tensor| ShardedMatrices::new(tensor, sharding)).collect();
    distribute(matrices, sharding.ranks)
}

/// Returns rounds of as many tensors as the memory of owners allows.
fn distribute(tensors: Vec<ShardedMatrices>, ranks: usize) -> Vec<Round> {
    let largest = tensors.iter().map(ShardedMatrices::size).max().unwrap_or(0);
    let values_max = ranks * largest.max(DEVICE_VALUES);
    let mut rounds = vec![Round::default()];
    let mut values = 0;
    for matrices in tensors {
        let split = matrices.split();
        let more = split.len() * matrices.size();
        if values > 0 && values + more > values_max {
            rounds.push(Round::default());
            values = 0;
        }
        values += more;
        if let Some(round) = rounds.last_mut() {
            round.tensors.push(matrices);
            round.split.extend(split);
        }
    }
    rounds.into_iter().map(|round| round.choose_owners(ranks)).collect()
}

/// Updates the tensors `indices` of `parameters`, which are sharded over several GPUs. `momentum` is the name
/// of their state. Every rank must call this function.
///
/// # Errors
/// When an exchange fails, or memory runs out.
pub fn update(parameters: &Parameters, indices: &[usize], step: &Muon, momentum: &str) -> Result<()> {
    let tensors = indices.iter().map(|&index| (index, &parameters.specs[index]));
    let rounds = rounds(tensors, parameters.shard_mesh().sharding());
    rounds.iter().try_for_each(|round| round.update(parameters, step, momentum))
}

/// The most that one of several GPUs needs for the update of some tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UpdateCost {
    /// Operations of the iterations.
    pub flop: f64,
    /// Temporary GPU memory.
    pub scratch_bytes: u64,
    /// Bytes from other ranks.
    pub received_bytes: u64,
}

impl UpdateCost {
    /// Returns the cost of the update of `tensors`, each with its index in the store.
    pub fn new<'a>(tensors: impl Iterator<Item = (usize, &'a ParameterSpec)>, sharding: Sharding) -> Self {
        let (rounds, ranks) = (rounds(tensors, sharding), sharding.ranks);
        let total = |rank: usize| Self {
            flop: rounds.iter().map(|round| round.flop(rank)).sum(),
            scratch_bytes: rounds.iter().map(|round| round.scratch_bytes(rank)).max().unwrap_or(0),
            received_bytes: rounds.iter().map(|round| round.received_bytes(rank)).sum(),
        };
        (0..ranks).map(total).fold(Self::default(), |most, cost| Self {
            flop: most.flop.max(cost.flop),
            scratch_bytes: most.scratch_bytes.max(cost.scratch_bytes),
            received_bytes: most.received_bytes.max(cost.received_bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::shard_range;

    /// Experts, a tall and a wide matrix, and one that is smaller than a block of shards.
    fn tensors(ranks: usize) -> Vec<ShardedMatrices> {
        let shapes = [(8, 48, 96), (1, 320, 64), (1, 64, 320), (1, 16, 4)];
        let tensor = |(index, (count, rows, columns)): (usize, (usize, usize, usize))| {
            let shard = |rank: usize| shard_range(count * rows * columns, index, rank, ranks);
            ShardedMatrices { tensor: index, shape: (rows, columns), shards: (0..ranks).map(shard).collect() }
        };
        shapes.into_iter().enumerate().map(tensor).collect()
    }

    fn round(ranks: usize) -> Round {
        let tensors = tensors(ranks);
        let split = tensors.iter().flat_map(ShardedMatrices::split).collect();
        Round { tensors, split }.choose_owners(ranks)
    }

    #[test]
    fn each_value_is_updated_once_whole_or_as_a_part() {
        for ranks in [2, 3, 4, 7, 8] {
            let round = round(ranks);
            for matrices in &round.tensors {
                let values = matrices.shards.iter().map(|shard| shard.end).max();
                let mut updates = vec![0; values.unwrap()];
                for (rank, shard) in matrices.shards.iter().enumerate() {
                    let (count, whole) = matrices.whole(rank);
                    assert_eq!(whole.len(), count * matrices.size());
                    assert!(whole.is_empty() || (shard.start + whole.start) % matrices.size() == 0);
                    updates[shard.start..shard.end][whole].iter_mut().for_each(|updates| *updates += 1);
                }
                for matrix in round.split.iter().filter(|matrix| matrix.tensor == matrices.tensor) {
                    for (rank, part) in matrix.parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                        let first = matrix.first + part.start;
                        assert!(matrices.shards[rank].contains(&first));
                        updates[first..matrix.first + part.end].iter_mut().for_each(|updates| *updates += 1);
                    }
                    assert_eq!(matrix.parts.iter().map(Range::len).sum::<usize>(), matrix.size());
                }
                assert!(updates.iter().all(|updates| *updates == 1), "{ranks} ranks, {:?}", matrices.shape);
            }
        }
    }

    #[test]
    fn owners_share_the_work() {
        for ranks in [2, 3, 4, 7] {
            let round = round(ranks);
            let work: Vec<f64> = (0..ranks).map(|rank| round.flop(rank)).collect();
            let largest = round.tensors.iter().map(|tensor| iteration_flop(tensor.shape)).fold(0.0, f64::max);
            let (least, most) =
                (work.iter().copied().fold(f64::MAX, f64::min), work.iter().copied().fold(0.0, f64::max));
            assert!(most - least <= largest, "{ranks} ranks: {work:?}");
        }
    }

    /// With one expert a rank, nothing is exchanged for experts.
    #[test]
    fn whole_experts_stay_where_they_are() {
        let experts = &tensors(8)[0];
        assert!(experts.split().is_empty());
        assert_eq!((0..8).map(|rank| experts.whole(rank).0).sum::<usize>(), 8);
        let cost = |ranks: usize| {
            let round = round(ranks);
            let received = |rank: usize| round.received_bytes(rank);
            (0..ranks).map(received).sum::<u64>()
        };
        // Two ranks hold four experts each, and exchange halves of the two other matrices: f32 to the
        // owner, bf16 back.
        let halves = 2 * 320 * 64 / 2;
        assert_eq!(cost(2), (halves * (F32 + BF16)) as u64);
    }

    #[test]
    fn rounds_limit_the_memory_of_owners() {
        let all = tensors(3);
        let size = DEVICE_VALUES / 4;
        let many: Vec<_> = (0..40)
            .map(|index| ShardedMatrices {
                tensor: index,
                shape: (size / 1024, 1024),
                shards: (0..3).map(|rank| shard_range(size, index, rank, 3)).collect(),
            })
            .collect();
        let rounds = distribute(many, 3);
        assert_eq!(rounds.iter().map(|round| round.tensors.len()).collect::<Vec<_>>(), [12, 12, 12, 4]);
        assert!(rounds.iter().all(|round| (0..3).all(|rank| round.flop(rank) > 0.0)));
        assert_eq!(distribute(all, 3).len(), 1);
    }
}
