//! From per-token losses to one number: the aggregation modes and their batch-wide denominators.

use anyhow::{Result, ensure};

use super::sequences::Sequences;
use crate::bad_input;

/// How per-token losses `l[s][t]` become one loss. Sums run over valid tokens; N is the number of valid tokens of
/// the whole batch and S the number of its sequences that have any.
///
/// Names in brackets are verl's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregation {
    /// Σ l / N (`token-mean`): every token weighs the same, so long answers weigh more.
    TokenMean,
    /// Σ l (`token-sum`).
    TokenSum,
    /// Σ_s (mean_t l) / S (`seq-mean-token-mean`): every sequence weighs the same.
    SequenceMeanTokenMean,
    /// Σ_s (Σ_t l) / S (`seq-mean-token-sum`).
    SequenceMeanTokenSum,
    /// Σ_s (Σ_t l) / (S · `tokens`) (`seq-mean-token-sum-norm`): Dr. GRPO's constant length, which does not depend
    /// on how long the sampled answers are.
    Constant { tokens: usize },
}

/// An [`Aggregation`] with the denominators of one batch.
///
/// The loss is linear in the per-token losses, so a micro-batch's share needs nothing but these numbers: the shares
/// of any split into micro-batches add up to the loss of the whole batch, and so do their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalizer {
    /// Whether a sequence's tokens are averaged before they are summed over sequences.
    token_mean_in_sequence: bool,
    /// What the sum over sequences is multiplied by. Infinite for a batch without valid tokens.
    scale: f64,
}

impl Normalizer {
    /// Denominators of the whole batch, counted over all micro-batches and all `replicas`, after any rejection.
    ///
    /// `tokens` counts valid tokens, `sequences` the sequences with at least one. `replicas` is the number of data
    /// replicas whose gradients are afterwards **averaged**; pass 1 when they are summed, or when there is one.
    pub fn global(
        aggregation: Aggregation,
        tokens: usize,
        sequences: usize,
        replicas: usize,
    ) -> Result<Self> {
        ensure!(replicas > 0, "the number of replicas must be at least 1");
        let denominator = match aggregation {
            Aggregation::TokenMean => tokens as f64,
            Aggregation::TokenSum => 1.0,
            Aggregation::SequenceMeanTokenMean | Aggregation::SequenceMeanTokenSum => sequences as f64,
            Aggregation::Constant { tokens: 0 } => {
                return Err(bad_input!(
                    "aggregation `constant` divides by a fixed number of tokens: give one of at least 1"
                ));
            }
            Aggregation::Constant { tokens } => sequences as f64 * tokens as f64,
        };
        Ok(Self {
            token_mean_in_sequence: aggregation == Aggregation::SequenceMeanTokenMean,
            scale: replicas as f64 / denominator,
        })
    }

    /// Denominators counted from `sequences`, which must be the whole batch.
    ///
    /// Refused for several `replicas`: one replica cannot know what the others hold.
    pub fn local(aggregation: Aggregation, sequences: &Sequences, replicas: usize) -> Result<Self> {
        if replicas > 1 {
            return Err(bad_input!(
                "{replicas} replicas share the batch, but only one replica's tokens were counted: count the \
                 valid tokens and sequences over all replicas and use those"
            ));
        }
        Self::global(aggregation, sequences.valid_tokens(), sequences.valid_sequences(), 1)
    }

    /// The loss `Σ weight · l` of `sequences` and its gradient with respect to every per-token quantity x.
    ///
    /// `term(row, token)` gives a valid token's loss and that loss's derivative dl/dx; the gradient is
    /// `weight · dl/dx`, and 0 where the mask is false. Without any valid token in the whole batch a mean does not
    /// exist: the loss is NaN (`TokenSum`: 0) and the gradient 0.
    pub fn reduce(
        &self,
        sequences: &Sequences,
        mut term: impl FnMut(usize, usize) -> (f64, f64),
    ) -> (f64, Vec<f32>) {
        let mut total = 0.0;
        let mut gradient = vec![0.0; sequences.tokens()];
        for (index, row) in sequences.rows().enumerate() {
            let count = sequences.valid(row.clone()).count();
            let share = if self.token_mean_in_sequence { 1.0 / count.max(1) as f64 } else { 1.0 };
            let mut row_total = 0.0;
            for token in sequences.valid(row) {
                let (loss, slope) = term(index, token);
                row_total += loss;
                gradient[token] = (self.scale * share * slope) as f32;
            }
            total += share * row_total;
        }
        (self.scale * total, gradient)
    }
}
