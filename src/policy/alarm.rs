//! Alarm limits of metrics.

/// A metric and its healthy range. A value outside the range means that something is wrong, although training
/// may continue to work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alarm {
    pub metric: &'static str,
    pub low: f64,
    pub high: f64,
    pub meaning: &'static str,
}

impl Alarm {
    /// Returns whether `value` is outside the healthy range. NaN counts as outside.
    pub fn triggers_at(&self, value: f64) -> bool {
        !(self.low..=self.high).contains(&value)
    }
}

/// The alarms that the console and the report show beside the metrics.
pub const ALARMS: [Alarm; 5] = {
    const fn alarm(metric: &'static str, [low, high]: [f64; 2], meaning: &'static str) -> Alarm {
        Alarm { metric, low, high, meaning }
    }
    const DRIFT: &str = "training and rollout policies have drifted apart";
    const MEAN: &str = "importance weights are far from 1 on average";
    const SAMPLE_SIZE: &str = "a few tokens carry most of the weight";
    const DIFFERENCE: &str =
        "token probabilities of training and rollout differ; usual values are below 0.005";
    const VARIANCE: &str = "the variance of the importance ratio is too large";
    [
        alarm("rollout_corr/kl", [-0.1, 0.1], DRIFT),
        alarm("rollout_corr/rollout_is_mean", [0.5, 2.0], MEAN),
        alarm("rollout_corr/rollout_is_eff_sample_size", [0.3, f64::INFINITY], SAMPLE_SIZE),
        alarm("training/rollout_probs_diff_mean", [0.0, 0.01], DIFFERENCE),
        alarm("rollout_corr/chi2_token", [f64::NEG_INFINITY, 1.0], VARIANCE),
    ]
};

/// Returns the alarm that `value` of `metric` triggers; `None` if the value is healthy.
pub fn alarm(metric: &str, value: f64) -> Option<&'static Alarm> {
    ALARMS.iter().find(|alarm| alarm.metric == metric && alarm.triggers_at(value))
}
