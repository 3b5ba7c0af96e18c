//! Rounding bounds: the log-prob mismatch that rounding alone makes in this model.
//!
//! The model runs three times: with mantissas slightly shorter than in f32, in bf16, and in bf16 with coarser
//! activations. Each run is compared with the model in f32.
//!
//! If two experts have nearly equal scores, bf16 may choose the other expert, which changes the token's
//! log-prob a lot. Such tokens make the bf16 bound large. Tokens with stable routing, where bf16 cannot
//! change the experts, therefore have a separate bound, which is much smaller.

use super::causes::Cause;
use super::distance::DifferenceStats;
use super::search::{CauseSearch, LogProbTrace, elementwise_differences};
use anyhow::Result;

/// Maximum multiples of the f32 bound at which a mismatch still counts as f32 rounding. The first multiple is
/// for median, p90 and mean; the second is for p99 and above.
const F32_FACTORS: (f64, f64) = (4.0, 8.0);
/// The multiples for bf16 rounding.
const BF16_FACTORS: (f64, f64) = (2.5, 8.0);
/// The multiples for bf16 rounding of targets with stable routing. For such targets even the largest
/// differences are noise.
const STABLE_ROUTING_FACTORS: (f64, f64) = (2.5, 4.0);
/// Differences below this value, in nats, always count as f32 rounding.
pub const F32_FLOOR: f64 = 2e-5;
/// Rounding to this number of mantissa bits simulates another order of summation in f32.
const F32_BITS: u32 = 21;
/// Number of mantissa bits of bf16.
const BF16_BITS: u32 = 7;
/// Number of mantissa bits of coarse activations. Other engines round at more points than this model: the
/// noise of Hugging Face transformers is about twice that of 7 bits.
const COARSE_BITS: u32 = 6;
/// Routing of a token is stable if the lowest score among its chosen experts is far above the highest score
/// among the other experts. The difference must be more than this multiple of the median change that bf16
/// makes to a score.
const ROUTING_MARGIN_MIN: f32 = 12.0;

/// The mismatch that rounding makes: a model with rounding is compared with the same model without rounding.
/// The model is the unchanged one, or the unchanged one with a cause applied.
pub struct RoundingBounds {
    pub f32: DifferenceStats,
    pub bf16: DifferenceStats,
    /// The bf16 bound of targets with stable routing.
    bf16_stable_routing: DifferenceStats,
    /// Whether each target has stable routing: bf16 cannot change its experts.
    stable_routing: Vec<bool>,
    /// Log-probs in bf16, with fine and with coarse activations.
    pub bf16_log_probs: [Vec<f32>; 2],
}

impl RoundingBounds {
    /// Computes the bounds of the model under `cause`. `exact` holds the model's log-probs without rounding.
    ///
    /// # Errors
    /// When a forward pass fails.
    pub fn compute(search: &CauseSearch, cause: Option<&Cause>, exact: &[f32]) -> Result<Self> {
        let f32 = search.trace_with_rounding(cause, (F32_BITS, F32_BITS))?;
        let bf16 = search.trace_with_rounding(cause, (BF16_BITS, BF16_BITS))?;
        let coarse = search.trace_with_rounding(cause, (BF16_BITS, COARSE_BITS))?.log_probs;
        let stable_routing = stable_routing(&f32, &bf16, search.experts_per_token());
        let differences = |rounded: &[f32]| elementwise_differences(rounded, exact);
        let bf16_log_probs = [bf16.log_probs, coarse];
        let bf16_bound = |select_targets: &dyn Fn(&[f64]) -> Vec<f64>| {
            let [fine, coarse] = bf16_log_probs
                .each_ref()
                .map(|rounded| DifferenceStats::from_differences(&select_targets(&differences(rounded))));
            fine.elementwise_max(&coarse)
        };
        Ok(Self {
            f32: DifferenceStats::from_differences(&differences(&f32.log_probs)),
            bf16: bf16_bound(&<[f64]>::to_vec),
            bf16_stable_routing: bf16_bound(&|differences| select(differences, &stable_routing)),
            stable_routing,
            bf16_log_probs,
        })
    }

    /// Returns bounds that are all 0.
    pub fn zero() -> Self {
        let zero = DifferenceStats::from_differences(&[]);
        Self {
            f32: zero,
            bf16: zero,
            bf16_stable_routing: zero,
            stable_routing: vec![],
            bf16_log_probs: [vec![], vec![]],
        }
    }

    /// Raises each bound to at least the bound of `other`.
    pub fn raise_to(&mut self, other: &RoundingBounds) {
        self.f32 = self.f32.elementwise_max(&other.f32);
        self.bf16 = self.bf16.elementwise_max(&other.bf16);
        self.bf16_stable_routing = self.bf16_stable_routing.elementwise_max(&other.bf16_stable_routing);
    }

