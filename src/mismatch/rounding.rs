//! Rounding bounds: the log-prob mismatch that rounding alone makes in this model.
//!
//! The model runs with mantissas slightly shorter than f32's, in bf16, and in bf16 with coarser activations.
//! Each result is compared with the unrounded one. In bf16 a near tie between two experts can go either way
//! and change the token a lot. The size of that change says nothing about a mistake. So targets whose experts
//! are the same under all roundings have their own, much smaller bound.

use super::causes::Cause;
use super::distance::DifferenceStats;
use super::search::{CauseSearch, LogProbTrace, elementwise_differences};
use anyhow::Result;

/// A difference counts as rounding up to these multiples of the bound: for median, p90 and mean, and for p99
/// and above.
const F32_FACTORS: (f64, f64) = (4.0, 8.0);
const BF16_FACTORS: (f64, f64) = (2.5, 8.0);
/// Multiples for targets whose experts are the same under all roundings; their tail has only noise.
const DECIDED_FACTORS: (f64, f64) = (2.5, 4.0);
/// Differences below this always count as f32 rounding, in nats.
pub const F32_FLOOR: f64 = 2e-5;
/// Mantissa bits that simulate other f32 summation orders, and the mantissa bits of bf16.
const F32_BITS: u32 = 21;
const BF16_BITS: u32 = 7;
/// Mantissa bits of coarse activations. Engines round in more places than this model: the noise of
/// transformers is about twice that of 7 bits.
const COARSE_BITS: u32 = 6;
/// The choice of experts counts as decided if the last chosen score leads the next one by this multiple of
/// the median change of a score in bf16.
const LEAD_MIN: f32 = 12.0;

/// Differences between the model with and without rounding, unchanged or under a cause.
pub struct RoundingBounds {
    pub f32: DifferenceStats,
    pub bf16: DifferenceStats,
    /// Figures of the targets that are `decided`.
    bf16_decided: DifferenceStats,
    /// Whether rounding to bf16 leaves the target's experts unchanged.
    decided: Vec<bool>,
    /// Log-probs in bf16, with fine and coarse activations.
    pub in_bf16: [Vec<f32>; 2],
}

impl RoundingBounds {
    /// Computes the bounds of the model under `cause`, whose log-probs are `exact`.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn compute(search: &CauseSearch, cause: Option<&Cause>, exact: &[f32]) -> Result<Self> {
        let f32 = search.trace_with_rounding(cause, (F32_BITS, F32_BITS))?;
        let bf16 = search.trace_with_rounding(cause, (BF16_BITS, BF16_BITS))?;
        let coarse = search.trace_with_rounding(cause, (BF16_BITS, COARSE_BITS))?.log_probs;
        let decided = decided(&f32, &bf16, search.experts_per_token());
        let differences = |other: &[f32]| elementwise_differences(other, exact);
        let in_bf16 = [bf16.log_probs, coarse];
        let of = |keep: &dyn Fn(&[f64]) -> Vec<f64>| {
            let [fine, coarse] =
                in_bf16.each_ref().map(|other| DifferenceStats::from_differences(&keep(&differences(other))));
            fine.elementwise_max(&coarse)
        };
        Ok(Self {
            f32: DifferenceStats::from_differences(&differences(&f32.log_probs)),
            bf16: of(&<[f64]>::to_vec),
            bf16_decided: of(&|differences| select(differences, &decided)),
            decided,
            in_bf16,
        })
    }

    /// Returns bounds of 0.
    pub fn exact() -> Self {
        let nothing = DifferenceStats::from_differences(&[]);
        Self {
            f32: nothing,
            bf16: nothing,
            bf16_decided: nothing,
            decided: vec![],
            in_bf16: [vec![], vec![]],
        }
    }

    /// Raises each bound to at least that of `other`.
    pub fn raise_to(&mut self, other: &RoundingBounds) {
        self.f32 = self.f32.elementwise_max(&other.f32);
        self.bf16 = self.bf16.elementwise_max(&other.bf16);
        self.bf16_decided = self.bf16_decided.elementwise_max(&other.bf16_decided);
    }

    /// Returns whether bf16 rounding explains `differences`.
    pub fn is_within_bf16(&self, differences: &[f64]) -> bool {
        DifferenceStats::from_differences(differences).is_within(&self.bf16, BF16_FACTORS, F32_FLOOR)
            && DifferenceStats::from_differences(&select(differences, &self.decided)).is_within(
                &self.bf16_decided,
                DECIDED_FACTORS,
                F32_FLOOR,
            )
    }

    /// Returns whether `figures` are at most `factor` the bf16 bound.
    pub fn is_near_bf16(&self, figures: &DifferenceStats, factor: f64) -> bool {
        figures.is_within(&self.bf16.scale(factor), BF16_FACTORS, F32_FLOOR)
    }

    /// Returns whether most of `figures` are within the f32 bound where bf16 would exceed it. Such a file was
    /// not computed in bf16.
    pub fn is_f32_rounding(&self, figures: &DifferenceStats) -> bool {
        let bound_max = (F32_FACTORS.0 * self.f32.median).max(F32_FLOOR);
        figures.median <= bound_max && self.bf16.median > 4.0 * bound_max
    }
}

