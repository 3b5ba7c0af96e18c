//! Yardsticks: the log-prob mismatch that rounding alone makes of this model.
//!
//! The model is computed with mantissas a little shorter than f32's, in bf16, and in bf16 with coarser
//! activations, and compared with itself. In bf16 a near tie between two experts falls either way, and its
//! token moves far: how far says nothing about a mistake. So targets whose experts no rounding changes are
//! held to their own, much smaller, yardstick.

use super::causes::Cause;
use super::distance::GapFigures;
use super::search::{Search, Traced, gaps_between};
use anyhow::Result;

/// Multiples of the yardstick that count as rounding: of the body's figures and of the tail's.
const F32_FACTORS: (f64, f64) = (4.0, 8.0);
const BF16_FACTORS: (f64, f64) = (2.5, 8.0);
/// The same multiples for targets whose experts no rounding changes: their tail is that of noise.
const DECIDED_FACTORS: (f64, f64) = (2.5, 4.0);
/// Never told from rounding of f32, nats.
pub const F32_FLOOR: f64 = 2e-5;
/// Mantissa bits that stand for f32's other orders of addition, and those of bf16.
const F32_BITS: u32 = 21;
const BF16_BITS: u32 = 7;
/// Mantissa bits of coarse activations: engines round at more places than this model does, which makes
/// transformers' noise about twice that of 7.
const COARSE_BITS: u32 = 6;
/// No rounding changes the choice of experts when the last one chosen leads the next by so many times what
/// bf16 moves a score (median).
const LEAD_MIN: f32 = 12.0;

/// This model, as it is or under a cause, rounded, against itself.
pub struct Yardsticks {
    pub f32: GapFigures,
    pub bf16: GapFigures,
    /// Figures of the targets that are `decided`.
    bf16_decided: GapFigures,
    /// Whether each target's experts stay the same in bf16.
    decided: Vec<bool>,
    /// Log-probs in bf16, finely and coarsely rounded.
    pub in_bf16: [Vec<f32>; 2],
}

impl Yardsticks {
    /// Yardsticks of the model under `cause`, whose log-probs are `exact`.
    ///
    /// # Errors
    /// When a forward fails.
    pub fn of(search: &Search, cause: Option<&Cause>, exact: &[f32]) -> Result<Self> {
        let f32 = search.rounded(cause, (F32_BITS, F32_BITS))?;
        let bf16 = search.rounded(cause, (BF16_BITS, BF16_BITS))?;
        let coarse = search.rounded(cause, (BF16_BITS, COARSE_BITS))?.log_probs;
        let decided = decided(&f32, &bf16, search.experts_chosen());
        let gaps = |other: &[f32]| gaps_between(other, exact);
        let in_bf16 = [bf16.log_probs, coarse];
        let of = |keep: &dyn Fn(&[f64]) -> Vec<f64>| {
            let [fine, coarse] = in_bf16.each_ref().map(|other| GapFigures::of(&keep(&gaps(other))));
            fine.larger(&coarse)
        };
        Ok(Self {
            f32: GapFigures::of(&gaps(&f32.log_probs)),
            bf16: of(&<[f64]>::to_vec),
            bf16_decided: of(&|gaps| kept(gaps, &decided)),
            decided,
            in_bf16,
        })
    }

    /// Yardsticks that nothing but equality is within.
    pub fn none() -> Self {
        let nothing = GapFigures::of(&[]);
        Self {
            f32: nothing,
            bf16: nothing,
            bf16_decided: nothing,
            decided: vec![],
            in_bf16: [vec![], vec![]],
        }
    }

    /// No yardstick below `other`'s.
    pub fn at_least(&mut self, other: &Yardsticks) {
        self.f32 = self.f32.larger(&other.f32);
        self.bf16 = self.bf16.larger(&other.bf16);
        self.bf16_decided = self.bf16_decided.larger(&other.bf16_decided);
    }

