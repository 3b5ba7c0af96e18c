//! When a run saves, and what.

use super::Trainer;
use crate::metrics::Phase;
use crate::model::config::Form;
use crate::recipe::SavedDtype;
use crate::train::checkpoint::{Snapshot, TrainerState};
use crate::train::critic::Critic;
use crate::train::optimizer::Optimizer;
use anyhow::Result;

impl Trainer {
    /// Saves when it is time, at the end of a stage and when a signal asked for it. Returns whether one did.
    pub(super) fn checkpoint_or_stop(
        &mut self,
        phase: Phase,
        step: u64,
        last: bool,
        optimizer: &Optimizer,
        critic: Option<&Critic>,
    ) -> Result<bool> {
        let asked = self.stop.asked();
        let every = self.bench.plan.recipe.checkpoint.every_steps;
        if asked || last || (every > 0 && step.is_multiple_of(every)) {
            let begun = std::time::Instant::now();
            self.save(phase, step, optimizer, critic)?;
            self.timings.add("save_checkpoint", begun.elapsed().as_secs_f64());
        }
        Ok(asked)
    }

    fn save(
        &mut self,
        phase: Phase,
        step: u64,
        optimizer: &Optimizer,
        critic: Option<&Critic>,
    ) -> Result<()> {
        let bench = &self.bench;
        let checkpoint = &bench.plan.recipe.checkpoint;
        let state = TrainerState {
            phase,
            step,
            updates: optimizer.updates,
            critic_updates: critic.map_or(0, |critic| critic.optimizer.updates),
            metrics_bytes: self.folder.sync_metrics()?,
            kl_coefficient: self.kl.steered(),
        };
        let snapshot = Snapshot {
            config: &bench.model.config,
            form: match checkpoint.dtype {
                SavedDtype::F32 => Form::F32,
                SavedDtype::Bf16 => Form::Bf16,
                SavedDtype::Mxfp4 => Form::Mxfp4,
            },
            companions: &bench.companions,
            parameters: &bench.parameters,
            critic,
            state,
        };
        snapshot.write(&self.folder.path, checkpoint.keep)?;
        Ok(())
    }
}
