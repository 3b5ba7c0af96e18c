//! Gradients of a whole batch: micro-batches side by side or one after the other, always summed in order.

use super::batch::MicroBatch;
use super::forward_backward::{HeadGradient, Pass, PassOutput, PassSettings};
use super::gradients::GradientSum;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::model::weights::WeightSource;
use crate::ops::threads::Threads;
use anyhow::Result;

/// Weights up to this size, bytes, run their micro-batches side by side, each on a thread of its own; larger models take one
/// micro-batch at a time and share out each op instead.
const SIDE_BY_SIDE_BYTES_MAX: u64 = 256 << 20;

/// Whether micro-batches of a model of `weight_bytes` run side by side.
pub fn side_by_side(weight_bytes: u64) -> bool {
    weight_bytes <= SIDE_BY_SIDE_BYTES_MAX
}

/// The model that a batch runs through. Gradients gather in the parameters.
#[derive(Clone, Copy)]
pub struct Learner<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
}

/// An objective of every micro-batch: its index, and what [`super::forward_backward::HeadObjective`] sees.
pub type BatchObjective<'a> = &'a (dyn Fn(usize, &[f32], &[f32]) -> Result<HeadGradient> + Sync);

/// A critic's objective of every micro-batch: its index, and what [`super::forward_backward::ValueObjective`] sees.
pub type BatchValueObjective<'a> = &'a (dyn Fn(usize, &[f32]) -> Result<Vec<f32>> + Sync);

impl Learner<'_> {
    /// Runs forward and backward of every micro-batch; the parameters' gradients are then the batch's.
    /// `objective(index, log_probs, entropies)` sees one micro-batch; its gradients must already be divided by the whole
    /// batch's count. `load_balance` is the coefficient over the whole batch.
    ///
    /// # Errors
    /// Those of the passes and of the objective.
    pub fn accumulate(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        objective: BatchObjective<'_>,
    ) -> Result<Vec<PassOutput>> {
        let tokens: usize = batches.iter().map(|b| b.sequence_rows.positions_count()).sum();
        self.sum(batches.len(), |index, weights| {
            let batch = &batches[index];
            let share = batch.sequence_rows.positions_count() as f64 / tokens.max(1) as f64;
            let settings = PassSettings { load_balance: settings.load_balance * share, ..settings };
            let pass = Pass { model: self.model, weights, batch, settings };
            pass.forward_backward(&|log_probs, entropies| objective(index, log_probs, entropies))
        })
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
    ) -> Result<()> {
        self.sum(batches.len(), |index, weights| {
            let pass = Pass { model: self.model, weights, batch: &batches[index], settings };
            pass.values_backward(&|values| objective(index, values))
        })
        .map(drop)
    }

    /// Runs `count` passes, each with weights whose gradients go to its place in the sum.
    fn sum<T: Send>(
        &self,
        count: usize,
        run: impl Fn(usize, &dyn WeightSource) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let sum = GradientSum::begin(self.parameters)?;
        self.each(count, |index| {
            let weights = self.parameters.learning(&sum.of_pass(index));
            // Passes after a failed one would wait for it.
            weights.and_then(|weights| run(index, &weights)).inspect_err(|_| sum.fail(index))
        })
    }

    /// Log-probabilities and entropies of every micro-batch, without gradients.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn forward(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<PassOutput>> {
        let weights = self.parameters.frozen()?;
        let pass =
            |index: usize| Pass { model: self.model, weights: &weights, batch: &batches[index], settings };
        self.each(batches.len(), |index| pass(index).forward())
    }

    /// A critic's values, without gradients: one a target, micro-batch after micro-batch.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn values(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<f32>> {
        let weights = self.parameters.frozen()?;
        let pass =
            |index: usize| Pass { model: self.model, weights: &weights, batch: &batches[index], settings };
        Ok(self.each(batches.len(), |index| pass(index).values())?.concat())
    }

    /// `run(index)` of every index below `count`, in order. The choice changes no result.
    fn each<T: Send>(&self, count: usize, run: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
        if side_by_side(self.parameters.bytes()) {
            self.threads.map(count, run)
        } else {
            self.threads.wide(|| (0..count).map(&run).collect())
        }
    }
}
