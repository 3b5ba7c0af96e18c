//! Success over several samples per problem: mean@k, pass@k, majority@k, and their confidence intervals.

use crate::tasks::Task;

/// The result of one sample of a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleResult {
    /// Whether the task graded the sample as right.
    pub success: bool,
    /// The answer, for the vote; `None` if the sample has no answer.
    pub answer: Option<String>,
}

/// Returns the fraction of successes.
pub fn mean(samples: &[SampleResult]) -> f64 {
    successes(samples) as f64 / samples.len().max(1) as f64
}

/// Returns the probability that at least one of `k` samples is right, if they are drawn without replacement
/// from the `n` samples. With `c` successes it is `1 − C(n−c, k) / C(n, k)`, the unbiased estimate of Chen et
/// al. 2021 (arXiv:2107.03374). `k` is at most `n`.
pub fn pass_at(k: usize, samples: &[SampleResult]) -> f64 {
    let (n, c) = (samples.len(), successes(samples));
    if c > n.saturating_sub(k) {
        return if k == 0 { 0.0 } else { 1.0 };
    }
    // C(n−c, k) / C(n, k) = Π (1 − k / i) over i in n−c+1..=n. This form has no factorial, which could
    // overflow.
    1.0 - (n - c + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>()
}

/// An answer and its number of votes. [`Task::same_answer`] decides which answers are equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vote {
    pub answer: String,
    pub votes: usize,
    /// Number of the votes that count as right: all if one of them is and [`Task::answer_decides`].
    pub successes: usize,
}

/// Counts the votes of each answer. The answer with the most votes comes first. Of two answers with the same
/// number of votes, the earlier one comes first. Samples without an answer do not vote.
pub fn count_votes(task: &dyn Task, samples: &[SampleResult]) -> Vec<Vote> {
    let mut votes: Vec<Vote> = vec![];
    for sample in samples {
        let Some(answer) = &sample.answer else { continue };
        match votes.iter_mut().find(|vote| task.same_answer(&vote.answer, answer)) {
            Some(vote) => {
                vote.votes += 1;
                vote.successes += usize::from(sample.success);
            }
            None => {
                votes.push(Vote { answer: answer.clone(), votes: 1, successes: usize::from(sample.success) });
            }
        }
    }
    for vote in votes.iter_mut().filter(|vote| vote.successes > 0 && task.answer_decides()) {
        vote.successes = vote.votes;
    }
    votes.sort_by_key(|vote| std::cmp::Reverse(vote.votes));
    votes
}

/// Returns 1 if the answer with the most votes is right, else 0. For a tie, returns the mean over the tied
/// answers, as if one of them were chosen at random. Returns 0 if there is no answer. An agent's answer
/// counts by the fraction that was right.
pub fn majority(votes: &[Vote]) -> f64 {
    let votes_max = votes.first().map_or(0, |vote| vote.votes);
    let first = votes.iter().take_while(|vote| vote.votes == votes_max);
    let right: f64 = first.clone().map(|vote| vote.successes as f64 / vote.votes as f64).sum();
    right / first.count().max(1) as f64
}

/// A mean over problems, with its 95% confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Estimate {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

impl Estimate {
    /// Returns the mean of the problems' values in `0..=1`, and the interval of ±1.96 standard errors,
    /// limited to `0..=1`. Each problem counts as one observation, because samples of one problem depend on
    /// each other.
    ///
    /// If all values are equal, for example 0 for each of a few problems, the standard error is 0. That is
    /// not a useful estimate. The interval is then that of Wilson (1927), with one yes-or-no outcome per
    /// problem.
    pub fn from_problems(values: &[f64]) -> Self {
        let n = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / n;
        let (centre, half) = if values.windows(2).all(|pair| pair[0] == pair[1]) {
            let z2 = Z95 * Z95 / n;
            let half = Z95 * (mean * (1.0 - mean) / n + z2 / n / 4.0).sqrt();
            ((mean + z2 / 2.0) / (1.0 + z2), half / (1.0 + z2))
        } else {
            let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
            (mean, Z95 * (variance / n).sqrt())
        };
        // Rounding must not put the mean outside its interval.
        Self { mean, low: (centre - half).clamp(0.0, mean), high: (centre + half).clamp(mean, 1.0) }
    }
}

/// Half the width of the interval that holds 95% of a normal distribution, in standard errors.
const Z95: f64 = 1.96;

