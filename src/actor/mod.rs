//! The actor: what is trained, and its verbs. It alone touches gradients, micro-batches, recomputation and
//! shards.
//!
//! | verb | effect |
//! | --- | --- |
//! | [`Actor::engine`] | samples with the current weights; the borrow keeps updates away |
//! | [`Actor::snapshot`] | a frozen copy of the trained weights, which later updates do not change |
//! | [`Actor::forward`] | columns of a batch; touches no gradient |
//! | [`Actor::forward_backward`] | columns of a batch; adds the gradients of a loss |
//! | [`Actor::optim_step`] | updates the weights by the gradients, and clears them |
//! | [`Actor::save`], [`Actor::load`] | weights with or without optimizer state, complete or absent |
//!
//! Gradients of micro-batches that run in parallel, in turn or on other processes are added in batch order
//! ([`gradients`]), so a sum does not depend on threads or processes. [`PassInput`] is split into
//! micro-batches here; a loss that divides by the tokens of the whole update does not depend on the split,
//! within rounding.
//!
//! Actors over one base share its weights, the model and the execution. A frozen reference and a teacher are
//! actors that are never trained.

pub mod batch_runner;
pub mod columns;
pub mod forward_backward;
pub mod gradients;
mod input;
pub mod micro_batch;
pub mod optimizer;
mod pass_results;
pub mod replica_sum;
pub mod routed_experts;
mod settings;
pub mod teacher;

pub use columns::{Columns, CriticColumns, PolicyColumns};
pub use forward_backward::PassSettings;
pub use input::{BatchPart, GivenTargets, PassInput};
pub use optimizer::UpdateSettings;
pub use settings::{OptimizerKind, OptimizerSettings, Schedule};

use crate::atomic_file::replace_folder;
use crate::checkpoint::{self, ModelFiles};
use crate::dist::{Mesh, RolloutWeightPlacement};
use crate::engine::{Engine, EngineLimits};
use crate::metrics::Progress;
use crate::model::ablations::Ablations;
use crate::model::adapter::{Lora, Owner};
use crate::model::cache::CacheCapacity;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::model::policy_view::PolicyView;
use crate::ops::cuda::SecondStream;
use crate::ops::threads::Threads;
use anyhow::{Context, Result};
use batch_runner::BatchRunner;
use forward_backward::PassOutput;
use micro_batch::{MicroBatch, MicroBatchValues, mean_of_rows};
use optimizer::Optimizer;
use routed_experts::{RoutedExperts, experts_from_forward};
use std::path::Path;
use std::sync::Arc;

const FROZEN: &str = "a frozen actor has no optimizer";

/// How this process computes, as chosen at startup. All actors share it.
pub struct Execution {
    pub threads: Threads,
    /// Whether the backward pass recomputes layers: `train.recompute_layers`, or what the memory plan chose
    /// (`run/startup/fit.rs`).
    pub recompute_layers: bool,
    /// Maximum number of tokens of a micro-batch.
    pub micro_batch_tokens: usize,
    /// Capacity of the GPU's KV cache.
    pub cache_capacity: CacheCapacity,
    /// Tokens whose keys and values are kept for later requests.
    pub prefix_tokens_max: usize,
    /// How each process holds the weights while it samples.
    pub rollout_weights: RolloutWeightPlacement,
}

/// A model with its weights. If it is trained, also with gradients and optimizer state.
pub struct Actor {
    pub model: Arc<Model>,
    pub parameters: Parameters,
    pub execution: Arc<Execution>,
    /// The threads of passes and updates, if they are not those of the execution.
    training_threads: Option<Arc<Threads>>,
    /// `None` before [`Self::start_optimizer`], and in a frozen actor.
    optimizer: Option<Optimizer>,
    /// Whether gradients have been added since the last update.
    has_gradients: bool,
}

