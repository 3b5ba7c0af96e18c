//! Forward and backward of one micro-batch, layer by layer.
//!
//! With recomputation, a pass keeps only each layer's input; the backward pass recomputes one layer at a
//! time. Without it, one graph holds all activations. Both give the same bits.

use super::micro_batch::MicroBatch;
use crate::model::attention::PackedAttention;
use crate::model::decoder_stack::{DecoderStack, LayerCallback};
use crate::model::forward::{ForwardOptions, Model, Rows};
use crate::model::layer::LayerOutput;
use crate::model::sequence_parallel::SequenceParallelAttention;
use crate::model::weights::Weights;
use crate::ops::graph::differentiate;
use crate::ops::{self, Dispatch};
use anyhow::{Context, Result, ensure};
use candle_core::Tensor;

/// The settings of a pass.
#[derive(Debug, Clone, Copy)]
pub struct PassSettings {
    pub recompute_layers: bool,
    /// The sampling temperature. Log-probabilities are those of the distribution at this temperature.
    pub temperature: f64,
    /// Coefficient of the load-balancing loss for this micro-batch, scaled by its share of the batch; 0 means
    /// off.
    pub load_balance: f64,
    pub forward: ForwardOptions,
}

/// The head's outputs for each target, in `N` columns of `[R]`: a policy's log-probabilities and entropies,
/// or a critic's values.
pub type HeadColumns<const N: usize> = [Vec<f32>; N];

/// A function from the head's columns to the objective's gradients with respect to them.
pub type HeadObjective<'a, const N: usize> = &'a dyn Fn([&[f32]; N]) -> Result<HeadColumns<N>>;

/// The output of a pass. The gradients are in the sink of the weights.
#[derive(Debug)]
pub struct PassOutput<const N: usize = 2> {
    pub head: HeadColumns<N>,
    /// The chosen experts, u32 `[T, K]` for each layer; empty for a model without experts.
    pub routes: Vec<Tensor>,
    /// Load-balancing loss, mean over layers, before its coefficient; 0 when it is off.
    pub load_balance: f64,
}

impl PassOutput {
    /// Returns the log-probability of each target, `[R]`.
    pub fn log_probs(&self) -> &[f32] {
        &self.head[0]
    }

    /// Returns the entropy of each target's distribution in nats, `[R]`.
    pub fn entropies(&self) -> &[f32] {
        &self.head[1]
    }
}

/// The forward and backward pass of one micro-batch.
pub struct Pass<'a> {
    pub model: &'a Model,
    /// The weights; trainable ones have a sink for their gradients.
    pub weights: &'a Weights,
    pub batch: &'a MicroBatch,
    pub settings: PassSettings,
}

