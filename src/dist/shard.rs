//! Shards of a tensor over ranks.

use std::ops::Range;

/// Alignment of shards, in values. It is the block size of 8-bit moments, so each block is on one rank.
pub const SHARD_ALIGNMENT: usize = 256;

/// How tensors are sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharding {
    pub ranks: usize,
    /// Whether a rank's shard of an expert tensor has whole experts ([`expert_range`]).
    pub by_expert: bool,
}

/// Returns the range of experts that `rank` of `ranks` holds. Experts are split evenly.
pub fn expert_range(experts: usize, rank: usize, ranks: usize) -> Range<usize> {
    experts * rank / ranks..experts * (rank + 1) / ranks
}

/// Returns the length of a whole shard of a tensor with `values` values over `ranks` ranks. It is a multiple
/// of [`SHARD_ALIGNMENT`].
pub fn shard_length(values: usize, ranks: usize) -> usize {
    values.div_ceil(SHARD_ALIGNMENT).div_ceil(ranks) * SHARD_ALIGNMENT
}

/// Returns the rank of the first shard of tensor `index`. The other shards follow on the next ranks. A tensor
/// with a shard on every rank starts on rank 0. The first rank of a smaller tensor depends on its index, so
/// that small tensors are not all on one rank.
pub fn first_shard_rank(values: usize, index: usize, ranks: usize) -> usize {
    let shards = values.div_ceil(shard_length(values, ranks).max(1)).max(1);
    index % (ranks - shards + 1)
}

/// Returns the shard of tensor `index` that rank `rank` of `ranks` holds, as a range of values. The tensor
/// has `values` values.
///
/// Shards are equal ranges of whole blocks, in rank order and without padding. The last shard may be shorter.
/// A rank without a shard has an empty range.
pub fn shard_range(values: usize, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    let (length, first) = (shard_length(values, ranks), first_shard_rank(values, index, ranks));
    let at = |rank: usize| (rank.saturating_sub(first) * length).min(values);
    at(rank)..at(rank + 1)
}

/// Returns the shard that `rank` held before shards were in rank order. Older checkpoints have these shards.
pub fn rotated_shard_range(values: usize, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    let (length, place) = (shard_length(values, ranks), (rank + ranks - index % ranks) % ranks);
    let at = |place: usize| (place * length).min(values);
    at(place)..at(place + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_a_tensor_once_in_rank_order_and_small_tensors_go_round() {
        for (values, ranks) in [(0, 3), (1, 4), (256, 2), (257, 2), (600, 4), (5000, 3), (100_000, 8)] {
            for index in 0..2 * ranks {
                let range = |rank| shard_range(values, index, rank, ranks);
                let shards: Vec<_> = (0..ranks).map(range).collect();
                assert_eq!((shards[0].start, shards[ranks - 1].end), (0, values));
                assert!(shards.windows(2).all(|two| two[0].end == two[1].start));
                // A gathered tensor is contiguous: all shards but the last are whole.
                let (length, first) = (shard_length(values, ranks), first_shard_rank(values, index, ranks));
                for (rank, shard) in shards.iter().enumerate().filter(|(_, shard)| !shard.is_empty()) {
                    assert_eq!(shard.start, (rank - first) * length);
                    assert!(shard.end == values || shard.len() == length);
                }
            }
        }
        let rank_of = |index| (0..4).find(|&rank| !shard_range(64, index, rank, 4).is_empty()).unwrap();
        assert_eq!((0..4).map(rank_of).collect::<Vec<_>>(), [0, 1, 2, 3]);
        // Three shards start on rank 0 or 1.
        let first = |index| first_shard_rank(600, index, 4);
        assert_eq!((0..4).map(first).collect::<Vec<_>>(), [0, 1, 0, 1]);
    }

    #[test]
    fn shards_of_older_checkpoints_were_rotated_by_the_index() {
        let starts = |index| (0..3).map(move |rank| rotated_shard_range(700, index, rank, 3).start);
        assert_eq!(starts(0).collect::<Vec<_>>(), [0, 256, 512]);
        assert_eq!(starts(1).collect::<Vec<_>>(), [512, 0, 256]);
        assert_eq!(starts(5).collect::<Vec<_>>(), [256, 512, 0]);
        assert_eq!(rotated_shard_range(700, 1, 0, 3), 512..700);
    }
}
