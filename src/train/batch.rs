//! Sequences packed without padding, in micro-batches of a bounded number of tokens.

use candle_core::Tensor;
use std::ops::Range;
use std::sync::Arc;

/// One sequence to train on.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    /// True where the token is trained on; the first token never is, nothing predicts it.
    pub mask: Vec<bool>,
}

/// Sequences as the forward takes them. A sequence's last token predicts nothing, so it is a target only.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Which sequences of the batch these are.
    pub sequences: Range<usize>,
    /// Input ids, `[T]`.
    pub tokens: Arc<Vec<u32>>,
    /// Position of each within its sequence, `[T]`.
    pub positions: Vec<u32>,
    /// Start of each sequence in `tokens`, and `T`.
    pub cu_seqlens: Arc<Vec<usize>>,
    /// Rows that predict a trained token, `[R]`.
    pub rows: Arc<Vec<u32>>,
    /// The tokens they predict, `[R]`.
    pub targets: Arc<Vec<u32>>,
    /// Start of each sequence in `rows`, and `R`.
    pub cu_targets: Vec<usize>,
    /// Experts to use instead of the router's choice, u32 `[T, K]` a layer.
    pub replay: Option<Vec<Tensor>>,
}

impl MicroBatch {
    fn new(sequences: &[Sequence], range: Range<usize>) -> Self {
        let (mut tokens, mut positions, mut cu_seqlens) = (vec![], vec![], vec![0]);
        let (mut rows, mut targets, mut cu_targets) = (vec![], vec![], vec![0]);
        for sequence in &sequences[range.clone()] {
            let start = tokens.len();
            let inputs = sequence.tokens.len().saturating_sub(1);
            tokens.extend_from_slice(&sequence.tokens[..inputs]);
            positions.extend(0..inputs as u32);
            cu_seqlens.push(tokens.len());
            for i in (1..sequence.tokens.len()).filter(|&i| sequence.mask[i]) {
                rows.push((start + i - 1) as u32);
                targets.push(sequence.tokens[i]);
            }
            cu_targets.push(rows.len());
        }
        Self {
            sequences: range,
            tokens: Arc::new(tokens),
            positions,
            cu_seqlens: Arc::new(cu_seqlens),
            rows: Arc::new(rows),
            targets: Arc::new(targets),
            cu_targets,
            replay: None,
        }
    }

    /// Splits `sequences`, in order, into micro-batches of up to `tokens_max` input tokens and about equal size;
    /// a longer sequence makes one of its own.
    pub fn split(sequences: &[Sequence], tokens_max: usize) -> Vec<Self> {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.tokens.len().saturating_sub(1)).collect();
        let total: usize = lengths.iter().sum();
        let parts = total.div_ceil(tokens_max.max(1));
        let mut batches = vec![];
        let (mut start, mut tokens, mut part, mut before) = (0, 0, 0, 0);
        for (i, &length) in lengths.iter().enumerate() {
            // The part in which the sequence's middle lies, when the whole is cut into equal parts.
            let own = (2 * before + length) * parts / (2 * total).max(1);
            if i > start && (own > part || tokens + length > tokens_max) {
                batches.push(Self::new(sequences, start..i));
                (start, tokens) = (i, 0);
            }
            part = own;
            tokens += length;
            before += length;
        }
        if start < sequences.len() {
            batches.push(Self::new(sequences, start..sequences.len()));
        }
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_packed_without_padding_and_split_at_the_bound() {
        let sequence = |n: u32| Sequence { tokens: (0..n).collect(), mask: (0..n).map(|i| i != 1).collect() };
        let batches = MicroBatch::split(&[sequence(4), sequence(3), sequence(9), sequence(2)], 6);
        let ranges: Vec<_> = batches.iter().map(|b| b.sequences.clone()).collect();
        assert_eq!(ranges, [0..2, 2..3, 3..4]);
        let first = &batches[0];
        assert_eq!(*first.tokens, [0, 1, 2, 0, 1]);
        assert_eq!(first.positions, [0, 1, 2, 0, 1]);
        assert_eq!(*first.cu_seqlens, [0, 3, 5]);
        assert_eq!(*first.rows, [1, 2, 4]);
        assert_eq!(*first.targets, [2, 3, 2]);
        assert_eq!(first.cu_targets, [0, 2, 3]);
    }
}
