//! Packs sequences without padding into micro-batches of a bounded number of rows. Samples of a group can
//! share the rows of their common prefix, such as the prompt.

use super::input::GivenTargets;
use crate::dist::Mesh;
use crate::model::parallel::sequence_parallel::SequenceShards;
use crate::ops::SequenceRows;
use crate::ops::token_set::{KeptTokens, TokenSet};
use crate::trajectory::Trajectory;
use anyhow::{Context, Result};
use candle_core::Tensor;
use std::borrow::{Borrow, Cow};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// One training sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    /// True where the loss covers the token. False for the first token, because nothing predicts it.
    pub mask: Vec<bool>,
    /// For each token, the tokens that it was drawn from, if its distribution was truncated. Empty if no
    /// token has such a set.
    pub kept_tokens: Vec<Option<TokenSet>>,
}

impl From<&Trajectory> for Sequence {
    fn from(trajectory: &Trajectory) -> Self {
        let Trajectory { tokens, mask, kept_tokens, .. } = trajectory;
        Self { tokens: tokens.clone(), mask: mask.clone(), kept_tokens: kept_tokens.clone() }
    }
}

/// Packed sequences, the input of a forward pass. The last token of a sequence predicts nothing, so it is
/// only a target.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Range of these sequences in the batch.
    pub sequences: Range<usize>,
    /// Input ids, `[T]`.
    pub tokens: Arc<Vec<u32>>,
    /// Position of each token within its sequence, `[T]`.
    pub positions: Vec<u32>,
    /// The rows of each sequence in `tokens`.
    pub sequence_rows: Arc<SequenceRows>,
    /// Number of sequences that share each row, `[T]`; `None` if no row is shared.
    pub sequences_per_row: Option<Arc<Vec<u32>>>,
    /// Rows that predict a trained token, `[R]`. A shared row appears once per sequence in which the next
    /// token is trained.
    pub rows: Arc<Vec<u32>>,
    /// The tokens that `rows` predict, `[R]`.
    pub targets: Arc<Vec<u32>>,
    /// The tokens that each target was drawn from, `[R]`; `None` if no target has such a set.
    pub kept_tokens: Option<KeptTokens>,
    /// Whether the targets were given. The backward pass then leaves out those without a gradient.
    pub has_given_targets: bool,
    /// Start of each sequence in `rows`, followed by the length `R`.
    pub cu_targets: Vec<usize>,
    /// Experts that replace the router's choice, u32 `[T, K]` for each layer.
    pub replay: Option<Vec<Tensor>>,
    /// Present if this is one rank's shard of a micro-batch. In a shard, tokens, positions, rows, targets and
    /// experts are those of this rank. The other fields describe the whole micro-batch.
    pub shards: Option<Arc<MicroBatchShards>>,
}

/// The parameters of packing. The same sequences, experts and parameters always give the same micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackingParameters {
    pub limits: MicroBatchLimits,
    /// Maximum number of positions that a sequence may share with the previous sequence.
    pub shared_positions_max: usize,
    /// Number of experts per token.
    pub top_k: usize,
}

/// The limits for the split of a batch into micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MicroBatchLimits {
    /// Maximum number of input tokens of a micro-batch.
    pub tokens_max: usize,
    /// Whether the number of micro-batches should be 1 or even, if possible, so that two threads have equal
    /// work. The actual number of threads does not matter, because a run's result must not depend on it.
    pub needs_even_count: bool,
}

impl From<usize> for MicroBatchLimits {
    /// Limits only the tokens of a micro-batch.
    fn from(tokens_max: usize) -> Self {
        Self { tokens_max, needs_even_count: false }
    }
}

/// The shards of a micro-batch, one per rank of a sequence-parallel group.
pub struct MicroBatchShards {
    pub rows: Arc<SequenceShards>,
    /// For each rank, the indices of its targets in the whole micro-batch.
    pub targets: Vec<Vec<usize>>,
}

