//! Aggregates per-token losses to one loss. The denominators count the whole batch.

use anyhow::Result;

use super::sequences::Sequences;
use crate::bad_input;
use crate::settings::choice;

choice! {
    /// How per-token losses `l[s][t]` become one loss. Sums run over valid tokens. N is the number of valid
    /// tokens of the update's minibatch. S is the number of its sequences that have a valid token. The
    /// names in verl are `token-mean`, `token-sum`, `seq-mean-token-mean`, `seq-mean-token-sum` and
    /// `seq-mean-token-sum-norm`.
    pub enum Aggregation {
        /// Sum over the tokens of the update, divided by their count.
        TokenMean = "token_mean",
        /// Sum over the tokens of the update.
        TokenSum = "token_sum",
        /// Mean over sequences of the mean over tokens.
        SequenceMeanTokenMean = "sequence_mean_token_mean",
        /// Mean over sequences of the sum over tokens.
        SequenceMeanTokenSum = "sequence_mean_token_sum",
        /// Sum over tokens, divided by the number of sequences times `rollout.response_tokens_max`.
        Constant = "constant",
    }
}

/// The counts that give a batch's denominators. They cover all micro-batches, after any rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSize {
    /// N, the number of valid tokens.
    pub tokens: usize,
    /// S, the number of sequences with a valid token.
    pub sequences: usize,
    /// The fixed number of tokens in the denominator of [`Aggregation::Constant`] (Dr. GRPO). It does not
    /// depend on the lengths of the sampled answers.
    pub response_tokens_max: usize,
}

impl BatchSize {
    /// Counts the tokens and sequences of `sequences`, which must be the whole batch.
    pub fn from_sequences(sequences: &Sequences, response_tokens_max: usize) -> Self {
        let (tokens, with_tokens) = (sequences.valid_tokens(), sequences.valid_sequences());
        Self { tokens, sequences: with_tokens, response_tokens_max }
    }
}

/// An [`Aggregation`] with the denominators of one batch.
///
/// The loss is linear in the per-token losses. For any split into micro-batches, the losses of the
/// micro-batches therefore add up to the loss of the whole batch, and the gradients add up too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalizer {
    /// Whether the tokens of a sequence are averaged before the sum over sequences.
    token_mean_in_sequence: bool,
    /// The factor of the sum over sequences. It is infinite for a batch without valid tokens.
    scale: f64,
}

impl Normalizer {
    /// Computes the denominators for a batch of this `size`. The losses, in the order of [`Aggregation`],
    /// are: Σ l / N, Σ l, Σ_s (mean_t l) / S, Σ_s (Σ_t l) / S, and Σ_s (Σ_t l) / (S · `response_tokens_max`).
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) when `response_tokens_max` is 0 with [`Aggregation::Constant`].
    pub fn new(aggregation: Aggregation, size: BatchSize) -> Result<Self> {
        let (tokens, sequences) = (size.tokens as f64, size.sequences as f64);
        let denominator = match aggregation {
            Aggregation::TokenMean => tokens,
            Aggregation::TokenSum => 1.0,
            Aggregation::SequenceMeanTokenMean | Aggregation::SequenceMeanTokenSum => sequences,
            Aggregation::Constant if size.response_tokens_max == 0 => {
                return Err(bad_input!(
                    "aggregation `constant` divides by `response_tokens_max`, which must be at least 1"
                ));
            }
            Aggregation::Constant => sequences * size.response_tokens_max as f64,
        };
        Ok(Self {
            token_mean_in_sequence: aggregation == Aggregation::SequenceMeanTokenMean,
            scale: 1.0 / denominator,
        })
    }

    /// Returns the loss `Σ weight · l` of `sequences`, and its gradient with respect to a per-token quantity
    /// x.
    ///
    /// `term(sequence, token)` returns the loss l of a valid token and its derivative dl/dx. The gradient is
    /// `weight · dl/dx`, and 0 where the mask is false. For a batch without valid tokens the loss is NaN (0
    /// for `TokenSum`) and the gradient is 0.
    pub fn reduce(
        &self,
        sequences: &Sequences,
        mut term: impl FnMut(usize, usize) -> (f64, f64),
    ) -> (f64, Vec<f32>) {
        let mut total = 0.0;
        let mut gradient = vec![0.0; sequences.tokens()];
        for (sequence, range) in sequences.token_ranges().enumerate() {
            let count = sequences.valid_indices(range.clone()).count();
            let token_weight = if self.token_mean_in_sequence { 1.0 / count.max(1) as f64 } else { 1.0 };
            let mut sequence_total = 0.0;
            for token in sequences.valid_indices(range) {
                let (loss, derivative) = term(sequence, token);
                sequence_total += loss;
                gradient[token] = (self.scale * token_weight * derivative) as f32;
            }
            total += token_weight * sequence_total;
        }
        (self.scale * total, gradient)
    }
}