impl Pass<'_> {
    /// Returns the head's columns and the chosen experts; `weights` should be frozen. A critic's value of a
    /// target is read at the row that predicts it. Calls `on_layer` after each layer.
    ///
    /// # Errors
    /// When the batch does not fit the model, or the head gives a number of columns other than `N`.
    pub fn forward<const N: usize>(&self, on_layer: &dyn Fn()) -> Result<PassOutput<N>> {
        let mut routes = vec![];
        let hidden = self.walk(&self.stack(), &mut |_, _, output| {
            routes.extend(output.routed_experts());
            on_layer();
            Ok(())
        })?;
        Ok(PassOutput { head: columns(&self.head(&hidden)?)?, routes, load_balance: 0.0 })
    }

    /// Runs the forward pass, `objective` on the head's columns, and the backward pass. Calls `on_layer`
    /// after each layer of the forward pass.
    ///
    /// # Errors
    /// When the batch does not fit the model, the head gives a number of columns other than `N`, or the
    /// objective fails.
    pub fn forward_backward<const N: usize>(
        &self,
        objective: HeadObjective<'_, N>,
        on_layer: &dyn Fn(),
    ) -> Result<PassOutput<N>> {
        match self.settings.recompute_layers {
            true => self.recomputed(objective, on_layer),
            false => self.whole_graph(objective, on_layer),
        }
    }

    fn stack(&self) -> DecoderStack<'_> {
        DecoderStack { model: self.model, weights: self.weights, forward: self.settings.forward }
    }

    /// Calls `f` with the batch's rows. The rows use the experts `replay`, if given.
    fn with_rows<R>(&self, replay: Option<&[Tensor]>, f: impl FnOnce(&mut Rows) -> R) -> R {
        let sequence_rows = self.batch.sequence_rows.clone();
        let rotation = self.model.rotation(self.batch.positions.clone());
        match &self.batch.split {
            None => f(&mut Rows { rotation, attend: &mut PackedAttention { sequence_rows }, replay }),
            Some(split) => {
                let attend = &mut SequenceParallelAttention { split: split.rows.clone(), sequence_rows };
                f(&mut Rows { rotation, attend, replay })
            }
        }
    }

    fn walk(&self, stack: &DecoderStack, keep: LayerCallback) -> Result<Tensor> {
        let on_device = |layers: &Vec<Tensor>| {
            let device = self.weights.device();
            layers.iter().map(|routes| Ok(routes.to_device(device)?)).collect::<Result<Vec<_>>>()
        };
        let replay = self.batch.replay.as_ref().map(on_device).transpose()?;
        self.with_rows(replay.as_deref(), |rows| stack.forward(&self.batch.tokens, rows, keep))
    }

    /// Returns the head's output, `[N, R]`.
    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = self.stack().final_norm_rows(hidden, &self.batch.rows)?;
        self.stack().head(&normed, &self.batch.targets, self.settings.temperature)
    }

    fn whole_graph<const N: usize>(
        &self,
        objective: HeadObjective<'_, N>,
        on_layer: &dyn Fn(),
    ) -> Result<PassOutput<N>> {
        let (mut routes, mut balances, mut values) = (vec![], vec![], None);
        differentiate(&[], || {
            let mut roots = vec![];
            let hidden = self.walk(&self.stack(), &mut |_, _, output| {
                roots.extend(self.load_balance(output, &mut balances)?);
                routes.extend(output.routed_experts());
                on_layer();
                Ok(())
            })?;
            let head = self.head(&hidden)?;
            roots.push((head.clone(), self.gradient(&head, objective)?));
            values = Some(head);
            anyhow::Ok(roots)
        })?;
        let head = values.context("a pass without a head")?;
        Ok(PassOutput { head: columns(&head)?, routes, load_balance: self.mean_of_layers(&balances)? })
    }

    fn recomputed<const N: usize>(
        &self,
        objective: HeadObjective<'_, N>,
        on_layer: &dyn Fn(),
    ) -> Result<PassOutput<N>> {
        let layers = self.model.config.num_hidden_layers;
        let (mut inputs, mut routes) = (Vec::with_capacity(layers), Vec::with_capacity(layers));
        let frozen = self.weights.without_gradient();
        let hidden =
            self.walk(&DecoderStack { weights: &frozen, ..self.stack() }, &mut |_, input, output| {
                inputs.push(input.clone());
                routes.extend(output.routed_experts());
                on_layer();
                Ok(())
            })?;
        let mut values = None;
        let mut upstream = self.through(&hidden, || {
            let head = self.head(&hidden)?;
            let root = (head.clone(), self.gradient(&head, objective)?);
            values = Some(head);
            Ok(vec![root])
        })?;
        drop(hidden);
        let head = values.context("a pass without a head")?;

        let mut balances = vec![];
        for index in (0..layers).rev() {
            let x = inputs.pop().context("a layer's input is missing")?;
            let next = index.checked_sub(1);
            upstream = self.through(&x, || {
                // The recomputation uses the experts of the first forward.
                let output =
                    self.with_rows(Some(&routes), |rows| self.stack().run_layer(index, next, &x, rows))?;
                let balance = self.load_balance(&output, &mut balances)?;
                Ok([(output.hidden, upstream)].into_iter().chain(balance).collect())
            })?;
        }
        differentiate(&[], || anyhow::Ok(vec![(self.stack().embed(&self.batch.tokens)?, upstream)]))?;
        Ok(PassOutput { head: columns(&head)?, routes, load_balance: self.mean_of_layers(&balances)? })
    }

    /// Returns the gradient with respect to `x`. `forward` computes outputs from `x` and returns each with
    /// its gradient.
    fn through(&self, x: &Tensor, forward: impl FnOnce() -> Result<Vec<(Tensor, Tensor)>>) -> Result<Tensor> {
        let gradient = differentiate(&[x], forward)?.pop().flatten();
        gradient.context("no gradient at a layer's input")
    }

    /// Returns the mean of `losses` over layers. It is read once at the end of a pass, because a read waits
    /// for the GPU.
    fn mean_of_layers(&self, losses: &[Tensor]) -> Result<f64> {
        let mut sum = 0.0;
        for loss in losses {
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        Ok(sum / self.model.config.num_hidden_layers as f64)
    }

    /// Returns the layer's load-balancing loss and its coefficient, if the coefficient is not 0. Appends the
    /// loss to `balances`.
    fn load_balance(
        &self,
        output: &LayerOutput,
        balances: &mut Vec<Tensor>,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let (true, Some(routing)) = (self.settings.load_balance != 0.0, &output.routing) else {
            return Ok(None);
        };
        let sequences_per_row = self.batch.sequences_per_row.as_ref();
        let loss = match &self.batch.split {
            None => ops::load_balance(&routing.router_logits, &routing.plan, sequences_per_row)?,
            Some(split) => {
                let routes = split.rows.gather_routed_experts(&routing.routes)?;
                let plan = Dispatch::new(&routes, self.model.config.num_local_experts)?;
                ops::load_balance(&split.rows.gather_rows(&routing.router_logits)?, &plan, sequences_per_row)?
            }
        };
        balances.push(loss.clone());
        let layers = self.model.config.num_hidden_layers as f64;
        let coefficient = Tensor::new((self.settings.load_balance / layers) as f32, loss.device())?;
        Ok(Some((loss, coefficient)))
    }

    /// Returns the objective's gradient as a tensor of the head's shape, `[N, R]`.
    fn gradient<const N: usize>(&self, head: &Tensor, objective: HeadObjective<'_, N>) -> Result<Tensor> {
        let mut columns = columns::<N>(head)?;
        for column in &mut columns {
            *column = self.of_all(std::mem::take(column))?;
        }
        let gradients = objective(columns.each_ref().map(Vec::as_slice))?;
        let own: Vec<f32> = gradients.into_iter().flat_map(|column| self.of_own(column)).collect();
        Ok(Tensor::from_vec(own, head.shape(), head.device())?)
    }

    /// Joins this rank's column `own` with the columns of the other ranks into the column of all targets.
    fn of_all(&self, own: Vec<f32>) -> Result<Vec<f32>> {
        let Some(split) = &self.batch.split else { return Ok(own) };
        let lengths: Vec<usize> = split.targets.iter().map(Vec::len).collect();
        Ok(split.join_columns(&split.rows.gather("what the head gives", &own, &lengths)?))
    }

    /// Returns this rank's shard of a column of all targets.
    fn of_own(&self, all: Vec<f32>) -> Vec<f32> {
        match &self.batch.split {
            None => all,
            Some(split) => split.local_targets().iter().map(|&place| all[place]).collect(),
        }
    }
}

fn columns<const N: usize>(head: &Tensor) -> Result<HeadColumns<N>> {
    ensure!(head.dim(0)? == N, "the head gives {} columns, and {N} were asked for", head.dim(0)?);
    let mut columns = [const { vec![] }; N];
    for (index, column) in columns.iter_mut().enumerate() {
        *column = head.get(index)?.to_vec1()?;
    }
    Ok(columns)
}
