//! Estimates how many tokens a rollout still samples.

use std::time::{Duration, Instant};

/// Minimum time between two estimates.
const INTERVAL: Duration = Duration::from_millis(500);

/// The time of the last estimate.
#[derive(Default)]
pub(super) struct LastEstimate(Option<Instant>);

impl LastEstimate {
    /// Returns whether an estimate is due at `now`. If so, it is the last one from now on.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

/// Estimates the number of tokens still to sample, from the lengths of `finished` and `unfinished`
/// trajectories and the number of those `waiting` for their first token. A trajectory has at most
/// `length_max` tokens. `None` before one has finished.
///
/// Short trajectories finish first. So an estimate from the mean length is too small near the end. One from
/// the survival of the lengths (Kaplan and Meier) is too large at the beginning, where few have finished. The
/// result goes from the first to the second with the finished fraction.
pub(super) fn tokens_left(
    finished: &[usize],
    unfinished: &[usize],
    waiting: usize,
    length_max: usize,
) -> Option<f64> {
    if finished.is_empty() {
        return None;
    }
    let fraction = finished.len() as f64 / (finished.len() + unfinished.len() + waiting) as f64;
    let by_mean = left_by_mean(finished, unfinished, waiting);
    let by_survival = left_by_survival(finished, unfinished, waiting, length_max);
    Some((1.0 - fraction) * by_mean + fraction * by_survival)
}

/// The mean length is over all trajectories that have begun. An unfinished one counts as half a trajectory.
fn left_by_mean(finished: &[usize], unfinished: &[usize], waiting: usize) -> f64 {
    let sum = |lengths: &[usize]| lengths.iter().sum::<usize>() as f64;
    let (done, open) = (sum(finished), sum(unfinished));
    let length = (done + open) / (finished.len() as f64 + unfinished.len() as f64 / 2.0);
    let expected = (unfinished.len() + waiting) as f64 * length;
    (expected - open).max(expected / 4.0)
}

/// Each unfinished trajectory has the mean residual life at its length, a waiting one the mean length. Beyond
/// the longest length so far, trajectories finish at the rate of those beyond the median.
fn left_by_survival(finished: &[usize], unfinished: &[usize], waiting: usize, length_max: usize) -> f64 {
    let mut sorted = finished.to_vec();
    sorted.sort_unstable();
    let median = sorted[sorted.len() / 2];
    let late = sorted.iter().filter(|&&length| length >= median).count() as f64;
    let after_median: usize =
        finished.iter().chain(unfinished).map(|length| length.saturating_sub(median)).sum();
    let longest = finished.iter().chain(unfinished).copied().max().unwrap_or(0);
    // How many of each length finished, and how many are open at it.
    let (mut ends, mut open) = (vec![0usize; longest + 1], vec![0usize; longest + 1]);
    finished.iter().for_each(|&length| ends[length] += 1);
    unfinished.iter().for_each(|&length| open[length] += 1);
    let mut at_risk = finished.len() + unfinished.len();
    let mut survival = Vec::with_capacity(longest + 1);
    let mut now = 1.0;
    for (&ends, &open) in ends.iter().zip(&open) {
        if at_risk > 0 {
            now *= 1.0 - ends as f64 / at_risk as f64;
        }
        at_risk -= ends + open;
        survival.push(now);
    }
    // beyond[l]: the expected number of tokens after the first l, times the survival at l.
    let mut beyond = vec![0.0; longest + 2];
    let room = length_max.saturating_sub(longest).max(1) as f64;
    beyond[longest + 1] = survival[longest] * ((after_median as f64 + 1.0) / (late + 0.5)).min(room);
    for length in (0..=longest).rev() {
        beyond[length] = beyond[length + 1] + survival[length];
    }
    let residual =
        |length: usize| if survival[length] > 0.0 { beyond[length + 1] / survival[length] } else { 1.0 };
    unfinished.iter().map(|&length| residual(length)).sum::<f64>() + waiting as f64 * beyond[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of the answers of a model of 1.5B to 100 problems of GSM8K, with programs.
    const LENGTHS: [usize; 100] = [
        273, 135, 512, 179, 512, 252, 266, 276, 203, 318, 144, 512, 512, 378, 358, 465, 116, 454, 239, 512,
        346, 188, 236, 186, 232, 300, 274, 227, 512, 335, 333, 218, 220, 277, 287, 248, 194, 336, 448, 512,
        161, 322, 198, 392, 265, 286, 512, 414, 206, 325, 96, 171, 244, 458, 105, 120, 196, 441, 324, 169,
        187, 264, 512, 221, 512, 362, 289, 249, 140, 211, 322, 191, 260, 325, 341, 204, 504, 229, 445, 184,
        290, 285, 84, 265, 331, 305, 106, 348, 245, 289, 384, 210, 355, 289, 115, 361, 4, 276, 378, 255,
    ];

    /// Regression test: the time left of a rollout was half of the true one from its middle on.
    #[test]
    fn tokens_left_are_near_the_truth_from_the_first_tenth_to_the_last() {
        for (slots, range) in [(16, 0.9..1.3), (50, 0.8..1.7)] {
            let (mut waiting, mut running, mut finished) =
                (LENGTHS.len(), Vec::<(usize, usize)>::new(), vec![]);
            while finished.len() < LENGTHS.len() * 9 / 10 {
                while running.len() < slots && waiting > 0 {
                    running.push((0, LENGTHS[LENGTHS.len() - waiting]));
                    waiting -= 1;
                }
                running.iter_mut().for_each(|(length, _)| *length += 1);
                finished.extend(running.extract_if(.., |(length, end)| length == end).map(|(_, end)| end));
                if finished.len() >= LENGTHS.len() / 10 {
                    let open: Vec<usize> = running.iter().map(|(length, _)| *length).collect();
                    let truth = running.iter().map(|(length, end)| end - length).sum::<usize>()
                        + LENGTHS[LENGTHS.len() - waiting..].iter().sum::<usize>();
                    let ratio = tokens_left(&finished, &open, waiting, 600).unwrap() / truth as f64;
                    let place = format!("{slots} slots, {} finished: {ratio}", finished.len());
                    assert!(range.contains(&ratio), "{place}");
                }
            }
        }
    }

    /// Each question moved the time of the last estimate, so a rollout that asked at every token kept its
    /// first estimate: 19 s left, from two thirds of it to its end.
    #[test]
    fn an_estimate_is_due_again_however_often_it_is_asked_for() {
        let (mut last, start) = (LastEstimate::default(), Instant::now());
        let due = (0..100).filter(|i| last.is_due(start + INTERVAL / 10 * *i));
        assert_eq!(due.collect::<Vec<_>>(), [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
    }

    #[test]
    fn nothing_is_known_before_a_trajectory_has_finished() {
        assert_eq!(tokens_left(&[], &[9, 9], 3, 10), None);
        assert_eq!(tokens_left(&[5], &[], 0, 10), Some(0.0));
        assert!(tokens_left(&[0, 3], &[0], 1, 10).unwrap() > 0.0, "lengths of 0 divide nothing");
        assert!(tokens_left(&[10, 10], &[10], 1, 10).unwrap() > 0.0);
    }
}