impl std::fmt::Debug for MicroBatchShards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MicroBatchShards").field("targets", &self.targets).finish_non_exhaustive()
    }
}

impl MicroBatchShards {
    /// Returns the indices of this rank's targets.
    pub fn local_targets(&self) -> &[usize] {
        &self.targets[self.rows.group_index]
    }

    /// Joins the columns of the ranks into the column of all targets.
    pub fn join_columns(&self, parts: &[Vec<f32>]) -> Vec<f32> {
        let mut whole = vec![0.0; self.targets.iter().map(Vec::len).sum()];
        for (target_indices, part) in self.targets.iter().zip(parts) {
            target_indices.iter().zip(part).for_each(|(&index, &value)| whole[index] = value);
        }
        whole
    }
}

impl MicroBatch {
    /// Returns the shards for the sequence-parallel ranks of `mesh`; `None` without sequence parallelism.
    ///
    /// # Errors
    /// When there are fewer rows than ranks.
    pub fn shards(&self, mesh: &Arc<Mesh>) -> Result<Option<MicroBatchShards>> {
        if mesh.sequence_ranks() == 1 {
            return Ok(None);
        }
        let rows = SequenceShards::new(mesh, self.tokens.len())?;
        let target_indices = |range: &Range<usize>| -> Vec<usize> {
            (0..self.rows.len()).filter(|&index| range.contains(&(self.rows[index] as usize))).collect()
        };
        let targets = rows.ranges.iter().map(target_indices).collect();
        Ok(Some(MicroBatchShards { rows: Arc::new(rows), targets }))
    }

