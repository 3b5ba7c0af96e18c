//! The observer of a run: shows progress, time left and warnings, and records metrics and trajectories. It
//! observes the events of the trainer and changes none.

use super::gradient_norms::GradientNorms;
use super::monitor::Monitor;
use super::sample::SampleOutput;
use crate::checkpoint::ResumePoint;
use crate::metrics::{Console, Metrics, Phase, Progress, Row, Timings, Warning, read_rows, read_warnings};
use crate::ops::cuda::{DeviceMemory, device_memory, reset_memory_peaks};
use crate::recipe::Recipe;
use crate::rollout::Rollouts;
use crate::run::causes::{SampleCounts, SampleFacts, sample_causes};
use crate::run::environment::Environment;
use crate::run::evaluation::{Evaluation, ValidationResult};
use crate::run::run_folder::RunFolder;
use crate::run::sampling_folder::report_failures;
use crate::run::signals::StopFlag;
use crate::trajectory::TokenStats;
use anyhow::{Result, ensure};
use candle_core::Device;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The metrics on the console line of a step: label and metric name.
const CONSOLE_METRICS: [(&str, &str); 3] = [
    ("reward", "critic/rewards/mean"),
    ("explained variance", "critic/vf_explained_var"),
    ("max mismatch", "mismatch/log_ppl_abs_diff_max"),
];

/// The name of the SFT warm-up on the console.
const WARM_UP_STAGE: &str = "SFT warm-up";

/// Shows the stages of a step and measures their time.
#[derive(Clone, Copy)]
pub struct Stages<'a> {
    pub timings: &'a Timings,
    pub console: &'a Console,
}

impl Stages<'_> {
    /// Runs `work` as a stage of the progress display, which shows no count. `timing` is the stage's name in
    /// the timings, and `label` its name on the console.
    pub fn run<T>(&self, (timing, label): (&str, &str), work: impl FnOnce() -> Result<T>) -> Result<T> {
        let stage = self.console.start_inner_stage(label, 0);
        let result = self.timings.time(timing, work)?;
        stage.finish();
        Ok(result)
    }
}

/// Observes one run.
pub(super) struct Observer {
    pub console: Console,
    pub timings: Arc<Timings>,
    pub folder: RunFolder,
    pub monitor: Monitor,
    /// The facts about the model and the environment that warnings about samples need.
    facts: SampleFacts,
    /// The device whose memory peaks are recorded.
    device: Device,
    /// Whether a tool call has reached the wall-clock limit, so that the run is not reproducible. The warning
    /// about this is printed only once.
    has_tool_timeout: bool,
    /// The warnings about samples so far, without their digits.
    told_causes: Vec<(Phase, String)>,
    /// The current activity, as text.
    activity: Arc<Mutex<String>>,
}

/// A finished step.
pub(super) struct FinishedStep<'a> {
    pub step: u64,
    pub samples: &'a SampleOutput,
    /// The metrics of the update.
    pub metrics: Metrics,
    pub token_stats: &'a [TokenStats],
    /// When the step started.
    pub started: Instant,
}

/// Returns a warning without its numbers, which differ from step to step.
fn without_digits(text: &str) -> String {
    text.replace(|c: char| c.is_ascii_digit(), "")
}

impl Observer {
    /// Observes a run in `folder`. The rows of a resumed run are read first: warnings about earlier steps are
    /// not repeated.
    ///
    /// # Errors
    /// When the metrics of a resumed run cannot be read.
    pub fn new(
        (folder, console): (RunFolder, Console),
        recipe: &Recipe,
        (facts, device): (SampleFacts, Device),
        resume_point: Option<&ResumePoint>,
    ) -> Result<Self> {
        let (mut monitor, mut told_causes) = (Monitor::new(recipe), vec![]);
        if resume_point.is_some() {
            let earlier = read_warnings(&folder.path).into_iter();
            told_causes.extend(earlier.filter_map(|told| Some((told.phase?, without_digits(&told.text)))));
            let earlier_rows = read_rows(&folder.path.join("metrics.jsonl"))?;
            earlier_rows.iter().for_each(|row| match row.phase {
                Phase::Rl => drop(monitor.record(row.step, &row.metrics)),
                Phase::SftWarmUp => drop(monitor.warm_up_norms.record(&row.metrics)),
                Phase::Eval => {}
            });
        }
        Ok(Self {
            console,
            timings: Arc::new(Timings::new()),
            folder,
            monitor,
            facts,
            device,
            has_tool_timeout: false,
            told_causes,
            activity: Arc::default(),
        })
    }

