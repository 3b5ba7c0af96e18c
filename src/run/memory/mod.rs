//! Memory plan: the peak memory of a command, computed from the recipe and the config before any work.
//!
//! The peak is the resident memory (program, weights, gradients, optimizer, critic, reference) plus the
//! largest phase. The phases are sampling and the update; the update counts the larger of policy and critic.
//! In `check-mismatch`, a comparison takes the place of the update. Only one phase runs at a time. If
//! sampling runs ahead, a third phase has sampling and the update together. [`MemoryPlan::check_available`]
//! compares the peak with the available memory.

mod gpu;
mod gpu_shards;
mod input;
mod machine;
mod passes;
mod program;
mod remedies;
mod sampling;
mod teacher;
mod weights;

pub use input::{AdapterInput, MemoryChoices, MemoryPlanInput, ToolInput, TrainableInput, WeightPlacement};
pub use machine::{AvailableMemory, available_memory, min_over_processes, remaining_memory};
pub use passes::PassShape;
pub use program::tokenizer_bytes;
pub use remedies::Remedy;
pub use sampling::KEPT_TOKENS_PLANNED;
pub use teacher::TeacherInput;

use crate::actor::OptimizerSettings;
use crate::actor::batch_runner::runs_in_parallel;
use crate::actor::gradients::exchange_bytes_max;
use crate::actor::optimizer::{has_master, state_bytes, update_bytes};
use crate::bad_input;
use crate::metrics::TextTable;
use crate::model::config::WeightFormat;
use crate::model::names::{ParameterSpec, parameter_specs, value_model_specs};
use crate::model::rounding::WeightRounding;
use crate::rollout::REPLY_FRAME_TOKENS;
use crate::run::source::precision;
use anyhow::Result;
use program::retained_bytes;
use weights::{gather_peak_bytes, on_demand_bytes, unsharded_bytes};

/// A plan above this fraction of the available memory gets a warning.
const WARNING_FRACTION: f64 = 0.9;

/// Maximum bytes of activations that all concurrent passes save, if the available memory is unknown. If they
/// would save more, layers are recomputed.
const SAVED_BYTES_MAX: u64 = 1 << 30;

/// Returns the number of passes that run concurrently.
fn concurrent_passes(weight_bytes: u64, threads: usize) -> u64 {
    if runs_in_parallel(weight_bytes) { threads as u64 } else { 1 }
}

/// A command that runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ModelCommand {
    Train,
    Rollout,
    Eval,
    /// A chat or an export. It samples at most one sequence at a time.
    Chat,
    /// The HTTP server. It samples as many sequences at a time as an engine takes.
    Serve,
    CheckMismatch(SecondWeights),
}

/// The second set of weights of `check-mismatch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondWeights {
    /// Rounded weights. Ablations sample with them.
    Rounded(WeightRounding),
    /// Weights that a possible cause of mismatch has changed. Only one layer is in memory at a time.
    Changed,
}

impl ModelCommand {
    /// Returns the command's name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns whether the command trains.
    pub fn trains(self) -> bool {
        self == ModelCommand::Train
    }
}

/// A trainable tensor and its index in the parameter store.
type TrainableTensor = (usize, ParameterSpec);

/// Returns the trainable tensors of `specs`. The tensor of the first spec has the index `first`.
fn select_trainable(
    specs: impl IntoIterator<Item = ParameterSpec>,
    trainable: &[bool],
    first: usize,
) -> Vec<TrainableTensor> {
    let all = (first..).zip(specs).zip(trainable);
    all.filter(|(_, is_trainable)| **is_trainable).map(|(tensor, _)| tensor).collect()
}

/// Returns the bytes of `tensors` in f32, unsharded.
fn gathered_bytes(tensors: &[TrainableTensor]) -> u64 {
    tensors.iter().map(|(_, spec)| spec.resident_bytes(WeightFormat::F32)).sum()
}

/// Returns the bytes of `specs` in f32.
fn f32_bytes(specs: &[ParameterSpec]) -> u64 {
    specs.iter().map(|spec| spec.resident_bytes(WeightFormat::F32)).sum()
}

/// A stage of training.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TrainingStage {
    ColdStart,
    ReinforcementLearning,
}

/// One line of a memory plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryItem {
    pub name: &'static str,
    pub bytes: u64,
}

impl MemoryItem {
    fn new(name: &'static str, bytes: u64) -> Self {
        Self { name, bytes }
    }
}

/// The peak memory of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Memory that is used for the whole run.
    pub resident: Vec<MemoryItem>,
    /// Name and memory of each phase. Only one phase runs at a time.
    pub phases: Vec<(&'static str, Vec<MemoryItem>)>,
}

