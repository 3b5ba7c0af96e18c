//! The list of losses: what a recipe calls each, what it may stand beside, and how it is made.

use anyhow::Result;

use super::{LossInput, PolicyLoss};
use crate::policy::PolicySettings;
use crate::policy::aggregation::Normalizer;

/// A policy loss with its settings.
pub trait LossFunction: std::fmt::Debug + Send + Sync {
    /// A micro-batch's share of the loss. A loss reads either `normalizer` or `batch_sequences`, the number of sequences of
    /// the whole batch.
    ///
    /// # Errors
    /// When a slice of `input` does not fit its sequences.
    fn loss(&self, input: &LossInput, normalizer: &Normalizer, batch_sequences: usize) -> Result<PolicyLoss>;
}

/// A loss as recipes name it.
#[derive(Debug)]
pub struct LossEntry {
    pub name: &'static str,
    /// For the recipe's page.
    pub meaning: &'static str,
    pub make: fn(&PolicySettings) -> Result<Box<dyn LossFunction>>,
    /// Whether the loss has a ratio against the anchor, beside which importance weights against the rollout would count
    /// the gap twice.
    pub has_ratio: bool,
    /// Whether the clip bounds a weight, so that it may reach 1 and more, and not a ratio.
    pub clips_weight: bool,
    pub token_weights: TokenWeights,
}

impl LossEntry {
    /// What most losses are; name, meaning and `make` are each loss's own.
    pub(super) const USUAL: LossEntry = LossEntry {
        name: "",
        meaning: "",
        make: |_| Err(anyhow::anyhow!("a loss without a maker")),
        has_ratio: true,
        clips_weight: false,
        token_weights: TokenWeights::Any,
    };
}

/// Which importance weights of single tokens a loss can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenWeights {
    Any,
    /// Those that truncate, and not those that are 0 outside of bounds; with the reason and the remedy.
    Truncated(&'static str),
    /// None, but those of whole sequences; with the reason and the remedy.
    None(&'static str),
}