    pub fn stages(&self) -> Stages<'_> {
        Stages { timings: &self.timings, console: &self.console }
    }

    /// The run begins after `done`. The console then shows one remaining time for all stages. A signal is
    /// answered with the current activity.
    pub fn run_begins(
        &self,
        environment: &Environment,
        done: Option<(Phase, u64)>,
        is_rank_zero: bool,
        stop: &StopFlag,
    ) -> Result<()> {
        self.plan_progress(environment, done);
        if is_rank_zero {
            self.console.start_status_file(&self.folder.path);
        }
        let (console, activity) = (self.console.clone(), self.activity.clone());
        stop.on_request(move || {
            let activity = activity.lock().unwrap_or_else(PoisonError::into_inner).clone();
            console.print(&format!("finishing {activity}, then saving; repeat the signal to stop at once"));
        })
    }

    fn plan_progress(&self, environment: &Environment, done: Option<(Phase, u64)>) {
        let recipe = environment.recipe();
        let (steps, every) = (recipe.train.steps, recipe.eval.every_steps);
        let (warm_up_done, rl_done) = match done {
            Some((Phase::Rl, step)) => (recipe.cold_start.steps, step),
            Some((_, step)) => (step, 0),
            None => (0, 0),
        };
        let evaluations_up_to = |step: u64| step.checked_div(every).unwrap_or(0);
        let last = u64::from(every > 0 && steps > rl_done && !steps.is_multiple_of(every.max(1)));
        let first = u64::from(recipe.eval.before_training && rl_done == 0 && steps > 0);
        let evaluations = evaluations_up_to(steps).saturating_sub(evaluations_up_to(rl_done)) + last + first;
        let held_out = evaluation_trajectories(environment);
        let evaluations = if held_out > 0 { evaluations } else { 0 };
        let conversations = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt;
        self.console.set_plan(&[
            (
                WARM_UP_STAGE,
                recipe.cold_start.steps.saturating_sub(warm_up_done),
                recipe.cold_start.batch_size as f64,
            ),
            // Sampling one conversation costs as much as 0.25 demonstrations. Sampling and training on it
            // cost 6 times that in the quickstart, 3 times at 0.5B; 4 is between. Measured times replace
            // this guess.
            ("rl", steps.saturating_sub(rl_done), conversations as f64),
            ("evaluation", evaluations, 0.25 * held_out as f64),
        ]);
    }

    /// The stage of reinforcement learning, or of the SFT warm-up, goes on after step `done` of `steps`.
    pub fn stage_begins(&self, phase: Phase, steps: u64, done: u64) -> Progress {
        self.console.start_stage(if phase == Phase::Rl { "rl" } else { WARM_UP_STAGE }, steps, done)
    }

    /// An activity begins, which is printed when a signal requests a stop.
    pub fn activity_begins(&self, activity: String) {
        *self.activity.lock().unwrap_or_else(PoisonError::into_inner) = activity;
    }

    /// A step ended: records its metrics and some of its trajectories, warns about unusual values, and
    /// advances `progress`.
    ///
    /// # Errors
    /// When the run's folder cannot be written, or too many steps in a row were skipped.
    pub fn step_ended(
        &mut self,
        environment: &Environment,
        finished: FinishedStep,
        progress: &Progress,
    ) -> Result<()> {
        let FinishedStep { step, samples, metrics: update_metrics, token_stats, started } = finished;
        self.expect_evaluation(environment, samples);
        let mut metrics = samples.metrics(step)?;
        metrics.extend(update_metrics);
        let seconds = started.elapsed().as_secs_f64();
        self.timings.add("step", seconds);
        let counts = samples.rollouts.counts();
        let tokens = counts.prefilled_tokens + counts.sampled_tokens;
        metrics.set("perf/throughput", tokens as f64 / seconds);
        metrics.set("perf/sampled_tokens_per_s", counts.sampled_tokens as f64 / seconds);
        self.warn_about_step(environment, step, &samples.rollouts, &metrics)?;
        self.warn_of_failures(Phase::Rl, step)?;
        let value = |&(name, metric): &(_, _)| metrics.get(metric).map(|value| (name, value));
        let console_metrics: Vec<(&str, f64)> = CONSOLE_METRICS.iter().filter_map(value).collect();
        self.write_row(step, Phase::Rl, metrics)?;
        self.monitor.actor_norms.check_skipped_steps()?;
        self.monitor.critic_norms.check_skipped_steps()?;
        let logged_rows = samples.rows(environment.recipe().logging.trajectories_per_step, token_stats);
        self.folder.write_trajectories(&format!("step-{step:06}"), logged_rows.into_iter())?;
        progress.advance(1, counts.sampled_tokens as u64, &console_metrics);
        Ok(())
    }

    /// A step of the SFT warm-up ended, whose gradient norm is in `metrics`.
    ///
    /// # Errors
    /// Those of [`Self::step_ended`].
    pub fn warm_up_step_ended(&mut self, step: u64, metrics: Metrics) -> Result<()> {
        self.write_row(step, Phase::SftWarmUp, metrics)?;
        self.monitor.warm_up_norms.check_skipped_steps()
    }

    /// An evaluation after step `step` begins.
    pub fn evaluation_begins(&self, step: u64) {
        self.activity_begins(match step {
            0 => "the first evaluation and step 1".to_owned(),
            _ => format!("the evaluation after step {step}"),
        });
        self.console.begin_step("evaluation");
    }

    /// The evaluation after step `step` ended, which began at `started`.
    ///
    /// # Errors
    /// When the run's folder cannot be written, or every trajectory of the first evaluation failed.
    pub fn evaluation_ended(
        &mut self,
        environment: &Environment,
        step: u64,
        evaluation: &Evaluation,
        started: Instant,
    ) -> Result<()> {
        self.console.count_step("evaluation");
        self.timings.add("testing", started.elapsed().as_secs_f64());
        self.timings.add("step", started.elapsed().as_secs_f64());
        self.warn_of_failures(Phase::Eval, step)?;
        self.console.print(&format!("step {step}: {}", evaluation.summary()));
        let rows = evaluation.sets.iter().flat_map(ValidationResult::rows);
        let causes = sample_causes(&self.facts, environment, rows);
        causes.into_iter().try_for_each(|cause| self.warn_of_cause(Phase::Eval, step, cause))?;
        let failed = evaluation.rows().filter(|row| row.trajectory.has_failure()).count();
        let count = evaluation.rows().count();
        // Stop before training. Each step would fail too, but only after the time limits of its trajectories.
        ensure!(
            step > 0 || failed < count,
            "every trajectory of the first evaluation failed, because the task's program or the tool's workers failed; the \
             first failures are printed above"
        );
        self.write_row(step, Phase::Eval, evaluation.metrics()?)?;
        if failed * 2 > count {
            let what = format!(
                "{failed} of {count} trajectories failed for reasons outside the policy; the results say little about the policy"
            );
            self.warn(Phase::Eval, step, what)?;
        }
        let logged_rows = evaluation.rows().take(environment.recipe().logging.trajectories_per_step);
        self.folder.write_trajectories(&format!("eval-{step:06}"), logged_rows)
    }

    /// Reinforcement learning ended.
    ///
    /// # Errors
    /// When most trajectories failed.
    pub fn run_ended(&self) -> Result<()> {
        report_failures(self.monitor.failure_counts(), &self.console)
    }

    /// Estimates the time of an evaluation from the rollout of a step, because both sample trajectories.
    fn expect_evaluation(&self, environment: &Environment, samples: &SampleOutput) {
        let all = samples.rollouts.trajectories().count();
        if samples.seconds > 0.0 && all > 0 {
            let trajectories = evaluation_trajectories(environment);
            self.console.expect_step("evaluation", samples.seconds * trajectories as f64 / all as f64);
        }
    }

    /// Warns if the task's program, its tools or workers failed.
    fn warn_of_failures(&self, phase: Phase, step: u64) -> Result<()> {
        self.console.take_failure_warning().map_or(Ok(()), |failures| self.warn(phase, step, failures))
    }

    /// Warns about the samples of a step. A warning that differs from an earlier one of this phase only in
    /// its numbers is left out: its advice is long, and does not change.
    fn warn_of_cause(&mut self, phase: Phase, step: u64, cause: String) -> Result<()> {
        let words = without_digits(&cause);
        if self.told_causes.contains(&(phase, words.clone())) {
            return Ok(());
        }
        self.told_causes.push((phase, words));
        self.warn(phase, step, cause)
    }

    /// Prints a warning about a step and stores it for the report page.
    ///
    /// # Errors
    /// When the run's folder cannot be written.
    pub fn warn(&self, phase: Phase, step: u64, text: String) -> Result<()> {
        let warning = Warning::for_step(phase, step, text);
        self.console.print(&warning.line());
        self.folder.write_warning(&warning)
    }

    /// Warns about unusual values of a step.
    fn warn_about_step(
        &mut self,
        environment: &Environment,
        step: u64,
        rollouts: &Rollouts,
        metrics: &Metrics,
    ) -> Result<()> {
        if rollouts.has_tool_timeout() && !self.has_tool_timeout {
            self.has_tool_timeout = true;
            let what = "a tool call was ended by the wall-clock limit (interpreter.wall_clock_s); from this step on, another run \
                                            of this recipe may give different results";
            self.warn(Phase::Rl, step, what.to_owned())?;
        }
        let samples = rollouts.groups.iter().zip(&rollouts.messages).flat_map(|(group, messages)| {
            let all = group.trajectories.iter().zip(messages);
            all.map(|(trajectory, messages)| (trajectory, messages.as_slice()))
        });
        let counts = SampleCounts::count(environment.task.as_ref(), self.facts.response_tokens_max, samples);
        let causes = self.monitor.record_causes(counts.messages(&self.facts));
        causes.into_iter().try_for_each(|cause| self.warn_of_cause(Phase::Rl, step, cause))?;
        if counts.has_readable_answers() {
            self.facts.answers_read_in_step = Some(step);
        }
        let warnings = self.monitor.record(step, metrics);
        warnings.into_iter().try_for_each(|warning| self.warn(Phase::Rl, step, warning))
    }

    /// Records the norm of a step of the SFT warm-up, and warns if its update was skipped.
    ///
    /// # Errors
    /// When the run's folder cannot be written.
    pub fn warn_about_warm_up(&mut self, step: u64, metrics: &Metrics) -> Result<()> {
        match self.monitor.warm_up_norms.record(metrics) {
            Some(warning) => self.warn(Phase::SftWarmUp, step, warning),
            None => Ok(()),
        }
    }

    /// Writes a row of metrics with the timings and the memory peaks since the last row.
    ///
    /// # Errors
    /// When the run's folder cannot be written.
    pub fn write_row(&mut self, step: u64, phase: Phase, mut metrics: Metrics) -> Result<()> {
        metrics.extend(self.timings.take());
        metrics.extend(memory_peaks(&self.device)?);
        self.folder.write_metrics(&Row { step, phase, metrics })
    }

    /// Returns the norms of the SFT warm-up.
    pub fn warm_up_norms(&self) -> &GradientNorms {
        &self.monitor.warm_up_norms
    }
}

/// Removes the status file at the end of the run, including after an error.
impl Drop for Observer {
    fn drop(&mut self) {
        self.console.remove_status_file();
    }
}

/// Returns the number of trajectories of an evaluation.
fn evaluation_trajectories(environment: &Environment) -> usize {
    let problems: usize = environment.validation_prompts().iter().map(|(_, problems)| problems.len()).sum();
    problems * environment.recipe().eval.samples
}

/// Returns the peak memory of a GPU since the last row of metrics: memory allocated for tensors, and memory
/// reserved by this process.
fn memory_peaks(device: &Device) -> Result<Metrics> {
    let mut metrics = Metrics::new();
    if let Device::Cuda(gpu) = device {
        let memory: DeviceMemory = device_memory(gpu)?;
        metrics.set("perf/max_memory_allocated_gb", memory.used_max as f64 / 1e9);
        metrics.set("perf/max_memory_reserved_gb", memory.reserved_max as f64 / 1e9);
        reset_memory_peaks(gpu)?;
    }
    Ok(metrics)
}