    /// Returns this rank's shard; without sequence parallelism, the whole micro-batch.
    ///
    /// # Errors
    /// When there are fewer rows than ranks.
    pub fn local_shard(&self, mesh: &Arc<Mesh>) -> Result<Cow<'_, Self>> {
        let Some(shards) = self.shards(mesh)? else { return Ok(Cow::Borrowed(self)) };
        let (local_rows, target_indices) = (shards.rows.local_range(), shards.local_targets());
        let (start, length) = (local_rows.start, local_rows.len());
        let shard = |experts: &Tensor| Ok(experts.narrow(0, start, length)?.contiguous()?);
        let replay = self.replay.as_ref().map(|layers| layers.iter().map(shard).collect::<Result<_>>());
        Ok(Cow::Owned(Self {
            tokens: Arc::new(self.tokens[local_rows.clone()].to_vec()),
            positions: self.positions[local_rows].to_vec(),
            rows: Arc::new(target_indices.iter().map(|&index| self.rows[index] - start as u32).collect()),
            targets: Arc::new(target_indices.iter().map(|&index| self.targets[index]).collect()),
            kept_tokens: self
                .kept_tokens
                .as_ref()
                .map(|kept| Arc::new(target_indices.iter().map(|&index| kept[index].clone()).collect())),
            replay: replay.transpose()?,
            shards: Some(Arc::new(shards)),
            ..self.clone()
        }))
    }

    /// Packs the sequences `range`. Sequence `i` shares its first `shared[i]` positions with the previous
    /// sequence.
    fn new(sequences: &[Targeted], range: Range<usize>, shared: &[usize]) -> Self {
        let (mut tokens, mut rows, mut targets, mut cu_targets) = (vec![], vec![], vec![], vec![0]);
        let (mut sequence_rows, mut kept_tokens) = (SequenceRows::default(), vec![]);
        for (i, &Targeted { sequence, given }) in sequences[range.clone()].iter().enumerate() {
            sequence_rows.push(sequence.inputs().len(), if i == 0 { 0 } else { shared[range.start + i] });
            tokens.extend_from_slice(&sequence.inputs()[sequence_rows.first_own_position(i)..]);
            let row_indices = sequence_rows.row_indices(i);
            if let Some(given) = given {
                rows.extend(given.positions.iter().map(|&position| row_indices[position as usize] as u32));
                targets.extend_from_slice(&given.tokens);
                kept_tokens.resize(targets.len(), None);
            } else {
                for i in (1..sequence.tokens.len()).filter(|&i| sequence.mask[i]) {
                    rows.push(row_indices[i - 1] as u32);
                    targets.push(sequence.tokens[i]);
                    kept_tokens.push(sequence.kept_tokens.get(i).cloned().flatten());
                }
            }
            cu_targets.push(rows.len());
        }
        let has_given_targets = sequences[range.clone()].iter().any(|targeted| targeted.given.is_some());
        Self {
            sequences: range,
            has_given_targets,
            tokens: Arc::new(tokens),
            positions: sequence_rows.positions(),
            sequences_per_row: sequence_rows.sequences_per_row().map(Arc::new),
            sequence_rows: Arc::new(sequence_rows),
            rows: Arc::new(rows),
            targets: Arc::new(targets),
            kept_tokens: kept_tokens.iter().any(Option::is_some).then(|| Arc::new(kept_tokens)),
            cu_targets,
            replay: None,
            shards: None,
        }
    }

    /// Splits `sequences`, in order, into micro-batches of about equal size within `limits`. A sequence that
    /// exceeds the limit has a micro-batch of its own.
    pub fn split(sequences: &[Sequence], limits: impl Into<MicroBatchLimits>) -> Vec<Self> {
        Self::split_with_prefixes(sequences, limits, |_| 0)
    }

    /// Works like [`Self::split`], but a sequence shares its common prefix with the previous sequence, up to
    /// `shared_max(index)` tokens. For the limit, a sequence counts as the larger of two numbers: its tokens
    /// that are not shared, and its targets.
    pub fn split_with_prefixes(
        sequences: &[impl Borrow<Sequence>],
        limits: impl Into<MicroBatchLimits>,
        shared_max: impl Fn(usize) -> usize,
    ) -> Vec<Self> {
        let sequences: Vec<&Sequence> = sequences.iter().map(Borrow::borrow).collect();
        Self::split_with_targets(&sequences, None, limits.into(), shared_max)
    }

    /// Works like [`Self::split_with_prefixes`], with the targets `given` of each sequence, if there are any,
    /// in place of its trained tokens.
    pub(super) fn split_with_targets(
        sequences: &[&Sequence],
        given: Option<&[GivenTargets]>,
        limits: MicroBatchLimits,
        shared_max: impl Fn(usize) -> usize,
    ) -> Vec<Self> {
        let mut shared = vec![0; sequences.len()];
        for (i, pair) in sequences.windows(2).enumerate() {
            let tokens = pair[0].inputs().iter().zip(pair[1].inputs());
            shared[i + 1] = tokens.take_while(|(a, b)| a == b).count().min(shared_max(i + 1));
        }
        let given = |i: usize| given.map(|given| &given[i]);
        let sequences = sequences.iter().enumerate();
        let sequences: Vec<Targeted> =
            sequences.map(|(i, sequence)| Targeted { sequence, given: given(i) }).collect();
        Self::split_rows(&sequences, &shared, limits)
    }

    /// Returns the micro-batch of a batch in which `count` sequences come first.
    pub(super) fn after(mut self, count: usize) -> Self {
        self.sequences = self.sequences.start + count..self.sequences.end + count;
        self
    }

    fn split_rows(
        sequences: &[Targeted],
        shared: &[usize],
        MicroBatchLimits { tokens_max, needs_even_count }: MicroBatchLimits,
    ) -> Vec<Self> {
        let groups = group_by_prefix(sequences, shared, tokens_max);
        let total: usize = groups.iter().map(|group| group.added_tokens).sum();
        let count_min = total.div_ceil(tokens_max.max(1));
        let split = |parts: usize| split_into(parts, total, &groups, tokens_max);
        let is_even = |ranges: &Vec<_>| !needs_even_count || ranges.len() < 2 || ranges.len() % 2 == 0;
        // An even number is not always possible. Try up to three micro-batches more than the minimum.
        let even_ranges =
            (count_min..count_min + 4).map(split).find(is_even).unwrap_or_else(|| split(count_min));
        // A micro-batch that begins within a group repeats the group's prompt, so it may exceed the limit.
        // The split then has one more micro-batch than intended, and that micro-batch is small. If a larger
        // number of micro-batches avoids this, use that number.
        let exact_ranges = (count_min..=even_ranges.len())
            .map(|parts| (parts, split(parts)))
            .find(|(parts, ranges)| ranges.len() <= *parts && is_even(ranges));
        let ranges = exact_ranges.map_or(even_ranges, |(_, ranges)| ranges);
        ranges.into_iter().map(|range| Self::new(sequences, range, shared)).collect()
    }
}

