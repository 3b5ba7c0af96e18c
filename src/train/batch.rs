//! Sequences packed without padding, in micro-batches of a bounded number of rows. Where it is asked for, sequences that begin
//! alike, as the samples of a group with their prompt, share the rows of what they have in common.

use crate::dist::Mesh;
use crate::model::split_rows::SplitRows;
use crate::ops::SequenceRows;
use anyhow::Result;
use candle_core::Tensor;
use std::borrow::Cow;
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
    /// The rows of each sequence in `tokens`.
    pub sequence_rows: Arc<SequenceRows>,
    /// How many sequences hold each row, `[T]`; `None` where nothing is shared.
    pub holders: Option<Arc<Vec<u32>>>,
    /// Rows that predict a trained token, `[R]`. One that predicts the next token of several sequences is there as often.
    pub rows: Arc<Vec<u32>>,
    /// The tokens they predict, `[R]`.
    pub targets: Arc<Vec<u32>>,
    /// Start of each sequence in `rows`, and `R`.
    pub cu_targets: Vec<usize>,
    /// Experts to use instead of the router's choice, u32 `[T, K]` a layer.
    pub replay: Option<Vec<Tensor>>,
    /// Present in a part of a micro-batch: tokens, positions, rows, targets and experts are then this rank's, the rest the whole's.
    pub split: Option<Arc<Split>>,
}

/// How a micro-batch lies over the ranks that share it.
pub struct Split {
    pub rows: Arc<SplitRows>,
    /// For each rank the places in the whole's targets that its rows predict.
    pub targets: Vec<Vec<usize>>,
}

impl std::fmt::Debug for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Split").field("targets", &self.targets).finish_non_exhaustive()
    }
}

impl Split {
    /// The places of this rank's targets.
    pub fn own_targets(&self) -> &[usize] {
        &self.targets[self.rows.place()]
    }

    /// The whole's column of targets from each rank's.
    pub fn column(&self, parts: &[Vec<f32>]) -> Vec<f32> {
        let mut whole = vec![0.0; self.targets.iter().map(Vec::len).sum()];
        for (places, part) in self.targets.iter().zip(parts) {
            places.iter().zip(part).for_each(|(&place, &value)| whole[place] = value);
        }
        whole
    }
}

impl MicroBatch {
    /// How it lies over the ranks of `mesh` that share sequences; `None` where none do.
    ///
    /// # Errors
    /// When there are fewer rows than ranks.
    pub fn split_over(&self, mesh: &Arc<Mesh>) -> Result<Option<Split>> {
        if mesh.sequence_ranks() == 1 {
            return Ok(None);
        }
        let rows = SplitRows::new(mesh, self.tokens.len())?;
        let holds = |range: &Range<usize>, row: u32| range.contains(&(row as usize));
        let places = |range: &Range<usize>| -> Vec<usize> {
            (0..self.rows.len()).filter(|&place| holds(range, self.rows[place])).collect()
        };
        let targets = rows.ranges().iter().map(places).collect();
        Ok(Some(Split { rows: Arc::new(rows), targets }))
    }

