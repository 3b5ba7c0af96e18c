//! Gradients of a whole batch: micro-batches side by side or one after the other, always summed in order.

use super::batch::MicroBatch;
use super::forward_backward::{HeadGradient, Pass, PassOutput, PassSettings};
use super::gradients::GradientSum;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::model::weights::WeightSource;
use crate::ops::threads::Threads;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

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
            let batch = &batches[turn.index];
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
        let outputs = self.sum(batches.len(), pass)?;
        self.others(&outputs, |index, output| objective(index, &output.log_probs, &output.entropies).map(drop))?;
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
            let pass = Pass { model: self.model, weights, batch: &batches[turn.index], settings };
            pass.values_backward(&|values| match turn.masked {
                true => Ok(vec![0.0; values.len()]),
                false => objective(turn.index, values),
            })
        };
        let values = self.sum(batches.len(), pass)?;
        self.others(&values, |index, values| objective(index, values).map(drop))
    }

    /// Runs `count` passes, each with weights whose gradients go to its place in the sum.
    fn sum<T: Shared>(
        &self,
        count: usize,
        run: impl Fn(Turn, &dyn WeightSource) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let sum = GradientSum::begin(self.parameters)?;
        let results = self.each(count, |turn| {
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
        let weights = self.parameters.passing()?;
        let pass =
            |index: usize| Pass { model: self.model, weights: &weights, batch: &batches[index], settings };
        self.each(batches.len(), |turn| pass(turn.index).forward())
    }

    /// A critic's values, without gradients: one a target, micro-batch after micro-batch.
    ///
    /// # Errors
    /// Those of the passes.
    pub fn values(&self, batches: &[MicroBatch], settings: PassSettings) -> Result<Vec<f32>> {
        let weights = self.parameters.passing()?;
        let pass =
            |index: usize| Pass { model: self.model, weights: &weights, batch: &batches[index], settings };
        Ok(self.each(batches.len(), |turn| pass(turn.index).values())?.concat())
    }

    /// `run` of every index below `count`, in order, wherever it runs. The choice changes no result.
    fn each<T: Shared>(&self, count: usize, run: impl Fn(Turn) -> Result<T> + Sync) -> Result<Vec<T>> {
        let mesh = self.parameters.mesh();
        let alone = |index: usize| run(Turn { index, round: index, masked: false });
        match mesh.ranks() {
            1 if side_by_side(self.parameters.bytes()) => self.threads.map(count, alone),
            1 => self.threads.wide(|| (0..count).map(alone).collect()),
            ranks => self.threads.wide(|| self.in_turn(count, (mesh.rank(), ranks), &run)),
        }
    }

    /// The same where `ranks` processes take the indices in turn. All make as many passes, since their passes meet: who has no
    /// micro-batch left runs the last one masked.
    fn in_turn<T: Shared>(
        &self,
        count: usize,
        (rank, ranks): (usize, usize),
        run: &(dyn Fn(Turn) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        let mut own = vec![];
        for round in 0..count.div_ceil(ranks) {
            let index = round * ranks + rank;
            let masked = index >= count;
            let result = run(Turn { index: index.min(count - 1), round, masked })?;
            if !masked {
                own.push(result.shared()?);
            }
        }
        let mut all = self.parameters.mesh().all_records("what passes gave", &own)?;
        all.iter_mut().for_each(|results| results.reverse());
        let next = |index: usize| all[index % ranks].pop().context("a rank made fewer passes");
        (0..count).map(next).map(|found| T::from_shared(found?)).collect()
    }

    /// Calls `see` with what other processes computed.
    fn others<T>(&self, results: &[T], mut see: impl FnMut(usize, &T) -> Result<()>) -> Result<()> {
        let (rank, ranks) = (self.parameters.mesh().rank(), self.parameters.mesh().ranks());
        let foreign = results.iter().enumerate().filter(|(index, _)| index % ranks != rank);
        foreign.map(|(index, result)| see(index, result)).collect()
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
    fn from_shared(record: Self::Record) -> Result<Self>;
}

impl Shared for Vec<f32> {
    type Record = Self;

    fn shared(self) -> Result<Self> {
        Ok(self)
    }

    fn from_shared(record: Self) -> Result<Self> {
        Ok(record)
    }
}

impl Shared for PassOutput {
    /// Log-probabilities, entropies, each layer's experts with their number a token, and the load balance.
    type Record = (Vec<f32>, Vec<f32>, Vec<(Vec<u32>, usize)>, f64);

    fn shared(self) -> Result<Self::Record> {
        let experts = |routes: &Tensor| Ok((routes.flatten_all()?.to_vec1()?, routes.dim(1)?));
        let routes = self.routes.iter().map(experts).collect::<Result<_>>()?;
        Ok((self.log_probs, self.entropies, routes, self.load_balance))
    }

    fn from_shared((log_probs, entropies, routes, load_balance): Self::Record) -> Result<Self> {
        let experts = |(routes, top_k): (Vec<u32>, usize)| {
            let tokens = routes.len() / top_k.max(1);
            Ok(Tensor::from_vec(routes, (tokens, top_k), &Device::Cpu)?)
        };
        let routes = routes.into_iter().map(experts).collect::<Result<_>>()?;
        Ok(Self { log_probs, entropies, routes, load_balance })
    }
}
