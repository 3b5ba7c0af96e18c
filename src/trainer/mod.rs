//! A run of `rloss train`: SFT warm-up, then reinforcement learning step by step, with evaluations and
//! checkpoints.
//!
//! [`Trainer::reinforcement_learning`] is the loop over steps; `schedule.rs` gives a step its samples,
//! `step.rs` is the algorithm of one update, `observer.rs` shows and records.

mod data;
pub mod gradient_norms;
mod in_flight;
mod monitor;
pub mod observer;
mod sample;
mod save;
mod schedule;
mod start;
pub mod step;
mod warm_up;

pub use data::TrainingData;

use crate::actor::{Actor, OptimizerSettings, PassSettings};
use crate::checkpoint::ResumePoint;
use crate::learner::critic::Critic;
use crate::metrics::{Console, Metrics, Phase};
use crate::model::forward::ForwardOptions;
use crate::policy::kl_in_reward::KlController;
use crate::run::causes::SampleFacts;
use crate::run::environment::Environment;
use crate::run::evaluation::evaluate;
use crate::run::loaded::LoadedModel;
use crate::run::run_folder::RunFolder;
use crate::run::sampling::Sampling;
use crate::run::signals::StopFlag;
use crate::trajectory::{Group, TokenStats};
use anyhow::{Context, Result, ensure};
use gradient_norms::{GradientNormLimits, norm_limit};
use observer::{FinishedStep, Observer};
use sample::SampleOutput;
use schedule::Schedule;
use std::sync::Arc;
use std::time::Instant;
use step::PolicyStep;

/// Number of steps in a row without a group to train on after which a run ends.
const STEPS_WITHOUT_GROUPS_MAX: u64 = 3;

/// One training run.
pub struct Trainer {
    /// The policy, and what was loaded with it.
    loaded: LoadedModel,
    /// Samplings in flight share it.
    environment: Arc<Environment>,
    critic: Option<Critic>,
    /// The frozen reference, if the recipe needs a reference.
    reference: Option<Actor>,
    /// The digest of the file that holds the reference.
    reference_digest: Option<blake3::Hash>,
    data: TrainingData,
    schedule: Schedule,
    observer: Observer,
    stop: StopFlag,
    /// Number of steps in a row, including the last one, in which no group could be trained on.
    steps_without_groups: u64,
    /// The KL coefficient, which may adapt to a target.
    kl: KlController,
}

impl Trainer {
    /// Prepares a run in `folder`. With the checkpoint `resume_point` the run is resumed, else it is new.
    ///
    /// # Errors
    /// When memory runs out, or the metrics of a resumed run cannot be read.
    pub fn new(
        (mut loaded, environment): (LoadedModel, Arc<Environment>),
        two_samplings: bool,
        mut data: TrainingData,
        (folder, console): (RunFolder, Console),
        stop: StopFlag,
        resume_point: Option<&ResumePoint>,
    ) -> Result<Self> {
        loaded.actor.parameters.set_trainable(&loaded.trainable)?;
        if let Some(agent) = &environment.agent {
            agent.log_to(folder.path.join("agent.log"))?;
        }
        let adapted_coefficient = resume_point.and_then(|point| point.state.kl_coefficient);
        let recipe = environment.recipe();
        let kl = Self::kl_controller(&recipe.policy.kl, adapted_coefficient)?;
        let facts = SampleFacts::new(&loaded, &environment);
        let device = loaded.actor.parameters.device().clone();
        let observer = Observer::new((folder, console), recipe, (facts, device), resume_point)?;
        let (actor, stored) = (&mut loaded.actor, data.stored.take());
        let schedule = Schedule::new(&environment, &observer.timings, actor, stored, two_samplings)?;
        Ok(Self {
            loaded,
            environment,
            critic: None,
            reference: None,
            reference_digest: None,
            data,
            schedule,
            observer,
            stop,
            steps_without_groups: 0,
            kl,
        })
    }

    /// Runs the SFT warm-up and reinforcement learning. Returns whether a signal stopped the run.
    ///
    /// A resume in the warm-up restores weights and optimizer (`trainer.safetensors`). A resume in
    /// reinforcement learning restores, in this order: weights and optimizer, the critic
    /// (`critic.safetensors`), the reference (`reference.safetensors` of the run), and what was sampled
    /// ahead.
    ///
    /// # Errors
    /// Any error. The last checkpoint stays intact.
    pub fn run(&mut self, resume_point: Option<ResumePoint>) -> Result<bool> {
        let recipe = self.environment.recipe().clone();
        let done = resume_point.as_ref().map(|p| (p.state.phase, p.state.step));
        let is_rank_zero = self.loaded.mesh().is_rank_zero();
        self.observer.run_begins(&self.environment, done, is_rank_zero, &self.stop)?;
        self.save_base_model()?;
        let (mut rl_start, mut resumed) = (0, None);
        match done {
            Some((Phase::Rl, step)) => (rl_start, resumed) = (step, resume_point),
            _ if recipe.cold_start.steps > 0 => {
                self.start_optimizer(&recipe.cold_start.optimizer, resume_point.as_ref())?;
                if self.sft_warm_up(done.map_or(0, |(_, step)| step))? {
                    return Ok(true);
                }
            }
            _ => {}
        }
        if recipe.train.steps == 0 {
            return Ok(false);
        }
        self.attach_adapter()?;
        let stage = self.observer.console.start_inner_stage("optimizer, critic, reference", 0);
        self.start_optimizer(&recipe.train.optimizer, resumed.as_ref())?;
        self.critic = self.critic(resumed.as_ref())?;
        self.set_reference(resumed.as_ref())?;
        if let Some(resume_point) = &resumed {
            self.check_teacher(resume_point)?;
            self.schedule.restore(resume_point, self.loaded.config().vocab_size)?;
        }
        stage.finish();
        if resumed.is_none() && recipe.eval.before_training && recipe.train.steps > 0 {
            self.evaluate(0)?;
        }
        self.reinforcement_learning(rl_start)
    }