    /// This rank's part, where several share sequences; the whole elsewhere.
    ///
    /// # Errors
    /// When there are fewer rows than ranks.
    pub fn part(&self, mesh: &Arc<Mesh>) -> Result<Cow<'_, Self>> {
        let Some(split) = self.split_over(mesh)? else { return Ok(Cow::Borrowed(self)) };
        let (own, places) = (split.rows.own(), split.own_targets());
        let cut = |routes: &Tensor| Ok(routes.narrow(0, own.start, own.len())?.contiguous()?);
        let replay = self.replay.as_ref().map(|layers| layers.iter().map(cut).collect::<Result<_>>());
        Ok(Cow::Owned(Self {
            tokens: Arc::new(self.tokens[own.clone()].to_vec()),
            positions: self.positions[own.clone()].to_vec(),
            rows: Arc::new(places.iter().map(|&place| self.rows[place] - own.start as u32).collect()),
            targets: Arc::new(places.iter().map(|&place| self.targets[place]).collect()),
            replay: replay.transpose()?,
            split: Some(Arc::new(split)),
            ..self.clone()
        }))
    }

    /// The sequences `range`, each of which shares with the one before it the positions that `shared` says.
    fn new(sequences: &[Sequence], range: Range<usize>, shared: &[usize]) -> Self {
        let (mut tokens, mut rows, mut targets, mut cu_targets) = (vec![], vec![], vec![], vec![0]);
        let mut sequence_rows = SequenceRows::default();
        for (i, sequence) in sequences[range.clone()].iter().enumerate() {
            sequence_rows.push(sequence.inputs().len(), if i == 0 { 0 } else { shared[range.start + i] });
            tokens.extend_from_slice(&sequence.inputs()[sequence_rows.shared(i)..]);
            let path = sequence_rows.path(i);
            for i in (1..sequence.tokens.len()).filter(|&i| sequence.mask[i]) {
                rows.push(path[i - 1] as u32);
                targets.push(sequence.tokens[i]);
            }
            cu_targets.push(rows.len());
        }
        Self {
            sequences: range,
            tokens: Arc::new(tokens),
            positions: sequence_rows.positions(),
            holders: sequence_rows.holders().map(Arc::new),
            sequence_rows: Arc::new(sequence_rows),
            rows: Arc::new(rows),
            targets: Arc::new(targets),
            cu_targets,
            replay: None,
            split: None,
        }
    }

    /// Splits `sequences`, in order, into micro-batches of up to `tokens_max` input tokens and about equal size;
    /// a longer sequence makes one of its own.
    pub fn split(sequences: &[Sequence], tokens_max: usize) -> Vec<Self> {
        Self::cut(sequences, &vec![0; sequences.len()], tokens_max)
    }

    /// The same, where a sequence shares with the one before it the input tokens that both begin with, up to
    /// `shared_max(index)`: they are there once. `tokens_max` bounds the rows that are there, and what they predict.
    pub fn split_sharing(
        sequences: &[Sequence],
        tokens_max: usize,
        shared_max: impl Fn(usize) -> usize,
    ) -> Vec<Self> {
        let mut shared = vec![0; sequences.len()];
        for (i, pair) in sequences.windows(2).enumerate() {
            let tokens = pair[0].inputs().iter().zip(pair[1].inputs());
            shared[i + 1] = tokens.take_while(|(a, b)| a == b).count().min(shared_max(i + 1));
        }
        Self::cut(sequences, &shared, tokens_max)
    }

    fn cut(sequences: &[Sequence], shared: &[usize], tokens_max: usize) -> Vec<Self> {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.inputs().len()).collect();
        // Sequences may share all their rows, but what they predict counts for each.
        let own = |(i, s): (usize, &Sequence)| {
            (lengths[i] - shared[i]).max(s.mask.iter().skip(1).filter(|m| **m).count())
        };
        let own: Vec<usize> = sequences.iter().enumerate().map(own).collect();
        let total: usize = own.iter().sum();
        let parts = total.div_ceil(tokens_max.max(1));
        let mut batches = vec![];
        let (mut start, mut tokens, mut part, mut before) = (0, 0, 0, 0);
        for (i, &length) in own.iter().enumerate() {
            // The part in which the sequence's middle lies, when the whole is cut into equal parts.
            let own_part = (2 * before + length) * parts / (2 * total).max(1);
            if i > start && (own_part > part || tokens + length > tokens_max) {
                batches.push(Self::new(sequences, start..i, shared));
                (start, tokens) = (i, 0);
            }
            part = own_part;
            // The first of a micro-batch has nobody to share with.
            tokens += if i == start { lengths[i] } else { length };
            before += length;
        }
        if start < sequences.len() {
            batches.push(Self::new(sequences, start..sequences.len(), shared));
        }
        batches
    }
}

impl Sequence {
    /// What the forward takes: the last token is a target only.
    fn inputs(&self) -> &[u32] {
        &self.tokens[..self.tokens.len().saturating_sub(1)]
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
        assert_eq!(first.sequence_rows.cu_seqlens().unwrap(), [0, 3, 5]);
        assert_eq!(*first.rows, [1, 2, 4]);
        assert_eq!(*first.targets, [2, 3, 2]);
        assert_eq!(first.cu_targets, [0, 2, 3]);
    }

    #[test]
    fn samples_of_a_prompt_share_its_rows_within_a_micro_batch() {
        let sample = |prompt: u32, response: &[u32]| {
            let tokens: Vec<u32> = (0..4).map(|i| prompt + i).chain(response.iter().copied()).collect();
            Sequence { mask: (0..tokens.len()).map(|i| i >= 4).collect(), tokens }
        };
        let sequences = [sample(10, &[7, 8]), sample(10, &[7, 9]), sample(10, &[1]), sample(20, &[1, 2, 3])];
        let batches = MicroBatch::split_sharing(&sequences, 100, |_| usize::MAX);
        let [batch] = &batches[..] else { panic!("{} micro-batches", batches.len()) };
        assert_eq!(*batch.tokens, [10, 11, 12, 13, 7, 20, 21, 22, 23, 1, 2]);
        assert_eq!(batch.positions, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]);
        // The prompt's last row predicts three first tokens.
        assert_eq!(*batch.rows, [3, 4, 3, 4, 3, 8, 9, 10]);
        assert_eq!(*batch.targets, [7, 8, 7, 9, 1, 1, 2, 3]);
        assert_eq!(batch.cu_targets, [0, 2, 4, 5, 8]);
        assert_eq!(**batch.holders.as_ref().unwrap(), [3, 3, 3, 3, 2, 1, 1, 1, 1, 1, 1]);
        // What is cut off from its group brings the prompt along.
        let batches = MicroBatch::split_sharing(&sequences, 6, |_| usize::MAX);
        assert_eq!(batches.iter().map(|b| b.sequences.clone()).collect::<Vec<_>>(), [0..1, 1..3, 3..4]);
        assert_eq!(*batches[1].tokens, [10, 11, 12, 13, 7]);
        let same = vec![sample(10, &[7, 8]); 4];
        assert_eq!(MicroBatch::split_sharing(&same, 9, |_| usize::MAX).len(), 2);
        let batches = MicroBatch::split_sharing(&sequences[..3], 100, |i| 5 - i);
        assert_eq!(*batches[0].tokens, [10, 11, 12, 13, 7, 7, 13]);
    }
}