/// A sequence and its given targets; without these, its trained tokens are the targets.
#[derive(Clone, Copy)]
struct Targeted<'a> {
    sequence: &'a Sequence,
    given: Option<&'a GivenTargets>,
}

impl Targeted<'_> {
    fn target_count(&self) -> usize {
        match self.given {
            Some(given) => given.with_gradient,
            None => self.sequence.mask.iter().skip(1).filter(|m| **m).count(),
        }
    }
}

/// Returns the mean of `values`. There is one value per micro-batch, weighted by the number of rows of that
/// micro-batch.
pub(super) fn mean_of_rows(micro_batches: &[MicroBatch], values: impl Iterator<Item = f64>) -> f64 {
    let rows: usize = micro_batches.iter().map(|batch| batch.tokens.len()).sum();
    let weighted = values.zip(micro_batches).map(|(value, batch)| value * batch.tokens.len() as f64);
    weighted.sum::<f64>() / rows.max(1) as f64
}

/// Consecutive sequences that stay together in one micro-batch.
struct SequenceGroup {
    sequences: Range<usize>,
    /// Number of tokens that the group adds to a micro-batch that already has sequences. It is a sum over the
    /// group's sequences. Each counts as the larger of two numbers: its rows that are not shared, and its
    /// targets.
    added_tokens: usize,
    /// This sum if the group is the first of a micro-batch. Its first sequence then shares no rows, so all
    /// rows of that sequence count.
    tokens: usize,
}

/// Groups `sequences` by their common prefix. A group that fits in a micro-batch stays together, because a
/// split would compute its prompt twice. A sequence begins a new group if the prefix it shares with the
/// previous sequence is less than half of the prefix it shares with the next one. So a prefix that all
/// prompts share, such as a system prompt, does not join groups.
fn group_by_prefix(sequences: &[Targeted], shared: &[usize], tokens_max: usize) -> Vec<SequenceGroup> {
    let single_group = |(i, targeted): (usize, &Targeted)| {
        let tokens = targeted.sequence.inputs().len();
        let targets = targeted.target_count();
        // Sequences may share all rows, but each sequence has its own targets.
        SequenceGroup { sequences: i..i + 1, added_tokens: (tokens - shared[i]).max(targets), tokens }
    };
    let single: Vec<SequenceGroup> = sequences.iter().enumerate().map(single_group).collect();
    let mut groups = vec![];
    let shared = |i: usize| shared.get(i).copied().unwrap_or(0);
    let begins_group = |i: usize| shared(i) == 0 || 2 * shared(i) < shared(i + 1);
    for group in single.chunk_by(|_, next| !begins_group(next.sequences.start)) {
        let tokens = group[0].tokens + group[1..].iter().map(|member| member.added_tokens).sum::<usize>();
        if tokens <= tokens_max {
            let sequences = group[0].sequences.start..group[group.len() - 1].sequences.end;
            let added_tokens = tokens - group[0].tokens + group[0].added_tokens;
            groups.push(SequenceGroup { sequences, added_tokens, tokens });
        } else {
            groups.extend(
                group.iter().map(|member| SequenceGroup { sequences: member.sequences.clone(), ..*member }),
            );
        }
    }
    groups
}

