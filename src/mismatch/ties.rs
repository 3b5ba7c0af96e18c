//! Ties of routing: the scores of two experts differ only by f32 rounding, so an engine may choose either
//! expert.

use super::distance::DifferenceStats;
use std::ops::Range;

/// Mantissa bits of the forward passes that are tried. Their rounding decides ties differently.
pub const TIE_BITS: [u32; 5] = [22, 21, 20, 19, 18];
/// A rounded forward pass explains a difference if at most this fraction of the difference remains. It
/// explains a row if at most this fraction of the sum of the row's differences remains: a tie at one token
/// also changes the later tokens, which attend to it.
const UNEXPLAINED_SHARE_MAX: f64 = 0.1;
/// If a forward pass explains a row, it also explains each token whose remaining difference is at most this
/// multiple of the row's 90th percentile.
const NOISE_FACTOR_MAX: f64 = 4.0;

/// Returns a copy of `differences` with 0 for every tie, and the number of ties. A target is a tie if one of
/// the rounded `forwards` explains its difference from `engine`. Differences up to `floor` are ignored.
pub fn clear_ties(
    differences: &[f64],
    engine: &[f32],
    rows: &[Range<usize>],
    forwards: &[Vec<f32>],
    floor: f64,
) -> (Vec<f64>, usize) {
    let (mut remaining, mut ties) = (differences.to_vec(), 0);
    for row in rows {
        let row_sum: f64 = differences[row.clone()].iter().map(|difference| difference.abs()).sum();
        for forward in forwards {
            let unexplained = |target: usize| (f64::from(engine[target]) - f64::from(forward[target])).abs();
            let unexplained_of_row: Vec<f64> = row.clone().map(unexplained).collect();
            let explains_row = unexplained_of_row.iter().sum::<f64>() <= UNEXPLAINED_SHARE_MAX * row_sum;
            let noise = NOISE_FACTOR_MAX * DifferenceStats::from_differences(&unexplained_of_row).p90;
            for (target, unexplained) in row.clone().zip(unexplained_of_row) {
                let difference = remaining[target].abs();
                if difference > floor
                    && (unexplained <= UNEXPLAINED_SHARE_MAX * difference
                        || explains_row && unexplained <= noise)
                {
                    remaining[target] = 0.0;
                    ties += 1;
                }
            }
        }
    }
    (remaining, ties)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tie_explains_its_row_and_no_mistake_beside_it() {
        // Two rows of 20 tokens. In the first row, a tie changes token 5 a lot and the tokens after it a
        // little. In the second row, token 30 is wrong.
        let model = [-2f32; 40];
        let mut tied = model;
        tied[5] = -2.5;
        tied[6..20].iter_mut().for_each(|l| *l -= 1e-4);
        let mut engine = tied;
        engine[30] = -2.4;
        let noisy: Vec<f32> = tied.iter().enumerate().map(|(i, l)| l + 2e-5 * (i as f32).sin()).collect();
        let differences: Vec<f64> =
            engine.iter().zip(model).map(|(t, o)| f64::from(*t) - f64::from(o)).collect();
        let (remaining, ties) =
            clear_ties(&differences, &engine, &[0..20, 20..40], &[model.to_vec(), noisy], 2e-5);
        assert_eq!(ties, 15);
        assert!(
            remaining.iter().enumerate().all(|(i, difference)| (difference.abs() > 0.1) == (i == 30)),
            "{remaining:?}"
        );
    }
}
