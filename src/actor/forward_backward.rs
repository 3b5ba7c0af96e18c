//! Forward and backward pass of one micro-batch, layer by layer.
//!
//! With recomputation, the forward pass keeps only the input of each layer, and the backward pass computes
//! one layer at a time again. Without recomputation, one graph holds all activations. The results of both are
//! bit-identical.

use super::columns::{Columns, PolicyColumns};
use super::micro_batch::MicroBatch;
use crate::model::attention::PackedAttention;
use crate::model::decoder_stack::{DecoderStack, LayerCallback, keep_nothing};
use crate::model::forward::{ForwardOptions, Model, Rows};
use crate::model::layer::LayerOutput;
use crate::model::parallel::sequence_parallel::SequenceParallelAttention;
use crate::model::weights::Weights;
use crate::ops::graph::differentiate;
use crate::ops::log_prob::HeadTargets;
use crate::ops::reverse_kl::TeacherRows;
use crate::ops::{self, Dispatch};
use anyhow::{Context, Result};
use candle_core::Tensor;

/// The settings of a pass.
#[derive(Debug, Clone, Copy)]
pub struct PassSettings {
    /// Sampling temperature. Log-probabilities are those of the distribution at this temperature.
    pub temperature: f64,
    /// Coefficient of the load-balancing loss, multiplied by the micro-batch's share of the batch; 0 means no
    /// such loss.
    pub load_balance_coefficient: f64,
    /// Whether the output has the routed experts.
    pub keeps_routed_experts: bool,
    pub forward: ForwardOptions,
}

impl PassSettings {
    /// Returns the settings of a pass without a load-balancing loss, whose output has no routed experts.
    pub fn new(temperature: f64, forward: ForwardOptions) -> Self {
        Self { temperature, load_balance_coefficient: 0.0, keeps_routed_experts: false, forward }
    }
}

/// A loss of the head's columns.
#[derive(Clone, Copy)]
pub struct ColumnLoss<'a, C> {
    /// Computes the gradient of the loss with respect to the columns.
    pub gradient: &'a dyn Fn(&C) -> Result<C>,
    /// Whether a pass skips its backward pass if all gradients would be 0: if every trajectory of the
    /// micro-batch has an advantage of 0, and no other loss is on.
    pub skips_zeros: bool,
}

/// The output of a pass without its gradients. The gradients go to the gradient sink of the weights.
#[derive(Debug)]
pub struct PassOutput<C = PolicyColumns> {
    /// The head's output for this rank's targets.
    pub columns: C,
    /// Routed experts, u32 `[T, K]` for each layer; empty for a model without experts, and if the pass does
    /// not keep them.
    pub routed_experts: Vec<Tensor>,
    /// Load-balancing loss, averaged over layers, before its coefficient; 0 without such a loss.
    pub load_balance_loss: f64,
    /// Whether the pass sent gradients to the sink; false for a forward pass and a skipped backward pass.
    pub has_gradients: bool,
}

/// The forward and backward pass of one micro-batch.
pub struct Pass<'a> {
    pub model: &'a Model,
    /// The weights. Each trainable weight has a gradient sink.
    pub weights: &'a Weights,
    pub batch: &'a MicroBatch,
    pub settings: PassSettings,
    /// Whether the backward pass computes each layer again.
    pub recompute_layers: bool,
    /// The teacher's rows for the batch's targets, if the head returns divergences from a teacher.
    pub teacher: Option<&'a TeacherRows>,
}

