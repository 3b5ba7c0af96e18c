//! Warnings about a step: failures, rewards without signal, a sharp fall of the success rate, alarm limits.

use super::gradient_norms::GradientNorms;
use crate::metrics::{Metrics, format_number};
use crate::policy::KlPlacement;
use crate::policy::advantage::Advantage;
use crate::policy::alarm::alarm;
use crate::recipe::Recipe;
use crate::run::causes::CAUSE_COUNT;
use crate::run::memory::KEPT_TOKENS_PLANNED;
use crate::trajectory::Outcome;
use std::collections::VecDeque;

/// Fraction of failed trajectories above which a step warns.
const FAILED_FRACTION_MAX: f64 = 0.2;
/// Number of steps over which the success rate is averaged.
const WINDOW_STEPS: usize = 5;
/// Minimum fall of the success rate, in standard errors. A smaller fall may be chance.
const FALL_ERRORS_MIN: f64 = 3.0;

/// Monitors the steps of a run.
pub(super) struct Monitor {
    /// Whether advantages compare the rewards of a group. If so, equal rewards give no gradient.
    compares_groups: bool,
    /// Number of trajectories of all steps so far.
    trajectories: f64,
    /// Number of failed trajectories of all steps so far.
    failed_trajectories: f64,
    /// Number of consecutive steps, including the last one, in which most trajectories failed.
    failing_steps: u64,
    /// Number of consecutive steps, including the last one, in which no group had a signal.
    no_signal_steps: u64,
    /// For each cause that makes samples useless for learning: the number of consecutive steps with this
    /// cause, including the last one.
    cause_steps: [u64; CAUSE_COUNT],
    /// Number of successes and of trajectories of each recent step.
    window: VecDeque<(f64, f64)>,
    /// The window with the highest success rate: success rate, number of trajectories, last step.
    best_window: Option<(f64, f64, u64)>,
    pub actor_norms: GradientNorms,
    pub critic_norms: GradientNorms,
    pub warm_up_norms: GradientNorms,
}

impl Monitor {
    pub fn new(recipe: &Recipe) -> Self {
        let has_groups = recipe.rollout.samples_per_prompt > 1;
        let compares_groups = match recipe.policy.advantage {
            // Every token has a gradient from the teacher.
            _ if recipe.policy.distill.is_some() => false,
            // Equal rewards differ after shaping.
            _ if recipe.policy.overlong.buffer_tokens > 0
                || recipe.policy.kl.place == KlPlacement::Reward =>
            {
                false
            }
            Advantage::Gae | Advantage::ReinforcePlusPlus => false,
            Advantage::Remax => true,
            _ => has_groups,
        };
        Self {
            compares_groups,
            trajectories: 0.0,
            failed_trajectories: 0.0,
            failing_steps: 0,
            no_signal_steps: 0,
            cause_steps: [0; CAUSE_COUNT],
            window: VecDeque::new(),
            best_window: None,
            actor_norms: GradientNorms::new("actor"),
            critic_norms: GradientNorms::new("critic"),
            warm_up_norms: GradientNorms::new("cold_start"),
        }
    }

    /// Records the metrics of step `step`. Returns warnings about the step.
    pub fn record(&mut self, step: u64, metrics: &Metrics) -> Vec<String> {
        let mut warnings = vec![];
        warnings.extend(self.failure_warning(step, metrics));
        let no_signal = self.no_signal_warning(metrics);
        // If trajectories failed, the failures already explain the missing signal.
        warnings.extend(no_signal.filter(|_| self.failing_steps == 0));
        warnings.extend(self.success_rate_warning(step, metrics));
        if metrics.get("rollout_corr/rollout_is_mean") == Some(0.0) {
            warnings.push(
                "every weight of the rollout correction is 0, so the policy cannot learn from this step; look at rollout_corr/kl and \
                 mismatch/, and at policy.correction.threshold"
                    .to_owned(),
            );
        }
        let kept = metrics.get("kept_tokens/mean").filter(|kept| *kept > KEPT_TOKENS_PLANNED as f64);
        warnings.extend(kept.map(|kept| {
            format!(
                "draws kept {kept:.0} tokens on average, and the memory plan counts {KEPT_TOKENS_PLANNED} each, so the run may need \
                 more memory than planned; lower rollout.top_p, or set rollout.top_k"
            )
        }));
        warnings.extend(self.actor_norms.record(metrics));
        warnings.extend(self.critic_norms.record(metrics));
        for (name, value) in metrics.iter() {
            if let Some(alarm) = alarm(name, value) {
                warnings.push(format!("{name} = {value:.4}: {}", alarm.meaning));
            }
        }
        warnings
    }

