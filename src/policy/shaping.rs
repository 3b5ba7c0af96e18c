//! Reward shaping.

use anyhow::Result;

use crate::bad_input;

/// DAPO's soft penalty on answers near the length limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OverlongPenalty {
    response_tokens_max: usize,
    buffer_tokens: usize,
    penalty: f64,
}

impl OverlongPenalty {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) unless 0 < `buffer_tokens` ≤ `response_tokens_max` and `penalty`
    /// is positive.
    pub fn new(response_tokens_max: usize, buffer_tokens: usize, penalty: f64) -> Result<Self> {
        if buffer_tokens == 0 || buffer_tokens > response_tokens_max {
            return Err(bad_input!(
                "the overlong buffer is {buffer_tokens} tokens: it must lie between 1 and the response limit of \
                 {response_tokens_max}"
            ));
        }
        if !(penalty > 0.0 && penalty.is_finite()) {
            return Err(bad_input!("the overlong penalty is {penalty}: it must be positive"));
        }
        Ok(Self { response_tokens_max, buffer_tokens, penalty })
    }

    /// Returns the term that is added to a response's reward (Yu et al. 2025, eq. 13). It is 0 for responses
    /// shorter than the buffer's start. It then falls linearly to −`penalty` at the limit, and is −`penalty`
    /// for longer responses.
    pub fn reward(&self, response_tokens: usize) -> f32 {
        let start = self.response_tokens_max - self.buffer_tokens;
        let excess = response_tokens.saturating_sub(start).min(self.buffer_tokens);
        (-self.penalty * excess as f64 / self.buffer_tokens as f64) as f32
    }
}