fn total_bytes(items: &[MemoryItem]) -> u64 {
    items.iter().map(|item| item.bytes).sum()
}

impl MemoryPlan {
    /// Computes the plan of `input`.
    pub fn new(input: &MemoryPlanInput) -> Self {
        match input.choices.gpu_sequences {
            None => {
                let (mut resident, phases) = (input.resident(), input.phases());
                resident.push(MemoryItem::new("kept by the allocator", retained_bytes(&phases)));
                Self { resident, phases }
            }
            Some(sequences) => Self { resident: input.gpu_resident(), phases: input.gpu_phases(sequences) },
        }
    }

    /// Returns the bytes that are used for the whole run.
    pub fn resident_bytes(&self) -> u64 {
        total_bytes(&self.resident)
    }

    /// Returns the peak in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.resident_bytes() + self.phases.iter().map(|(_, items)| total_bytes(items)).max().unwrap_or(0)
    }

    /// Compares the plan with the `available` memory. Returns a warning if the plan nearly fills it. An error
    /// lists remedies with their savings.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there is not enough memory.
    pub fn check_available(
        &self,
        available: Option<&AvailableMemory>,
        remedies: &[Remedy],
    ) -> Result<Option<String>> {
        let Some(AvailableMemory { bytes, limit }) = available else { return Ok(None) };
        let peak = self.peak_bytes();
        let (needed, free) = (gigabytes(peak), gigabytes(*bytes));
        if peak > *bytes {
            let remedies = join_remedies(remedies);
            return Err(bad_input!("needs {needed} of memory, but {free} are {limit}; remedies: {remedies}"));
        }
        Ok((peak as f64 > WARNING_FRACTION * *bytes as f64)
            .then(|| format!("needs {needed} of the {free} that are {limit}; this may not be enough")))
    }
}

/// Formats the remedies as one line.
fn join_remedies(remedies: &[Remedy]) -> String {
    let texts: Vec<String> = remedies.iter().map(Remedy::to_string).collect();
    if texts.is_empty() { "use a larger machine".to_owned() } else { texts.join("; ") }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = TextTable::new(["phase", "item", "GB"]);
        let resident = [("resident", &self.resident)];
        let phases = self.phases.iter().map(|(name, items)| (*name, items));
        for (name, items) in resident.into_iter().chain(phases) {
            for item in items.iter().filter(|item| item.bytes > 0) {
                table.add_row([name.to_owned(), item.name.to_owned(), plain_gigabytes(item.bytes)]);
            }
            table.add_row([name.to_owned(), "total".to_owned(), plain_gigabytes(total_bytes(items))]);
        }
        table.add_row(["peak".to_owned(), String::new(), plain_gigabytes(self.peak_bytes())]);
        write!(f, "{table}")
    }
}

/// Adds `memory`, the text of the memory plan, to `error` if the GPU ran out of memory.
pub fn explain_out_of_memory(error: anyhow::Error, memory: &str) -> anyhow::Error {
    match format!("{error:#}").contains("CUDA_ERROR_OUT_OF_MEMORY") {
        true => error.context(format!("the GPU's memory ran out; the plan was:\n\n{memory}\n")),
        false => error,
    }
}

/// Formats bytes as `1.50 GB`.
pub fn gigabytes(bytes: u64) -> String {
    format!("{} GB", plain_gigabytes(bytes))
}

fn plain_gigabytes(bytes: u64) -> String {
    // The plan of a GPU can be small, because it does not include the program. Small numbers get more
    // decimals.
    let decimals = if bytes < 50_000_000 { 5 } else { 2 };
    format!("{:.decimals$}", bytes as f64 / 1e9)
}

