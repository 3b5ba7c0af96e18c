//! How a tensor's values are cut over ranks.

use std::ops::Range;

/// Pieces begin at multiples of so many values: a block of 8-bit moments, so that no block is on two ranks.
pub const CUT: usize = 256;

/// The values of tensor `index`, `values` in all, that rank `rank` of `ranks` holds: even pieces of whole blocks, without
/// padding. Which rank holds the first goes round with the index, so that small tensors do not all lie on one.
pub fn piece(values: usize, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    let blocks = values.div_ceil(CUT).div_ceil(ranks);
    let place = (rank + ranks - index % ranks) % ranks;
    let at = |place: usize| (place * blocks * CUT).min(values);
    at(place)..at(place + 1)
}

/// The ranks in the order of their pieces of tensor `index`.
pub fn in_order(index: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (0..ranks).map(move |place| (place + index) % ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_tensor_once_and_small_tensors_go_round() {
        for (values, ranks) in [(1, 4), (256, 2), (257, 2), (5000, 3), (100_000, 8)] {
            for index in 0..2 * ranks {
                let pieces: Vec<_> =
                    in_order(index, ranks).map(|rank| piece(values, index, rank, ranks)).collect();
                assert_eq!((pieces[0].start, pieces[ranks - 1].end), (0, values));
                assert!(pieces.windows(2).all(|two| two[0].end == two[1].start));
                assert!(pieces.iter().all(|piece| piece.start % CUT == 0 || piece.start == values));
            }
        }
        let holders: Vec<usize> =
            (0..4).map(|index| (0..4).find(|&rank| !piece(64, index, rank, 4).is_empty()).unwrap()).collect();
        assert_eq!(holders, [0, 1, 2, 3]);
    }
}
