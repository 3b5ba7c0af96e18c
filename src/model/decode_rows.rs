//! The rows of a decode batch: which sequence is in which row, and how many rows a step has.

use std::collections::{HashMap, HashSet};

/// Largest number of rows that is rounded up to a power of two. Up to here a step reads all weights for few
/// rows, so that more rows take hardly longer.
const DOUBLED_ROWS_MAX: usize = 256;
/// Number of rows of which larger batches have a multiple.
const ROWS_STEP: usize = 128;

/// Returns the number of rows of a decode step of `sequences` sequences. There are few such numbers, so few
/// CUDA graphs serve all steps. The rows without a sequence are padding.
pub fn padded_rows(sequences: usize) -> usize {
    match sequences {
        0..=1 => 1,
        2..=4 => 4,
        5..=16 => 16,
        17..=DOUBLED_ROWS_MAX => sequences.next_power_of_two(),
        _ => sequences.next_multiple_of(ROWS_STEP),
    }
}

/// The sequences of a batch by row, without gaps. A sequence keeps its row as long as it can, because what
/// the GPU knows of it belongs to the row.
#[derive(Debug, Default)]
pub struct DecodeRows {
    /// The ids of the sequences.
    ids: Vec<u64>,
}

impl DecodeRows {
    /// Assigns the sequences `ids` to the rows from 0 on. Returns, for each row, the index in `ids`.
    /// Sequences that are new or last take the rows of those that left.
    pub fn assign(&mut self, ids: &[u64]) -> Vec<usize> {
        let indices: HashMap<u64, usize> = ids.iter().enumerate().map(|(index, &id)| (id, index)).collect();
        let known: HashSet<u64> = self.ids.iter().copied().collect();
        let mut waiting: Vec<u64> = ids.iter().copied().filter(|id| !known.contains(id)).rev().collect();
        let mut row = 0;
        while row < self.ids.len() {
            if !indices.contains_key(&self.ids[row]) {
                match waiting.pop() {
                    Some(id) => self.ids[row] = id,
                    // The last sequence takes the row, and is looked at next.
                    None => {
                        self.ids.swap_remove(row);
                        continue;
                    }
                }
            }
            row += 1;
        }
        self.ids.extend(waiting.into_iter().rev());
        self.ids.iter().map(|id| indices[id]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::sink_attention::Attention;
    use crate::ops::sink_attention::plan::{LaunchSequences, padded_chunks};
    use crate::random::{Purpose, stream};
    use rand::Rng;

    #[test]
    fn a_batch_has_one_of_few_sizes_and_at_most_thrice_its_sequences() {
        let sizes: HashSet<usize> = (1..=256).map(padded_rows).collect();
        assert_eq!(sizes, HashSet::from([1, 4, 16, 32, 64, 128, 256]));
        for sequences in 1..=3000 {
            let rows = padded_rows(sequences);
            assert!(rows >= sequences && padded_rows(rows) == rows, "{sequences} in {rows}");
            assert!(rows < 2 * sequences || sequences <= 16 && 5 * rows <= 16 * sequences);
            assert!(sequences <= 256 || rows < sequences + 128);
        }
    }

    #[test]
    fn a_sequence_keeps_its_row_and_the_last_fills_a_gap() {
        let mut rows = DecodeRows::default();
        assert_eq!(rows.assign(&[7, 3, 9, 4]), [0, 1, 2, 3]);
        assert_eq!(rows.assign(&[9, 4, 7, 3]), [2, 3, 0, 1], "the same rows in another order");
        // 3 left: 4, the last, takes its row.
        assert_eq!(rows.assign(&[7, 9, 4]), [0, 2, 1]);
        // 7 left and 5 is new: it takes row 0. 6 comes last.
        assert_eq!(rows.assign(&[9, 4, 5, 6]), [2, 1, 0, 3]);
        assert_eq!(rows.assign(&[6]), [0]);
        assert_eq!(rows.assign(&[]), [0; 0]);
        assert_eq!(rows.assign(&[2]), [0]);
    }

    #[test]
    fn few_sequences_move_when_others_come_and_go() {
        let mut random = stream(3, Purpose::Sampling, &[]);
        let mut rows = DecodeRows::default();
        let (mut ids, mut next): (Vec<u64>, u64) = ((1..=40).collect(), 41);
        let mut before: HashMap<u64, usize> = HashMap::new();
        for step in 0..400 {
            let (left, came) = (random.random_range(0..3.min(ids.len())), random.random_range(0..3));
            (0..left).for_each(|_| {
                ids.swap_remove(random.random_range(0..ids.len()));
            });
            (0..came).for_each(|_| {
                ids.insert(random.random_range(0..=ids.len()), next);
                next += 1;
            });
            let order = rows.assign(&ids);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..ids.len()).collect::<Vec<_>>(), "step {step}: each sequence has one row");
            let now: HashMap<u64, usize> = order.iter().enumerate().map(|(row, &i)| (ids[i], row)).collect();
            let moved = now.iter().filter(|(id, row)| before.get(id).is_some_and(|was| was != *row)).count();
            assert!(moved <= left, "step {step}: {moved} moved, {left} left");
            before = now;
        }
    }

    /// The shape of a step depends on its rows, and on the chunks of keys where they are split.
    #[test]
    fn at_most_eight_shapes_come_twice_in_a_rollout_of_256_sequences() {
        let attention = Attention {
            heads: 64,
            kv_heads: 8,
            head_dim: 64,
            window: None,
            sinks: true,
            sink_gradient: false,
        };
        let mut random = stream(7, Purpose::Sampling, &[]);
        for longest in [300, 2048, 8192] {
            let responses: Vec<usize> = (0..256).map(|_| random.random_range(1..=longest)).collect();
            let mut seen: HashMap<(usize, usize), usize> = HashMap::new();
            for step in 0..*responses.iter().max().unwrap() {
                let sequences = responses.iter().filter(|&&tokens| tokens > step).count();
                let mut lengths = vec![300 + step; sequences];
                lengths.resize(padded_rows(sequences), 0);
                let rows = lengths.len();
                let batch = LaunchSequences::for_cached_sequences(&vec![1; rows], &lengths).unwrap();
                let chunks = match batch.should_split_decode(&attention) {
                    true => padded_chunks(batch.chunk_tiles(&attention).len()),
                    false => 0,
                };
                *seen.entry((rows, chunks)).or_default() += 1;
            }
            let graphs = seen.values().filter(|&&times| times > 1).count();
            assert!(graphs <= 8, "responses of up to {longest}: {seen:?}");
            assert!(20 * seen.len() <= longest, "the first step of a shape is not replayed: {seen:?}");
        }
    }
}
