//! Forward and backward of one micro-batch, layer by layer.
//!
//! With recomputation only each layer's input is kept; the backward computes a layer again with gradients, from the gradient
//! above it. Without it one graph holds everything. The bits are the same.

use super::batch::MicroBatch;
use crate::model::attend::PackedAttention;
use crate::model::forward::{ForwardOptions, LayerOutput, Model, Rows};
use crate::model::split_rows::SplitAttention;
use crate::model::trunk::{self, Keep, Trunk};
use crate::model::weights::{Frozen, WeightSource};
use crate::ops::graph::differentiate;
use crate::ops::{self, Dispatch};
use anyhow::{Context, Result, ensure};
use candle_core::Tensor;

/// What the pass computes beside the gradient of the objective.
#[derive(Debug, Clone, Copy)]
pub struct PassSettings {
    pub recompute_layers: bool,
    /// Of the policy: log-probabilities are those of the distribution sampled from.
    pub temperature: f64,
    /// Coefficient of the load-balancing loss for this micro-batch (already its share of the batch); 0 for none.
    pub load_balance: f64,
    pub forward: ForwardOptions,
}

/// Gradients of the objective with respect to what the head gives, `[R]` each.
#[derive(Debug, Clone)]
pub struct HeadGradient {
    pub log_probs: Vec<f32>,
    pub entropies: Vec<f32>,
}

impl HeadGradient {
    /// That of an objective which `targets` targets do not move.
    pub fn zero(targets: usize) -> Self {
        Self { log_probs: vec![0.0; targets], entropies: vec![0.0; targets] }
    }
}

/// From the log-probabilities and entropies of the head, `[R]` each, to their gradients.
pub type HeadObjective<'a> = &'a dyn Fn(&[f32], &[f32]) -> Result<HeadGradient>;

/// From the values that a critic's head gives, `[R]`, to the gradient of its loss with respect to them.
pub type ValueObjective<'a> = &'a dyn Fn(&[f32]) -> Result<Vec<f32>>;

/// From what the head gives, `[n, R]`, to the gradient with respect to it, of the same shape.
type OnHead<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

/// What a pass returns. Gradients went where the weights sent them.
#[derive(Debug)]
pub struct PassOutput {
    /// Log-probability of each target, `[R]`.
    pub log_probs: Vec<f32>,
    /// Entropy of each target's distribution in nats, `[R]`.
    pub entropies: Vec<f32>,
    /// The experts chosen, u32 `[T, K]` a layer; none in a model without experts.
    pub routes: Vec<Tensor>,
    /// Load-balancing loss, mean over layers, before its coefficient; 0 when not asked for.
    pub load_balance: f64,
}

/// What a pass comes to under either head.
struct Walked {
    /// `[n, R]`.
    head: Tensor,
    routes: Vec<Tensor>,
    load_balance: f64,
}

/// The pass of one micro-batch.
pub struct Pass<'a> {
    pub model: &'a Model,
    /// Those that learn say where their gradients go.
    pub weights: &'a dyn WeightSource,
    pub batch: &'a MicroBatch,
    pub settings: PassSettings,
}

