//! Success on held-out problems, during training and by `rloss eval`.

use super::workbench::Workbench;
use crate::metrics::{Metrics, Phase};
use crate::rollout::{Prompt, RolloutSettings, Rollouts};
use crate::trajectory::TrajectoryRow;
use anyhow::Result;

/// What an evaluation found: a set after the other.
pub struct Evaluation {
    pub sets: Vec<SetResult>,
}

/// One validation set's samples.
pub struct SetResult {
    pub name: String,
    pub samples: usize,
    pub rollouts: Rollouts,
}

/// Samples every validation set with the model as it is. `None` when `stop` said so.
///
/// # Errors
/// Those of the rollout.
pub fn evaluate(
    bench: &Workbench,
    step: u64,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Evaluation>> {
    let eval = &bench.recipe().eval;
    let settings = RolloutSettings::evaluation(bench.recipe(), bench.preamble.clone(), step);
    let weights = bench.parameters.detached()?;
    let mut sets = vec![];
    let mut index = 0;
    for set in bench.task.validation_sets() {
        let prompts: Vec<Prompt> = set
            .problems
            .iter()
            .take(eval.problems_max)
            .cloned()
            .zip(index..)
            .map(|(problem, index)| Prompt { index, problem })
            .collect();
        index += set.problems.len() as u64;
        let rollout = bench.rollout(&weights, &settings);
        let Some(rollouts) = rollout.groups(&prompts, eval.samples, &|_| (), stop)? else { return Ok(None) };
        sets.push(SetResult { name: set.name.clone(), samples: eval.samples, rollouts });
    }
    Ok(Some(Evaluation { sets }))
}

impl SetResult {
    /// Share of successes of each problem.
    fn problem_means(&self) -> Vec<f64> {
        let share = |group: &crate::trajectory::Group| {
            let right = group.trajectories.iter().filter(|t| t.success).count();
            right as f64 / group.trajectories.len().max(1) as f64
        };
        self.rollouts.groups.iter().map(share).collect()
    }

    /// Mean success and its 95% interval over problems: 1.96 standard errors of the mean of their means.
    pub fn mean_and_interval(&self) -> (f64, f64, f64) {
        let means = self.problem_means();
        let n = means.len().max(1) as f64;
        let mean = means.iter().sum::<f64>() / n;
        let variance = means.iter().map(|m| (m - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        let half = 1.96 * (variance / n).sqrt();
        (mean, (mean - half).max(0.0), (mean + half).min(1.0))
    }

    /// `val-core/<set>/acc/mean@<k>`.
    pub fn key(&self) -> String {
        format!("val-core/{}/acc/mean@{}", self.name, self.samples)
    }
}

impl Evaluation {
    /// The row of `metrics.jsonl`.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::new();
        for set in &self.sets {
            let (mean, low, high) = set.mean_and_interval();
            metrics.set(set.key(), mean);
            metrics.set(format!("{}/ci95_low", set.key()), low);
            metrics.set(format!("{}/ci95_high", set.key()), high);
        }
        metrics
    }

    /// One line for the console.
    pub fn summary(&self) -> String {
        let line = |set: &SetResult| {
            let (mean, low, high) = set.mean_and_interval();
            format!("{} {mean:.3} (95% {low:.3} to {high:.3})", set.key())
        };
        self.sets.iter().map(line).collect::<Vec<_>>().join(", ")
    }

    /// The sampled conversations.
    pub fn rows(&self) -> impl Iterator<Item = TrajectoryRow> {
        self.sets.iter().flat_map(|set| set.rollouts.rows(Phase::Eval))
    }
}