impl MemoryPlanInput<'_> {
    /// Formats the plan and the remedies.
    pub fn to_text(&self) -> String {
        format!("{}\nremedies: {}", MemoryPlan::new(self), join_remedies(&self.remedies(u64::MAX)))
    }

    /// Returns whether the backward pass recomputes activations. Results are bitwise equal in both cases.
    pub fn recomputes_layers(&self) -> bool {
        let choice = self.recipe.train.recompute_layers.or(self.choices.recompute_layers);
        choice.unwrap_or_else(|| self.saved_bytes() > SAVED_BYTES_MAX)
    }

    /// Returns the bytes that the concurrent passes save if nothing is recomputed.
    fn saved_bytes(&self) -> u64 {
        let tokens = self.recipe.train.micro_batch_tokens;
        let has_adapter = self.trainable.adapter.is_some();
        let pass = PassShape {
            on_gpu: false,
            teacher: self.teacher.map(|teacher| teacher.config),
            ..self.pass_shape(tokens, tokens)
        };
        let saved = pass.forward_backward_bytes(false);
        match self.placement.processes {
            _ if self.choices.gpu_sequences.is_some() => saved,
            1 => concurrent_passes(self.largest_weight_bytes(), self.threads).saturating_mul(saved),
            _ if self.shard_ranks() == 1 => saved,
            // Without recomputation, the graph of all layers holds the gathered weights. The base of an
            // adapter is gathered only if it is sharded.
            _ if !has_adapter || !self.sharded_packed_tensors().is_empty() => saved + self.weight_bytes(),
            _ => saved,
        }
    }

    /// Returns whether recomputation is needed, because a plan without it would nearly fill the `available`
    /// memory.
    pub fn needs_recomputation(&self, available: &AvailableMemory) -> bool {
        let choices = MemoryChoices { recompute_layers: Some(false), ..self.choices };
        !MemoryPlanInput { choices, ..self.clone() }.fits_without_warning(available)
    }

    /// Returns the policy's trainable tensors in `stage`.
    fn trainable_tensors(&self, stage: TrainingStage) -> Vec<TrainableTensor> {
        match &self.trainable.adapter {
            Some(adapter) if stage == TrainingStage::ReinforcementLearning || !adapter.after_cold_start => {
                select_trainable(adapter.specs.clone(), &adapter.trainable, self.formats.len())
            }
            _ => select_trainable(parameter_specs(self.config), &self.trainable.policy, 0),
        }
    }

    /// Returns the policy's tensors that are trainable in any stage.
    fn ever_trainable_tensors(&self) -> Vec<TrainableTensor> {
        let mut tensors = self.trainable_tensors(TrainingStage::ReinforcementLearning);
        if self.trainable.adapter.as_ref().is_some_and(|adapter| adapter.after_cold_start) {
            tensors.extend(self.trainable_tensors(TrainingStage::ColdStart));
        }
        tensors
    }

    /// Returns the largest total of any process. The total of a process is the sum of `bytes(spec, n)` over
    /// `tensors`, where `n` is the number of elements in the process's shard.
    fn max_process_bytes(
        &self,
        tensors: &[TrainableTensor],
        bytes: impl Fn(&ParameterSpec, usize) -> u64,
    ) -> u64 {
        let rank_bytes = |rank: usize| -> u64 {
            let shard_elements =
                |spec: &ParameterSpec, index: usize| spec.shard_range(index, rank, self.sharding()).len();
            tensors.iter().map(|(index, spec)| bytes(spec, shard_elements(spec, *index))).sum()
        };
        (0..self.shard_ranks()).map(rank_bytes).max().unwrap_or(0)
    }

    /// Returns the f32 bytes of the largest shard of `tensors`.
    fn f32_shard_bytes(&self, tensors: &[TrainableTensor]) -> u64 {
        self.max_process_bytes(tensors, |_, shard_elements| shard_elements as u64 * size_of::<f32>() as u64)
    }

    /// Returns the bytes of optimizer state and master weights for the largest shard.
    fn optimizer_shard_bytes(&self, settings: &OptimizerSettings, tensors: &[TrainableTensor]) -> u64 {
        let rounds_weights = self.recipe.model.dtype.is_bf16();
        self.max_process_bytes(tensors, |spec, shard_elements| {
            let has_master = rounds_weights && has_master(spec, precision(self.recipe));
            let master = if has_master { (shard_elements * size_of::<f32>()) as u64 } else { 0 };
            master + state_bytes(settings, spec, shard_elements)
        })
    }

    /// Returns the bytes that a process gathers in a pass: weights, and gradients during their exchange. With
    /// recomputation, sharded weights are gathered layer by layer. Without recomputation, the graph has the
    /// weights of all layers.
    fn gathered_pass_bytes(&self, tensors: &[TrainableTensor], recomputes: bool) -> u64 {
        let largest =
            tensors.iter().map(|(_, spec)| spec.resident_bytes(WeightFormat::F32)).max().unwrap_or(0);
        let sharded = self.sharded_tensors(tensors.to_vec());
        let weights = if recomputes {
            gather_peak_bytes(&sharded)
        } else {
            unsharded_bytes(&sharded).max(gather_peak_bytes(&sharded))
        };
        weights + largest + exchange_bytes_max(gathered_bytes(tensors)).max(2 * largest)
    }

    /// Returns the host memory that is used during the whole run.
    fn resident(&self) -> Vec<MemoryItem> {
        let recipe = self.recipe;
        let weights = match self.placement.layers_on_demand {
            true => {
                MemoryItem::new("weights, one layer at a time", on_demand_bytes(self.config, self.formats))
            }
            false => MemoryItem::new("weights", self.local_weight_bytes()),
        };
        let mut items = self.program();
        items.push(weights);
        let mut add = |name, bytes| items.push(MemoryItem::new(name, bytes));
        if self.command.trains() {
            let (gradients, optimizer) = self.largest_stage(Self::optimizer_shard_bytes);
            add("gradients", gradients);
            add("optimizer", optimizer);
            if let (Some(critic), Some(trainable)) = (&recipe.critic, &self.trainable.critic) {
                let tensors = self.critic_tensors();
                let frozen = self.critic_weight_bytes(trainable).saturating_sub(gathered_bytes(&tensors));
                add("critic's weights", frozen + self.f32_shard_bytes(&tensors));
                add("critic's gradients", self.f32_shard_bytes(&tensors));
                add("critic's optimizer", self.optimizer_shard_bytes(&critic.optimizer, &tensors));
            }
            if self.needs_reference() {
                // The reference policy is sharded in the same way as the trainable weights.
                let tensors = self.trainable_tensors(TrainingStage::ReinforcementLearning);
                let frozen = self.unpacked_weight_bytes().saturating_sub(gathered_bytes(&tensors));
                add("reference", frozen + self.f32_shard_bytes(&tensors));
            }
        }
        if let Some(MemoryItem { name, bytes }) = self.teacher_item() {
            add(name, bytes);
        }
        add("kept tokens of samples, 512 each", self.token_set_bytes());
        let ahead = self.sampled_ahead_bytes();
        add("samples of later steps", ahead);
        if self.samples_beside_the_update() {
            let tensors = self.trainable_tensors(TrainingStage::ReinforcementLearning);
            add("weights that sample ahead", self.samplings_in_flight() * gathered_bytes(&tensors));
        }
        match self.command {
            ModelCommand::CheckMismatch(SecondWeights::Rounded(rounding)) => {
                add("weights, rounded", self.rounded_weight_bytes(rounding));
            }
            ModelCommand::CheckMismatch(SecondWeights::Changed) => {
                add("weights, changed", self.changed_weight_bytes())
            }
            // For the other commands, rounded weights are part of the sampling phase.
            ModelCommand::Train
            | ModelCommand::Rollout
            | ModelCommand::Eval
            | ModelCommand::Chat
            | ModelCommand::Serve => {}
        }
        items
    }

    /// Returns whether training holds a reference policy. With an adapter, it is the model without the
    /// adapter. SFT alone needs none.
    fn needs_reference(&self) -> bool {
        let recipe = self.recipe;
        recipe.train.steps > 0 && recipe.policy.needs_reference() && self.trainable.adapter.is_none()
    }

    /// Returns the critic's trainable tensors: its own tensors, and the factors of its adapter. None without
    /// a critic.
    fn critic_tensors(&self) -> Vec<TrainableTensor> {
        let Some(trainable) = &self.trainable.critic else { return vec![] };
        let factors = self.trainable.adapter.iter().flat_map(|adapter| adapter.specs.iter().cloned());
        select_trainable(value_model_specs(self.config).into_iter().chain(factors), trainable, 0)
    }

    /// Returns the policy's trainable tensors and the optimizer of each stage that the recipe has.
    fn stages(&self) -> impl Iterator<Item = (Vec<TrainableTensor>, &OptimizerSettings)> {
        let (warm_up, train) = (&self.recipe.cold_start, &self.recipe.train);
        let stages = [
            (TrainingStage::ColdStart, warm_up.steps, &warm_up.optimizer),
            (TrainingStage::ReinforcementLearning, train.steps, &train.optimizer),
        ];
        let trained = stages.into_iter().filter(|(_, steps, _)| *steps > 0);
        trained.map(|(stage, _, optimizer)| (self.trainable_tensors(stage), optimizer))
    }

    /// Returns the bytes of gradients and of `optimizer_bytes` in the stage that needs more memory for both.
    fn largest_stage(
        &self,
        optimizer_bytes: impl Fn(&Self, &OptimizerSettings, &[TrainableTensor]) -> u64,
    ) -> (u64, u64) {
        let bytes = self.stages().map(|(tensors, settings)| {
            (self.f32_shard_bytes(&tensors), optimizer_bytes(self, settings, &tensors))
        });
        bytes.max_by_key(|(a, b)| a + b).unwrap_or_default()
    }

    /// Returns the shape of a pass on the plan's device, which has all rows of its sequences and no teacher.
    fn pass_shape(&self, tokens: usize, targets: usize) -> PassShape<'_> {
        PassShape {
            config: self.config,
            tokens,
            targets,
            has_adapter: self.trainable.adapter.is_some(),
            on_gpu: self.choices.gpu_sequences.is_some(),
            teacher: None,
            sequence_ranks: 1,
        }
    }

    /// Returns the length of the longest sequence in tokens: prompt, samples and tool replies, limited by the
    /// context.
    pub(super) fn longest_sequence(&self) -> usize {
        let rollout = &self.recipe.rollout;
        // The calls of a turn share the characters of one reply. A character takes about one token at most.
        let reply_tokens = self.tools.reply_chars_max.map_or(0, |chars| chars + REPLY_FRAME_TOKENS);
        let replies = rollout.turns_max.saturating_sub(1);
        let tokens = rollout.prompt_tokens_max + rollout.response_tokens_max + replies * reply_tokens;
        tokens.min(self.config.max_position_embeddings)
    }

    /// Returns the host memory of each phase.
    fn phases(&self) -> Vec<(&'static str, Vec<MemoryItem>)> {
        let recipe = self.recipe;
        let mut phases = vec![];
        let steps = if self.command.trains() { recipe.train.steps } else { 1 };
        if steps > 0 {
            phases.push(("sampling", self.sampling_items()));
        }
        if !matches!(self.command, ModelCommand::Train | ModelCommand::CheckMismatch(_)) {
            return phases;
        }
        let tokens = self.local_micro_batch_tokens();
        let pass = PassShape {
            teacher: self.teacher.map(|teacher| teacher.config),
            sequence_ranks: self.sequence_ranks(),
            ..self.pass_shape(tokens, tokens)
        };
        // Passes of several processes exchange data, so each process runs only one pass at a time.
        let exchanges = self.placement.processes > 1;
        let passes = if exchanges { 1 } else { concurrent_passes(self.largest_weight_bytes(), self.threads) };
        if matches!(self.command, ModelCommand::CheckMismatch(_)) {
            phases.push(("comparison", vec![MemoryItem::new("activations", pass.forward_bytes())]));
            return phases;
        }
        let recomputes = self.recomputes_layers();
        let bytes = passes * pass.forward_backward_bytes(recomputes).max(self.teacher_pass_bytes(&pass));
        let name = if recomputes { "activations, recomputed" } else { "activations, all kept" };
        let tensors = [self.ever_trainable_tensors(), self.critic_tensors()];
        let gathered =
            tensors.iter().map(|tensors| self.gathered_pass_bytes(tensors, recomputes)).max().unwrap_or(0);
        let gathered = if self.shard_ranks() > 1 { gathered } else { 0 };
        let gathered = MemoryItem::new("gathered weights, exchanged gradients", gathered);
        let update = vec![MemoryItem::new(name, bytes), gathered];
        let samples_ahead = self.samples_beside_the_update() && steps > 0;
        let in_flight = self.samplings_in_flight();
        let times = |item: MemoryItem| MemoryItem { bytes: in_flight * item.bytes, ..item };
        let sampling: Option<Vec<_>> =
            samples_ahead.then(|| self.sampling_items().into_iter().map(times).collect());
        if let Some(sampling) = &sampling {
            phases.push(("sampling beside the update", [sampling.clone(), update.clone()].concat()));
        }
        phases.push(("update", update));
        phases.extend(self.copies_phase(4));
        phases.extend(self.optimizer_phase(sampling));
        phases
    }

    /// Returns the phase of the optimizers that multiply matrices. `sampling` has the items of sampling that
    /// runs at the same time.
    fn optimizer_phase(&self, sampling: Option<Vec<MemoryItem>>) -> Option<(&'static str, Vec<MemoryItem>)> {
        let bytes = self.optimizer_scratch_bytes();
        let products = MemoryItem::new("products of matrices", bytes);
        let items = sampling.into_iter().flatten().chain([products]);
        (bytes > 0).then(|| ("optimizer", items.collect()))
    }

    /// Returns the bytes that the update of a tensor needs besides weights, gradient and state. Tensors are
    /// updated one by one.
    fn optimizer_scratch_bytes(&self) -> u64 {
        let on_gpu = self.choices.gpu_sequences.is_some();
        let critic = self.recipe.critic.iter().map(|critic| (self.critic_tensors(), &critic.optimizer));
        let largest = |(tensors, settings): (Vec<TrainableTensor>, &OptimizerSettings)| {
            tensors.iter().map(|(_, spec)| update_bytes(settings, spec, on_gpu)).max()
        };
        self.stages().chain(critic).filter_map(largest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
