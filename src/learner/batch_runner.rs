//! Gradients of a whole batch: micro-batches side by side or one after the other, always summed in order.

use super::batch::{Cut, MicroBatch};
use super::forward_backward::{HeadGradient, Pass, PassOutput, PassSettings};
use super::gradients::GradientSum;
use crate::dist::Mesh;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::model::weights::WeightSource;
use crate::ops::threads::{Threads, awake};
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Weights up to this size, bytes, run their micro-batches side by side, each on a thread of its own; larger models take one
/// micro-batch at a time and share out each op instead.
const SIDE_BY_SIDE_BYTES_MAX: u64 = 256 << 20;

/// Whether micro-batches of a model of `weight_bytes` run side by side.
pub fn side_by_side(weight_bytes: u64) -> bool {
    weight_bytes <= SIDE_BY_SIDE_BYTES_MAX
}

/// The model that a batch runs through. Gradients gather in the parameters.
#[derive(Clone, Copy)]
pub struct BatchRunner<'a> {
    pub threads: &'a Threads,
    pub model: &'a Model,
    pub parameters: &'a Parameters,
}

/// An objective of every micro-batch: its index, and what [`super::forward_backward::HeadObjective`] sees.
pub type BatchObjective<'a> = &'a (dyn Fn(usize, &[f32], &[f32]) -> Result<HeadGradient> + Sync);

/// A critic's objective of every micro-batch: its index, and what [`super::forward_backward::ValueObjective`] sees.
pub type BatchValueObjective<'a> = &'a (dyn Fn(usize, &[f32]) -> Result<Vec<f32>> + Sync);

impl BatchRunner<'_> {
    /// Runs forward and backward of every micro-batch; the parameters' gradients are then the batch's.
    /// `objective(index, log_probs, entropies)` sees every micro-batch, also those that other processes ran; its gradients must
    /// already be divided by the whole batch's count. `load_balance` is the coefficient over the whole batch.
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
        let pass = |turn: Turn, weights: &dyn WeightSource| {
            let batch = &*batches[turn.index].part(self.parameters.mesh())?;
            let share = batch.sequence_rows.positions_count() as f64 / tokens.max(1) as f64;
            // A masked pass moves nothing.
            let share = if turn.masked { 0.0 } else { share };
            let settings = PassSettings { load_balance: settings.load_balance * share, ..settings };
            let pass = Pass { model: self.model, weights, batch, settings };
            pass.forward_backward(&|log_probs, entropies| match turn.masked {
                true => Ok(HeadGradient::zero(log_probs.len())),
                false => objective(turn.index, log_probs, entropies),
            })
        };
        let outputs = self.sum(batches, pass)?;
        self.others(&outputs, |index, output| {
            objective(index, &output.log_probs, &output.entropies).map(drop)
        })?;
        Ok(outputs)
    }

    /// The same for a critic. `objective(index, values)` sees every micro-batch and returns the gradient of its share.
    ///
    /// # Errors
    /// Those of the passes and of the objective.
    pub fn accumulate_values(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        objective: BatchValueObjective<'_>,
    ) -> Result<()> {
        let pass = |turn: Turn, weights: &dyn WeightSource| {
            let batch = &*batches[turn.index].part(self.parameters.mesh())?;
            let pass = Pass { model: self.model, weights, batch, settings };
            pass.values_backward(&|values| match turn.masked {
                true => Ok(vec![0.0; values.len()]),
                false => objective(turn.index, values),
            })
        };
        let values = self.sum(batches, pass)?;
        self.others(&values, |index, values| objective(index, values).map(drop))
    }

    /// Runs a pass of each of `batches`, with weights whose gradients go to its place in the sum.
    fn sum<T: Shared>(
        &self,
        batches: &[MicroBatch],
        run: impl Fn(Turn, &dyn WeightSource) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let sum = self.threads.wide(|| GradientSum::begin(self.parameters))?;
        let results = self.each(batches, |turn| {
            let weights = self.parameters.learning(&sum.of_pass(turn.round));
            // Passes after a failed one would wait for it.
            weights.and_then(|weights| run(turn, &weights)).inspect_err(|_| sum.fail(turn.round))
        })?;
        sum.finish()?;
        Ok(results)
    }

    /// Log-probabilities and entropies of every micro-batch, without gradients.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn forward(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<PassOutput>> {
        self.forward_observed(batches, settings, &|_| ())
    }

    /// The same; `passed` is told of every micro-batch that this process made, in any order and from any thread.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn forward_observed(
        &self,
        batches: &[MicroBatch],
        settings: PassSettings,
        passed: &(dyn Fn(&MicroBatch) + Sync),
    ) -> Result<Vec<PassOutput>> {
        let weights = self.parameters.passing()?;
        self.each(batches, |turn| {
            let batch = &*batches[turn.index].part(self.parameters.mesh())?;
            let output = Pass { model: self.model, weights: &weights, batch, settings }.forward()?;
            passed(batch);
            Ok(output)
        })
    }

    /// A critic's values, without gradients: one a target, micro-batch after micro-batch.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn values(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<f32>> {
        let weights = self.parameters.passing()?;
        let values = self.each(batches, |turn| {
            let batch = &*batches[turn.index].part(self.parameters.mesh())?;
            Pass { model: self.model, weights: &weights, batch, settings }.values()
        })?;
        Ok(values.concat())
    }

    /// Whether passes run side by side: a GPU makes one after the other.
    fn is_side_by_side(&self) -> bool {
        self.parameters.device().is_cpu() && side_by_side(self.parameters.bytes())
    }

    /// How a batch is cut into micro-batches of up to `tokens_max` tokens.
    pub fn cut(&self, tokens_max: usize) -> Cut {
        Cut { tokens_max, in_pairs: self.is_side_by_side() }
    }

    /// Up to how many positions at its beginning a sequence may share with the one before it: none where a GPU's attention reads
    /// whole sequences.
    pub fn shared_positions_max(&self) -> usize {
        if self.parameters.device().is_cpu() { usize::MAX } else { 0 }
    }

    /// `run` of every one of `batches`, in order, wherever it runs. The choice changes no result.
    fn each<T: Shared>(
        &self,
        batches: &[MicroBatch],
        run: impl Fn(Turn) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let (mesh, count) = (self.parameters.mesh(), batches.len());
        let run = |turn| awake(self.parameters.device(), || run(turn));
        let alone = |index: usize| run(Turn { index, round: index, masked: false });
        match mesh.ranks() {
            1 if self.is_side_by_side() => self.threads.map(count, alone),
            1 => self.threads.wide(|| (0..count).map(alone).collect()),
            _ => self.threads.wide(|| self.in_turn(batches, &run)),
        }
    }

    /// The same where several processes, or groups of them, take the micro-batches in turn. All make as many passes, since their
    /// passes meet: who has none left runs the last one masked.
    fn in_turn<T: Shared>(
        &self,
        batches: &[MicroBatch],
        run: &(dyn Fn(Turn) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        let (mesh, count) = (self.parameters.mesh(), batches.len());
        let (group, groups) = (mesh.data_rank(), mesh.data_ranks());
        let mut own = vec![];
        for round in 0..count.div_ceil(groups) {
            let index = round * groups + group;
            let masked = index >= count;
            let result = run(Turn { index: index.min(count - 1), round, masked })?;
            if !masked {
                own.push(result.shared()?);
            }
        }
        let mut all = mesh.all_records("what passes gave", &own)?;
        all.iter_mut().for_each(|results| results.reverse());
        let sharing = mesh.sequence_ranks();
        let of = |(index, batch): (usize, &MicroBatch)| {
            let first = index % groups * sharing;
            let parts = all[first..first + sharing].iter_mut().map(Vec::pop).collect::<Option<Vec<_>>>();
            T::joined(parts.context("a rank made fewer passes")?, batch, mesh)
        };
        batches.iter().enumerate().map(of).collect()
    }

    /// Calls `see` with what other processes computed.
    fn others<T>(&self, results: &[T], see: impl Fn(usize, &T) -> Result<()>) -> Result<()> {
        let mesh = self.parameters.mesh();
        let is_foreign = |index: usize| index % mesh.data_ranks() != mesh.data_rank();
        let mut foreign = results.iter().enumerate().filter(|(index, _)| is_foreign(*index));
        foreign.try_for_each(|(index, result)| see(index, result))
    }
}