impl Pass<'_> {
    /// Runs the forward pass up to the head, without gradients. Returns the head, and its input for each
    /// target; a policy is compared with them.
    ///
    /// # Errors
    /// When the batch does not fit the model, or the model has no LM head.
    pub fn teacher_rows(&self) -> Result<TeacherRows> {
        let hidden = self.run_layers(&self.stack(), &mut keep_nothing)?;
        self.weights.teacher_rows(self.stack().final_norm_rows(&hidden, &self.batch.rows)?)
    }

    /// Runs the forward pass without gradients; `weights` should be frozen. Calls `on_layer` after each
    /// layer.
    ///
    /// # Errors
    /// When the batch does not fit the model, or the head has other columns than `C`.
    pub fn forward<C: Columns>(&self, on_layer: &dyn Fn()) -> Result<PassOutput<C>> {
        let mut routed_experts = vec![];
        let hidden = self.run_layers(&self.stack(), &mut |_, _, output| {
            routed_experts.extend(self.kept_experts(output.routed_experts()));
            on_layer();
            Ok(())
        })?;
        Ok(PassOutput {
            columns: C::from_rows(self.head(&hidden)?.to_vec2()?)?,
            routed_experts,
            load_balance_loss: 0.0,
            has_gradients: false,
        })
    }

    /// Runs the forward pass, then `loss` on the head's columns, then the backward pass. Calls `on_layer`
    /// after each layer of the forward pass.
    ///
    /// # Errors
    /// When the batch does not fit the model, the head has other columns than `C`, or the loss fails.
    pub fn forward_backward<C: Columns>(
        &self,
        loss: &ColumnLoss<C>,
        on_layer: &dyn Fn(),
    ) -> Result<PassOutput<C>> {
        match self.recompute_layers {
            true => self.run_with_recomputation(loss, on_layer),
            false => self.run_as_one_graph(loss, on_layer),
        }
    }

    fn stack(&self) -> DecoderStack<'_> {
        DecoderStack { model: self.model, weights: self.weights, forward: self.settings.forward }
    }

    /// Calls `f` with the batch's rows. With `replay`, the rows are routed to the experts in `replay`.
    fn with_rows<R>(&self, replay: Option<&[Tensor]>, f: impl FnOnce(&mut Rows) -> R) -> R {
        let sequence_rows = self.batch.sequence_rows.clone();
        let rotation = self.model.rotation(self.batch.positions.clone());
        match &self.batch.shards {
            None => f(&mut Rows { rotation, attention: &mut PackedAttention { sequence_rows }, replay }),
            Some(shards) => {
                let attention = &mut SequenceParallelAttention { split: shards.rows.clone(), sequence_rows };
                f(&mut Rows { rotation, attention, replay })
            }
        }
    }

    /// Runs the embedding and the layers. Returns the output of the last layer, `[T, H]`. Calls `on_layer`
    /// with the output of each layer.
    fn run_layers(&self, stack: &DecoderStack, on_layer: LayerCallback) -> Result<Tensor> {
        let to_device = |layers: &Vec<Tensor>| {
            let device = self.weights.device();
            layers.iter().map(|experts| Ok(experts.to_device(device)?)).collect::<Result<Vec<_>>>()
        };
        let replay = self.batch.replay.as_ref().map(to_device).transpose()?;
        self.with_rows(replay.as_deref(), |rows| stack.forward(&self.batch.tokens, rows, on_layer))
    }

    /// Returns the routed experts of one layer or of all, if the pass keeps them; otherwise nothing.
    fn kept_experts<E: Default>(&self, routed_experts: E) -> E {
        if self.settings.keeps_routed_experts { routed_experts } else { E::default() }
    }

    /// Returns the head's output, `[C, R]`.
    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = self.stack().final_norm_rows(hidden, &self.batch.rows)?;
        let MicroBatch { targets, kept_tokens, has_given_targets, .. } = self.batch;
        if let Some(teacher) = self.teacher {
            let (head, temperature) = (&self.weights.head, self.settings.temperature);
            return head.log_prob_entropy_and_kl(&normed, targets, teacher, temperature);
        }
        let targets = HeadTargets {
            tokens: targets,
            kept: kept_tokens.as_ref(),
            skips_zero_gradients: *has_given_targets,
        };
        self.weights.head(&normed, targets, self.settings.temperature)
    }

    /// Runs the pass without recomputation.
    fn run_as_one_graph<C: Columns>(
        &self,
        loss: &ColumnLoss<C>,
        on_layer: &dyn Fn(),
    ) -> Result<PassOutput<C>> {
        let (mut routed_experts, mut balance_losses, mut head_output) = (vec![], vec![], None);
        let mut has_gradients = true;
        differentiate(&[], || {
            let mut roots = vec![];
            let hidden = self.run_layers(&self.stack(), &mut |_, _, output| {
                roots.extend(self.load_balance(output, &mut balance_losses)?);
                routed_experts.extend(self.kept_experts(output.routed_experts()));
                on_layer();
                Ok(())
            })?;
            let head = self.head(&hidden)?;
            let (columns, gradient) = self.gradient(&head, loss)?;
            has_gradients = gradient.is_some();
            roots.extend(gradient.map(|gradient| (head, gradient)));
            head_output = Some(columns);
            anyhow::Ok(roots)
        })?;
        let columns = head_output.context("a pass without a head")?;
        let load_balance_loss = self.layer_mean(&balance_losses)?;
        Ok(PassOutput { columns, routed_experts, load_balance_loss, has_gradients })
    }

    /// Runs the pass with recomputation.
    fn run_with_recomputation<C: Columns>(
        &self,
        loss: &ColumnLoss<C>,
        on_layer: &dyn Fn(),
    ) -> Result<PassOutput<C>> {
        let layers = self.model.config.num_hidden_layers;
        let (mut inputs, mut routed_experts) = (Vec::with_capacity(layers), Vec::with_capacity(layers));
        let stack = DecoderStack { weights: &self.weights.without_gradient(), ..self.stack() };
        let hidden = self.run_layers(&stack, &mut |_, input, output| {
            inputs.push(input.clone());
            routed_experts.extend(output.routed_experts());
            on_layer();
            Ok(())
        })?;
        let mut head_output = None;
        let upstream = differentiate(&[&hidden], || {
            let head = self.head(&hidden)?;
            let (columns, gradient) = self.gradient(&head, loss)?;
            head_output = Some(columns);
            anyhow::Ok(gradient.map(|gradient| (head, gradient)).into_iter().collect())
        })?;
        drop(hidden);
        let columns = head_output.context("a pass without a head")?;
        let Some(mut upstream) = upstream.into_iter().next().flatten() else {
            let routed_experts = self.kept_experts(routed_experts);
            return Ok(PassOutput { columns, routed_experts, load_balance_loss: 0.0, has_gradients: false });
        };

        let mut balance_losses = vec![];
        for index in (0..layers).rev() {
            let x = inputs.pop().context("a layer's input is missing")?;
            let next = index.checked_sub(1);
            upstream = input_gradient(&x, || {
                // The recomputation uses the experts of the first forward pass.
                let output = self.with_rows(Some(&routed_experts), |rows| {
                    self.stack().run_layer(index, next, &x, rows, None)
                })?;
                let balance = self.load_balance(&output, &mut balance_losses)?;
                Ok([(output.hidden, upstream)].into_iter().chain(balance).collect())
            })?;
        }
        differentiate(&[], || anyhow::Ok(vec![(self.weights.embed(&self.batch.tokens)?, upstream)]))?;
        let load_balance_loss = self.layer_mean(&balance_losses)?;
        let routed_experts = self.kept_experts(routed_experts);
        Ok(PassOutput { columns, routed_experts, load_balance_loss, has_gradients: true })
    }

    /// Returns the mean of `losses` over the layers. Call it only at the end of a pass, because each read
    /// waits for the GPU.
    fn layer_mean(&self, losses: &[Tensor]) -> Result<f64> {
        let mut sum = 0.0;
        for loss in losses {
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        Ok(sum / self.model.config.num_hidden_layers as f64)
    }

    /// Returns the layer's load-balancing loss and its coefficient; `None` if the coefficient is 0. Appends
    /// the loss to `losses`.
    fn load_balance(
        &self,
        output: &LayerOutput,
        losses: &mut Vec<Tensor>,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let (true, Some(routing)) = (self.settings.load_balance_coefficient != 0.0, &output.routing) else {
            return Ok(None);
        };
        let sequences_per_row = self.batch.sequences_per_row.as_ref();
        let loss = match &self.batch.shards {
            None => ops::load_balance(&routing.router_logits, &routing.plan, sequences_per_row)?,
            Some(shards) => {
                let routed_experts = shards.rows.gather_routed_experts(&routing.routed_experts)?;
                let plan = Dispatch::new(&routed_experts, self.model.config.num_local_experts)?;
                let router_logits = shards.rows.gather_rows(&routing.router_logits)?;
                ops::load_balance(&router_logits, &plan, sequences_per_row)?
            }
        };
        losses.push(loss.clone());
        let layers = self.model.config.num_hidden_layers as f64;
        let coefficient =
            Tensor::new((self.settings.load_balance_coefficient / layers) as f32, loss.device())?;
        Ok(Some((loss, coefficient)))
    }

    /// Returns the columns of `head`, `[C, R]`, and the gradient of the loss with respect to `head`. The
    /// gradient is `None` if all of its values are 0 and the backward pass may be skipped.
    fn gradient<C: Columns>(&self, head: &Tensor, loss: &ColumnLoss<C>) -> Result<(C, Option<Tensor>)> {
        let local: Vec<Vec<f32>> = head.to_vec2()?;
        let all = local.iter().map(|column| self.gather_column(column)).collect::<Result<_>>()?;
        let gradients = (loss.gradient)(&C::from_rows(all)?)?.into_rows();
        let gradients: Vec<f32> = gradients.into_iter().flat_map(|column| self.local_shard(column)).collect();
        let columns = C::from_rows(local)?;
        let skips_zeros = loss.skips_zeros && self.settings.load_balance_coefficient == 0.0;
        if skips_zeros && gradients.iter().all(|value| *value == 0.0) {
            return Ok((columns, None));
        }
        Ok((columns, Some(Tensor::from_vec(gradients, head.shape(), head.device())?)))
    }

    /// Gathers the column of all targets. `local` is this rank's shard of the column.
    fn gather_column(&self, local: &[f32]) -> Result<Vec<f32>> {
        let Some(shards) = &self.batch.shards else { return Ok(local.to_vec()) };
        let lengths: Vec<usize> = shards.targets.iter().map(Vec::len).collect();
        Ok(shards.join_columns(&shards.rows.gather("the head's output", local, &lengths)?))
    }

    /// Returns this rank's shard of the column of all targets.
    fn local_shard(&self, column: Vec<f32>) -> Vec<f32> {
        match &self.batch.shards {
            None => column,
            Some(shards) => shards.local_targets().iter().map(|&index| column[index]).collect(),
        }
    }
}

/// Returns the gradient with respect to `x`. `forward` computes outputs from `x`, and returns each output
/// with the gradient with respect to that output.
fn input_gradient(x: &Tensor, forward: impl FnOnce() -> Result<Vec<(Tensor, Tensor)>>) -> Result<Tensor> {
    differentiate(&[x], forward)?.pop().flatten().context("no gradient at a layer's input")
}
