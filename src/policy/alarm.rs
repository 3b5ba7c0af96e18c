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
pub const ALARMS: [Alarm; 5] = [
    Alarm {
        metric: "rollout_corr/kl",
        low: -0.1,
        high: 0.1,
        meaning: "training and rollout policies have drifted apart",
    },
    Alarm {
        metric: "rollout_corr/rollout_is_mean",
        low: 0.5,
        high: 2.0,
        meaning: "importance weights are far from 1 on average",
    },
    Alarm {
        metric: "rollout_corr/rollout_is_eff_sample_size",
        low: 0.3,
        high: f64::INFINITY,
        meaning: "a few tokens carry most of the weight",
    },
    Alarm {
        metric: "training/rollout_probs_diff_mean",
        low: 0.0,
        high: 0.01,
        meaning: "token probabilities of training and rollout differ; usual values are below 0.005",
    },
    Alarm {
        metric: "rollout_corr/chi2_token",
        low: f64::NEG_INFINITY,
        high: 1.0,
        meaning: "the variance of the importance ratio is too large",
    },
];

/// Returns the alarm that `value` of `metric` triggers; `None` if the value is healthy.
pub fn alarm(metric: &str, value: f64) -> Option<&'static Alarm> {
    ALARMS.iter().find(|alarm| alarm.metric == metric && alarm.triggers_at(value))
}
