//! The entry of a loss in the list of losses: its name, its constraints, its constructor.

use anyhow::Result;

use super::{LossInput, PolicyLoss};
use crate::policy::PolicySettings;
use crate::policy::aggregation::Normalizer;

/// A policy loss with its settings.
pub trait LossFunction: std::fmt::Debug + Send + Sync {
    /// Computes a micro-batch's share of the loss. A loss reads either `normalizer` or `batch_sequences`, the
    /// number of sequences of the whole batch.
    ///
    /// # Errors
    /// When a slice of `input` does not fit its sequences.
    fn loss(&self, input: &LossInput, normalizer: &Normalizer, batch_sequences: usize) -> Result<PolicyLoss>;
}

/// A loss in the list of losses.
#[derive(Debug)]
pub struct LossEntry {
    pub name: &'static str,
    /// Its description in the recipe reference.
    pub meaning: &'static str,
    pub make: fn(&PolicySettings) -> Result<Box<dyn LossFunction>>,
    /// Whether the loss has an importance ratio to the old log-probs. Importance weights against the rollout
    /// would then count the mismatch twice.
    pub has_ratio: bool,
    /// Whether the clip bounds a weight, which may reach 1 and more, instead of a ratio.
    pub clips_weight: bool,
    pub token_weights: TokenWeights,
}

impl LossEntry {
    /// The defaults of a loss; name, meaning and `make` are set by each loss.
    pub(super) const DEFAULT: LossEntry = LossEntry {
        name: "",
        meaning: "",
        make: |_| Err(anyhow::anyhow!("a loss without a constructor")),
        has_ratio: true,
        clips_weight: false,
        token_weights: TokenWeights::Any,
    };
}

/// The kinds of per-token importance weights that a loss accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWeights {
    Any,
    /// Truncated weights, but not masked ones (0 outside bounds); holds the reason and the remedy.
    Truncated(&'static str),
    /// No per-token weights, only weights of whole sequences; holds the reason and the remedy.
    None(&'static str),
}
