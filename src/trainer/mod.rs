//! A run of `rloss train`: SFT warm-up, then reinforcement learning step by step, with evaluations and
//! checkpoints.
//!
//! [`Trainer::reinforcement_learning`] is the loop over steps; `step.rs` is the algorithm of one step.

mod ahead;
mod data;
mod forward_passes;
pub mod gradient_norms;
mod in_flight;
mod monitor;
mod sample;
mod save;
mod start;
pub mod step;
mod warm_up;

pub use data::TrainingData;

use crate::checkpoint::{self, ResumePoint};
use crate::actor::OptimizerSettings;
use crate::actor::Actor;
use crate::actor::batch_runner::BatchRunner;
use crate::learner::critic::Critic;
use crate::actor::forward_backward::PassSettings;
use crate::actor::optimizer::Optimizer;
use crate::metrics::{Console, Metrics, Phase, Row, Timings, Warning, read_rows};
use crate::model::parameters::Parameters;
use crate::ops::cuda::{device_memory, reset_memory_peaks};
use crate::policy::kl_in_reward::KlController;
use crate::rollout::Rollouts;
use crate::run::causes::{SampleCounts, SampleFacts, sample_causes};
use crate::run::environment::Environment;
use crate::run::evaluation::{ValidationResult, evaluate};
use crate::run::loaded::LoadedModel;
use crate::run::run_folder::RunFolder;
use crate::run::sampling::Sampling;
use crate::run::sampling_folder::report_failures;
use crate::run::signals::StopFlag;
use ahead::{Beside, SampledAhead};
use anyhow::{Result, ensure};
use candle_core::Device;
use in_flight::InFlight;
use monitor::Monitor;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The metrics on the console line of a step: label and metric name.
const CONSOLE_METRICS: [(&str, &str); 3] = [
    ("reward", "critic/rewards/mean"),
    ("explained variance", "critic/vf_explained_var"),
    ("max mismatch", "mismatch/log_ppl_abs_diff_max"),
];

/// The name of the SFT warm-up on the console.
const WARM_UP_STAGE: &str = "SFT warm-up";

/// One training run.
pub struct Trainer {
    loaded: LoadedModel,
    /// Samplings in flight share it.
    environment: Arc<Environment>,
    /// Whether two samplings may be in flight.
    two_samplings: bool,
    data: TrainingData,
    folder: RunFolder,
    console: Console,
    stop: StopFlag,
    timings: Arc<Timings>,
    /// Whether a tool call has reached the wall-clock limit, so that the run is not reproducible. The warning
    /// about this is printed only once.
    has_tool_timeout: bool,
    /// The warnings about samples so far, without their digits.
    told_causes: Vec<(Phase, String)>,
    /// The current activity, as text.
    activity: Arc<Mutex<String>>,
    monitor: Monitor,
    /// The frozen reference, if the recipe needs a reference.
    reference: Option<Parameters>,
    /// The digest of the file that holds the reference.
    reference_digest: Option<blake3::Hash>,
    /// Number of steps in a row, including the last one, in which no group could be trained on.
    steps_without_groups: u64,
    /// The KL coefficient, which may adapt to a target.
    kl: KlController,
    /// The samples of later steps.
    ahead: SampledAhead,
    /// The samplings of the steps after those.
    in_flight: VecDeque<InFlight>,
    /// Resources of sampling beside the update, if the recipe samples ahead and this process can.
    beside: Option<Beside>,
}

impl Trainer {
    /// Prepares a run in `folder`. With the checkpoint `resume_point` the run is resumed, else it is new.
    ///
    /// # Errors
    /// When memory runs out, or the metrics of a resumed run cannot be read.
    pub fn new(
        (mut loaded, environment): (LoadedModel, Arc<Environment>),
        two_samplings: bool,
        data: TrainingData,
        folder: RunFolder,
        console: Console,
        stop: StopFlag,
        resume_point: Option<&ResumePoint>,
    ) -> Result<Self> {
        loaded.actor.parameters.set_trainable(&loaded.trainable)?;
        if let Some(agent) = &environment.agent {
            agent.log_to(folder.path.join("agent.log"))?;
        }
        let adapted_coefficient = resume_point.and_then(|point| point.state.kl_coefficient);
        let kl = Self::kl_controller(&environment.recipe().policy.kl, adapted_coefficient)?;
        let mut monitor = Monitor::new(environment.recipe());
        if resume_point.is_some() {
            let earlier_rows = read_rows(&folder.path.join("metrics.jsonl"))?;
            // Warnings about earlier steps are not repeated.
            earlier_rows.iter().for_each(|row| match row.phase {
                Phase::Rl => drop(monitor.record(row.step, &row.metrics)),
                Phase::SftWarmUp => drop(monitor.warm_up_norms.record(&row.metrics)),
                Phase::Eval => {}
            });
        }
        let beside = Beside::new(&loaded.actor, environment.recipe(), two_samplings)?;
        Ok(Self {
            loaded,
            environment,
            two_samplings,
            data,
            folder,
            console,
            stop,
            timings: Arc::new(Timings::new()),
            has_tool_timeout: false,
            told_causes: vec![],
            activity: Arc::default(),
            monitor,
            reference: None,
            reference_digest: None,
            steps_without_groups: 0,
            kl,
            ahead: SampledAhead::default(),
            in_flight: VecDeque::new(),
            beside,
        })
    }

