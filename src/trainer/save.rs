//! Checkpoints of a run: their schedule and contents.

use super::Trainer;
use crate::actor::Actor;
use crate::checkpoint::{self, ModelFiles, Snapshot, TrainerState};
use crate::metrics::Phase;
use crate::model::config::WeightFormat;
use anyhow::Result;

impl Trainer {
    /// Saves a checkpoint if it is due by the schedule, at the end of a stage, or after a signal. Returns
    /// whether a signal requested a stop.
    pub(super) fn save_if_due(&mut self, phase: Phase, step: u64, is_last: bool) -> Result<bool> {
        // Some processes may not have received the signal yet, so all processes exchange it.
        let must_stop = self.loaded.mesh().any("whether to stop", self.stop.is_requested())?;
        let every = self.environment.plan.recipe.checkpoint.every_steps;
        if must_stop || is_last || (every > 0 && step.is_multiple_of(every)) {
            self.schedule.join_all()?;
            let started = std::time::Instant::now();
            let stage = self.observer.console.start_inner_stage("checkpoint", 0);
            self.save(phase, step)?;
            stage.finish();
            self.observer.timings.add("save_checkpoint", started.elapsed().as_secs_f64());
        }
        // After its last step, the run is done and not stopped.
        let is_end = is_last && (phase == Phase::Rl || self.environment.plan.recipe.train.steps == 0);
        Ok(must_stop && !is_end)
    }

    /// Warns if the disk has too little free space for the next checkpoints.
    pub(super) fn check_disk_space(&self) {
        let policy = checkpoint::estimate_bytes(
            self.environment.plan.recipe.checkpoint.dtype,
            &self.loaded.actor.parameters,
        );
        // A critic has the size of the policy, or of the policy's adapter, in f32 with its optimizer state.
        let recipe = &self.environment.plan.recipe;
        let critic = recipe.critic.as_ref().filter(|_| recipe.train.steps > 0);
        let critic = critic
            .map_or(0, |_| checkpoint::estimate_bytes(WeightFormat::F32, &self.loaded.actor.parameters));
        if let Some(warning) = self.observer.folder.disk_space_warning(policy + critic) {
            self.observer.console.print(&format!("warning: {warning}"));
        }
    }

    fn save(&mut self, phase: Phase, step: u64) -> Result<()> {
        let sampled_ahead = if phase == Phase::Rl { self.schedule.sampled_ahead()? } else { None };
        let Self { loaded, environment, observer, critic, reference_digest, kl, .. } = self;
        let critic = critic.as_ref().map(|critic| &critic.actor);
        let folder = &mut observer.folder;
        let write = || {
            let checkpoint = &environment.plan.recipe.checkpoint;
            let (metrics_bytes, metrics_digest) = folder.sync_metrics()?;
            let state = TrainerState {
                phase,
                step,
                updates: loaded.actor.updates(),
                critic_updates: critic.map_or(0, Actor::updates),
                metrics_bytes,
                metrics_digest: Some(metrics_digest),
                reference_digest: reference_digest.filter(|_| phase == Phase::Rl),
                teacher_digest: loaded.teacher.as_ref().map(|teacher| teacher.digest.clone()),
                kl_coefficient: kl.adaptive_coefficient(),
            };
            let snapshot = Snapshot {
                files: ModelFiles {
                    config: loaded.config(),
                    format: checkpoint.dtype,
                    companions: &loaded.companions,
                    base: loaded.base.as_ref(),
                },
                parameters: &loaded.actor.parameters,
                critic: critic.map(|critic| &critic.parameters),
                recipe: &environment.plan.to_toml(),
                sampled_ahead: sampled_ahead.as_deref(),
                state,
            };
            // The write may have failed because the folder was moved during the run.
            let written = snapshot.write(&folder.path, checkpoint.keep).map(drop);
            written.map_err(|error| folder.explain_write_error(error))
        };
        let critic = critic.map(|critic| &critic.parameters);
        let parameters = &loaded.actor.parameters;
        loaded.mesh().run_on_rank_zero(write, |request| checkpoint::serve(parameters, critic, &request))
    }
}
