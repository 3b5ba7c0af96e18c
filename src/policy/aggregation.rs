//! Aggregation of per-token losses to one loss: the modes and their batch-wide denominators.

use anyhow::Result;

use super::sequences::Sequences;
use crate::bad_input;
use crate::settings::choice;

choice! {
    /// How per-token losses `l[s][t]` become one loss. Sums run over valid tokens. N is the number of valid
    /// tokens of the whole batch; S is the number of its sequences with a valid token. verl's names are
    /// `token-mean`, `token-sum`, `seq-mean-token-mean`, `seq-mean-token-sum` and `seq-mean-token-sum-norm`.
    pub enum Aggregation {
        /// Sum over the tokens of the whole batch, divided by their count.
        TokenMean = "token_mean",
        /// Sum over the tokens of the whole batch.
        TokenSum = "token_sum",
        /// Mean over sequences of the mean over tokens.
        SequenceMeanTokenMean = "sequence_mean_token_mean",
        /// Mean over sequences of the sum over tokens.
        SequenceMeanTokenSum = "sequence_mean_token_sum",
        /// Sum over tokens divided by sequences times `rollout.response_tokens_max`.
        Constant = "constant",
    }
}

/// The counts behind a batch's denominators: over all of its micro-batches, after any rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSize {
    /// N, the number of valid tokens.
    pub tokens: usize,
    /// S, the number of sequences with a valid token.
    pub sequences: usize,
    /// The fixed number of tokens by which [`Aggregation::Constant`] divides (Dr. GRPO). It does not depend
    /// on the length of the sampled answers.
    pub response_tokens_max: usize,
}

impl BatchSize {
    /// Counts `sequences`, which must be the whole batch.
    pub fn from_sequences(sequences: &Sequences, response_tokens_max: usize) -> Self {
        let (tokens, with_tokens) = (sequences.valid_tokens(), sequences.valid_sequences());
        Self { tokens, sequences: with_tokens, response_tokens_max }
    }
}

/// An [`Aggregation`] with the denominators of one batch.
///
/// The loss is linear in the per-token losses, so the shares of any split into micro-batches add up to the
/// loss of the whole batch. So do their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalizer {
    /// Whether a sequence's tokens are averaged before they are summed over sequences.
    token_mean_in_sequence: bool,
    /// The factor of the sum over sequences. It is infinite for a batch without valid tokens.
    scale: f64,
}

impl Normalizer {
    /// Computes the denominators for a batch of this `size`. In the order of [`Aggregation`]: Σ l / N, Σ l,
    /// Σ_s (mean_t l) / S, Σ_s (Σ_t l) / S, Σ_s (Σ_t l) / (S · tokens).
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when the divisor of [`Aggregation::Constant`] is 0.
    pub fn new(aggregation: Aggregation, size: BatchSize) -> Result<Self> {
        let (tokens, sequences) = (size.tokens as f64, size.sequences as f64);
        let denominator = match aggregation {
            Aggregation::TokenMean => tokens,
            Aggregation::TokenSum => 1.0,
            Aggregation::SequenceMeanTokenMean | Aggregation::SequenceMeanTokenSum => sequences,
            Aggregation::Constant if size.response_tokens_max == 0 => {
                return Err(bad_input!(
                    "aggregation `constant` divides by a fixed number of tokens, which must be at least 1"
                ));
            }
            Aggregation::Constant => sequences * size.response_tokens_max as f64,
        };
        Ok(Self {
            token_mean_in_sequence: aggregation == Aggregation::SequenceMeanTokenMean,
            scale: 1.0 / denominator,
        })
    }

    /// Returns the loss `Σ weight · l` of `sequences` and its gradient with respect to every per-token
    /// quantity x.
    ///
    /// `term(row, token)` returns a valid token's loss and its derivative dl/dx. The gradient is `weight ·
    /// dl/dx`, and 0 where the mask is false. A batch without valid tokens has no mean: its loss is NaN (0
    /// for `TokenSum`) and its gradient 0.
    pub fn reduce(
        &self,
        sequences: &Sequences,
        mut term: impl FnMut(usize, usize) -> (f64, f64),
    ) -> (f64, Vec<f32>) {
        let mut total = 0.0;
        let mut gradient = vec![0.0; sequences.tokens()];
        for (index, row) in sequences.token_ranges().enumerate() {
            let count = sequences.valid_indices(row.clone()).count();
            let share = if self.token_mean_in_sequence { 1.0 / count.max(1) as f64 } else { 1.0 };
            let mut row_total = 0.0;
            for token in sequences.valid_indices(row) {
                let (loss, slope) = term(index, token);
                row_total += loss;
                gradient[token] = (self.scale * share * slope) as f32;
            }
            total += share * row_total;
        }
        (self.scale * total, gradient)
    }
}
