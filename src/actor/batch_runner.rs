//! Runs the micro-batches of a batch, in parallel or one at a time. Adds up their gradients in batch order.

use super::columns::Columns;
use super::forward_backward::{ColumnLoss, Pass, PassOutput, PassSettings};
use super::gradients::GradientSum;
use super::micro_batch::{MicroBatch, MicroBatchLimits, PackingParameters};
use super::teacher::TeacherPasses;
use crate::metrics::Progress;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::model::weights::Weights;
use crate::ops::reverse_kl::TeacherRows;
use crate::ops::threads::{Threads, with_spinning_threads};
use anyhow::{Context, Result};

/// Maximum bytes of a model's weights for which micro-batches run in parallel, one per thread. For a larger
/// model, one micro-batch runs at a time and its ops use all threads.
const PARALLEL_BYTES_MAX: u64 = 256 << 20;

/// Fraction of a pass's time that the forward pass takes, for the progress display.
const FORWARD_SHARE: f64 = 1.0 / 3.0;

/// Returns whether micro-batches of a model with `weight_bytes` bytes of weights run in parallel.
pub fn runs_in_parallel(weight_bytes: u64) -> bool {
    weight_bytes <= PARALLEL_BYTES_MAX
}

/// Runs micro-batches through a model, and adds their gradients to those of the model's parameters.
#[derive(Clone, Copy)]
pub struct BatchRunner<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// Whether backward passes compute each layer again.
    pub recompute_layers: bool,
}

/// The gradient of a [`ColumnLoss`]. It also gets the index of the micro-batch.
pub type MicroBatchLoss<'a, C> = &'a (dyn Fn(usize, &C) -> Result<C> + Sync);

