//! Where tokens come from: the model's distribution, or a script that decides on what was drawn from it.

use crate::ops::logits::Sampling;
use anyhow::Result;

/// Where in a rollout a token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampledPlace {
    pub prompt: u64,
    pub sample: u64,
    pub turn: u64,
    /// Index within the turn.
    pub token: usize,
}

/// Where tokens come from: [`Sampling`], or something that replays or forces them.
pub trait TokenSource: Sync {
    /// How tokens are drawn.
    fn sampling(&self) -> Sampling;

    /// The token to take where `drawn` was drawn. Its log-probability is the model's, under [`Self::sampling`].
    ///
    /// # Errors
    /// When there is none to take.
    fn choose(&self, place: SampledPlace, drawn: u32) -> Result<u32> {
        let _ = place;
        Ok(drawn)
    }
}

impl TokenSource for Sampling {
    fn sampling(&self) -> Sampling {
        *self
    }
}
