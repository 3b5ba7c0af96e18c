//! The input of an actor's passes, and its split into micro-batches.

use super::batch_runner::BatchRunner;
use super::micro_batch::{MicroBatch, PackingParameters, Sequence};
use super::routed_experts::{self as experts, RoutedExperts};
use super::teacher::Teacher;
use crate::bad_input;
use crate::model::forward::Model;
use anyhow::Result;
use std::ops::Range;

/// The sequences of a pass.
#[derive(Clone, Default)]
pub struct PassInput<'a> {
    pub sequences: Vec<&'a Sequence>,
    /// Whether sequences of a micro-batch share the rows of their common prefix. On a GPU none do.
    pub shares_prefixes: bool,
    /// The experts that replace the router's choice, one entry per sequence.
    pub replay: Option<&'a [RoutedExperts]>,
    /// The targets of each sequence, in place of its trained tokens.
    pub targets: Option<&'a [GivenTargets]>,
    /// Indices of sequences at which a micro-batch begins in any case, in order.
    pub splits: &'a [usize],
    /// The teacher whose distributions the policy is compared with.
    pub teacher: Option<Teacher<'a>>,
}

/// The given targets of a sequence: each input position has none, one or several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GivenTargets {
    /// The input position that predicts each target, in order.
    pub positions: Vec<u32>,
    /// The target tokens.
    pub tokens: Vec<u32>,
    /// The number of targets whose log-probability may have a gradient. Micro-batches are packed by it.
    pub with_gradient: usize,
}

/// The part of a batch that one pass computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPart {
    /// Its sequences in the batch.
    pub sequences: Range<usize>,
    /// Its targets in the batch's columns.
    pub targets: Range<usize>,
    /// Start of each sequence in the part's columns, followed by their length.
    pub cu_targets: Vec<usize>,
}

impl BatchPart {
    /// Returns the parts of a batch, in order.
    pub(super) fn of_micro_batches(batches: &[MicroBatch]) -> Vec<Self> {
        let mut start = 0;
        let part = |batch: &MicroBatch| {
            let targets = start..start + batch.cu_targets.last().copied().unwrap_or(0);
            start = targets.end;
            Self { sequences: batch.sequences.clone(), targets, cu_targets: batch.cu_targets.clone() }
        };
        batches.iter().map(part).collect()
    }
}

impl PassInput<'_> {
    /// Checks the input against `model` before any pass.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the sequence.
    pub(super) fn check(&self, model: &Model) -> Result<()> {
        let (vocabulary, context) = (model.config.vocab_size, model.context_tokens_max());
        let refused = |index: usize, reason: String| Err(bad_input!("sequence {index}: {reason}"));
        for (name, count) in
            [("experts", self.replay.map(<[_]>::len)), ("targets", self.targets.map(<[_]>::len))]
        {
            if let Some(count) = count.filter(|&count| count != self.sequences.len()) {
                return Err(bad_input!("{name} for {count} of {} sequences", self.sequences.len()));
            }
        }
        for (index, sequence) in self.sequences.iter().enumerate() {
            let inputs = sequence.tokens.len().saturating_sub(1);
            if let Some(token) = sequence.tokens.iter().find(|&&token| token as usize >= vocabulary) {
                return refused(index, format!("token {token} is not below {vocabulary}"));
            }
            if inputs > context {
                return refused(index, format!("{inputs} tokens exceed the model's context of {context}"));
            }
            let Some(GivenTargets { positions, tokens, .. }) = self.targets.map(|targets| &targets[index])
            else {
                continue;
            };
            if positions.len() != tokens.len() {
                return refused(index, format!("{} positions for {} targets", positions.len(), tokens.len()));
            }
            if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
                return refused(index, format!("target {token} is not below {vocabulary}"));
            }
            if let Some(position) = positions.iter().find(|&&position| position as usize >= inputs) {
                return refused(index, format!("a target at position {position} of {inputs}"));
            }
            if !positions.is_sorted() {
                return refused(index, "the positions of targets are not in order".to_owned());
            }
        }
        Ok(())
    }

    /// Packs the sequences for `runner` into micro-batches of up to `tokens_max` tokens. Two sequences share
    /// a row only if its replayed experts are equal in both.
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn pack(&self, runner: &BatchRunner, tokens_max: usize) -> Result<Vec<MicroBatch>> {
        let PackingParameters { limits, shared_positions_max, top_k } = runner.packing_parameters(tokens_max);
        let shared_positions_max = if self.shares_prefixes { shared_positions_max } else { 0 };
        let common = |i: usize| match self.replay {
            Some(replay) => experts::common_prefix_length(&replay[i - 1], &replay[i], top_k),
            None => usize::MAX,
        };
        let shared_max = |i: usize| common(i).min(shared_positions_max);
        let mut batches = vec![];
        let ends = self.splits.iter().copied().chain([self.sequences.len()]);
        let mut start = 0;
        for end in ends {
            let range = start..end.clamp(start, self.sequences.len());
            let targets = self.targets.map(|targets| &targets[range.clone()]);
            let shared_max = |i: usize| shared_max(range.start + i);
            let part =
                MicroBatch::split_with_targets(&self.sequences[range.clone()], targets, limits, shared_max);
            batches.extend(part.into_iter().map(|batch| batch.after(range.start)));
            start = range.end;
        }
        if let Some(replay) = self.replay {
            for batch in &mut batches {
                let sequences = &replay[batch.sequences.clone()];
                batch.replay = experts::pack_experts(sequences, &batch.sequence_rows, top_k)?;
            }
        }
        Ok(batches)
    }
}
