//! Tokens with an engine's log-probs, packed into batches.

use crate::actor::micro_batch::{MicroBatch, Sequence};
use std::ops::Range;

/// Sequences that are computed together.
#[derive(Debug, Clone)]
pub struct EngineBatch {
    pub micro_batch: MicroBatch,
    /// The temperature that the file states for the log-probs.
    pub temperature: f64,
    /// Whether each target was sampled. Targets of the prompt were not sampled: engines report the log-probs
    /// of such targets at temperature 1 and without filters.
    pub sampled: Vec<bool>,
}

/// Tokens and log-probs to compare with the model.
#[derive(Debug, Clone, Default)]
pub struct EngineLogProbs {
    pub batches: Vec<EngineBatch>,
    /// Log-probs of all targets, in batch order.
    pub log_probs: Vec<f32>,
}

impl EngineLogProbs {
    /// Wraps batches whose targets were all sampled at one temperature.
    pub fn from_samples(batches: Vec<MicroBatch>, temperature: f64, log_probs: Vec<f32>) -> Self {
        let batch = |tokens: MicroBatch| {
            let sampled = vec![true; tokens.targets.len()];
            EngineBatch { micro_batch: tokens, temperature, sampled }
        };
        Self { batches: batches.into_iter().map(batch).collect(), log_probs }
    }

    /// Returns the number of input tokens of the longest sequence.
    pub fn sequence_tokens_max(&self) -> usize {
        let positions = self.batches.iter().flat_map(|batch| &batch.micro_batch.positions);
        positions.max().map_or(0, |&last| last as usize + 1)
    }

    /// Returns the number of input tokens.
    pub fn tokens(&self) -> u64 {
        self.batches.iter().map(|batch| batch.micro_batch.tokens.len() as u64).sum()
    }

    /// Returns the range of the targets of each sequence.
    pub fn target_ranges(&self) -> Vec<Range<usize>> {
        let batches = self.batches.iter().map(|batch| &batch.micro_batch.cu_targets);
        let counts = batches.flat_map(|cu_targets| cu_targets.windows(2).map(|w| w[1] - w[0]));
        let mut end = 0;
        let mut next_range = |count| {
            end += count;
            end - count..end
        };
        counts.map(&mut next_range).collect()
    }

    /// Selects evenly spaced sequences with about `targets_max` targets in total. The last sequence may be
    /// truncated. Also returns the indices of the selected targets among all targets.
    pub fn select_sequences(&self, targets_max: usize) -> (Self, Vec<usize>) {
        let stride = self.log_probs.len().div_ceil(targets_max.max(1)).max(1);
        let (mut subset, mut indices) = (Self::default(), vec![]);
        let (mut sequence, mut first) = (0, 0);
        for batch in &self.batches {
            let mut selected = vec![];
            for (index, w) in batch.micro_batch.cu_targets.windows(2).enumerate() {
                let count = (w[1] - w[0]).min(targets_max.saturating_sub(indices.len()));
                if sequence % stride == 0 && count > 0 {
                    selected.push((index, count));
                    indices.extend((first + w[0]..).take(count));
                }
                sequence += 1;
            }
            first += batch.sampled.len();
            if !selected.is_empty() {
                subset.batches.push(batch.select_sequences_of_batch(&selected));
            }
        }
        subset.log_probs = indices.iter().map(|&index| self.log_probs[index]).collect();
        (subset, indices)
    }
}

impl EngineBatch {
    /// Selects sequences. `selected` lists, for each selected sequence, its index and the number of targets
    /// to keep.
    fn select_sequences_of_batch(&self, selected: &[(usize, usize)]) -> Self {
        let whole = &self.micro_batch;
        let (mut sequences, mut sampled) = (vec![], vec![]);
        for &(index, count) in selected {
            let targets = whole.cu_targets[index]..whole.cu_targets[index] + count;
            let path = whole.sequence_rows.row_indices(index);
            let indices = whole.rows[targets.clone()]
                .iter()
                .filter_map(|&row| path.binary_search(&(row as usize)).ok());
            let indices: Vec<usize> = indices.collect();
            let length = indices.last().map_or(0, |&index| index + 1);
            let inputs = path[..length].iter().map(|&row| whole.tokens[row]);
            let tokens: Vec<u32> = inputs.chain(whole.targets[targets.clone()].last().copied()).collect();
            let (mut mask, mut kept_tokens) = (vec![false; tokens.len()], vec![]);
            indices.iter().for_each(|&index| mask[index + 1] = true);
            if let Some(kept) = &whole.kept_tokens {
                kept_tokens = vec![None; tokens.len()];
                indices.iter().zip(targets.clone()).for_each(|(&index, target)| {
                    kept_tokens[index + 1] = kept[target].clone();
                });
            }
            sequences.push(Sequence { tokens, mask, kept_tokens });
            sampled.extend_from_slice(&self.sampled[targets]);
        }
        // Without a limit there is exactly one micro-batch.
        let tokens = MicroBatch::split(&sequences, usize::MAX).swap_remove(0);
        Self { micro_batch: tokens, temperature: self.temperature, sampled }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_holds_whole_sequences_and_the_last_cut_short() {
        let sequence = |from: u32, n: u32| Sequence {
            tokens: (from..from + n).collect(),
            mask: (0..n).map(|i| i > 1).collect(),
            kept_tokens: vec![],
        };
        let sequences = [sequence(0, 6), sequence(10, 5), sequence(20, 8), sequence(30, 4)];
        let batches = MicroBatch::split(&sequences, 12);
        let count: usize = batches.iter().map(|batch| batch.targets.len()).sum();
        let whole = EngineLogProbs::from_samples(batches, 1.0, (0..count).map(|i| i as f32).collect());
        let (part, indices) = whole.select_sequences(8);
        assert_eq!(whole.target_ranges(), [0..4, 4..7, 7..13, 13..15]);
        // Every second sequence is selected. The first has 4 targets, so 4 of the 6 targets of the third
        // remain.
        assert_eq!(indices, [0, 1, 2, 3, 7, 8, 9, 10]);
        assert_eq!(part.log_probs, [0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0]);
        let all = |of: &dyn Fn(&MicroBatch) -> Vec<u32>| -> Vec<u32> {
            part.batches.iter().flat_map(|batch| of(&batch.micro_batch)).collect()
        };
        assert_eq!(all(&|b| b.tokens.to_vec()), [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]);
        assert_eq!(all(&|b| b.targets.to_vec()), [2, 3, 4, 5, 22, 23, 24, 25]);
        for batch in &part.batches {
            for (row, target) in batch.micro_batch.rows.iter().zip(batch.micro_batch.targets.iter()) {
                assert_eq!(batch.micro_batch.tokens[*row as usize] + 1, *target);
            }
            assert_eq!(batch.sampled.len(), batch.micro_batch.targets.len());
        }
        assert_eq!(whole.select_sequences(100).0.log_probs.len(), count);
    }
}