    /// Returns whether bf16 rounding explains `differences`.
    pub fn is_within_bf16(&self, differences: &[f64]) -> bool {
        DifferenceStats::from_differences(differences).is_within(&self.bf16, BF16_FACTORS, F32_FLOOR)
            && DifferenceStats::from_differences(&select(differences, &self.stable_routing)).is_within(
                &self.bf16_stable_routing,
                STABLE_ROUTING_FACTORS,
                F32_FLOOR,
            )
    }

    /// Returns whether bf16 rounding explains `stats`, if the bf16 bounds are multiplied by `factor`.
    pub fn is_near_bf16(&self, stats: &DifferenceStats, factor: f64) -> bool {
        stats.is_within(&self.bf16.scaled_by(factor), BF16_FACTORS, F32_FLOOR)
    }

    /// Returns whether the median difference is as small as f32 rounding, and bf16 rounding would be clearly
    /// larger. If so, the engine did not compute in bf16, although single tokens may differ more.
    pub fn is_f32_rounding(&self, stats: &DifferenceStats) -> bool {
        let bound_max = (F32_FACTORS.0 * self.f32.median).max(F32_FLOOR);
        stats.median <= bound_max && self.bf16.median > 4.0 * bound_max
    }
}

/// Returns whether f32 rounding explains `stats`. `bound` is the f32 bound.
pub fn is_within_f32(stats: &DifferenceStats, bound: &DifferenceStats) -> bool {
    stats.is_within(bound, F32_FACTORS, F32_FLOOR)
}

fn select(differences: &[f64], keep: &[bool]) -> Vec<f64> {
    differences.iter().zip(keep).filter(|(_, keep)| **keep).map(|(difference, _)| *difference).collect()
}

/// Returns whether each target has stable routing. `top_k` is the number of experts per token.
fn stable_routing(exact: &LogProbTrace, bf16: &LogProbTrace, top_k: usize) -> Vec<bool> {
    let mut stable_routing = vec![true; exact.log_probs.len()];
    for (exact, bf16) in exact.scores.iter().zip(&bf16.scores) {
        let mut changes: Vec<f32> =
            exact.iter().flatten().zip(bf16.iter().flatten()).map(|(e, b)| (e - b).abs()).collect();
        let middle = changes.len() / 2;
        if top_k == 0 || changes.is_empty() || exact[0].len() <= top_k {
            continue;
        }
        let median_change = *changes.select_nth_unstable_by(middle, f32::total_cmp).1;
        for (is_stable, scores) in stable_routing.iter_mut().zip(exact) {
            let mut scores = scores.clone();
            scores.sort_unstable_by(|a, b| b.total_cmp(a));
            *is_stable &= scores[top_k - 1] - scores[top_k] > ROUTING_MARGIN_MIN * median_change;
        }
    }
    stable_routing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_tie_has_no_stable_routing() {
        let trace = |scores: Vec<Vec<f32>>| LogProbTrace { log_probs: vec![-1.0; 3], scores: vec![scores] };
        let exact = trace(vec![vec![3.0, 2.0, 0.0], vec![2.0, 0.0, 1.99], vec![0.0, 4.0, 2.0]]);
        let bf16 = trace(vec![vec![3.01, 2.01, 0.01], vec![2.01, 0.01, 2.0], vec![0.01, 4.01, 2.01]]);
        assert_eq!(stable_routing(&exact, &bf16, 1), [true, false, true]);
        assert_eq!(stable_routing(&exact, &bf16, 3), [true; 3], "all experts are chosen");
    }

    #[test]
    fn a_wrong_token_is_found_among_changes_of_routing() {
        // Every tenth token may change experts, which makes a large difference. The other tokens differ by
        // noise.
        let noise = |i: usize| 0.01 * (i as f64 * 0.7).sin();
        let stable_routing: Vec<bool> = (0..400).map(|i| i % 10 > 0).collect();
        let bf16: Vec<f64> = (0..400).map(|i| if i % 40 == 0 { 3.0 } else { noise(i) }).collect();
        let bound = RoundingBounds {
            bf16: DifferenceStats::from_differences(&bf16),
            bf16_stable_routing: DifferenceStats::from_differences(&select(&bf16, &stable_routing)),
            stable_routing,
            ..RoundingBounds::zero()
        };
        let mut differences: Vec<f64> =
            (0..400).map(|i| if i % 40 == 20 { 3.5 } else { noise(i + 1) }).collect();
        assert!(bound.is_within_bf16(&differences), "other tokens with a change of routing, same size");
        differences[33] = 1.0;
        assert!(!bound.is_within_bf16(&differences), "a token with stable routing");
    }
}
