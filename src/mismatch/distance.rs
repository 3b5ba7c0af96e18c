//! The distance between two lists of log-probabilities. [`DifferenceStats`] shows whether a few tokens
//! differ. [`StudentTFit`] ranks causes.

/// Maximum difference, in nats. The difference between −∞ and a number is set to this value.
const DIFFERENCE_MAX: f64 = 50.0;
/// Log-probs below this value mean −∞. JSON has no −∞, so engines write −9999 or a similar value.
const INFINITE_BELOW: f32 = -1000.0;
/// Minimum scale of a fit: the resolution of f32.
const SCALE_MIN: f64 = 2e-7;

/// Returns the differences `engine − model`, in nats; 0 where `has_value` is false.
pub fn log_prob_differences(engine: &[f32], model: &[f32], has_value: &[bool]) -> Vec<f64> {
    let difference = |(&t, &o): (&f32, &f32)| match (t < INFINITE_BELOW, o < INFINITE_BELOW) {
        (true, true) => 0.0,
        (false, false) if t.is_finite() && o.is_finite() => {
            (f64::from(t) - f64::from(o)).clamp(-DIFFERENCE_MAX, DIFFERENCE_MAX)
        }
        (true, _) => -DIFFERENCE_MAX,
        _ => DIFFERENCE_MAX,
    };
    let pairs = engine.iter().zip(model).zip(has_value);
    pairs.map(|(pair, has_value)| if *has_value { difference(pair) } else { 0.0 }).collect()
}

/// Statistics of |Δlogp|. A single statistic that is too large shows a difference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DifferenceStats {
    pub median: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    pub mean: f64,
    /// Effective sample size of the weights e^Δ, divided by the number of weights.
    pub effective_sample_share: f64,
}

impl DifferenceStats {
    pub fn from_differences(differences: &[f64]) -> Self {
        let mut sorted: Vec<f64> = differences.iter().map(|difference| difference.abs()).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let count = sorted.len();
        // The smallest value `v` such that at least this fraction of the values is ≤ `v`.
        let quantile = |share: f64| match ((share * count as f64).ceil() as usize).clamp(1, count.max(1)) {
            _ if count == 0 => 0.0,
            rank => sorted[rank - 1],
        };
        let weights = differences.iter().map(|difference| difference.exp());
        let (sum, squares) = weights.fold((0.0, 0.0), |(sum, squares), w| (sum + w, squares + w * w));
        Self {
            median: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: quantile(1.0),
            mean: sorted.iter().sum::<f64>() / count.max(1) as f64,
            effective_sample_share: if squares > 0.0 { sum * sum / squares / count as f64 } else { 1.0 },
        }
    }

    /// Returns the statistics with their names in `mismatch.json`.
    pub fn with_names(&self) -> [(&'static str, f64); 7] {
        [
            ("median", self.median),
            ("p90", self.p90),
            ("p99", self.p99),
            ("p99.9", self.p999),
            ("max", self.max),
            ("mean", self.mean),
            ("effective_sample_share", self.effective_sample_share),
        ]
    }

    /// Returns the statistics for differences that are `factor` times as large. One minus the effective
    /// sample share grows by `factor²`.
    pub fn scaled_by(&self, factor: f64) -> Self {
        Self {
            median: factor * self.median,
            p90: factor * self.p90,
            p99: factor * self.p99,
            p999: factor * self.p999,
            max: factor * self.max,
            mean: factor * self.mean,
            effective_sample_share: 1.0 - factor * factor * (1.0 - self.effective_sample_share),
        }
    }

    /// Returns the larger value of each statistic; for the effective sample share, the smaller value.
    pub fn elementwise_max(&self, other: &DifferenceStats) -> Self {
        Self {
            median: self.median.max(other.median),
            p90: self.p90.max(other.p90),
            p99: self.p99.max(other.p99),
            p999: self.p999.max(other.p999),
            max: self.max.max(other.max),
            mean: self.mean.max(other.mean),
            effective_sample_share: self.effective_sample_share.min(other.effective_sample_share),
        }
    }

    /// Returns whether every statistic is at most `max(floor, factor × bound)`. The factor is `body` for
    /// median, p90 and mean, and `tail` for the other statistics.
    pub fn is_within(&self, bound: &DifferenceStats, (body, tail): (f64, f64), floor: f64) -> bool {
        let at_most = |figure: f64, bound: f64, factor: f64| figure <= (factor * bound).max(floor);
        at_most(self.median, bound.median, body)
            && at_most(self.p90, bound.p90, body)
            && at_most(self.mean, bound.mean, body)
            // With few tokens, p99 may be a single token that is routed to other experts. So p99 may also
            // reach the bound's p99.9.
            && at_most(self.p99, bound.p99.max(bound.p999 / tail), tail)
            && at_most(self.p999, bound.p999, tail)
            && at_most(self.max, bound.max, tail)
            && at_most(1.0 - self.effective_sample_share, 1.0 - bound.effective_sample_share, tail * tail)
    }
}

/// Student's t distribution with 3 degrees of freedom and location 0, fitted to differences. A few outliers,
/// such as tokens that are routed to other experts, hardly change its scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StudentTFit {
    pub scale: f64,
    pub log_likelihood: f64,
}