    /// Runs the SFT warm-up and reinforcement learning. Returns whether a signal stopped the run.
    ///
    /// # Errors
    /// Any error. The last checkpoint stays intact.
    pub fn run(&mut self, resume_point: Option<ResumePoint>) -> Result<bool> {
        let recipe = self.environment.plan.recipe.clone();
        let done = resume_point.as_ref().map(|p| (p.state.phase, p.state.step));
        self.plan_progress(done);
        if self.loaded.mesh().is_rank_zero() {
            self.console.start_status_file(&self.folder.path);
        }
        let (console, activity) = (self.console.clone(), self.activity.clone());
        self.stop.on_request(move || {
            let activity = activity.lock().unwrap_or_else(PoisonError::into_inner).clone();
            console.print(&format!("finishing {activity}, then saving; repeat the signal to stop at once"));
        })?;
        self.save_base_model()?;
        let (mut rl_start, mut resumed) = (0, None);
        match done {
            Some((Phase::Rl, step)) => (rl_start, resumed) = (step, resume_point),
            _ if recipe.cold_start.steps > 0 => {
                let optimizer = self.optimizer(&recipe.cold_start.optimizer, resume_point.as_ref())?;
                if self.sft_warm_up(optimizer, done.map_or(0, |(_, step)| step))? {
                    return Ok(true);
                }
            }
            _ => {}
        }
        if recipe.train.steps == 0 {
            return Ok(false);
        }
        self.attach_adapter()?;
        let stage = self.console.start_inner_stage("optimizer, critic, reference", 0);
        let optimizer = self.optimizer(&recipe.train.optimizer, resumed.as_ref())?;
        let critic = self.critic(resumed.as_ref())?;
        self.set_reference(resumed.as_ref())?;
        if let Some(resume_point) = &resumed {
            self.check_teacher(resume_point)?;
            self.restore_ahead(resume_point)?;
        }
        stage.finish();
        if resumed.is_none() && recipe.eval.before_training && recipe.train.steps > 0 {
            self.evaluate(0)?;
        }
        self.reinforcement_learning(optimizer, critic, rl_start)
    }

    /// Tells the console which work remains after `done`. The console then shows one remaining time for all
    /// stages.
    fn plan_progress(&self, done: Option<(Phase, u64)>) {
        let recipe = self.environment.recipe();
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
        let problems: usize =
            self.environment.validation_prompts().iter().map(|(_, problems)| problems.len()).sum();
        let conversations = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt;
        self.console.set_plan(&[
            (
                WARM_UP_STAGE,
                recipe.cold_start.steps.saturating_sub(warm_up_done),
                recipe.cold_start.batch_size as f64,
            ),
            // In the quickstart, sampling one conversation and training on it costs as much as 1.5
            // demonstrations; sampling alone costs 0.25. Measured times replace this guess.
            ("rl", steps.saturating_sub(rl_done), 1.5 * conversations as f64),
            ("evaluation", evaluations, 0.25 * (problems * recipe.eval.samples) as f64),
        ]);
    }

    /// Estimates the time of an evaluation from the rollout of the step, because both sample trajectories.
    fn estimate_evaluation_time(&self, samples: &sample::SampleOutput) {
        let all = samples.rollouts.trajectories().count();
        if samples.seconds > 0.0 && all > 0 {
            let problems: usize =
                self.environment.validation_prompts().iter().map(|(_, problems)| problems.len()).sum();
            let trajectories = problems * self.environment.recipe().eval.samples;
            self.console.expect_step("evaluation", samples.seconds * trajectories as f64 / all as f64);
        }
    }