/// Splits `groups`, which have `total` tokens, into about `parts` ranges of similar size. A range has at most
/// `tokens_max` tokens, unless a single group has more.
fn split_into(parts: usize, total: usize, groups: &[SequenceGroup], tokens_max: usize) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = vec![];
    let (mut tokens, mut part, mut before) = (0, 0, 0);
    for group in groups {
        // With `total` divided into `parts` equal parts, the index of the part that contains the middle of
        // the group.
        let group_part = (2 * before + group.added_tokens) * parts / (2 * total).max(1);
        before += group.added_tokens;
        match ranges.last_mut() {
            Some(range) if group_part <= part && tokens + group.added_tokens <= tokens_max => {
                range.end = group.sequences.end;
                tokens += group.added_tokens;
            }
            _ => {
                ranges.push(group.sequences.clone());
                tokens = group.tokens;
            }
        }
        part = group_part;
    }
    ranges
}

impl Sequence {
    /// Returns the input tokens of the forward pass: all but the last one, which is only a target.
    fn inputs(&self) -> &[u32] {
        &self.tokens[..self.tokens.len().saturating_sub(1)]
    }
}

/// One value per micro-batch. Objectives set the values from any thread.
pub struct MicroBatchValues<S>(Vec<Mutex<Option<S>>>);

impl<S> MicroBatchValues<S> {
    pub fn new(micro_batches: &[MicroBatch]) -> Self {
        Self(micro_batches.iter().map(|_| Mutex::new(None)).collect())
    }