impl BatchRunner<'_> {
    /// Runs the forward and backward pass of every micro-batch. Adds their gradients to those of the
    /// parameters, in batch order.
    ///
    /// `loss` is called for every micro-batch, including those that other processes ran. It must divide its
    /// gradients by the token count of the whole batch. `settings.load_balance_coefficient` is the
    /// coefficient for the whole batch. With a `teacher`, the columns have the divergences from it.
    /// `progress` advances by the tokens of this process, layer by layer.
    ///
    /// # Errors
    /// When a pass or the loss fails. A part of the gradients may have been added.
    pub fn accumulate<C: Columns>(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        teacher: Option<&TeacherPasses>,
        loss: MicroBatchLoss<'_, C>,
        progress: &Progress,
    ) -> Result<Vec<PassOutput<C>>> {
        let tokens: usize = batches.iter().map(|b| b.sequence_rows.positions_count()).sum();
        let mesh = self.parameters.mesh();
        let pass = |slot: PassSlot, weights: &Weights| {
            let batch = &*batches[slot.index].local_shard(mesh)?;
            let share = batch.sequence_rows.positions_count() as f64 / tokens.max(1) as f64;
            // A masked pass adds no gradient.
            let share = if slot.masked { 0.0 } else { share };
            let settings = PassSettings {
                load_balance_coefficient: settings.load_balance_coefficient * share,
                ..settings
            };
            // The teacher's pass ends before the policy's pass begins, so their activations do not add up.
            let teacher = teacher.map(|teacher| teacher.rows(slot.index)).transpose()?;
            let pass = self.pass(weights, batch, settings, teacher.as_ref());
            let progress_tokens = progress_tokens(&batches[slot.index], &slot);
            let loss =
                |columns: &C| if slot.masked { Ok(columns.zeros()) } else { loss(slot.index, columns) };
            let on_layer = || progress.advance_tokens(progress_tokens * FORWARD_SHARE / self.layers());
            // With several ranks, no backward pass is skipped, because the ranks exchange the gradients of
            // every pass.
            let loss = ColumnLoss { gradient: &loss, skips_zeros: mesh.ranks() == 1 };
            pass.forward_backward(&loss, &on_layer)
        };
        let sum = GradientSum::new(self.parameters);
        let in_parallel = teacher.is_none_or(|teacher| runs_in_parallel(teacher.weight_bytes()));
        let outputs = self.run_passes(batches, in_parallel, |slot| {
            let backward_tokens = progress_tokens(&batches[slot.index], &slot) * (1.0 - FORWARD_SHARE);
            let sink = sum.pass_sink(slot.round, Some((progress, backward_tokens)));
            let weights = self.parameters.pass_weights(Some(&sink));
            // Later passes must not wait for a pass that failed.
            let output = weights.and_then(|weights| pass(slot, &weights));
            let output = output.inspect_err(|_| sum.fail(slot.round))?;
            if !output.has_gradients {
                sum.skip(slot.round);
                progress.advance_tokens(backward_tokens);
            }
            Ok(output)
        })?;
        sum.finish()?;
        let ran_elsewhere = |index: usize| index % mesh.data_ranks() != mesh.data_rank();
        for (index, output) in outputs.iter().enumerate().filter(|(index, _)| ran_elsewhere(*index)) {
            loss(index, &output.columns)?;
        }
        Ok(outputs)
    }

    /// Returns the head's columns of every micro-batch. Computes no gradients. `progress` advances as in
    /// [`Self::accumulate`].
    ///
    /// # Errors
    /// When a pass fails.
    pub fn forward<C: Columns>(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        progress: &Progress,
    ) -> Result<Vec<PassOutput<C>>> {
        let weights = self.parameters.pass_weights(None)?;
        self.run_passes(batches, true, |slot| {
            let batch = &*batches[slot.index].local_shard(self.parameters.mesh())?;
            let progress_tokens = progress_tokens(&batches[slot.index], &slot);
            let on_layer = || progress.advance_tokens(progress_tokens / self.layers());
            self.pass(&weights, batch, settings, None).forward(&on_layer)
        })
    }

    fn pass<'p>(
        &'p self,
        weights: &'p Weights,
        batch: &'p MicroBatch,
        settings: PassSettings,
        teacher: Option<&'p TeacherRows>,
    ) -> Pass<'p> {
        let Self { model, recompute_layers, .. } = *self;
        Pass { model, weights, batch, settings, recompute_layers, teacher }
    }

    /// Returns the number of tokens of `batches` that this process runs through the model.
    pub fn local_tokens(&self, batches: &[MicroBatch]) -> u64 {
        let mesh = self.parameters.mesh();
        let local = batches.iter().skip(mesh.data_rank()).step_by(mesh.data_ranks());
        local.map(|batch| batch.sequence_rows.positions_count() as u64).sum()
    }

    fn layers(&self) -> f64 {
        self.model.config.num_hidden_layers as f64
    }

    /// Returns whether passes run in parallel. On a GPU, passes run one at a time.
    fn runs_passes_in_parallel(&self) -> bool {
        self.parameters.device().is_cpu() && runs_in_parallel(self.parameters.bytes())
    }

    /// Returns the limits of micro-batches with up to `tokens_max` tokens.
    pub fn limits(&self, tokens_max: usize) -> MicroBatchLimits {
        MicroBatchLimits { tokens_max, needs_even_count: self.runs_passes_in_parallel() }
    }

    /// Returns the parameters for packing trajectories into micro-batches of up to `tokens_max` tokens. On a
    /// GPU, sequences share no rows, because the attention kernels read whole sequences.
    pub fn packing_parameters(&self, tokens_max: usize) -> PackingParameters {
        let shared_positions_max = if self.parameters.device().is_cpu() { usize::MAX } else { 0 };
        let top_k = self.model.config.num_experts_per_tok;
        PackingParameters { limits: self.limits(tokens_max), shared_positions_max, top_k }
    }

    /// Calls `run` on each of `batches` and returns the results in order. Passes run in parallel only if
    /// `may_run_in_parallel`.
    fn run_passes<C: Columns>(
        &self,
        batches: &[MicroBatch],
        may_run_in_parallel: bool,
        run: impl Fn(PassSlot) -> Result<PassOutput<C>> + Sync,
    ) -> Result<Vec<PassOutput<C>>> {
        let (mesh, count) = (self.parameters.mesh(), batches.len());
        let run = |slot| with_spinning_threads(self.parameters.device(), || run(slot));
        let run_index = |index: usize| run(PassSlot { index, round: index, masked: false });
        match mesh.ranks() {
            1 if may_run_in_parallel && self.runs_passes_in_parallel() => self.threads.map(count, run_index),
            1 => self.threads.run_on_all(|| (0..count).map(run_index).collect()),
            _ => self.threads.run_on_all(|| self.run_distributed(batches, &run)),
        }
    }

    /// Distributes the micro-batches over the processes, or over sequence-parallel groups of processes, in
    /// round-robin order. All processes run the same number of passes, because passes exchange tensors. A
    /// process without a micro-batch in the last round runs a masked pass.
    fn run_distributed<C: Columns>(
        &self,
        batches: &[MicroBatch],
        run: &(dyn Fn(PassSlot) -> Result<PassOutput<C>> + Sync),
    ) -> Result<Vec<PassOutput<C>>> {
        let (mesh, count) = (self.parameters.mesh(), batches.len());
        let (group, groups) = (mesh.data_rank(), mesh.data_ranks());
        let mut local_records = vec![];
        for round in 0..count.div_ceil(groups) {
            let index = round * groups + group;
            let masked = index >= count;
            let result = run(PassSlot { index: index.min(count - 1), round, masked })?;
            if !masked {
                local_records.push(result.into_record()?);
            }
        }
        let mut records = mesh.all_gather_records("pass results", &local_records)?;
        records.iter_mut().for_each(|of_rank| of_rank.reverse());
        let ranks_per_group = mesh.sequence_ranks();
        let join_ranks = |(index, batch): (usize, &MicroBatch)| {
            let first = index % groups * ranks_per_group;
            let ranks = &mut records[first..first + ranks_per_group];
            let shards = ranks.iter_mut().map(Vec::pop).collect::<Option<Vec<_>>>();
            PassOutput::join(shards.context("a rank made fewer passes")?, batch, mesh)
        };
        batches.iter().enumerate().map(join_ranks).collect()
    }
}

/// Returns the number of tokens by which a pass advances the progress display.
fn progress_tokens(batch: &MicroBatch, slot: &PassSlot) -> f64 {
    if slot.masked { 0.0 } else { batch.sequence_rows.positions_count() as f64 }
}

/// One pass over a batch in this process.
#[derive(Debug, Clone, Copy)]
struct PassSlot {
    /// Index of the micro-batch.
    index: usize,
    /// Index of the pass among the passes of this process.
    round: usize,
    /// Whether the pass adds no gradient. A masked pass runs only to exchange tensors with the passes of
    /// other ranks.
    masked: bool,
}
