//! Gradient norms of a model in recent steps: the rule of `train.on_bad_step = "skip"`, and its warnings.

use crate::learner::OnBadStep;
use crate::metrics::{Metrics, format_number};
use crate::recipe::Recipe;
use anyhow::{Result, ensure};
use std::collections::VecDeque;

/// Maximum number of norms in the median: the most recent ones. Norms of 0 and norms of skipped updates do
/// not count.
const MEDIAN_WINDOW: usize = 32;
/// Minimum number of norms in the median. With fewer norms, the limit is infinite.
const NORMS_MIN: usize = 8;
/// An update is skipped if its norm exceeds the median times this factor.
const SKIP_FACTOR: f64 = 10.0;
/// Maximum number of consecutive steps without an update.
const SKIPPED_MAX: usize = 5;

/// Returns the limit of the gradient norm; an update with a larger norm is skipped. `None` if the recipe
/// skips no update.
pub(super) fn norm_limit(recipe: &Recipe, norms: &GradientNorms) -> Option<f64> {
    (recipe.train.on_bad_step == OnBadStep::Skip).then(|| norms.limit())
}

/// Returns the `norm` of a skipped update; `None` if it is not finite.
///
/// # Errors
/// When no update may be skipped (`limit` is `None`).
pub(super) fn skipped_norm(norm: f64, limit: Option<f64>) -> Result<Option<f64>> {
    ensure!(
        limit.is_some(),
        "the gradient norm is {norm}: the run stops, so that the weights are not damaged; lower the learning \
         rate or the clipping norm, or skip such steps with train.on_bad_step = \"skip\""
    );
    Ok(norm.is_finite().then_some(norm))
}

/// Limits of the gradient norms. An update with a larger norm is skipped. With `None`, no update is skipped,
/// and a norm that is not finite ends the run.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradientNormLimits {
    pub actor: Option<f64>,
    pub critic: Option<f64>,
}

/// Gradient norms of a model in recent steps. They can be restored from the metrics, so a resumed run makes
/// the same decisions as an uninterrupted run.
pub(super) struct GradientNorms {
    /// The prefix of the model's metrics.
    name: &'static str,
    norms: VecDeque<f64>,
    /// Number of consecutive steps without an update, including the last step.
    skipped_steps: usize,
}

impl GradientNorms {
    pub fn new(name: &'static str) -> Self {
        Self { name, norms: VecDeque::new(), skipped_steps: 0 }
    }

    /// Returns the limit of the norm; an update with a larger norm is skipped. With fewer than [`NORMS_MIN`]
    /// norms, the limit is infinite.
    pub fn limit(&self) -> f64 {
        let mut sorted: Vec<f64> = self.norms.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.len() < NORMS_MIN { f64::INFINITY } else { SKIP_FACTOR * sorted[sorted.len() / 2] }
    }

    /// Records the metrics of a step. Returns a warning if an update of the step was skipped.
    pub fn record(&mut self, metrics: &Metrics) -> Option<String> {
        let name = self.name;
        let get = |metric: &str| metrics.get(&format!("{name}/{metric}"));
        let (limit, bad_updates) = (self.limit(), get("updates_bad"));
        match (get("grad_norm"), bad_updates) {
            (Some(norm), _) => {
                self.skipped_steps = 0;
                // The norm of a step without signal is 0, and does not count.
                if norm > 0.0 {
                    self.norms.push_back(norm);
                }
                if self.norms.len() > MEDIAN_WINDOW {
                    self.norms.pop_front();
                }
            }
            (None, Some(_)) => self.skipped_steps += 1,
            (None, None) => {}
        }
        let count = format_number(bad_updates?);
        let reason = match get("grad_norm_bad") {
            Some(norm) => format!(
                "gradient norm {} exceeds {}, {SKIP_FACTOR} times the median of the recent steps",
                format_number(norm),
                format_number(limit)
            ),
            None => "the gradient norm is not finite".to_owned(),
        };
        Some(format!("skipped updates of {name} (train.on_bad_step): {count}; {reason}"))
    }

    /// Checks the number of consecutive steps without an update.
    ///
    /// # Errors
    /// When the number exceeds [`SKIPPED_MAX`], so that the run must stop.
    pub fn check_skipped_steps(&self) -> Result<()> {
        ensure!(
            self.skipped_steps <= SKIPPED_MAX,
            "{} consecutive steps were skipped because of their gradients ({}/updates_bad), so the run stops; lower the \
             learning rate, or look at the rewards in trajectories/",
            self.skipped_steps,
            self.name
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(norm: f64) -> Metrics {
        Metrics::from_iter([("actor/grad_norm", norm)])
    }

    fn bad(norm: Option<f64>) -> Metrics {
        let mut metrics = Metrics::from_iter([("actor/updates_bad", 1.0)]);
        norm.into_iter().for_each(|norm| metrics.set("actor/grad_norm_bad", norm));
        metrics
    }

    #[test]
    fn the_limit_is_ten_times_the_median_of_the_last_steps_with_a_signal() {
        let mut norms = GradientNorms::new("actor");
        for norm in [0.0, 1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 6.0, 7.0] {
            assert_eq!(norms.record(&step(norm)), None);
        }
        assert_eq!(norms.limit(), f64::INFINITY, "seven norms are too few");
        norms.record(&step(100.0));
        assert_eq!(norms.limit(), 50.0);
        let reported = norms.record(&bad(Some(50.5))).unwrap();
        assert!(reported.contains("gradient norm 50.5 exceeds 50, 10 times the median"), "{reported}");
        assert_eq!(norms.limit(), 50.0, "the norm of a skipped update does not count");
        (0..32).for_each(|_| drop(norms.record(&step(0.5))));
        assert_eq!(norms.limit(), 5.0, "older norms are forgotten");
    }

    #[test]
    fn the_sixth_skipped_step_in_a_row_is_refused() {
        let mut norms = GradientNorms::new("actor");
        for _ in 0..5 {
            let reported = norms.record(&bad(None)).unwrap();
            assert!(reported.contains("the gradient norm is not finite"), "{reported}");
            norms.check_skipped_steps().unwrap();
        }
        norms.record(&step(1.0));
        for skipped in 1..=6 {
            norms.record(&bad(None));
            assert_eq!(norms.check_skipped_steps().is_err(), skipped == 6, "{skipped}");
        }
    }
}
