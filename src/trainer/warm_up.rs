//! The SFT warm-up (`[cold_start]`): supervised steps before reinforcement learning, by the same actor.

use super::Trainer;
use super::gradient_norms::{norm_limit, skipped_norm};
use crate::actor::micro_batch::Sequence;
use crate::actor::{GradientNorm, PassSettings};
use crate::learner::supervised::{self, SupervisedOutput};
use crate::metrics::{Metrics, Phase};
use anyhow::Result;

impl Trainer {
    /// Runs the SFT warm-up after step `start`. Returns whether a signal stopped it.
    pub(super) fn sft_warm_up(&mut self, start: u64) -> Result<bool> {
        let steps = self.environment.recipe().cold_start.steps;
        let every = self.environment.recipe().cold_start.eval_every_steps;
        let has_validation = every > 0 && !self.data.validation.is_empty();
        let progress = self.observer.stage_begins(Phase::SftWarmUp, steps, start);
        if start == 0 && has_validation {
            let mut metrics = Metrics::new();
            metrics.set("cold_start/held_out_loss", self.validation_loss()?);
            self.observer.write_row(0, Phase::SftWarmUp, metrics)?;
        }
        for step in start + 1..=steps {
            self.observer.activity_begins(format!("step {step} of the SFT warm-up"));
            let started = std::time::Instant::now();
            let (output, mut metrics) = self.warm_up_step(step)?;
            let is_last = step == steps;
            if has_validation && (is_last || step % every == 0) {
                let loss = self.observer.timings.time("held_out", || self.validation_loss())?;
                metrics.set("cold_start/held_out_loss", loss);
            }
            let seconds = started.elapsed().as_secs_f64();
            self.observer.timings.add("step", seconds);
            metrics.set("perf/throughput", output.tokens as f64 / seconds);
            self.observer.warm_up_step_ended(step, metrics)?;
            progress.advance(1, output.tokens as u64, &[("loss", output.loss)]);
            if self.save_if_due(Phase::SftWarmUp, step, is_last)? {
                return Ok(true);
            }
        }
        progress.finish();
        Ok(false)
    }

    /// Trains on the demonstrations of step `step`. Returns the loss and the metrics.
    fn warm_up_step(&mut self, step: u64) -> Result<(SupervisedOutput, Metrics)> {
        let pass = self.pass_settings(1.0);
        let Self { environment, data, loaded, observer, .. } = self;
        let (recipe, cold_start) = (environment.recipe(), &environment.recipe().cold_start);
        let first = (step - 1) * cold_start.batch_size as u64;
        let batch = observer.timings.time("demonstrations", || {
            let renderer = environment.renderer(loaded.config());
            let (task, seed) = (environment.task.as_ref(), recipe.train.seed);
            data.examples.batch(&renderer, task, seed, first, cold_start.batch_size)
        })?;
        let pass = PassSettings { load_balance_coefficient: cold_start.load_balance_coefficient, ..pass };
        let actor = &mut loaded.actor;
        let progress = |tokens| observer.console.start_pass("update", tokens);
        let output =
            observer.timings.time("update", || supervised::add_gradients(actor, &batch, pass, &progress))?;
        let mut metrics = Metrics::new();
        metrics.set("cold_start/loss", output.loss);
        if pass.load_balance_coefficient > 0.0 {
            metrics.set("cold_start/load_balance", output.load_balance);
        }
        let limit = norm_limit(recipe, observer.warm_up_norms());
        let update = actor.update_settings(step, cold_start.steps, limit)?;
        match observer.stages().run(("optimizer", "optimizer"), || actor.optim_step(&update))? {
            GradientNorm::Applied(norm) => metrics.set("cold_start/grad_norm", norm),
            GradientNorm::Skipped(norm) => {
                metrics.set("cold_start/updates_bad", 1.0);
                if let Some(norm) = skipped_norm(norm, limit)? {
                    metrics.set("cold_start/grad_norm_bad", norm);
                }
            }
        }
        observer.warn_about_warm_up(step, &metrics)?;
        metrics.set("cold_start/lr", update.lr);
        Ok((output, metrics))
    }

    fn validation_loss(&self) -> Result<f64> {
        let validation: &[Sequence] = &self.data.validation;
        let progress = |tokens| self.observer.console.start_pass("validation loss", tokens);
        supervised::loss(&self.loaded.actor, validation, self.pass_settings(1.0), &progress)
    }
}
