//! The SFT warm-up (`[cold_start]`): supervised steps before reinforcement learning. Both use the same
//! forward and backward pass.

use super::{Trainer, WARM_UP_STAGE};
use crate::actor::batch_runner::BatchRunner;
use crate::actor::forward_backward::PassSettings;
use crate::actor::micro_batch::Sequence;
use crate::actor::optimizer::{GradientNorm, Optimizer};
use crate::learner::supervised;
use crate::metrics::{Metrics, Phase};
use anyhow::Result;

impl Trainer {
    /// Runs the SFT warm-up after step `start`. Returns whether a signal stopped it.
    pub(super) fn sft_warm_up(&mut self, mut optimizer: Optimizer, start: u64) -> Result<bool> {
        let recipe = self.environment.plan.recipe.clone();
        let cold_start = &recipe.cold_start;
        let progress = self.console.start_stage(WARM_UP_STAGE, cold_start.steps, start);
        if start == 0 && cold_start.eval_every_steps > 0 && !self.data.validation.is_empty() {
            let mut metrics = Metrics::new();
            metrics.set("cold_start/held_out_loss", self.validation_loss(&self.data.validation)?);
            self.write_row(0, Phase::SftWarmUp, metrics)?;
        }
        for step in start + 1..=cold_start.steps {
            self.set_activity(format!("step {step} of the SFT warm-up"));
            let started = std::time::Instant::now();
            let first = (step - 1) * cold_start.batch_size as u64;
            let batch = self.timings.time("demonstrations", || {
                let task = self.environment.task.as_ref();
                self.data.examples.batch(
                    &self.environment.renderer(self.loaded.config()),
                    task,
                    recipe.train.seed,
                    first,
                    cold_start.batch_size,
                )
            })?;
            let pass = PassSettings {
                load_balance_coefficient: cold_start.load_balance_coefficient,
                ..self.pass_settings(1.0)
            };
            let output = self.timings.time("update", || {
                let tokens_max = recipe.train.micro_batch_tokens;
                supervised::gradients(&self.runner(), &batch, tokens_max, pass, &self.console)
            })?;
            let mut metrics = Metrics::new();
            metrics.set("cold_start/loss", output.loss);
            if pass.load_balance_coefficient > 0.0 {
                metrics.set("cold_start/load_balance", output.load_balance);
            }
            let lr = optimizer.learning_rate(step, cold_start.steps);
            let norm_limit = self.norm_limit(&self.monitor.warm_up_norms);
            let stage = self.console.start_inner_stage("optimizer", 0);
            let BatchRunner { threads, parameters, .. } = self.runner();
            let update = || optimizer.clip_and_update(threads, parameters, lr, norm_limit);
            let norm = self.timings.time("optimizer", update)?;
            stage.finish();
            match norm {
                GradientNorm::Applied(norm) => metrics.set("cold_start/grad_norm", norm),
                GradientNorm::Skipped(norm) => {
                    metrics.set("cold_start/updates_bad", 1.0);
                    if norm.is_finite() {
                        metrics.set("cold_start/grad_norm_bad", norm);
                    }
                }
            }
            if let Some(warning) = self.monitor.warm_up_norms.record(&metrics) {
                self.warn(Phase::SftWarmUp, step, warning)?;
            }
            metrics.set("cold_start/lr", lr);
            let is_last = step == cold_start.steps;
            let every = cold_start.eval_every_steps;
            let is_validation_due = every > 0 && (is_last || step % every == 0);
            if is_validation_due && !self.data.validation.is_empty() {
                let loss = self.timings.time("held_out", || self.validation_loss(&self.data.validation))?;
                metrics.set("cold_start/held_out_loss", loss);
            }
            let seconds = started.elapsed().as_secs_f64();
            self.timings.add("step", seconds);
            metrics.set("perf/throughput", output.tokens as f64 / seconds);
            self.write_row(step, Phase::SftWarmUp, metrics)?;
            self.monitor.warm_up_norms.check_skipped_steps()?;
            progress.advance(1, output.tokens as u64, &[("loss", output.loss)]);
            if self.save_if_due(Phase::SftWarmUp, step, is_last, &optimizer, None)? {
                return Ok(true);
            }
        }
        progress.finish();
        Ok(false)
    }

    fn validation_loss(&self, validation: &[Sequence]) -> Result<f64> {
        let tokens = self.environment.plan.recipe.train.micro_batch_tokens;
        supervised::loss(&self.runner(), validation, tokens, self.pass_settings(1.0), &self.console)
    }
}
