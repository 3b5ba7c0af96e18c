//! How sequences lie in a batch's rows: one after the other, and what a sequence has in common with the one before it once.
//!
//! A row's result depends on the positions before it alone, so sequences that begin alike have the same bits there: the
//! samples of a group share their prompt's rows. Backward, a shared row's gradient is the sum over the sequences that hold it.

use std::ops::Range;

/// One sequence: its own rows, which follow what it shares.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// Positions it shares with the sequence before it: also that of its first own row.
    shared: usize,
    rows: Range<usize>,
}

/// Sequences in a batch's rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SequenceRows {
    parts: Vec<Part>,
}

impl SequenceRows {
    /// Sequences that share nothing: `cu_seqlens` holds the start of each, and the number of rows.
    pub fn separate(cu_seqlens: &[usize]) -> Self {
        let mut sequence_rows = Self::default();
        cu_seqlens.windows(2).for_each(|span| sequence_rows.push(span[1].saturating_sub(span[0]), 0));
        sequence_rows
    }

    /// Adds a sequence of `length` positions, the first `shared` of which are those of the sequence added before it.
    ///
    /// What neither has is not shared: `shared` is cut down to the shorter one's length.
    pub fn push(&mut self, length: usize, shared: usize) {
        let before = self.parts.last().map_or(0, Part::length);
        let shared = shared.min(length).min(before);
        let start = self.rows();
        self.parts.push(Part { shared, rows: start..start + length - shared });
    }

    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.parts.last().map_or(0, |part| part.rows.end)
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.parts.len()
    }

    /// The rows that sequence `index` does not share with the one before it.
    pub fn own_rows(&self, index: usize) -> Range<usize> {
        self.parts[index].rows.clone()
    }

    /// The position of the first of them.
    pub fn shared(&self, index: usize) -> usize {
        self.parts[index].shared
    }

    /// The row of each position of sequence `index`.
    pub fn path(&self, index: usize) -> Vec<usize> {
        let mut stretches = vec![];
        let mut end = usize::MAX;
        for part in self.parts[..=index].iter().rev() {
            if part.shared < end {
                let count = part.rows.len().min(end - part.shared);
                stretches.push(part.rows.start..part.rows.start + count);
                end = part.shared;
            }
            if end == 0 {
                break;
            }
        }
        stretches.into_iter().rev().flatten().collect()
    }

    /// The position of each row within its sequence.
    pub fn positions(&self) -> Vec<u32> {
        self.parts.iter().flat_map(|part| (part.shared..part.length()).map(|p| p as u32)).collect()
    }

    /// How many sequences hold each row; `None` where each row is held by one.
    pub fn holders(&self) -> Option<Vec<u32>> {
        if self.parts.iter().all(|part| part.shared == 0) {
            return None;
        }
        let mut holders = vec![0; self.rows()];
        (0..self.sequences()).for_each(|i| self.path(i).into_iter().for_each(|row| holders[row] += 1));
        Some(holders)
    }

    /// Positions of all sequences together: the rows, a shared one as often as it is held.
    pub fn positions_count(&self) -> usize {
        self.parts.iter().map(Part::length).sum()
    }

    /// Start of each sequence and the number of rows, where nothing is shared.
    pub fn cu_seqlens(&self) -> Option<Vec<usize>> {
        let starts = self.parts.iter().map(|part| (part.shared == 0).then_some(part.rows.start));
        starts.chain([Some(self.rows())]).collect()
    }
}

impl Part {
    fn length(&self) -> usize {
        self.shared + self.rows.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_row_is_there_once_and_in_every_sequence_that_holds_it() {
        let mut sequence_rows = SequenceRows::default();
        // The third shares more with the second than the second with the first; the fourth is a beginning of the third; the
        // fifth shares with the fourth alone; the sixth begins anew.
        for (length, shared) in [(5, 0), (6, 3), (7, 5), (4, 9), (6, 2), (2, 0)] {
            sequence_rows.push(length, shared);
        }
        let paths: Vec<Vec<usize>> = (0..sequence_rows.sequences()).map(|i| sequence_rows.path(i)).collect();
        assert_eq!(
            paths,
            [
                vec![0, 1, 2, 3, 4],
                vec![0, 1, 2, 5, 6, 7],
                vec![0, 1, 2, 5, 6, 8, 9],
                vec![0, 1, 2, 5],
                vec![0, 1, 10, 11, 12, 13],
                vec![14, 15],
            ]
        );
        assert_eq!(sequence_rows.rows(), 16);
        assert_eq!(sequence_rows.positions(), [0, 1, 2, 3, 4, 3, 4, 5, 5, 6, 2, 3, 4, 5, 0, 1]);
        assert_eq!(sequence_rows.holders().unwrap(), [5, 5, 4, 1, 1, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(sequence_rows.positions_count(), 30);
        assert_eq!((sequence_rows.own_rows(4), sequence_rows.shared(4)), (10..14, 2));
        assert_eq!(sequence_rows.cu_seqlens(), None);
        let separate = SequenceRows::separate(&[0, 3, 3, 5]);
        assert_eq!(separate.cu_seqlens().unwrap(), [0, 3, 3, 5]);
        assert_eq!((separate.holders(), separate.positions()), (None, vec![0, 1, 2, 0, 1]));
    }
}