    /// Returns the number of failed trajectories, and the number of all trajectories.
    pub fn failure_counts(&self) -> (usize, usize) {
        (self.failed_trajectories as usize, self.trajectories as usize)
    }

    /// Records the `causes` that make a step's samples useless for learning. Returns the warnings that are
    /// due.
    pub fn record_causes(&mut self, causes: [Option<String>; CAUSE_COUNT]) -> Vec<String> {
        let mut due = vec![];
        for (steps, cause) in self.cause_steps.iter_mut().zip(causes) {
            *steps = if cause.is_some() { *steps + 1 } else { 0 };
            due.extend(cause.filter(|_| is_warning_due(*steps)));
        }
        due
    }

    /// Records the failed trajectories of a step. Returns a warning if more than a fifth failed and a warning
    /// is due.
    fn failure_warning(&mut self, step: u64, metrics: &Metrics) -> Option<String> {
        let get = |name: &str| metrics.get(name).unwrap_or(0.0);
        let count = trajectory_count(metrics);
        let failed = (get("trajectory/failed_fraction") * count).round();
        self.trajectories += count;
        self.failed_trajectories += failed;
        self.failing_steps = if failed > FAILED_FRACTION_MAX * count { self.failing_steps + 1 } else { 0 };
        is_warning_due(self.failing_steps).then(|| {
            format!(
                "{} of {} trajectories failed for reasons outside the policy: outcome/task_failed = {}, tool/worker_died = {}; \
                 no step trains on them unless task.on_failure is \"zero\", and a grader that fails on bad answers alone biases \
                 the groups; look at the failures above, at \"When it fails\" in docs/TASKS.md and at trajectories/step-{step:06}.jsonl",
                format_number(failed),
                format_number(count),
                format_number(get("outcome/task_failed")),
                format_number(get("tool/worker_died"))
            )
        })
    }

    /// Records whether a step has a signal. Returns a warning if there is no signal and a warning is due.
    fn no_signal_warning(&mut self, metrics: &Metrics) -> Option<String> {
        let no_signal = self.compares_groups && metrics.get("group/zero_signal_fraction") == Some(1.0);
        self.no_signal_steps = if no_signal { self.no_signal_steps + 1 } else { 0 };
        if !is_warning_due(self.no_signal_steps) {
            return None;
        }
        let span = if self.no_signal_steps == 1 {
            String::new()
        } else {
            format!(", for {} steps now", self.no_signal_steps)
        };
        let range = ["min", "max"]
            .map(|end| metrics.get(&format!("critic/rewards/{end}")).map_or("?".to_owned(), format_number));
        Some(format!(
            "no group has two different rewards{span} (between groups they go from {} to {}), so the policy cannot learn from this step; look at what is \
             rewarded in trajectories/, and try easier or harder problems, more rollout.samples_per_prompt or \
             rollout.resample_rounds_max",
            range[0], range[1]
        ))
    }

    /// Records the success rate of a step. Returns one warning per fall: the moving average is below half of
    /// its best value, and chance does not explain the difference.
    fn success_rate_warning(&mut self, step: u64, metrics: &Metrics) -> Option<String> {
        let count = trajectory_count(metrics);
        self.window.push_back((metrics.get("critic/success/mean")? * count, count));
        if self.window.len() > WINDOW_STEPS {
            self.window.pop_front();
        }
        if self.window.len() < WINDOW_STEPS {
            return None;
        }
        let (successes, count) =
            self.window.iter().fold((0.0, 0.0), |sum, step| (sum.0 + step.0, sum.1 + step.1));
        let rate = successes / count.max(1.0);
        let (best_rate, best_count, best_step) = *self.best_window.get_or_insert((rate, count, step));
        if rate >= best_rate {
            self.best_window = Some((rate, count, step));
            return None;
        }
        let pooled = (best_rate * best_count + successes) / (best_count + count);
        let error = (pooled * (1.0 - pooled) * (1.0 / best_count + 1.0 / count)).sqrt();
        if rate >= best_rate / 2.0 || best_rate - rate <= FALL_ERRORS_MIN * error {
            return None;
        }
        // Later steps are compared only with steps after this fall, so the warning is not repeated.
        self.window.clear();
        self.best_window = None;
        Some(format!(
            "the success rate fell from {} (mean of {WINDOW_STEPS} steps up to step {best_step}) to {}; look at actor/grad_norm, actor/entropy, \
             response_length/mean and mismatch/log_ppl_abs_diff_max since then, and try a lower train.optimizer.lr",
            format_number(best_rate),
            format_number(rate)
        ))
    }
}