    pub fn set(&self, index: usize, value: S) {
        *self.0[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    /// Returns the values in batch order.
    ///
    /// # Errors
    /// When an objective was not called.
    pub fn into_values(self) -> Result<Vec<S>> {
        let value = |cell: Mutex<Option<S>>| cell.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.0.into_iter().map(|cell| value(cell).context("a micro-batch has no value")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_packed_without_padding_and_split_at_the_bound() {
        let sequence = |n: u32| Sequence {
            tokens: (0..n).collect(),
            mask: (0..n).map(|i| i != 1).collect(),
            kept_tokens: vec![],
        };
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
    fn micro_batches_in_pairs_leave_no_thread_of_two_idle() {
        let of = |lengths: &[usize], tokens_max: usize| -> Vec<usize> {
            let sequence = |&n: &usize| Sequence {
                tokens: vec![1; n + 1],
                mask: vec![true; n + 1],
                kept_tokens: vec![],
            };
            let sequences: Vec<Sequence> = lengths.iter().map(sequence).collect();
            let batches =
                MicroBatch::split(&sequences, MicroBatchLimits { tokens_max, needs_even_count: true });
            assert!(batches.iter().all(|batch| batch.tokens.len() <= tokens_max));
            batches.iter().map(|batch| batch.tokens.len()).collect()
        };
        assert_eq!(of(&[60; 16], 1000), [960], "sequences that fit in one micro-batch are not split");
        assert_eq!(of(&[60; 16], 512), [480; 2]);
        assert_eq!(of(&[60; 18], 512), [240, 300, 240, 300], "with three, one thread would be idle");
        assert_eq!(of(&[60; 15], 500), [420, 480]);
        assert_eq!(of(&[100; 3], 100), [100; 3], "there are no more sequences");
        assert!(of(&[], 100).is_empty());
    }

    #[test]
    fn a_group_is_not_cut_where_it_fits() {
        // Prompts of 20 tokens; all prompts share the first 6. There are 4 samples of 10 tokens each.
        let sample = |group: u32, sample: u32| {
            let prompt = (0..20).map(|i| if i < 6 { i } else { 100 * (group + 1) + i });
            let tokens: Vec<u32> = prompt.chain((0..11).map(|i| 1000 * (sample + 1) + i)).collect();
            Sequence { mask: (0..tokens.len()).map(|i| i >= 20).collect(), tokens, kept_tokens: vec![] }
        };
        let groups: Vec<Sequence> = (0..6).flat_map(|group| (0..4).map(move |i| sample(group, i))).collect();
        let spans = |tokens_max: usize, needs_even_count: bool| -> Vec<Range<usize>> {
            let limits = MicroBatchLimits { tokens_max, needs_even_count };
            let batches = MicroBatch::split_with_prefixes(&groups, limits, |_| usize::MAX);
            batches.into_iter().map(|batch| batch.sequences).collect()
        };
        // A group has 64 rows, and 58 rows after another group.
        assert_eq!(spans(130, false), [0..8, 8..16, 16..24]);
        assert_eq!(spans(130, true), [0..4, 4..12, 12..16, 16..24]);
        assert_eq!(spans(70, true), [0..4, 4..8, 8..12, 12..16, 16..20, 20..24]);
        assert!(spans(50, true).len() % 2 == 0, "groups that do not fit are split");
    }

    #[test]
    fn a_group_that_does_not_fit_is_cut_into_parts_of_about_one_size() {
        // A prompt of 40 tokens and 64 samples of 10.
        let sample = |sample: u32| {
            let tokens: Vec<u32> = (0..40).chain((0..11).map(|i| 100 * (sample + 1) + i)).collect();
            Sequence { mask: (0..tokens.len()).map(|i| i >= 40).collect(), tokens, kept_tokens: vec![] }
        };
        let group: Vec<Sequence> = (0..64).map(sample).collect();
        for needs_even_count in [false, true] {
            let batches = MicroBatch::split_with_prefixes(
                &group,
                MicroBatchLimits { tokens_max: 100, needs_even_count },
                |_| usize::MAX,
            );
            let rows: Vec<usize> = batches.iter().map(|batch| batch.tokens.len()).collect();
            // The first micro-batch also holds the prompt.
            assert!(rows.len() <= 14 && rows[1..].iter().all(|rows| (80..=100).contains(rows)), "{rows:?}");
        }
    }

    #[test]
    fn samples_of_a_prompt_share_its_rows_within_a_micro_batch() {
        let sample = |prompt: u32, response: &[u32]| {
            let tokens: Vec<u32> = (0..4).map(|i| prompt + i).chain(response.iter().copied()).collect();
            Sequence { mask: (0..tokens.len()).map(|i| i >= 4).collect(), tokens, kept_tokens: vec![] }
        };
        let sequences = [sample(10, &[7, 8]), sample(10, &[7, 9]), sample(10, &[1]), sample(20, &[1, 2, 3])];
        let batches = MicroBatch::split_with_prefixes(&sequences, 100, |_| usize::MAX);
        let [batch] = &batches[..] else { panic!("{} micro-batches", batches.len()) };
        assert_eq!(*batch.tokens, [10, 11, 12, 13, 7, 20, 21, 22, 23, 1, 2]);
        assert_eq!(batch.positions, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]);
        // The prompt's last row predicts three first tokens.
        assert_eq!(*batch.rows, [3, 4, 3, 4, 3, 8, 9, 10]);
        assert_eq!(*batch.targets, [7, 8, 7, 9, 1, 1, 2, 3]);
        assert_eq!(batch.cu_targets, [0, 2, 4, 5, 8]);
        assert_eq!(**batch.sequences_per_row.as_ref().unwrap(), [3, 3, 3, 3, 2, 1, 1, 1, 1, 1, 1]);
        // A micro-batch that begins within a group repeats the prompt.
        let batches = MicroBatch::split_with_prefixes(&sequences, 6, |_| usize::MAX);
        assert_eq!(batches.iter().map(|b| b.sequences.clone()).collect::<Vec<_>>(), [0..1, 1..3, 3..4]);
        assert_eq!(*batches[1].tokens, [10, 11, 12, 13, 7]);
        let same = vec![sample(10, &[7, 8]); 4];
        assert_eq!(MicroBatch::split_with_prefixes(&same, 9, |_| usize::MAX).len(), 2);
        let batches = MicroBatch::split_with_prefixes(&sequences[..3], 100, |i| 5 - i);
        assert_eq!(*batches[0].tokens, [10, 11, 12, 13, 7, 7, 13]);
    }
}