    /// Sets the current activity, which is printed when a signal requests a stop.
    fn set_activity(&self, activity: String) {
        *self.activity.lock().unwrap_or_else(PoisonError::into_inner) = activity;
    }

    /// Returns the policy in place, and the environment.
    fn sampling(&self) -> Sampling<'_> {
        Sampling { actor: &self.loaded.actor, environment: &self.environment }
    }

    /// Creates an optimizer. With `resume_point`, restores the state and the weights from the checkpoint.
    fn optimizer(
        &mut self,
        settings: &OptimizerSettings,
        resume_point: Option<&ResumePoint>,
    ) -> Result<Optimizer> {
        let round = self.environment.plan.recipe.model.dtype.is_bf16();
        let parameters = &mut self.loaded.actor.parameters;
        let mut optimizer = Optimizer::new(settings, parameters, round)?;
        if let Some(resume_point) = resume_point {
            optimizer.updates = resume_point.state.updates;
            checkpoint::restore(&resume_point.folder, parameters)?;
            optimizer.write_weights(parameters)?;
        }
        self.check_disk_space();
        Ok(optimizer)
    }

    /// Runs reinforcement learning after step `start`. Returns whether a signal stopped it.
    fn reinforcement_learning(
        &mut self,
        mut optimizer: Optimizer,
        mut critic: Option<Critic>,
        start: u64,
    ) -> Result<bool> {
        let recipe = self.environment.plan.recipe.clone();
        let steps = recipe.train.steps;
        let progress = self.console.start_stage("rl", steps, start);
        for step in start + 1..=steps {
            self.set_activity(format!("step {step}"));
            let started = std::time::Instant::now();
            let (samples, update_metrics, token_stats) = self.step(step, &mut optimizer, critic.as_mut())?;
            self.estimate_evaluation_time(&samples);
            let mut metrics = samples.metrics(step)?;
            metrics.extend(update_metrics);
            let seconds = started.elapsed().as_secs_f64();
            self.timings.add("step", seconds);
            let counts = samples.rollouts.counts();
            let tokens = counts.prefilled_tokens + counts.sampled_tokens;
            metrics.set("perf/throughput", tokens as f64 / seconds);
            metrics.set("perf/sampled_tokens_per_s", counts.sampled_tokens as f64 / seconds);
            self.warn_about_step(step, &samples.rollouts, &metrics)?;
            self.warn_about_workers(Phase::Rl, step)?;
            let console_metrics: Vec<(&str, f64)> = CONSOLE_METRICS
                .iter()
                .filter_map(|&(name, metric)| metrics.get(metric).map(|value| (name, value)))
                .collect();
            self.write_row(step, Phase::Rl, metrics)?;
            self.monitor.actor_norms.check_skipped_steps()?;
            self.monitor.critic_norms.check_skipped_steps()?;
            let logged_rows = samples.rows(recipe.logging.trajectories_per_step, &token_stats);
            self.folder.write_trajectories(&format!("step-{step:06}"), logged_rows.into_iter())?;
            progress.advance(1, counts.sampled_tokens as u64, &console_metrics);

            let is_last = step == steps;
            if recipe.eval.every_steps > 0 && (is_last || step % recipe.eval.every_steps == 0) {
                self.evaluate(step)?;
            }
            if self.save_if_due(Phase::Rl, step, is_last, &optimizer, critic.as_ref())? {
                return Ok(true);
            }
        }
        progress.finish();
        report_failures(self.monitor.failure_counts(), &self.console)?;
        Ok(false)
    }

    fn evaluate(&mut self, step: u64) -> Result<()> {
        if self.environment.validation_prompts().iter().all(|(_, held_out)| held_out.is_empty()) {
            return Ok(());
        }
        self.join_samplings()?;
        self.set_activity(match step {
            0 => "the first evaluation and step 1".to_owned(),
            _ => format!("the evaluation after step {step}"),
        });
        let started = std::time::Instant::now();
        self.console.begin_step("evaluation");
        let evaluation = evaluate(self.sampling(), step, &self.console, &|| false)?
            .ok_or_else(|| anyhow::anyhow!("the evaluation was stopped"))?;
        self.console.count_step("evaluation");
        self.timings.add("testing", started.elapsed().as_secs_f64());
        self.timings.add("step", started.elapsed().as_secs_f64());
        self.warn_about_workers(Phase::Eval, step)?;
        self.console.print(&format!("step {step}: {}", evaluation.summary()));
        let causes = sample_causes(
            &self.loaded,
            &self.environment,
            evaluation.sets.iter().flat_map(ValidationResult::rows),
        );
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
        let logged_rows = evaluation.rows().take(self.environment.plan.recipe.logging.trajectories_per_step);
        self.folder.write_trajectories(&format!("eval-{step:06}"), logged_rows)
    }

    fn runner(&self) -> BatchRunner<'_> {
        let Actor { model, parameters, execution } = &self.loaded.actor;
        BatchRunner { threads: &execution.threads, model, parameters }
    }

    fn pass_settings(&self, temperature: f64) -> PassSettings {
        PassSettings {
            recompute_layers: self.loaded.actor.execution.recompute_layers,
            temperature,
            load_balance_coefficient: 0.0,
            keeps_routed_experts: false,
            forward: self.environment.training_forward(),
        }
    }

    /// Warns if workers of the Python tool died.
    fn warn_about_workers(&self, phase: Phase, step: u64) -> Result<()> {
        match self.environment.dead_worker_warning() {
            Some(deaths) => self.warn(phase, step, deaths),
            None => Ok(()),
        }
    }

    /// Warns about the samples of a step. A warning that differs from an earlier one of this phase only in
    /// its numbers is left out: its advice is long, and does not change.
    fn warn_of_cause(&mut self, phase: Phase, step: u64, cause: String) -> Result<()> {
        let words = cause.replace(|c: char| c.is_ascii_digit(), "");
        if self.told_causes.contains(&(phase, words.clone())) {
            return Ok(());
        }
        self.told_causes.push((phase, words));
        self.warn(phase, step, cause)
    }

    /// Prints a warning about a step and stores it for the report page.
    fn warn(&self, phase: Phase, step: u64, text: String) -> Result<()> {
        let warning = Warning::for_step(phase, step, text);
        self.console.print(&warning.line());
        self.folder.write_warning(&warning)
    }

    /// Warns about unusual values of a step.
    fn warn_about_step(&mut self, step: u64, rollouts: &Rollouts, metrics: &Metrics) -> Result<()> {
        if rollouts.has_tool_timeout() && !self.has_tool_timeout {
            self.has_tool_timeout = true;
            let what = "a tool call was ended by the wall-clock limit (interpreter.wall_clock_s); from this step on, another run \
                                            of this recipe may give different results";
            self.warn(Phase::Rl, step, what.to_owned())?;
        }
        let samples = rollouts.groups.iter().zip(&rollouts.messages).flat_map(|(group, messages)| {
            group
                .trajectories
                .iter()
                .zip(messages)
                .map(|(trajectory, messages)| (trajectory, messages.as_slice()))
        });
        let facts = SampleFacts::new(&self.loaded, &self.environment);
        let causes = SampleCounts::count(self.environment.task.as_ref(), facts.response_tokens_max, samples);
        let causes = causes.messages(&facts);
        let causes = self.monitor.record_causes(causes);
        causes.into_iter().try_for_each(|cause| self.warn_of_cause(Phase::Rl, step, cause))?;
        let warnings = self.monitor.record(step, metrics);
        warnings.into_iter().try_for_each(|warning| self.warn(Phase::Rl, step, warning))
    }

    fn write_row(&mut self, step: u64, phase: Phase, mut metrics: Metrics) -> Result<()> {
        metrics.extend(self.timings.take());
        metrics.extend(memory_peaks(self.loaded.actor.parameters.device())?);
        self.folder.write_metrics(&Row { step, phase, metrics })
    }
}

/// At the end of the run, including after an error: removes the status file, and ends the samplings in
/// flight.
impl Drop for Trainer {
    fn drop(&mut self) {
        self.console.remove_status_file();
        self.in_flight.clear();
    }
}

/// Returns the peak memory of a GPU since the last row of metrics: memory allocated for tensors, and memory
/// reserved by this process.
fn memory_peaks(device: &Device) -> Result<Metrics> {
    let mut metrics = Metrics::new();
    if let Device::Cuda(gpu) = device {
        let memory = device_memory(gpu)?;
        metrics.set("perf/max_memory_allocated_gb", memory.used_max as f64 / 1e9);
        metrics.set("perf/max_memory_reserved_gb", memory.reserved_max as f64 / 1e9);
        reset_memory_peaks(gpu)?;
    }
    Ok(metrics)
}
