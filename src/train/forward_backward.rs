//! Forward and backward of one micro-batch, layer by layer.
//!
//! With recomputation only each layer's input is kept; the backward computes a layer again with gradients and feeds
//! the gradient from above in through [`ops::upstream()`]. Without it one graph holds everything. The bits are the same.

use super::batch::MicroBatch;
use super::gradients::Gradients;
use crate::model::forward::{ForwardOptions, Model, PackedAttention};
use crate::model::names::{ParameterSpec, Role};
use crate::model::weights::{Head, LayerWeights, Parameters, Resident, WeightSource};
use crate::ops;
use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use std::sync::Arc;

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

/// From the log-probabilities and entropies of the head, `[R]` each, to their gradients.
pub type Objective<'a> = &'a dyn Fn(&[f32], &[f32]) -> Result<HeadGradient>;

/// From the values that a critic's head gives, `[R]`, to the gradient of its loss with respect to them.
pub type ValueObjective<'a> = &'a dyn Fn(&[f32]) -> Result<Vec<f32>>;

/// From what the head gives, `[n, R]`, to the gradient with respect to it, of the same shape.
type OnHead<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

/// The experts chosen in every layer, `[layers]` of `[T][K]`.
pub type Routes = Vec<Arc<Vec<u16>>>;

/// What a pass returns.
#[derive(Debug)]
pub struct PassOutput {
    /// Log-probability of each target, `[R]`.
    pub log_probs: Vec<f32>,
    /// Entropy of each target's distribution in nats, `[R]`.
    pub entropies: Vec<f32>,
    pub routes: Routes,
    /// Load-balancing loss, mean over layers, before its coefficient; 0 when not asked for.
    pub load_balance: f64,
    pub gradients: Gradients,
}

/// What a pass comes to under either head.
struct Walked {
    /// `[n, R]`.
    head: Tensor,
    routes: Routes,
    load_balance: f64,
    gradients: Gradients,
}

/// The pass of one micro-batch over `parameters`.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// Which parameters learn.
    pub trainable: &'a [bool],
    pub batch: &'a MicroBatch,
    pub settings: PassSettings,
}