/// One pass of a batch.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// Its micro-batch.
    index: usize,
    /// Its number among the passes of this process.
    round: usize,
    /// Whether it is made only so that other ranks' passes meet it.
    masked: bool,
}

/// What a pass gives, as it travels between processes.
trait Shared: Send + Sized {
    type Record: Serialize + DeserializeOwned;

    fn shared(self) -> Result<Self::Record>;
    /// Of the parts that the ranks of one group made of `batch`, the whole.
    fn joined(parts: Vec<Self::Record>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Self>;
}

/// The column of `batch`'s targets from each rank's part of it.
fn column(mut parts: Vec<Vec<f32>>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Vec<f32>> {
    Ok(match batch.split_over(mesh)? {
        None => parts.pop().unwrap_or_default(),
        Some(split) => split.column(&parts),
    })
}

impl Shared for Vec<f32> {
    type Record = Self;

    fn shared(self) -> Result<Self> {
        Ok(self)
    }

    fn joined(parts: Vec<Self>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Self> {
        column(parts, batch, mesh)
    }
}

/// A [`PassOutput`] on its way.
#[derive(Serialize, Deserialize)]
struct SharedOutput {
    log_probs: Vec<f32>,
    entropies: Vec<f32>,
    /// Each layer's experts.
    routes: Vec<Vec<u32>>,
    top_k: usize,
    load_balance: f64,
}

impl Shared for PassOutput {
    type Record = SharedOutput;

    fn shared(self) -> Result<SharedOutput> {
        let Self { log_probs, entropies, routes, load_balance } = self;
        let top_k = routes.first().map_or(Ok(1), |routes| routes.dim(1))?;
        let experts = |routes: &Tensor| Ok(routes.flatten_all()?.to_vec1()?);
        let routes = routes.iter().map(experts).collect::<Result<_>>()?;
        Ok(SharedOutput { log_probs, entropies, routes, top_k, load_balance })
    }

    fn joined(parts: Vec<SharedOutput>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Self> {
        let first = parts.first().context("a group without ranks")?;
        let (layers, top_k, load_balance) = (first.routes.len(), first.top_k, first.load_balance);
        let experts = |layer: usize| {
            let experts: Vec<u32> =
                parts.iter().flat_map(|part| part.routes[layer].iter().copied()).collect();
            let tokens = experts.len() / top_k;
            Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
        };
        let routes = (0..layers).map(experts).collect::<Result<_>>()?;
        let (log_probs, entropies) = parts.into_iter().map(|part| (part.log_probs, part.entropies)).unzip();
        let column = |parts| column(parts, batch, mesh);
        Ok(Self { log_probs: column(log_probs)?, entropies: column(entropies)?, routes, load_balance })
    }
}