/// The result of a forward pass over a batch.
#[derive(Debug, Default)]
pub struct Forward<C = PolicyColumns> {
    /// One value for each target, in batch order.
    pub columns: C,
    /// Routed experts, one entry per sequence; empty if the pass does not keep them.
    pub routed_experts: Vec<RoutedExperts>,
    /// Load-balancing loss before its coefficient, averaged over rows; 0 without such a loss.
    pub load_balance: f64,
    /// Number of tokens that went through the model.
    pub tokens: usize,
}

/// The gradient norm of an update, before clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradientNorm {
    /// The weights were updated.
    Applied(f64),
    /// The norm is not finite or exceeds the limit. The weights did not change.
    Skipped(f64),
}

/// The loss of one part of a batch: from its columns to the gradient with respect to them, and a value for
/// the caller. It must divide its gradients by the number of tokens of the whole update.
pub type PartLoss<'a, C, S> = &'a (dyn Fn(&BatchPart, &C) -> Result<(C, S)> + Sync);

/// Starts the progress display of a pass over so many tokens.
pub type StartProgress<'a> = &'a dyn Fn(u64) -> Progress;

impl Actor {
    /// Returns a frozen actor.
    pub fn new(model: Arc<Model>, parameters: Parameters, execution: Arc<Execution>) -> Self {
        let (training_threads, optimizer) = (None, None);
        Self { model, parameters, execution, training_threads, optimizer, has_gradients: false }
    }

    /// Returns an actor with a new adapter on the base of this actor. No tensor of the base is copied.
    ///
    /// # Errors
    /// When a target of `lora` is not a matrix of the base.
    pub fn with_adapter(&self, lora: Lora, seed: u64) -> Result<Self> {
        let mut parameters = self.parameters.without_adapter();
        let values = lora.initial_values(&parameters.specs, seed, Owner::Policy)?;
        parameters.attach_adapter(lora, values)?;
        Ok(self.beside(parameters))
    }

    /// Returns a frozen actor with the weights `parameters` of the same architecture, which computes on the
    /// same threads.
    pub fn beside(&self, parameters: Parameters) -> Self {
        let actor = Self::new(self.model.clone(), parameters, self.execution.clone());
        Self { training_threads: self.training_threads.clone(), ..actor }
    }

    /// Returns a frozen actor without the adapter, which shares all weights.
    pub fn without_adapter(&self) -> Self {
        self.beside(self.parameters.without_adapter())
    }