    /// Starts the optimizer of a stage. With `resume_point`, restores its state and the weights from the
    /// checkpoint.
    fn start_optimizer(
        &mut self,
        settings: &OptimizerSettings,
        resume_point: Option<&ResumePoint>,
    ) -> Result<()> {
        let actor = &mut self.loaded.actor;
        actor.start_optimizer(settings, self.environment.recipe().model.dtype.is_bf16())?;
        if let Some(ResumePoint { folder, state, .. }) = resume_point {
            actor.load(folder, Some(state.updates))?;
        }
        self.check_disk_space();
        Ok(())
    }

    /// Runs reinforcement learning after step `start`. Returns whether a signal stopped it.
    fn reinforcement_learning(&mut self, start: u64) -> Result<bool> {
        let (steps, every) =
            (self.environment.recipe().train.steps, self.environment.recipe().eval.every_steps);
        let progress = self.observer.stage_begins(Phase::Rl, steps, start);
        for step in start + 1..=steps {
            self.observer.activity_begins(format!("step {step}"));
            self.loaded.check_base_files()?;
            let started = Instant::now();
            let samples = self.schedule.next(step, &self.loaded.actor, self.observer.stages())?;
            let (metrics, token_stats) = self.update(step, &samples)?;
            let finished =
                FinishedStep { step, samples: &samples, metrics, token_stats: &token_stats, started };
            self.observer.step_ended(&self.environment, finished, &progress)?;
            let is_last = step == steps;
            if every > 0 && (is_last || step % every == 0) {
                self.evaluate(step)?;
            }
            if self.save_if_due(Phase::Rl, step, is_last)? {
                return Ok(true);
            }
        }
        progress.finish();
        self.observer.run_ended()?;
        Ok(false)
    }

    /// Trains on the groups of step `step`. Returns the metrics, and statistics of each trained token.
    fn update(&mut self, step: u64, samples: &SampleOutput) -> Result<(Metrics, Vec<TokenStats>)> {
        let groups = samples.training_groups();
        let groups: Vec<&Group> = groups.iter().map(|group| &**group).collect();
        if groups.is_empty() {
            self.skip_step(step)?;
            return Ok((Metrics::new(), vec![]));
        }
        self.steps_without_groups = 0;
        let Self { loaded, environment, critic, reference, observer, kl, .. } = self;
        let LoadedModel { actor, teacher, .. } = loaded;
        let recipe = environment.recipe();
        let reward_weights = environment.task.reward_weights();
        let update = PolicyStep {
            step,
            policy: &recipe.policy,
            train: &recipe.train,
            pass: PassSettings {
                load_balance_coefficient: recipe.train.load_balance_coefficient,
                ..pass_settings(environment, recipe.rollout.temperature)
            },
            old_log_prob_forward: ForwardOptions::for_old_log_probs(&recipe.arms, recipe.train.seed),
            response_tokens_max: recipe.rollout.response_tokens_max,
            reward_min: recipe.task.name.reward_min,
            reward_weights: &reward_weights,
            kl_coefficient: kl.coefficient,
            norm_limits: GradientNormLimits {
                actor: norm_limit(recipe, &observer.monitor.actor_norms),
                critic: norm_limit(recipe, &observer.monitor.critic_norms),
            },
            reference: reference.as_ref(),
            teacher: start::teacher(teacher.as_ref(), environment, reference.as_ref()),
            stages: observer.stages(),
        };
        let (metrics, token_stats) = update.run(&groups, actor, critic.as_mut())?;
        if let Some(penalty) = metrics.get("actor/reward_kl_penalty") {
            kl.update(penalty, groups.iter().map(|group| group.trajectories.len()).sum());
        }
        Ok((metrics, token_stats))
    }

    /// Warns about a step without a group to train on: too many episodes failed. It changes no weight.
    ///
    /// # Errors
    /// After several such steps in a row.
    fn skip_step(&mut self, step: u64) -> Result<()> {
        self.steps_without_groups += 1;
        let steps = self.steps_without_groups;
        ensure!(
            steps < STEPS_WITHOUT_GROUPS_MAX,
            "for {steps} steps no group has had enough episodes with a reward; the first failures are printed above, and \
             agent/failed or trajectory/dropped in metrics.jsonl counts all; correct the program and resume the run"
        );
        let text = "no group has enough episodes with a reward (agent/failed, trajectory/dropped), so this step changes no weight";
        self.observer.warn(Phase::Rl, step, text.to_owned())
    }

    fn evaluate(&mut self, step: u64) -> Result<()> {
        if self.environment.validation_prompts().iter().all(|(_, held_out)| held_out.is_empty()) {
            return Ok(());
        }
        self.schedule.join_all()?;
        self.observer.evaluation_begins(step);
        let started = Instant::now();
        let sampling = Sampling { actor: &self.loaded.actor, environment: &self.environment };
        let evaluation = evaluate(sampling, step, &self.observer.console, &|| false)?
            .context("the evaluation was stopped")?;
        self.observer.evaluation_ended(&self.environment, step, &evaluation, started)
    }

    /// Returns the settings of a training pass.
    fn pass_settings(&self, temperature: f64) -> PassSettings {
        pass_settings(&self.environment, temperature)
    }
}

fn pass_settings(environment: &Environment, temperature: f64) -> PassSettings {
    PassSettings::new(temperature, environment.training_forward())
}
