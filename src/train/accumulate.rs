//! Gradients of a whole batch: micro-batches side by side or one after the other, always summed in order.

use super::batch::MicroBatch;
use super::forward_backward::{HeadGradient, Pass, PassOutput, PassSettings};
use super::gradients::Gradients;
use crate::model::forward::Model;
use crate::model::weights::Parameters;
use crate::ops::threads::Threads;
use anyhow::Result;

/// Gradients that may exist at the same time when micro-batches run side by side, bytes. Larger models take one
/// micro-batch at a time and share out each op instead.
const SIDE_BY_SIDE_BYTES_MAX: usize = 512 << 20;

/// The model that a batch runs through.
#[derive(Clone, Copy)]
pub struct Learner<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// Which parameters learn.
    pub trainable: &'a [bool],
}

/// An objective of every micro-batch: its index, and what [`super::forward_backward::Objective`] sees.
pub type BatchObjective<'a> = &'a (dyn Fn(usize, &[f32], &[f32]) -> Result<HeadGradient> + Sync);

/// A critic's objective of every micro-batch: its index, and what [`super::forward_backward::ValueObjective`] sees.
pub type BatchValueObjective<'a> = &'a (dyn Fn(usize, &[f32]) -> Result<Vec<f32>> + Sync);

impl Learner<'_> {
    /// Runs forward and backward of every micro-batch. `objective(index, log_probs, entropies)` sees one
    /// micro-batch; its gradients must already be divided by the whole batch's count. `load_balance` is the
    /// coefficient over the whole batch. Returns the summed gradients, and every pass without its own.
    ///
    /// # Errors
    /// Those of the passes and of the objective.
    pub fn accumulate(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        objective: BatchObjective<'_>,
    ) -> Result<(Gradients, Vec<PassOutput>)> {
        let tokens: usize = batches.iter().map(|b| b.tokens.len()).sum();
        let run = |index: usize| {
            let batch = &batches[index];
            let share = batch.tokens.len() as f64 / tokens.max(1) as f64;
            let settings = PassSettings { load_balance: settings.load_balance * share, ..settings };
            self.pass(batch, settings)
                .forward_backward(&|log_probs, entropies| objective(index, log_probs, entropies))
        };
        let mut outputs = Vec::with_capacity(batches.len());
        let gradients = self.sum(batches.len(), run, |mut output| {
            let gradients = std::mem::replace(&mut output.gradients, Gradients::none(0));
            outputs.push(output);
            gradients
        })?;
        Ok((gradients, outputs))
    }

    /// The same for a critic. `objective(index, values)` sees one micro-batch and returns the gradient of its share.
    ///
    /// # Errors
    /// Those of the passes and of the objective.
    pub fn accumulate_values(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        objective: BatchValueObjective<'_>,
    ) -> Result<Gradients> {
        let run = |index: usize| {
            self.pass(&batches[index], settings).values_backward(&|values| objective(index, values))
        };
        self.sum(batches.len(), run, |gradients| gradients)
    }

    /// Runs `count` passes and adds up, in their order, the gradients that `take` finds in each.
    fn sum<T: Send>(
        &self,
        count: usize,
        run: impl Fn(usize) -> Result<T> + Sync,
        mut take: impl FnMut(T) -> Gradients,
    ) -> Result<Gradients> {
        let mut gradients = Gradients::none(self.parameters.len());
        let wave = self.side_by_side();
        for start in (0..count).step_by(wave) {
            let passes = if wave == 1 {
                vec![self.threads.wide(|| run(start))?]
            } else {
                self.threads.map(wave.min(count - start), |i| run(start + i))?
            };
            passes.into_iter().for_each(|pass| gradients.add(take(pass)));
        }
        Ok(gradients)
    }

    /// Log-probabilities and entropies of every micro-batch, without gradients.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn forward(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<PassOutput>> {
        self.each(batches.len(), |index| self.pass(&batches[index], settings).forward())
    }

    /// A critic's values, without gradients: one a target, micro-batch after micro-batch.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn values(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<f32>> {
        Ok(self.each(batches.len(), |index| self.pass(&batches[index], settings).values())?.concat())
    }

    /// Passes that hold no gradients, in their order.
    fn each<T: Send>(&self, count: usize, run: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
        if self.side_by_side() == 1 {
            self.threads.wide(|| (0..count).map(&run).collect())
        } else {
            self.threads.map(count, run)
        }
    }

    fn pass<'b>(&'b self, batch: &'b MicroBatch, settings: PassSettings) -> Pass<'b> {
        let Learner { model, parameters, trainable, .. } = *self;
        Pass { model, parameters, trainable, batch, settings }
    }

    /// Micro-batches that run at the same time.
    fn side_by_side(&self) -> usize {
        let bytes = self.parameters.element_count() * size_of::<f32>();
        let threads = self.threads.count();
        if bytes * threads <= SIDE_BY_SIDE_BYTES_MAX { threads } else { 1 }
    }
}