/// Returns the number of trajectories of the step, computed from its outcome counts.
fn trajectory_count(metrics: &Metrics) -> f64 {
    Outcome::ALL.iter().filter_map(|outcome| metrics.get(&format!("outcome/{}", outcome.name()))).sum()
}

/// Returns whether a warning is due after `steps` consecutive steps with a problem: after 1 step, after 3
/// steps, and then after every 10 steps.
fn is_warning_due(steps: u64) -> bool {
    matches!(steps, 1 | 3) || (steps > 0 && steps.is_multiple_of(10))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicySettings;

    fn step(failed: f64, flat: f64, success: f64) -> Metrics {
        Metrics::from_iter([
            ("outcome/finished", 64.0 * (1.0 - failed)),
            ("outcome/task_failed", 64.0 * failed),
            ("trajectory/failed_fraction", failed),
            ("group/zero_signal_fraction", flat),
            ("critic/rewards/min", 0.0),
            ("critic/rewards/max", 1.0),
            ("critic/success/mean", success),
        ])
    }

    fn monitor() -> Monitor {
        Monitor::new(&Recipe::default())
    }

    #[test]
    fn failures_are_told_and_counted() {
        let mut monitor = monitor();
        let reported = monitor.record(1, &step(0.75, 0.0, 0.1));
        assert_eq!(reported.len(), 1);
        for part in
            ["48 of 64 trajectories failed", "outcome/task_failed = 48", "docs/TASKS.md", "step-000001"]
        {
            assert!(reported[0].contains(part), "{part} in {reported:?}");
        }
        assert_eq!(monitor.failure_counts(), (48, 64));
        assert!(monitor.record(2, &step(0.1875, 0.0, 0.1)).is_empty(), "below a fifth");
        let mut monitor = self::monitor();
        let lines: usize = (1..=10).map(|at| monitor.record(at, &step(1.0, 1.0, 0.0)).len()).sum();
        assert_eq!(lines, 3, "warnings at steps 1, 3 and 10 of the same problem");
        assert_eq!(monitor.failure_counts(), (640, 640));
    }

    #[test]
    fn groups_without_signal_are_told_where_groups_are_compared() {
        let mut monitor = monitor();
        assert!(monitor.record(1, &step(0.0, 0.9, 0.5)).is_empty());
        let first = monitor.record(2, &step(0.0, 1.0, 0.5));
        assert!(
            first[0].contains("no group has two different rewards (between groups they go from 0 to 1)"),
            "{first:?}"
        );
        assert!(monitor.record(3, &step(0.0, 1.0, 0.5)).is_empty());
        let third = monitor.record(4, &step(0.0, 1.0, 0.5));
        assert!(third[0].contains("for 3 steps now") && third[0].contains("samples_per_prompt"), "{third:?}");
        let policy = PolicySettings { advantage: Advantage::Gae, ..PolicySettings::default() };
        let mut critic = Monitor::new(&Recipe { policy, ..Recipe::default() });
        assert!(critic.record(1, &step(0.0, 1.0, 0.5)).is_empty(), "a critic compares no groups");
    }

    #[test]
    fn a_collapse_is_told_once_and_chance_is_not() {
        let mut monitor = monitor();
        let mut reported = vec![];
        for at in 1..=30 {
            let success = if at <= 15 { 0.6 } else { 0.05 };
            reported.extend(monitor.record(at, &step(0.0, 0.0, success)).into_iter().map(|line| (at, line)));
        }
        assert_eq!(reported.len(), 1, "{reported:?}");
        assert!(
            reported[0].0 > 15 && reported[0].1.contains("the success rate fell from 0.6"),
            "{reported:?}"
        );
        let mut noisy = self::monitor();
        for at in 1..=30 {
            let success = if at % 2 == 0 { 0.03 } else { 0.015 };
            assert!(noisy.record(at, &step(0.0, 0.0, success)).is_empty(), "step {at}");
        }
    }

    #[test]
    fn weights_that_are_all_0_are_told() {
        let mut metrics = step(0.0, 0.0, 0.5);
        metrics.set("rollout_corr/rollout_is_mean", 0.0);
        let reported = monitor().record(1, &metrics);
        assert!(
            reported.iter().any(|line| line.starts_with("every weight of the rollout correction is 0")),
            "{reported:?}"
        );
    }
}
