//! Rejection rules: a statistic of the log ratio, and its bounds.

use anyhow::Result;

use crate::bad_input;
use crate::settings::{Choice, choice};

choice! {
    /// Statistics of x = log ρ: k1 = −x, k2 = ½·x², k3 = eˣ − 1 − x. No option uses the maximum of k1: k1 is
    /// negative where ratios are large, so its maximum says nothing about them.
    pub enum RejectOption {
        /// k1 of the token.
        TokenK1 = "token_k1",
        /// k2 of the token.
        TokenK2 = "token_k2",
        /// k3 of the token.
        TokenK3 = "token_k3",
        /// Sum of k1 over the response.
        SeqSumK1 = "seq_sum_k1",
        /// Sum of k2 over the response.
        SeqSumK2 = "seq_sum_k2",
        /// Sum of k3 over the response.
        SeqSumK3 = "seq_sum_k3",
        /// Mean of k1 over the response.
        SeqMeanK1 = "seq_mean_k1",
        /// Mean of k2 over the response.
        SeqMeanK2 = "seq_mean_k2",
        /// Mean of k3 over the response.
        SeqMeanK3 = "seq_mean_k3",
        /// Largest k2 of the response.
        SeqMaxK2 = "seq_max_k2",
        /// Largest k3 of the response.
        SeqMaxK3 = "seq_max_k3",
    }
}

/// The scope of a statistic. Sequence scopes reject whole responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Token,
    SequenceSum,
    SequenceMean,
    SequenceMax,
}

/// A statistic of x = clamp(log ρ, ±20).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Statistic {
    /// −x.
    K1,
    /// ½·x².
    K2,
    /// eˣ − 1 − x.
    K3,
}

impl Statistic {
    pub(super) fn evaluate(self, x: f64) -> f64 {
        match self {
            Statistic::K1 => -x,
            Statistic::K2 => 0.5 * x * x,
            // k3 is never negative, except by rounding.
            Statistic::K3 => (x.exp_m1() - x).max(0.0),
        }
    }
}

impl RejectOption {
    pub(super) fn scope(self) -> Scope {
        match self.name() {
            name if name.starts_with("seq_sum") => Scope::SequenceSum,
            name if name.starts_with("seq_mean") => Scope::SequenceMean,
            name if name.starts_with("seq_max") => Scope::SequenceMax,
            _ => Scope::Token,
        }
    }

    pub(super) fn statistic(self) -> Statistic {
        match self.name() {
            name if name.ends_with("k1") => Statistic::K1,
            name if name.ends_with("k2") => Statistic::K2,
            _ => Statistic::K3,
        }
    }

    /// Returns what is wrong with the bounds of a rule, and the remedy; `None` if the bounds are valid.
    pub fn bounds_error(self, bounds: &[f64]) -> Option<String> {
        let signed = self.statistic() == Statistic::K1;
        if !bounds.iter().all(|&bound| bound > 0.0 && bound.is_finite()) {
            return Some(format!("{bounds:?} must be positive"));
        }
        match (signed, bounds) {
            (true, &[bound]) if bound < 1.0 => Some(format!(
                "one bound u means the range from 1/u to u, which is empty for {bound}; give 1 or more, or two bounds"
            )),
            (true, &[low, high]) if low > high => {
                Some(format!("the lower bound {low} is above the upper bound {high}; swap them"))
            }
            (true, [_] | [_, _]) | (false, [_]) => None,
            (true, _) => Some("give one bound on the ratio, or a lower and an upper bound".to_owned()),
            (false, _) => Some("the statistic is never negative; give one upper bound".to_owned()),
        }
    }
}

/// A condition that a token or a response must meet.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectionRule {
    pub option: RejectOption,
    /// Bounds of the statistic, both inclusive. For k1 they are logarithms of the ratio's bounds. For k2 and
    /// k3 they are [0, limit].
    pub low: f64,
    pub high: f64,
}

impl RejectionRule {
    /// Reads bounds. For k1 they bound ρ = π_train/π_rollout: either `[low, high]`, or `[u]`, which means
    /// `[1/u, u]`. For k2 and k3 there is one number, the upper limit of the statistic.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for bounds with a [`RejectOption::bounds_error`].
    pub fn new(option: RejectOption, bounds: &[f64]) -> Result<Self> {
        let (low, high) = match (option.bounds_error(bounds), option.statistic(), bounds) {
            (None, Statistic::K1, &[bound]) => (-bound.ln(), bound.ln()),
            (None, Statistic::K1, &[low, high]) => (-high.ln(), -low.ln()),
            (None, Statistic::K2 | Statistic::K3, &[max]) => (0.0, max),
            (wrong, ..) => return Err(bad_input!("the bounds of {option}: {}", wrong.unwrap_or_default())),
        };
        Ok(Self { option, low, high })
    }

    pub(super) fn accepts(&self, statistic: f64) -> bool {
        self.low <= statistic && statistic <= self.high
    }
}