/// Returns whether f32 rounding explains `figures`, given its bound `bound`.
pub fn is_within_f32(figures: &DifferenceStats, bound: &DifferenceStats) -> bool {
    figures.is_within(bound, F32_FACTORS, F32_FLOOR)
}

fn select(differences: &[f64], keep: &[bool]) -> Vec<f64> {
    differences.iter().zip(keep).filter(|(_, keep)| **keep).map(|(difference, _)| *difference).collect()
}

/// Returns whether each target's `chosen` experts lead the others in every layer by far more than bf16
/// changes a score.
fn decided(exact: &LogProbTrace, bf16: &LogProbTrace, chosen: usize) -> Vec<bool> {
    let mut decided = vec![true; exact.log_probs.len()];
    for (exact, bf16) in exact.scores.iter().zip(&bf16.scores) {
        let mut changes: Vec<f32> =
            exact.iter().flatten().zip(bf16.iter().flatten()).map(|(e, b)| (e - b).abs()).collect();
        let middle = changes.len() / 2;
        if chosen == 0 || changes.is_empty() || exact[0].len() <= chosen {
            continue;
        }
        let median_change = *changes.select_nth_unstable_by(middle, f32::total_cmp).1;
        for (decided, scores) in decided.iter_mut().zip(exact) {
            let mut scores = scores.clone();
            scores.sort_unstable_by(|a, b| b.total_cmp(a));
            *decided &= scores[chosen - 1] - scores[chosen] > LEAD_MIN * median_change;
        }
    }
    decided
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_tie_is_not_decided() {
        let traced = |scores: Vec<Vec<f32>>| LogProbTrace { log_probs: vec![-1.0; 3], scores: vec![scores] };
        let exact = traced(vec![vec![3.0, 2.0, 0.0], vec![2.0, 0.0, 1.99], vec![0.0, 4.0, 2.0]]);
        let bf16 = traced(vec![vec![3.01, 2.01, 0.01], vec![2.01, 0.01, 2.0], vec![0.01, 4.01, 2.01]]);
        assert_eq!(decided(&exact, &bf16, 1), [true, false, true]);
        assert_eq!(decided(&exact, &bf16, 3), [true; 3], "all experts are chosen");
    }

    #[test]
    fn a_wrong_token_shows_among_flips_of_routing() {
        // Every tenth token may change experts and then moves far; the others hardly move.
        let noise = |i: usize| 0.01 * (i as f64 * 0.7).sin();
        let decided: Vec<bool> = (0..400).map(|i| i % 10 > 0).collect();
        let bf16: Vec<f64> = (0..400).map(|i| if i % 40 == 0 { 3.0 } else { noise(i) }).collect();
        let bound = RoundingBounds {
            bf16: DifferenceStats::from_differences(&bf16),
            bf16_decided: DifferenceStats::from_differences(&select(&bf16, &decided)),
            decided,
            ..RoundingBounds::exact()
        };
        let mut differences: Vec<f64> =
            (0..400).map(|i| if i % 40 == 20 { 3.5 } else { noise(i + 1) }).collect();
        assert!(bound.is_within_bf16(&differences), "other flips of the same size are rounding");
        differences[33] = 1.0;
        assert!(!bound.is_within_bf16(&differences), "what no flip can move is no rounding");
    }
}
