//! Sources of tokens: the model's distribution, or a script that replaces drawn tokens.

use crate::ops::logits::SamplingParameters;
use anyhow::Result;

/// The position of a token in a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenPosition {
    pub prompt: u64,
    pub sample: u64,
    pub turn: u64,
    /// Index within the turn.
    pub token: usize,
}

/// A source of tokens: [`SamplingParameters`], or one that replays or forces tokens.
pub trait TokenSource: Sync {
    /// Returns the sampling parameters.
    fn sampling(&self) -> SamplingParameters;

    /// Returns the token to use in place of `drawn`. Its log-probability is the model's, under
    /// [`Self::sampling`].
    ///
    /// # Errors
    /// When there is no token to use.
    fn choose(&self, place: TokenPosition, drawn: u32) -> Result<u32> {
        let _ = place;
        Ok(drawn)
    }
}

impl TokenSource for SamplingParameters {
    fn sampling(&self) -> SamplingParameters {
        *self
    }
}