    /// Returns a frozen actor with the current weights, which later updates do not change. It copies the
    /// trained tensors and shares the others. On a GPU, `second` is the stream that uses the copy.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn snapshot(&self, second: Option<&SecondStream>) -> Result<Self> {
        let parameters = self.parameters.snapshot(second)?;
        Ok(Self::new(self.model.clone(), parameters, self.execution.clone()))
    }

    /// Returns the processes of the run.
    pub fn mesh(&self) -> &Arc<Mesh> {
        self.parameters.mesh()
    }

    /// Sets the threads of passes and updates, beside samplings on the threads of the execution.
    pub fn set_training_threads(&mut self, threads: Arc<Threads>) {
        self.training_threads = Some(threads);
    }

    /// Starts an optimizer with zero state over the trainable tensors, and clears the gradients.
    /// `round_to_bf16`: whether the model computes with weights in bf16.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn start_optimizer(&mut self, settings: &OptimizerSettings, round_to_bf16: bool) -> Result<()> {
        self.optimizer = Some(Optimizer::new(settings, &mut self.parameters, round_to_bf16)?);
        self.clear_gradients()
    }

    /// Returns the settings of an update at step `step` (from 1) of `steps`: those of the optimizer, with the
    /// learning rate of the schedule.
    ///
    /// # Errors
    /// When the actor has no optimizer.
    pub fn update_settings(&self, step: u64, steps: u64, norm_limit: Option<f64>) -> Result<UpdateSettings> {
        let settings = &self.optimizer.as_ref().context(FROZEN)?.settings;
        Ok(settings.for_update(settings.learning_rate(step, steps), norm_limit))
    }

    /// Returns the number of updates so far.
    pub fn updates(&self) -> u64 {
        self.optimizer.as_ref().map_or(0, |optimizer| optimizer.updates)
    }

    /// Returns an engine that samples with `policy`, a view of this actor's weights. Its completions name the
    /// weights by `version`. Updates need this actor alone, so none happens while the engine is in use.
    ///
    /// # Errors
    /// When a GPU's memory does not suffice for the KV caches.
    pub fn engine<'a>(
        &'a self,
        threads: &'a Threads,
        policy: PolicyView<'a>,
        version: u64,
        (sequences_max, cuda_graphs): (usize, bool),
    ) -> Result<Engine<'a>> {
        let &Execution { cache_capacity, prefix_tokens_max, .. } = &*self.execution;
        let limits = EngineLimits { sequences_max, cuda_graphs, cache_capacity, prefix_tokens_max };
        Engine::new(threads, policy, version, limits)
    }

    /// Returns the policy that samples, with `ablations` and their seed applied if given. All processes of
    /// the run call it together.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when an ablation does not fit the model.
    pub fn policy(&self, ablations: Option<(&Ablations, u64)>) -> Result<PolicyView<'_>> {
        let (ablations, seed) = ablations.unzip();
        let weights = self.execution.rollout_weights;
        PolicyView::across_processes(&self.model, &self.parameters, ablations, seed.unwrap_or(0), weights)
    }

    /// Returns the columns of a batch, one value for each target. Neither adds to nor clears gradients.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the input does not fit the model; any other error when a pass fails.
    pub fn forward<C: Columns>(
        &self,
        input: &PassInput,
        settings: PassSettings,
        progress: StartProgress<'_>,
    ) -> Result<Forward<C>> {
        input.check(&self.model)?;
        let runner = self.runner();
        let batches = input.pack(&runner, self.execution.micro_batch_tokens)?;
        let progress = progress(runner.local_tokens(&batches));
        let outputs = runner.forward(&batches, settings, &progress)?;
        progress.finish();
        Forward::join(&batches, outputs)
    }

    /// Runs the forward and backward pass of a batch, and adds the gradients of `loss`. Returns the columns,
    /// and the values that `loss` returned for each part, in batch order.
    ///
    /// A micro-batch never spans two calls. Two calls add the same bits as one call with all sequences, if
    /// [`PassInput::splits`] names the place between them.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the input does not fit the model or the teacher: nothing was added.
    /// When a pass or the loss fails: all gradients are cleared, and the error says so if earlier calls had
    /// added some.
    pub fn forward_backward<C: Columns, S: Send>(
        &mut self,
        input: &PassInput,
        settings: PassSettings,
        loss: PartLoss<'_, C, S>,
        progress: StartProgress<'_>,
    ) -> Result<(Forward<C>, Vec<S>)> {
        input.check(&self.model)?;
        let runner = self.runner();
        let batches = input.pack(&runner, self.execution.micro_batch_tokens)?;
        let teacher = input.teacher.map(|teacher| teacher.passes(&input.sequences, &batches)).transpose()?;
        let parts = BatchPart::of_micro_batches(&batches);
        let values = MicroBatchValues::new(&batches);
        let loss = |index: usize, columns: &C| {
            let (gradient, value) = loss(&parts[index], columns)?;
            values.set(index, value);
            Ok(gradient)
        };
        let progress = progress(runner.local_tokens(&batches));
        let outputs = runner.accumulate(&batches, settings, teacher.as_ref(), &loss, &progress);
        let result = outputs.and_then(|outputs| {
            progress.finish();
            Ok((Forward::join(&batches, outputs)?, values.into_values()?))
        });
        if result.is_ok() {
            self.has_gradients = true;
        }
        result.map_err(|error| self.clear_after(error))
    }

    /// Updates the weights by the gradients since the last update, and clears the gradients. All gradients
    /// are scaled down together if their norm exceeds the clipping norm. A norm that is not finite changes no
    /// weight and is a result: the trainer ends the run, or counts it and goes on (`train.on_bad_step`).
    ///
    /// # Errors
    /// When the actor has no optimizer, or a tensor cannot be written. Then the actor cannot be used further.
    pub fn optim_step(&mut self, update: &UpdateSettings) -> Result<GradientNorm> {
        let Self { parameters, optimizer, execution, training_threads, .. } = self;
        let optimizer = optimizer.as_mut().context(FROZEN)?;
        let threads = training_threads.as_deref().unwrap_or(&execution.threads);
        let norm = threads.run_on_all(|| {
            if let Some(replicas) = parameters.mesh().replica_group() {
                replica_sum::sum_replicas(replicas, parameters.gradients())?;
            }
            let norm = gradients::global_norm(parameters)?;
            if !norm.is_finite() || update.norm_limit.is_some_and(|limit| norm > limit) {
                return anyhow::Ok(GradientNorm::Skipped(norm));
            }
            gradients::clip(parameters, norm, update.grad_norm_max)?;
            optimizer.update(parameters, update)?;
            Ok(GradientNorm::Applied(norm))
        })?;
        self.clear_gradients()?;
        Ok(norm)
    }

    /// Sets all gradients to 0.
    fn clear_gradients(&mut self) -> Result<()> {
        self.has_gradients = false;
        self.runner().threads.run_on_all(|| gradients::clear(&self.parameters))
    }

    /// Writes the weights into the folder `place`, with the optimizer state if `has_optimizer`. The folder is
    /// complete or absent. All processes call it together.
    ///
    /// # Errors
    /// When writing fails.
    pub fn save(&self, place: &Path, files: &ModelFiles, has_optimizer: bool) -> Result<()> {
        let fill = |folder: &Path| files.write(folder, &self.parameters, has_optimizer)?.write(folder);
        let serve = |request| checkpoint::serve(&self.parameters, None, &request);
        self.mesh().run_on_rank_zero(|| replace_folder(place, fill), serve)
    }

    /// Restores the weights and the optimizer state after `updates` updates from `place`, bit for bit;
    /// without `updates`, the values of the adapter alone. Gradients are cleared.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the folder is incomplete, or belongs to another model or optimizer.
    /// Another error when the actor has no optimizer.
    pub fn load(&mut self, place: &Path, updates: Option<u64>) -> Result<()> {
        let optimizer = self.optimizer.as_mut().context(FROZEN)?;
        match updates {
            Some(updates) => {
                checkpoint::restore(place, &mut self.parameters)?;
                optimizer.updates = updates;
            }
            None => checkpoint::restore_adapter(place, &mut self.parameters)?,
        }
        optimizer.write_weights(&mut self.parameters)?;
        self.clear_gradients()
    }

    /// Returns what runs this actor's micro-batches.
    fn runner(&self) -> BatchRunner<'_> {
        let Self { model, parameters, execution, training_threads, .. } = self;
        BatchRunner {
            threads: training_threads.as_deref().unwrap_or(&execution.threads),
            model,
            parameters,
            recompute_layers: execution.recompute_layers,
        }
    }

    /// Clears the gradients after `error` in a backward pass. Returns the error.
    fn clear_after(&mut self, error: anyhow::Error) -> anyhow::Error {
        let had_gradients = self.has_gradients;
        match self.clear_gradients() {
            Err(second) => error.context(format!("the gradients could not be cleared: {second:#}")),
            Ok(()) if had_gradients => error.context("the gradients since the last update were cleared"),
            Ok(()) => error,
        }
    }
}

impl<C: Columns> Forward<C> {
    /// Joins the outputs of all micro-batches.
    fn join(batches: &[MicroBatch], outputs: Vec<PassOutput<C>>) -> Result<Self> {
        let routed_experts = match outputs.iter().any(|output| !output.routed_experts.is_empty()) {
            true => experts_from_forward(batches, &outputs)?,
            false => vec![],
        };
        let load_balance = mean_of_rows(batches, outputs.iter().map(|output| output.load_balance_loss));
        let tokens = batches.iter().map(|batch| batch.tokens.len()).sum();
        let columns = columns::concat(outputs.into_iter().map(|output| output.columns))?;
        Ok(Self { columns, routed_experts, load_balance, tokens })
    }
}