impl StudentTFit {
    pub fn from_differences(differences: &[f64]) -> Self {
        let count = differences.len().max(1) as f64;
        let mut sorted: Vec<f64> = differences.iter().map(|difference| difference.abs()).collect();
        let middle = sorted.len() / 2;
        let start =
            if sorted.is_empty() { 0.0 } else { *sorted.select_nth_unstable_by(middle, f64::total_cmp).1 };
        let mut scale = start.max(SCALE_MIN);
        for _ in 0..30 {
            // EM: the expectation step gives outliers a smaller weight; the maximisation step computes the
            // weighted variance.
            let weighted: f64 = differences
                .iter()
                .map(|difference| difference * difference * weight(*difference, scale))
                .sum();
            scale = (weighted / count).sqrt().max(SCALE_MIN);
        }
        let log_density =
            |difference: &f64| -scale.ln() - 2.0 * (difference / scale).powi(2).mul_add(1.0 / 3.0, 1.0).ln();
        Self { scale, log_likelihood: differences.iter().map(log_density).sum() }
    }
}

fn weight(difference: f64, scale: f64) -> f64 {
    4.0 / (3.0 + (difference / scale).powi(2))
}

/// Regresses `before`, the differences without the cause, on `before − after`, the change that the cause
/// makes. Outliers have a smaller weight. Returns the slope and its standard error. The slope is 1 for the
/// correct cause, and 0 for a cause whose change is unrelated to the differences.
pub fn regression_slope(before: &[f64], after: &[f64]) -> (f64, f64) {
    let scale = StudentTFit::from_differences(after).scale;
    let (mut xy, mut xx) = (0.0, 0.0);
    for (b, a) in before.iter().zip(after) {
        let (step, w) = (b - a, weight(*a, scale));
        xy += w * step * b;
        xx += w * step * step;
    }
    if xx == 0.0 { (0.0, f64::INFINITY) } else { (xy / xx, scale / xx.sqrt()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_figure_alone_can_veto() {
        let rounding: Vec<f64> = (0..1000).map(|i| f64::from(i % 10) * 1e-3).collect();
        let bound = DifferenceStats::from_differences(&rounding);
        let within = |differences: &[f64]| {
            DifferenceStats::from_differences(differences).is_within(&bound, (2.0, 3.0), 0.0)
        };
        assert!(within(&rounding));
        for share in [1, 10, 200, 450] {
            let mut broken = rounding.clone();
            broken.iter_mut().step_by(1000 / share).take(share).for_each(|difference| *difference = 5.0);
            assert!(!within(&broken), "{share} of 1000");
        }
    }

    #[test]
    fn all_spellings_of_minus_infinity_are_equal() {
        let differences = log_prob_differences(
            &[-9999.0, -1.0, -1e30],
            &[f32::NEG_INFINITY, f32::NEG_INFINITY, -2.0],
            &[true; 3],
        );
        assert_eq!(differences, [0.0, 50.0, -50.0]);
        assert_eq!(log_prob_differences(&[-1.0], &[-3.0], &[false]), [0.0]);
    }

    #[test]
    fn a_correct_step_has_slope_one() {
        let noise: Vec<f64> = (0..500).map(|i| (f64::from(i) * 0.7).sin() * 0.01).collect();
        let step = |i: usize| (i as f64 * 1.3).cos() * 0.1;
        let before: Vec<f64> = noise.iter().enumerate().map(|(i, n)| n + step(i)).collect();
        let (slope, error) = regression_slope(&before, &noise);
        assert!((slope - 1.0).abs() < 4.0 * error && error < 0.02, "{slope} ± {error}");
        assert!(
            StudentTFit::from_differences(&noise).log_likelihood
                > StudentTFit::from_differences(&before).log_likelihood
        );
    }
}
