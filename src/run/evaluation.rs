//! Evaluation on held-out problems, during training and by `rloss eval`.

use super::environment::Environment;
use super::sampling::Sampling;
use crate::metrics::{Accumulator, Console, Metrics, Phase};
use crate::rollout::accuracy::{self, Estimate, SampleResult, Vote};
use crate::rollout::{Prompt, RolloutProgress};
use crate::tasks::{Transcript, ValidationSet};
use crate::trajectory::{CallOutcome, Outcome, TrajectoryRow};
use anyhow::Result;

/// The result of an evaluation: one entry per validation set.
pub struct Evaluation {
    pub sets: Vec<ValidationResult>,
}

/// The samples of one validation set.
pub struct ValidationResult {
    pub name: String,
    /// The k of mean@k.
    pub samples: usize,
    /// The k of each pass@k.
    pub pass_at: Vec<usize>,
    pub problems: Vec<ProblemResult>,
}

/// The samples of one problem.
pub struct ProblemResult {
    pub id: String,
    pub rows: Vec<TrajectoryRow>,
    pub samples: Vec<SampleResult>,
    pub votes: Vec<Vote>,
}

/// Samples every validation set with the policy without ablations. `console` shows the progress as a stage
/// within a step. Returns `None` if `stop` returned true.
///
/// # Errors
/// When the rollout fails.
pub fn evaluate(
    sampling: Sampling,
    step: u64,
    console: &Console,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Evaluation>> {
    let environment = sampling.environment;
    let samples = environment.recipe().eval.samples;
    let plan = environment.evaluation_rollout(step);
    let engine = sampling.engine(sampling.policy_without_ablations()?, step, &plan.settings)?;
    let mut sets = vec![];
    for (set, prompts) in environment.validation_prompts() {
        let stage = console.start_inner_stage("evaluation", (prompts.len() * samples) as u64);
        let progress = RolloutProgress::show_on(&stage);
        let rollouts = sampling.sample_groups(&engine, &plan, (&prompts, samples), &progress, None, stop)?;
        stage.finish();
        let Some(rollouts) = rollouts else { return Ok(None) };
        let mut rows = rollouts.rows(Phase::Eval);
        let groups = prompts.iter().map(|_| rows.by_ref().take(samples).collect()).collect();
        sets.push(ValidationResult::new(environment, set, &prompts, groups));
    }
    Ok(Some(Evaluation { sets }))
}

impl ValidationResult {
    /// Builds the result from the rows of each prompt.
    pub fn new(
        environment: &Environment,
        set: &ValidationSet,
        prompts: &[Prompt],
        groups: Vec<Vec<TrajectoryRow>>,
    ) -> Self {
        let eval = &environment.recipe().eval;
        let problem = |(prompt, rows): (&Prompt, Vec<TrajectoryRow>)| {
            let prompt_messages = environment.first_messages(&prompt.problem).len();
            let samples: Vec<SampleResult> =
                rows.iter().map(|row| to_sample(environment, row, prompt_messages)).collect();
            let votes = accuracy::count_votes(environment.task.as_ref(), &samples);
            ProblemResult { id: prompt.problem.id.clone(), rows, samples, votes }
        };
        Self {
            name: set.name.clone(),
            samples: eval.samples,
            pass_at: eval.pass_at.clone(),
            problems: prompts.iter().zip(groups).map(problem).collect(),
        }
    }

    /// Returns the estimates with their names: mean@k, each requested pass@k, and maj@k if k > 1.
    pub fn estimates(&self) -> Vec<(String, Estimate)> {
        let estimate = |value: &dyn Fn(&ProblemResult) -> f64| {
            Estimate::from_problems(&self.problems.iter().map(value).collect::<Vec<_>>())
        };
        let k = self.samples;
        let mut estimates = vec![(format!("mean@{k}"), estimate(&|p| accuracy::mean(&p.samples)))];
        for &k in &self.pass_at {
            estimates.push((format!("pass@{k}"), estimate(&|p| accuracy::pass_at(k, &p.samples))));
        }
        if k > 1 {
            estimates.push((format!("maj@{k}"), estimate(&|p| accuracy::majority(&p.votes))));
        }
        estimates
    }

    /// Returns the name of the metric, `val-core/<set>/acc/<measure>`.
    pub fn key(&self, measure: &str) -> String {
        format!("val-core/{}/acc/{measure}", self.name)
    }

    /// Computes the mean reward, `val-aux/<set>/reward/mean@<k>`, and the mean of each named reward,
    /// `val-aux/<set>/reward/<name>/mean@<k>`. Trajectories without a reward of the name do not count.
    ///
    /// # Errors
    /// When a reward is NaN.
    pub fn reward_metrics(&self) -> Result<Metrics> {
        let mut metrics = Accumulator::new();
        let (set, k) = (&self.name, self.samples);
        for trajectory in self.rows().map(|row| &row.trajectory).filter(|t| t.begins_episode()) {
            metrics.mean(&format!("val-aux/{set}/reward/mean@{k}"), f64::from(trajectory.reward), 1.0);
            for (name, &value) in &trajectory.rewards {
                metrics.mean(&format!("val-aux/{set}/reward/{name}/mean@{k}"), f64::from(value), 1.0);
            }
        }
        metrics.finish()
    }

    /// Iterates over all sampled conversations.
    pub fn rows(&self) -> impl Iterator<Item = &TrajectoryRow> {
        self.problems.iter().flat_map(|problem| &problem.rows)
    }
}

/// Converts a row to a sample. The first `prompt_messages` messages belong to the prompt.
fn to_sample(environment: &Environment, row: &TrajectoryRow, prompt_messages: usize) -> SampleResult {
    let trajectory = &row.trajectory;
    let answered =
        |call: &&CallOutcome| !matches!(call, CallOutcome::MalformedCall | CallOutcome::UnknownRecipient);
    let transcript = Transcript {
        calls_answered: trajectory.turns.iter().flat_map(|turn| &turn.calls).filter(answered).count(),
        ..Transcript::new(row.messages.get(prompt_messages..).unwrap_or_default(), trajectory.outcome)
    };
    let answer = match trajectory.outcome {
        Outcome::TaskFailed => None,
        _ => environment.task.answer_text(&transcript),
    };
    SampleResult { success: trajectory.success, answer }
}

impl Evaluation {
    /// Returns the row of `metrics.jsonl`.
    ///
    /// # Errors
    /// When a reward is NaN.
    pub fn metrics(&self) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        for set in &self.sets {
            for (measure, Estimate { mean, low, high }) in set.estimates() {
                let key = set.key(&measure);
                metrics.set(format!("{key}/ci95_low"), low);
                metrics.set(format!("{key}/ci95_high"), high);
                metrics.set(key, mean);
            }
            metrics.extend(set.reward_metrics()?);
        }
        Ok(metrics)
    }

    /// Returns the results as one line for the console.
    pub fn summary(&self) -> String {
        let text = |set: &ValidationResult, (measure, e): (String, Estimate)| {
            format!("{} {:.3} (95% {:.3} to {:.3})", set.key(&measure), e.mean, e.low, e.high)
        };
        let line =
            |set: &ValidationResult| set.estimates().into_iter().map(|e| text(set, e)).collect::<Vec<_>>();
        self.sets.iter().flat_map(line).collect::<Vec<_>>().join(", ")
    }

    /// Iterates over all sampled conversations.
    pub fn rows(&self) -> impl Iterator<Item = TrajectoryRow> {
        self.sets.iter().flat_map(ValidationResult::rows).cloned()
    }
}