impl Pass<'_> {
    /// Log-probabilities and entropies only: `[R]` each, with the experts chosen.
    ///
    /// # Errors
    /// When the batch does not fit the model.
    pub fn forward(&self) -> Result<PassOutput> {
        let (head, routes) = self.head_alone()?;
        let [log_probs, entropies] = split_head(&head)?;
        let gradients = Gradients::none(0);
        Ok(PassOutput { log_probs, entropies, routes, load_balance: 0.0, gradients })
    }

    /// Values only, `[R]`: that of a target is read where the target is predicted, before it is seen.
    ///
    /// # Errors
    /// When the batch does not fit the model, or it has no value head.
    pub fn values(&self) -> Result<Vec<f32>> {
        read_values(&self.head_alone()?.0)
    }

    /// Forward, `objective` on the head's values, backward.
    ///
    /// # Errors
    /// When the batch does not fit the model or the objective fails.
    pub fn forward_backward(&self, objective: Objective<'_>) -> Result<PassOutput> {
        let Walked { head, routes, load_balance, gradients } = self.walk(&|head| apply(head, objective))?;
        let [log_probs, entropies] = split_head(&head)?;
        Ok(PassOutput { log_probs, entropies, routes, load_balance, gradients })
    }

    /// The same for a critic: `objective` on its values. Returns the gradients.
    ///
    /// # Errors
    /// When the batch does not fit the model, it has no value head, or the objective fails.
    pub fn values_backward(&self, objective: ValueObjective<'_>) -> Result<Gradients> {
        let on_head = |head: &Tensor| {
            let gradient = objective(&read_values(head)?)?;
            Ok(Tensor::from_vec(gradient, head.shape(), &Device::Cpu)?)
        };
        Ok(self.walk(&on_head)?.gradients)
    }

    fn walk(&self, objective: OnHead<'_>) -> Result<Walked> {
        if self.settings.recompute_layers { self.recomputed(objective) } else { self.whole_graph(objective) }
    }

    fn head_alone(&self) -> Result<(Tensor, Routes)> {
        let weights = self.parameters.detached()?;
        let (inputs, routes) = self.layer_inputs(&weights)?;
        let hidden = inputs.last().context("a model without layers")?;
        Ok((self.head(&weights, hidden)?, routes))
    }

    fn whole_graph(&self, objective: OnHead<'_>) -> Result<Walked> {
        let weights = self.parameters.tracked(self.trainable)?;
        let mut x = ops::embedding(&weights.embedding()?, &self.batch.tokens)?;
        let mut attend = self.packed();
        let rotation = self.model.rotation(self.batch.positions.clone());
        let (mut routes, mut balance, mut balance_sum) = (vec![], None::<Tensor>, 0.0);
        for index in 0..self.model.config.num_hidden_layers {
            let layer = weights.layer(index)?;
            let (options, replay) = (self.settings.forward, self.batch.replayed(index));
            let output = self.model.layer(index, &layer, &x, &rotation, &mut attend, options, replay)?;
            if let Some((loss, value)) = self.load_balance(&output.router_logits, &output.routes)? {
                balance = Some(match balance {
                    Some(sum) => (sum + loss)?,
                    None => loss,
                });
                balance_sum += value;
            }
            x = output.hidden;
            routes.push(output.routes);
        }
        let head = self.head(&weights, &x)?;
        let mut root = ops::upstream(&head, &objective(&head)?)?;
        if let Some(balance) = balance {
            root = (root + balance)?;
        }
        let store = root.backward()?;
        let mut gradients = Gradients::none(self.parameters.len());
        self.collect(&store, &mut gradients, |_| true)?;
        let load_balance = balance_sum / self.model.config.num_hidden_layers as f64;
        Ok(Walked { head: head.detach(), routes, load_balance, gradients })
    }

    fn recomputed(&self, objective: OnHead<'_>) -> Result<Walked> {
        let weights = self.parameters.tracked(self.trainable)?;
        let layers = self.model.config.num_hidden_layers;
        let (mut inputs, routes) = self.layer_inputs(&self.parameters.detached()?)?;
        let mut gradients = Gradients::none(self.parameters.len());

        let top = Var::from_tensor(&inputs.pop().context("a model without layers")?)?;
        let head = self.head(&weights, top.as_tensor())?;
        let mut store = ops::upstream(&head, &objective(&head)?)?.backward()?;
        let after_layers = |spec: &ParameterSpec| spec.layer.is_none() && spec.role != Role::Embedding;
        self.collect(&store, &mut gradients, after_layers)?;
        let mut upstream = store.remove(top.as_tensor()).context("no gradient at the last layer")?;
        let head = head.detach();
        drop((store, top));

        let rotation = self.model.rotation(self.batch.positions.clone());
        let mut balance_sum = 0.0;
        for index in (0..layers).rev() {
            let x = Var::from_tensor(&inputs.pop().context("a layer's input is missing")?)?;
            let layer = weights.layer(index)?;
            let (mut attend, options) = (self.packed(), self.settings.forward);
            let replay = Some(&routes[index]);
            let output =
                self.model.layer(index, &layer, x.as_tensor(), &rotation, &mut attend, options, replay)?;
            let mut root = ops::upstream(&output.hidden, &upstream)?;
            if let Some((loss, value)) = self.load_balance(&output.router_logits, &output.routes)? {
                root = (root + loss)?;
                balance_sum += value;
            }
            let mut store = root.backward()?;
            upstream = store.remove(x.as_tensor()).context("no gradient at a layer's input")?;
            self.collect(&store, &mut gradients, |spec| spec.layer == Some(index))?;
        }
        let embedded = ops::embedding(&weights.embedding()?, &self.batch.tokens)?;
        if embedded.track_op() {
            let store = ops::upstream(&embedded, &upstream)?.backward()?;
            self.collect(&store, &mut gradients, |spec| spec.role == Role::Embedding)?;
        }
        let load_balance = balance_sum / layers as f64;
        Ok(Walked { head, routes, load_balance, gradients })
    }

    /// The input of every layer and the output of the last, without gradients; and the experts chosen.
    fn layer_inputs(&self, weights: &Resident) -> Result<(Vec<Tensor>, Routes)> {
        let rotation = self.model.rotation(self.batch.positions.clone());
        let mut attend = self.packed();
        let mut inputs = vec![ops::embedding(&weights.embedding()?, &self.batch.tokens)?];
        let mut routes = vec![];
        for index in 0..self.model.config.num_hidden_layers {
            let layer: LayerWeights = weights.layer(index)?;
            let (options, replay) = (self.settings.forward, self.batch.replayed(index));
            let output =
                self.model.layer(index, &layer, &inputs[index], &rotation, &mut attend, options, replay)?;
            inputs.push(output.hidden);
            routes.push(output.routes);
        }
        Ok((inputs, routes))
    }

    fn packed(&self) -> PackedAttention {
        PackedAttention { cu_seqlens: self.batch.cu_seqlens.clone() }
    }

    /// `[2, R]`: log-probabilities and entropies of the targets; under a value head `[1, R]`: values.
    fn head(&self, weights: &Resident, hidden: &Tensor) -> Result<Tensor> {
        let rows = ops::embedding::select_rows(hidden, &self.batch.rows)?;
        let normed = self.model.final_norm(weights, &rows)?;
        match weights.head() {
            Head::LanguageModel(weight) => {
                let temperature = self.settings.temperature;
                Ok(ops::log_prob_and_entropy(&normed, weight, &self.batch.targets, temperature)?)
            }
            Head::Value(head) => {
                Ok(ops::linear(&normed, &head.weight, &head.bias)?.reshape((1, self.batch.targets.len()))?)
            }
        }
    }

    /// The layer's share of the load-balancing loss, times its coefficient, and its plain value.
    fn load_balance(&self, router_logits: &Tensor, routes: &[u16]) -> Result<Option<(Tensor, f64)>> {
        if self.settings.load_balance == 0.0 {
            return Ok(None);
        }
        let config = &self.model.config;
        let mut counts = vec![0usize; config.num_local_experts];
        routes.iter().for_each(|&e| counts[e as usize] += 1);
        let loss = ops::load_balance(router_logits, &counts)?;
        let value = loss.to_scalar::<f32>()? as f64;
        Ok(Some(((loss * (self.settings.load_balance / config.num_hidden_layers as f64))?, value)))
    }

    fn collect(
        &self,
        store: &GradStore,
        gradients: &mut Gradients,
        wanted: impl Fn(&ParameterSpec) -> bool,
    ) -> Result<()> {
        for (index, spec) in self.parameters.specs.iter().enumerate() {
            if self.trainable[index] && wanted(spec) {
                let gradient = store.get(self.parameters.var(index));
                let gradient = gradient.with_context(|| format!("no gradient for {}", spec.name))?;
                gradients.add_tensor(index, gradient)?;
            }
        }
        Ok(())
    }
}

fn split_head(head: &Tensor) -> Result<[Vec<f32>; 2]> {
    Ok([head.get(0)?.to_vec1()?, head.get(1)?.to_vec1()?])
}

fn read_values(head: &Tensor) -> Result<Vec<f32>> {
    ensure!(head.dim(0)? == 1, "values of a model that has no value head");
    Ok(head.get(0)?.to_vec1()?)
}

/// The objective's gradient as a tensor of the head's shape.
fn apply(head: &Tensor, objective: Objective<'_>) -> Result<Tensor> {
    let [log_probs, entropies] = split_head(head)?;
    let HeadGradient { log_probs: mut gradient, entropies: entropy_gradient } =
        objective(&log_probs, &entropies)?;
    gradient.extend(entropy_gradient);
    Ok(Tensor::from_vec(gradient, head.shape(), &Device::Cpu)?)
}