impl Pass<'_> {
    /// Log-probabilities and entropies only: `[R]` each, with the experts chosen. `weights` should not learn.
    ///
    /// # Errors
    /// When the batch does not fit the model.
    pub fn forward(&self) -> Result<PassOutput> {
        let mut routes = vec![];
        let head = self.head_alone(&mut |_, _, output| {
            routes.extend(output.routes());
            Ok(())
        })?;
        let [log_probs, entropies] = split_head(&head)?;
        Ok(PassOutput { log_probs, entropies, routes, load_balance: 0.0 })
    }

    /// Values only, `[R]`: that of a target is read where the target is predicted, before it is seen.
    ///
    /// # Errors
    /// When the batch does not fit the model, or it has no value head.
    pub fn values(&self) -> Result<Vec<f32>> {
        read_values(&self.head_alone(&mut trunk::nothing)?)
    }

    /// Forward, `objective` on the head's values, backward.
    ///
    /// # Errors
    /// When the batch does not fit the model or the objective fails.
    pub fn forward_backward(&self, objective: HeadObjective<'_>) -> Result<PassOutput> {
        let Walked { head, routes, load_balance } = self.both_ways(&|head| self.apply(head, objective))?;
        let [log_probs, entropies] = split_head(&head)?;
        Ok(PassOutput { log_probs, entropies, routes, load_balance })
    }

    /// The same for a critic: `objective` on its values, which are returned.
    ///
    /// # Errors
    /// When the batch does not fit the model, it has no value head, or the objective fails.
    pub fn values_backward(&self, objective: ValueObjective<'_>) -> Result<Vec<f32>> {
        let on_head = |head: &Tensor| {
            let gradient = objective(&self.of_all(&read_values(head)?)?)?;
            Ok(Tensor::from_vec(self.of_own(gradient), head.shape(), head.device())?)
        };
        read_values(&self.both_ways(&on_head)?.head)
    }

    fn both_ways(&self, objective: OnHead<'_>) -> Result<Walked> {
        if self.settings.recompute_layers { self.recomputed(objective) } else { self.whole_graph(objective) }
    }

    fn trunk(&self) -> Trunk<'_> {
        Trunk { model: self.model, weights: self.weights, forward: self.settings.forward }
    }

    /// Calls `f` with the batch's rows, which use the experts `replay`.
    fn with_rows<R>(&self, replay: Option<&[Tensor]>, f: impl FnOnce(&mut Rows) -> R) -> R {
        let sequence_rows = self.batch.sequence_rows.clone();
        let rotation = self.model.rotation(self.batch.positions.clone());
        match &self.batch.split {
            None => f(&mut Rows { rotation, attend: &mut PackedAttention { sequence_rows }, replay }),
            Some(split) => {
                let attend = &mut SplitAttention { split: split.rows.clone(), sequence_rows };
                f(&mut Rows { rotation, attend, replay })
            }
        }
    }

    fn walk(&self, trunk: &Trunk, keep: Keep) -> Result<Tensor> {
        let on_device = |layers: &Vec<Tensor>| {
            let device = self.weights.device()?;
            layers.iter().map(|routes| Ok(routes.to_device(&device)?)).collect::<Result<Vec<_>>>()
        };
        let replay = self.batch.replay.as_ref().map(on_device).transpose()?;
        self.with_rows(replay.as_deref(), |rows| trunk.walk(&self.batch.tokens, rows, keep))
    }

    /// What the head gives, `[n, R]`.
    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = self.trunk().normed(hidden, &self.batch.rows)?;
        self.trunk().head(&normed, &self.batch.targets, self.settings.temperature)
    }

    fn head_alone(&self, keep: Keep) -> Result<Tensor> {
        self.head(&self.walk(&self.trunk(), keep)?)
    }

    fn whole_graph(&self, objective: OnHead<'_>) -> Result<Walked> {
        let (mut routes, mut balances, mut values) = (vec![], vec![], None);
        differentiate(&[], || {
            let mut roots = vec![];
            let hidden = self.walk(&self.trunk(), &mut |_, _, output| {
                roots.extend(self.load_balance(output, &mut balances)?);
                routes.extend(output.routes());
                Ok(())
            })?;
            let head = self.head(&hidden)?;
            roots.push((head.clone(), objective(&head)?));
            values = Some(head);
            anyhow::Ok(roots)
        })?;
        let head = values.context("a pass without a head")?;
        Ok(Walked { head, routes, load_balance: self.mean_of_layers(&balances)? })
    }

    fn recomputed(&self, objective: OnHead<'_>) -> Result<Walked> {
        let layers = self.model.config.num_hidden_layers;
        let (mut inputs, mut routes) = (Vec::with_capacity(layers), Vec::with_capacity(layers));
        let frozen = Frozen(self.weights);
        let hidden = self.walk(&Trunk { weights: &frozen, ..self.trunk() }, &mut |_, input, output| {
            inputs.push(input.clone());
            routes.extend(output.routes());
            Ok(())
        })?;
        let mut values = None;
        let mut upstream = self.through(&hidden, || {
            let head = self.head(&hidden)?;
            let root = (head.clone(), objective(&head)?);
            values = Some(head);
            Ok(vec![root])
        })?;
        drop(hidden);
        let head = values.context("a pass without a head")?;

        let mut balances = vec![];
        for index in (0..layers).rev() {
            let x = inputs.pop().context("a layer's input is missing")?;
            upstream = self.through(&x, || {
                // The experts of the first time, whatever chose them.
                let output = self.with_rows(Some(&routes), |rows| self.trunk().layer(index, &x, rows))?;
                let balance = self.load_balance(&output, &mut balances)?;
                Ok([(output.hidden, upstream)].into_iter().chain(balance).collect())
            })?;
        }
        differentiate(&[], || anyhow::Ok(vec![(self.trunk().embed(&self.batch.tokens)?, upstream)]))?;
        Ok(Walked { head, routes, load_balance: self.mean_of_layers(&balances)? })
    }

    /// The gradient with respect to `x` of what `forward` computes from it and returns with its gradients.
    fn through(&self, x: &Tensor, forward: impl FnOnce() -> Result<Vec<(Tensor, Tensor)>>) -> Result<Tensor> {
        let gradient = differentiate(&[x], forward)?.pop().flatten();
        gradient.context("no gradient at a layer's input")
    }

    /// The mean over layers of what those with experts gave; read at the end of a pass, as a GPU is waited for.
    fn mean_of_layers(&self, losses: &[Tensor]) -> Result<f64> {
        let mut sum = 0.0;
        for loss in losses {
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        Ok(sum / self.model.config.num_hidden_layers as f64)
    }

    /// The layer's load-balancing loss with its coefficient, where it is asked for; the loss is noted in `balances`.
    fn load_balance(
        &self,
        output: &LayerOutput,
        balances: &mut Vec<Tensor>,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let (true, Some(routing)) = (self.settings.load_balance != 0.0, &output.routing) else {
            return Ok(None);
        };
        let holders = self.batch.holders.as_ref();
        let loss = match &self.batch.split {
            None => ops::load_balance(&routing.router_logits, &routing.plan, holders)?,
            Some(split) => {
                let routes = split.rows.all_routes(&routing.routes)?;
                let plan = Dispatch::new(&routes, self.model.config.num_local_experts)?;
                ops::load_balance(&split.rows.all_rows(&routing.router_logits)?, &plan, holders)?
            }
        };
        balances.push(loss.clone());
        let layers = self.model.config.num_hidden_layers as f64;
        let coefficient = Tensor::new((self.settings.load_balance / layers) as f32, loss.device())?;
        Ok(Some((loss, coefficient)))
    }

    /// The objective's gradient as a tensor of the head's shape.
    fn apply(&self, head: &Tensor, objective: HeadObjective<'_>) -> Result<Tensor> {
        let [log_probs, entropies] = split_head(head)?;
        let HeadGradient { log_probs, entropies } =
            objective(&self.of_all(&log_probs)?, &self.of_all(&entropies)?)?;
        let gradient = [self.of_own(log_probs), self.of_own(entropies)].concat();
        Ok(Tensor::from_vec(gradient, head.shape(), head.device())?)
    }

    /// The column of all targets, of which this rank has `own`.
    fn of_all(&self, own: &[f32]) -> Result<Vec<f32>> {
        let Some(split) = &self.batch.split else { return Ok(own.to_vec()) };
        let lengths: Vec<usize> = split.targets.iter().map(Vec::len).collect();
        Ok(split.column(&split.rows.all("what the head gives", own, &lengths)?))
    }

    /// Of a column of all targets this rank's.
    fn of_own(&self, all: Vec<f32>) -> Vec<f32> {
        match &self.batch.split {
            None => all,
            Some(split) => split.own_targets().iter().map(|&place| all[place]).collect(),
        }
    }
}

fn split_head(head: &Tensor) -> Result<[Vec<f32>; 2]> {
    Ok([head.get(0)?.to_vec1()?, head.get(1)?.to_vec1()?])
}

fn read_values(head: &Tensor) -> Result<Vec<f32>> {
    ensure!(head.dim(0)? == 1, "values of a model that has no value head");
    Ok(head.get(0)?.to_vec1()?)
}
