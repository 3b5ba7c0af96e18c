//! An entry of the list of losses: the loss's name, its constraints and its constructor.

use anyhow::{Result, bail};
use rand::RngCore;

use super::{LossInput, PolicyLoss, SelectionInput};
use crate::policy::PolicySettings;
use crate::policy::aggregation::Normalizer;

/// A policy loss with its settings.
pub trait LossFunction: std::fmt::Debug + Send + Sync {
    /// Computes the loss of one micro-batch. The losses of all micro-batches add up to the loss of the batch.
    /// A loss uses either `normalizer` or `batch_sequences`, the number of sequences of the whole batch.
    ///
    /// # Errors
    /// When a slice of `input` does not fit its sequences.
    fn loss(&self, input: &LossInput, normalizer: &Normalizer, batch_sequences: usize) -> Result<PolicyLoss> {
        input.check()?;
        self.compute(input, normalizer, batch_sequences)
    }

    /// Computes [`Self::loss`] of an input that is checked.
    ///
    /// # Errors
    /// Those of the loss itself, such as a missing selection.
    fn compute(
        &self,
        input: &LossInput,
        normalizer: &Normalizer,
        batch_sequences: usize,
    ) -> Result<PolicyLoss>;

    /// Selects tokens of the whole batch before its first update; one flag per token, false where the mask is
    /// false. Only losses with [`LossEntry::selects_tokens`] select tokens.
    ///
    /// # Errors
    /// When a slice of `batch` does not fit its sequences, or the loss selects no tokens.
    fn select_tokens(&self, batch: &SelectionInput, random: &mut dyn RngCore) -> Result<Vec<bool>> {
        let _ = (batch, random);
        bail!("this loss selects no tokens")
    }
}

/// A loss in the list of losses.
#[derive(Debug)]
pub struct LossEntry {
    pub name: &'static str,
    /// Description of the loss in the recipe reference.
    pub meaning: &'static str,
    pub build: fn(&PolicySettings) -> Result<Box<dyn LossFunction>>,
    /// Whether the loss has an importance ratio to the old log-probs. If these are the log-probs of the
    /// rollout, importance weights of the rollout correction would correct the mismatch a second time.
    pub has_ratio: bool,
    /// Whether the loss clips a weight of the gradient instead of the ratio. Only then may `policy.clip_low`
    /// and `policy.clip_high` be 1 or more.
    pub clips_weight: bool,
    /// Whether the loss selects tokens of the batch before the first update of a step. It needs old log-probs
    /// that are known then.
    pub selects_tokens: bool,
    pub token_weights: TokenWeights,
}

impl LossEntry {
    /// The defaults of an entry. Each loss sets its own name, meaning and `build`.
    pub(super) const DEFAULT: LossEntry = LossEntry {
        name: "",
        meaning: "",
        build: |_| Err(anyhow::anyhow!("a loss without a constructor")),
        has_ratio: true,
        clips_weight: false,
        selects_tokens: false,
        token_weights: TokenWeights::Any,
    };
}

/// The per-token importance weights that a loss accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWeights {
    Any,
    /// Truncated weights, but no masked weights (0 outside the bounds). Holds the reason and the remedy.
    Truncated(&'static str),
    /// No per-token weights, only weights of whole sequences. Holds the reason and the remedy.
    None(&'static str),
}
