//! Norms of a model's last gradients: the rule of `train.on_bad_step = "skip"`, and its warnings.

use crate::metrics::{Metrics, format_number};
use anyhow::{Result, ensure};
use std::collections::VecDeque;

/// Steps whose norms give the median.
const MEDIAN_WINDOW: usize = 32;
/// Minimum number of norms before an update is skipped for the size of its norm.
const NORMS_MIN: usize = 8;
/// An update is skipped if its norm exceeds the median times this factor.
const SKIP_FACTOR: f64 = 10.0;
/// Maximum number of consecutive steps without an update.
const SKIPPED_MAX: usize = 5;

/// Norms of a model's last gradients. The rows of metrics hold them, so a resumed run makes the same
/// decisions as an uninterrupted one.
pub(super) struct GradientNorms {
    /// First part of the names of the model's metrics.
    name: &'static str,
    norms: VecDeque<f64>,
    /// Consecutive steps whose updates were all skipped.
    skipped: usize,
}

impl GradientNorms {
    pub fn new(name: &'static str) -> Self {
        Self { name, norms: VecDeque::new(), skipped: 0 }
    }

    /// Returns the norm above which an update is skipped.
    pub fn limit(&self) -> f64 {
        let mut sorted: Vec<f64> = self.norms.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.len() < NORMS_MIN { f64::INFINITY } else { SKIP_FACTOR * sorted[sorted.len() / 2] }
    }

    /// Adds the metrics of a step. Returns a warning if one of its updates was skipped.
    pub fn note(&mut self, metrics: &Metrics) -> Option<String> {
        let name = self.name;
        let get = |metric: &str| metrics.get(&format!("{name}/{metric}"));
        let (limit, bad) = (self.limit(), get("updates_bad"));
        match (get("grad_norm"), bad) {
            (Some(norm), _) => {
                self.skipped = 0;
                // A step without signal has the norm 0.
                if norm > 0.0 {
                    self.norms.push_back(norm);
                }
                if self.norms.len() > MEDIAN_WINDOW {
                    self.norms.pop_front();
                }
            }
            (None, Some(_)) => self.skipped += 1,
            (None, None) => {}
        }
        let (count, was) = (format_number(bad?), get("grad_norm_bad"));
        let why = match was {
            Some(norm) => format!(
                "gradient norm {} exceeds {}, {SKIP_FACTOR} times the median of the last steps",
                format_number(norm),
                format_number(limit)
            ),
            None => "the gradient norm is not finite".to_owned(),
        };
        Some(format!("updates skipped of {name} (train.on_bad_step): {count}; {why}"))
    }

    /// Ends a run whose updates are skipped step after step.
    ///
    /// # Errors
    /// When too many consecutive steps were skipped.
    pub fn check_skipped(&self) -> Result<()> {
        ensure!(
            self.skipped <= SKIPPED_MAX,
            "{} steps in a row were skipped for their gradients ({}/updates_bad), so the run stops; lower the \
             learning rate, or look at the rewards in trajectories/",
            self.skipped,
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
            assert_eq!(norms.note(&step(norm)), None);
        }
        assert_eq!(norms.limit(), f64::INFINITY, "seven norms are too few");
        norms.note(&step(100.0));
        assert_eq!(norms.limit(), 50.0);
        let reported = norms.note(&bad(Some(50.5))).unwrap();
        assert!(reported.contains("gradient norm 50.5 exceeds 50, 10 times the median"), "{reported}");
        assert_eq!(norms.limit(), 50.0, "the norm of a skipped update does not count");
        (0..32).for_each(|_| drop(norms.note(&step(0.5))));
        assert_eq!(norms.limit(), 5.0, "older norms are forgotten");
    }

    #[test]
    fn the_sixth_skipped_step_in_a_row_is_refused() {
        let mut norms = GradientNorms::new("actor");
        for _ in 0..5 {
            let reported = norms.note(&bad(None)).unwrap();
            assert!(reported.contains("the gradient norm is not finite"), "{reported}");
            norms.check_skipped().unwrap();
        }
        norms.note(&step(1.0));
        for skipped in 1..=6 {
            norms.note(&bad(None));
            assert_eq!(norms.check_skipped().is_err(), skipped == 6, "{skipped}");
        }
    }
}