    /// Whether `gaps` are what bf16 leaves.
    pub fn within_bf16(&self, gaps: &[f64]) -> bool {
        GapFigures::of(gaps).within(&self.bf16, BF16_FACTORS, F32_FLOOR)
            && GapFigures::of(&kept(gaps, &self.decided)).within(
                &self.bf16_decided,
                DECIDED_FACTORS,
                F32_FLOOR,
            )
    }

    /// Whether gaps of `figures` may be `times` as large as what bf16 leaves, or less.
    pub fn near_bf16(&self, figures: &GapFigures, times: f64) -> bool {
        figures.within(&self.bf16.scaled(times), BF16_FACTORS, F32_FLOOR)
    }

    /// Whether most of `figures` are what f32 leaves where bf16 would leave more: such a file was not
    /// computed in bf16.
    pub fn is_of_f32(&self, figures: &GapFigures) -> bool {
        let most = (F32_FACTORS.0 * self.f32.median).max(F32_FLOOR);
        figures.median <= most && self.bf16.median > 4.0 * most
    }
}

/// Whether `figures` are what rounding of f32 leaves, by `yard`.
pub fn within_f32(figures: &GapFigures, yard: &GapFigures) -> bool {
    figures.within(yard, F32_FACTORS, F32_FLOOR)
}

fn kept(gaps: &[f64], keep: &[bool]) -> Vec<f64> {
    gaps.iter().zip(keep).filter(|(_, keep)| **keep).map(|(gap, _)| *gap).collect()
}

/// Returns whether each target's `chosen` experts lead the others by far more than bf16 moves a score, in
/// every layer.
fn decided(exact: &Traced, bf16: &Traced, chosen: usize) -> Vec<bool> {
    let mut decided = vec![true; exact.log_probs.len()];
    for (exact, bf16) in exact.scores.iter().zip(&bf16.scores) {
        let mut moves: Vec<f32> =
            exact.iter().flatten().zip(bf16.iter().flatten()).map(|(e, b)| (e - b).abs()).collect();
        let middle = moves.len() / 2;
        if chosen == 0 || moves.is_empty() || exact[0].len() <= chosen {
            continue;
        }
        let moved = *moves.select_nth_unstable_by(middle, f32::total_cmp).1;
        for (decided, scores) in decided.iter_mut().zip(exact) {
            let mut scores = scores.clone();
            scores.sort_unstable_by(|a, b| b.total_cmp(a));
            *decided &= scores[chosen - 1] - scores[chosen] > LEAD_MIN * moved;
        }
    }
    decided
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_tie_is_not_decided() {
        let traced = |scores: Vec<Vec<f32>>| Traced { log_probs: vec![-1.0; 3], scores: vec![scores] };
        let exact = traced(vec![vec![3.0, 2.0, 0.0], vec![2.0, 0.0, 1.99], vec![0.0, 4.0, 2.0]]);
        let bf16 = traced(vec![vec![3.01, 2.01, 0.01], vec![2.01, 0.01, 2.0], vec![0.01, 4.01, 2.01]]);
        assert_eq!(decided(&exact, &bf16, 1), [true, false, true]);
        assert_eq!(decided(&exact, &bf16, 3), [true; 3], "all experts are chosen");
    }

    #[test]
    fn a_wrong_token_shows_among_flips_of_routing() {
        // Every tenth token may flip, and then moves far; the others hardly move.
        let noise = |i: usize| 0.01 * (i as f64 * 0.7).sin();
        let decided: Vec<bool> = (0..400).map(|i| i % 10 > 0).collect();
        let bf16: Vec<f64> = (0..400).map(|i| if i % 40 == 0 { 3.0 } else { noise(i) }).collect();
        let yard = Yardsticks {
            bf16: GapFigures::of(&bf16),
            bf16_decided: GapFigures::of(&kept(&bf16, &decided)),
            decided,
            ..Yardsticks::none()
        };
        let mut gaps: Vec<f64> = (0..400).map(|i| if i % 40 == 20 { 3.5 } else { noise(i + 1) }).collect();
        assert!(yard.within_bf16(&gaps), "other flips of the same size are rounding");
        gaps[33] = 1.0;
        assert!(!yard.within_bf16(&gaps), "what no flip can move is no rounding");
    }
}
