//! Shards of a tensor over ranks.

use std::ops::Range;

/// Alignment of shards, in values. It is the block size of 8-bit moments, so each block is on one rank.
pub const SHARD_ALIGNMENT: usize = 256;

/// Returns the shard of tensor `index` that rank `rank` of `ranks` holds, as a range of values. The tensor
/// has `values` values.
///
/// Shards are equal ranges of whole blocks, without padding. The last shards may be shorter or empty. The
/// rank of the first shard depends on the index, so that small tensors are not all on one rank.
pub fn shard_range(values: usize, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    let blocks = values.div_ceil(SHARD_ALIGNMENT).div_ceil(ranks);
    let place = (rank + ranks - index % ranks) % ranks;
    let at = |place: usize| (place * blocks * SHARD_ALIGNMENT).min(values);
    at(place)..at(place + 1)
}

/// Returns the ranks in the order of their shards within tensor `index`.
pub fn ranks_in_shard_order(index: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (0..ranks).map(move |place| (place + index) % ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_tensor_once_and_small_tensors_go_round() {
        for (values, ranks) in [(1, 4), (256, 2), (257, 2), (5000, 3), (100_000, 8)] {
            for index in 0..2 * ranks {
                let pieces: Vec<_> = ranks_in_shard_order(index, ranks)
                    .map(|rank| shard_range(values, index, rank, ranks))
                    .collect();
                assert_eq!((pieces[0].start, pieces[ranks - 1].end), (0, values));
                assert!(pieces.windows(2).all(|two| two[0].end == two[1].start));
                assert!(
                    pieces.iter().all(|piece| piece.start % SHARD_ALIGNMENT == 0 || piece.start == values)
                );
            }
        }
        let sequences_per_row: Vec<usize> = (0..4)
            .map(|index| (0..4).find(|&rank| !shard_range(64, index, rank, 4).is_empty()).unwrap())
            .collect();
        assert_eq!(sequences_per_row, [0, 1, 2, 3]);
    }
}