fn successes(samples: &[SampleResult]) -> usize {
    samples.iter().filter(|sample| sample.success).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Choice;
    use crate::tasks::{self, TaskContext, TaskName, TaskSettings};

    fn samples(right: &[bool]) -> Vec<SampleResult> {
        right.iter().map(|&success| SampleResult { success, answer: None }).collect()
    }

    /// Returns the fraction of all k-subsets that contain a success.
    fn pass_by_counting(k: usize, right: &[bool]) -> f64 {
        let subsets = (0u32..1 << right.len()).filter(|set| set.count_ones() as usize == k);
        let holds = |set: &u32| right.iter().enumerate().any(|(i, &right)| right && set >> i & 1 == 1);
        subsets.clone().filter(holds).count() as f64 / subsets.count() as f64
    }

    #[test]
    fn pass_at_k_is_the_share_of_all_subsets_that_hold_a_success() {
        for n in 1..=9 {
            for c in 0..=n {
                // It does not matter which samples are right, so they are spread.
                let right: Vec<bool> = (0..n).map(|i| (i * 5 + 2) % n < c).collect();
                let right = if right.iter().filter(|&&r| r).count() == c {
                    right
                } else {
                    (0..n).map(|i| i < c).collect()
                };
                for k in 1..=n {
                    let (found, expected) = (pass_at(k, &samples(&right)), pass_by_counting(k, &right));
                    assert!((found - expected).abs() < 1e-12, "n {n} c {c} k {k}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn pass_at_one_is_the_mean_and_large_numbers_do_not_overflow() {
        let mut many = vec![false; 100_000];
        many[..3].fill(true);
        let many = samples(&many);
        assert!((pass_at(1, &many) - mean(&many)).abs() < 1e-12);
        // Half of all draws miss each of the three successes.
        assert!((pass_at(50_000, &many) - 0.875).abs() < 1e-5);
        assert_eq!(pass_at(99_998, &many), 1.0);
    }

    #[test]
    fn the_majority_is_of_equal_answers_and_a_tie_counts_by_shares() {
        let task = |name: &str| {
            let settings =
                TaskSettings { name: TaskName::from_name(name).unwrap(), ..TaskSettings::default() };
            tasks::build(&settings, &TaskContext::default()).expect("a task without files")
        };
        let votes = |task: Box<dyn Task>, given: &[(&str, bool)]| {
            let sample = |&(answer, success): &(&str, bool)| SampleResult {
                success,
                answer: (!answer.is_empty()).then(|| answer.to_owned()),
            };
            majority(&count_votes(task.as_ref(), &given.iter().map(sample).collect::<Vec<_>>()))
        };
        let vote = |given: &[(&str, bool)]| votes(task("arithmetic"), given);
        assert_eq!(vote(&[("7", true), ("8", false), ("7", true)]), 1.0);
        assert_eq!(vote(&[("7", true), ("8", false), ("8", false)]), 0.0);
        assert_eq!(vote(&[("7", true), ("8", false)]), 0.5);
        assert_eq!(vote(&[("9", false), ("7", true), ("8", false)]), 1.0 / 3.0);
        assert_eq!(vote(&[("", false), ("", false), ("7", true)]), 1.0);
        assert_eq!(vote(&[("", false)]), 0.0);
        // One right sample made an agent's answer "Done." right, whatever became of the others.
        let done = [("Done.", false), ("Done.", true), ("Done.", false), ("Done.", false)];
        assert_eq!((votes(task("agent"), &done), vote(&done)), (0.25, 1.0));
    }

    #[test]
    fn the_interval_is_over_problems() {
        let estimate = Estimate::from_problems(&[0.0, 0.5, 1.0, 0.5]);
        let half = 1.96 * (0.5f64 / 3.0 / 4.0).sqrt();
        assert_eq!(estimate.mean, 0.5);
        assert!((estimate.low - (0.5 - half)).abs() < 1e-12 && (estimate.high - (0.5 + half)).abs() < 1e-12);
        assert_eq!(Estimate::from_problems(&[0.9, 1.0, 1.0]).high, 1.0);
    }

    #[test]
    fn equal_problems_are_no_certainty() {
        // For 0 of n, Wilson's interval is [0, z² / (n + z²)].
        let none = Estimate::from_problems(&[0.0; 24]);
        assert_eq!((none.mean, none.low), (0.0, 0.0));
        assert!((none.high - 3.8416 / 27.8416).abs() < 1e-12);
        let all = Estimate::from_problems(&[1.0; 24]);
        assert_eq!((all.mean, all.high), (1.0, 1.0));
        assert!((all.low - 24.0 / 27.8416).abs() < 1e-12);
        let halves = Estimate::from_problems(&[0.5; 4]);
        assert!((halves.low + halves.high - 1.0).abs() < 1e-12 && halves.low > 0.1 && halves.low < 0.2);
    }
}
