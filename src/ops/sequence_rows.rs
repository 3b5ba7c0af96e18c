//! The layout of sequences in the rows of a batch. Sequences are concatenated, and shared prefixes are stored
//! once.
//!
//! The result of a row depends only on the tokens up to its position, so the common prefix of several
//! sequences has the same bits in each. The samples of a group share the rows of their prompt. In the
//! backward pass, the gradient of a shared row is the sum over the sequences that share it.

use std::ops::Range;

/// A sequence: the length of its shared prefix, and its own rows after the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SequenceSpan {
    /// Number of positions shared with the previous sequence. It is also the position of the first own row.
    shared: usize,
    rows: Range<usize>,
}

/// The layout of sequences in the rows of a batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SequenceRows {
    parts: Vec<SequenceSpan>,
}

impl SequenceRows {
    /// Returns the layout of sequences without shared prefixes. `cu_seqlens` has the start of each sequence,
    /// then the number of rows.
    pub fn from_cu_seqlens(cu_seqlens: &[usize]) -> Self {
        let mut sequence_rows = Self::default();
        cu_seqlens.windows(2).for_each(|span| sequence_rows.push(span[1].saturating_sub(span[0]), 0));
        sequence_rows
    }

    /// Adds a sequence of `length` positions. It shares its first `shared` positions with the previous
    /// sequence.
    ///
    /// `shared` is limited to the length of the shorter sequence.
    pub fn push(&mut self, length: usize, shared: usize) {
        let before = self.parts.last().map_or(0, SequenceSpan::length);
        let shared = shared.min(length).min(before);
        let start = self.rows();
        self.parts.push(SequenceSpan { shared, rows: start..start + length - shared });
    }

    /// Returns the number of rows of the batch.
    pub fn rows(&self) -> usize {
        self.parts.last().map_or(0, |part| part.rows.end)
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.parts.len()
    }

    /// Returns the rows of sequence `index` that it does not share with the previous sequence.
    pub fn own_rows(&self, index: usize) -> Range<usize> {
        self.parts[index].rows.clone()
    }

    /// Returns the position of the first own row of sequence `index`.
    pub fn first_own_position(&self, index: usize) -> usize {
        self.parts[index].shared
    }

    /// Returns the row of each position of sequence `index`.
    pub fn row_indices(&self, index: usize) -> Vec<usize> {
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

    /// Returns the position of each row within its sequence.
    pub fn positions(&self) -> Vec<u32> {
        self.parts.iter().flat_map(|part| (part.shared..part.length()).map(|p| p as u32)).collect()
    }

    /// Returns the number of sequences that share each row; `None` if no row is shared.
    pub fn sequences_per_row(&self) -> Option<Vec<u32>> {
        if self.parts.iter().all(|part| part.shared == 0) {
            return None;
        }
        let mut sequences_per_row = vec![0; self.rows()];
        (0..self.sequences())
            .for_each(|i| self.row_indices(i).into_iter().for_each(|row| sequences_per_row[row] += 1));
        Some(sequences_per_row)
    }

    /// Returns the total number of positions. A shared row counts once per sequence.
    pub fn positions_count(&self) -> usize {
        self.parts.iter().map(SequenceSpan::length).sum()
    }

    /// Returns the start of each sequence and the number of rows; `None` if rows are shared.
    pub fn cu_seqlens(&self) -> Option<Vec<usize>> {
        let starts = self.parts.iter().map(|part| (part.shared == 0).then_some(part.rows.start));
        starts.chain([Some(self.rows())]).collect()
    }
}

impl SequenceSpan {
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
        // The third shares more with the second than the second with the first. The fourth is a prefix of
        // the third. The fifth shares with the fourth only. The sixth shares nothing.
        for (length, shared) in [(5, 0), (6, 3), (7, 5), (4, 9), (6, 2), (2, 0)] {
            sequence_rows.push(length, shared);
        }
        let paths: Vec<Vec<usize>> =
            (0..sequence_rows.sequences()).map(|i| sequence_rows.row_indices(i)).collect();
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
        assert_eq!(
            sequence_rows.sequences_per_row().unwrap(),
            [5, 5, 4, 1, 1, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        );
        assert_eq!(sequence_rows.positions_count(), 30);
        assert_eq!((sequence_rows.own_rows(4), sequence_rows.first_own_position(4)), (10..14, 2));
        assert_eq!(sequence_rows.cu_seqlens(), None);
        let separate = SequenceRows::from_cu_seqlens(&[0, 3, 3, 5]);
        assert_eq!(separate.cu_seqlens().unwrap(), [0, 3, 3, 5]);
        assert_eq!((separate.sequences_per_row(), separate.positions()), (None, vec![0, 1, 2, 0, 1]));
    }
}
