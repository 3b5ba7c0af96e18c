//! Memory plan: the peak memory of a command, computed from recipe and config before any work.
//!
//! The peak is the resident memory (program, weights, gradients, optimizer, critic, reference) plus the
//! largest phase. Phases follow one another: sampling, the policy's update, the critic's update.
//! [`MemoryPlan::check_available`] compares the peak with the available memory.

mod gpu;
mod machine;
mod passes;
mod program;
mod remedies;
mod traffic;
mod weights;

pub use machine::{AvailableMemory, available_memory, min_over_processes};
pub use passes::PassShape;
pub use program::tokenizer_bytes;
pub use remedies::Remedy;
pub use traffic::Traffic;

use crate::bad_input;
use crate::dist::shard_range;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::learner::OptimizerSettings;
use crate::learner::batch_runner::runs_in_parallel;
use crate::learner::gradients::exchange_bytes_max;
use crate::learner::optimizer::state_bytes;
use crate::metrics::Table;
use crate::model::cache::SequenceCache;
use crate::model::config::{Config, WeightFormat};
use crate::model::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use crate::model::rounding::WeightRounding;
use crate::policy::KlPlacement;
use crate::recipe::Recipe;
use crate::rollout::{FORWARD_TOKENS_MAX, engine_count};
use anyhow::Result;
use program::retained_bytes;
use weights::{ShardedTensor, gather_peak_bytes, unsharded_bytes};

/// A plan above this fraction of the available memory gets a warning.
const WARNED_SHARE: f64 = 0.9;
/// Tokens around a tool's reply.
const REPLY_FRAME_TOKENS: usize = 32;

/// Limit of saved activations of all concurrent passes in bytes, where the available memory is unknown.
const KEPT_BYTES_MAX: u64 = 1 << 30;

fn passes_at_once(weight_bytes: u64, threads: usize) -> u64 {
    if runs_in_parallel(weight_bytes) { threads as u64 } else { 1 }
}

/// A command that runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelCommand {
    Train,
    Rollout,
    Eval,
    /// A chat, or the export of a model: at most one sequence.
    Chat,
    CheckMismatch(SecondWeights),
}

/// The second set of weights that `check-mismatch` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondWeights {
    /// The weights with which the ablations sample.
    Rounded(WeightRounding),
    /// The weights changed by a known fault, one layer at a time, to explain another engine's log-probs.
    Changed,
}

impl ModelCommand {
    /// Returns the command's name.
    pub fn name(self) -> &'static str {
        match self {
            ModelCommand::Train => "train",
            ModelCommand::Rollout => "rollout",
            ModelCommand::Eval => "eval",
            ModelCommand::Chat => "chat",
            ModelCommand::CheckMismatch(_) => "check-mismatch",
        }
    }

    /// Returns whether the command trains.
    pub fn trains(self) -> bool {
        self == ModelCommand::Train
    }

    /// Returns whether the command may read layers from disk on demand. It pays only for few forward passes
    /// over many tokens.
    pub fn can_stream(self) -> bool {
        matches!(self, ModelCommand::Eval | ModelCommand::CheckMismatch(_))
    }
}

/// The input of a memory plan.
#[derive(Clone)]
pub struct PlanInput<'a> {
    pub command: ModelCommand,
    pub recipe: &'a Recipe,
    pub config: &'a Config,
    /// Storage format of each of the policy's tensors while frozen.
    pub formats: &'a [WeightFormat],
    /// Trainable flags of the policy's tensors.
    pub trainable: Vec<bool>,
    /// Trainable flags of the critic's tensors; `None` without a critic.
    pub critic_trainable: Option<Vec<bool>>,
    /// The adapter that is trained, or that came with the model.
    pub adapter: Option<AdapterInput>,
    /// Memory of the tokenizer; see [`tokenizer_bytes`].
    pub tokenizer_bytes: u64,
    /// Number of worker processes of the Python tool; 0 without the tool.
    pub python_workers: usize,
    pub threads: usize,
    /// True when layers stay on disk and are read on demand.
    pub streamed: bool,
    /// Number of processes of the run. The plan is for one of them.
    pub processes: usize,
    /// How each process holds the trainable weights while it samples.
    pub rollout_weights: RolloutWeightPlacement,
    /// How each process holds the packed weights.
    pub packed_weights: PackedWeightPlacement,
    /// Number of sequences in the GPU's KV cache; `None` on the CPU. It selects the memory to plan: GPU or
    /// host.
    pub gpu_sequences: Option<usize>,
    /// Whether the backward recomputes activations, by the available memory; `None` if that is unknown. The
    /// recipe's key overrides it.
    pub recompute_layers: Option<bool>,
}

/// An adapter as the memory plan sees it.
#[derive(Debug, Clone)]
pub struct AdapterInput {
    /// Names and shapes of the factors.
    pub specs: Vec<ParameterSpec>,
    /// Trainable flags, one per factor.
    pub trainable: Vec<bool>,
    /// True when SFT warm-up first trains the whole model without the adapter.
    pub after_cold_start: bool,
}

impl AdapterInput {
    fn bytes(&self) -> u64 {
        f32_bytes(&self.specs)
    }
}

/// A trainable tensor and its index in the parameter store.
type TrainableTensor = (usize, ParameterSpec);

/// Returns the specs that `trainable` marks, with indices that start at `first`.
fn select_trainable(
    specs: impl IntoIterator<Item = ParameterSpec>,
    trainable: &[bool],
    first: usize,
) -> Vec<TrainableTensor> {
    (first..)
        .zip(specs)
        .zip(trainable)
        .filter(|(_, is_trainable)| **is_trainable)
        .map(|(found, _)| found)
        .collect()
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
enum Stage {
    ColdStart,
    Reinforcement,
}

/// One line of a memory plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryItem {
    pub name: &'static str,
    pub bytes: u64,
}

/// The peak memory of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Memory held for the whole run.
    pub resident: Vec<MemoryItem>,
    /// Memory of each phase; only one phase runs at a time.
    pub phases: Vec<(&'static str, Vec<MemoryItem>)>,
}

fn sum(parts: &[MemoryItem]) -> u64 {
    parts.iter().map(|part| part.bytes).sum()
}

impl MemoryPlan {
    /// Computes the plan of `input`.
    pub fn new(input: &PlanInput) -> Self {
        match input.gpu_sequences {
            None => {
                let (mut resident, phases) = (input.resident(), input.phases());
                let bytes = retained_bytes(&phases);
                resident.push(MemoryItem { name: "kept by the allocator", bytes });
                Self { resident, phases }
            }
            Some(sequences) => Self { resident: input.gpu_resident(), phases: input.gpu_phases(sequences) },
        }
    }

    /// Returns the bytes held for the whole run.
    pub fn resident_bytes(&self) -> u64 {
        sum(&self.resident)
    }

    /// Returns the peak in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.resident_bytes() + self.phases.iter().map(|(_, parts)| sum(parts)).max().unwrap_or(0)
    }

    /// Refuses a plan that needs more than `available`, and names the remedies with their savings. Returns a
    /// warning for a plan that nearly fills the memory.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there is not enough memory.
    pub fn check_available(
        &self,
        available: Option<&AvailableMemory>,
        remedies: &[Remedy],
    ) -> Result<Option<String>> {
        let Some(AvailableMemory { bytes, bound }) = available else { return Ok(None) };
        let peak = self.peak_bytes();
        let compared = format!("{} of memory are needed, {} are {bound}", gigabytes(peak), gigabytes(*bytes));
        if peak > *bytes {
            let help = what_helps(remedies);
            return Err(bad_input!("{compared}; what would help: {help}"));
        }
        Ok((peak as f64 > WARNED_SHARE * *bytes as f64).then(|| format!("{compared}; it may not suffice")))
    }
}

/// Formats the remedies as one line.
fn what_helps(remedies: &[Remedy]) -> String {
    let help: Vec<String> = remedies.iter().map(Remedy::to_string).collect();
    if help.is_empty() { "use a larger machine".to_owned() } else { help.join("; ") }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new(["phase", "item", "GB"]);
        let stays = [("resident", &self.resident)];
        let phases = self.phases.iter().map(|(name, parts)| (*name, parts));
        for (name, parts) in stays.into_iter().chain(phases) {
            for part in parts.iter().filter(|part| part.bytes > 0) {
                table.add_row([name.to_owned(), part.name.to_owned(), plain_gigabytes(part.bytes)]);
            }
            table.add_row([name.to_owned(), "total".to_owned(), plain_gigabytes(sum(parts))]);
        }
        table.add_row(["peak".to_owned(), String::new(), plain_gigabytes(self.peak_bytes())]);
        write!(f, "{table}")
    }
}

/// Adds the memory plan and its remedies to the `error` if a GPU ran out of memory.
pub fn explain_out_of_memory(error: anyhow::Error, memory: &str) -> anyhow::Error {
    match format!("{error:#}").contains("CUDA_ERROR_OUT_OF_MEMORY") {
        true => error.context(format!("the GPU's memory ran out; the plan was:\n\n{memory}\n")),
        false => error,
    }
}

/// Formats as `1.50 GB`.
pub fn gigabytes(bytes: u64) -> String {
    format!("{} GB", plain_gigabytes(bytes))
}

fn plain_gigabytes(bytes: u64) -> String {
    // A GPU's plan can be small, because it has no line for the program.
    let places = if bytes < 50_000_000 { 4 } else { 2 };
    format!("{:.places$}", bytes as f64 / 1e9)
}

impl PlanInput<'_> {
    /// Formats the plan and the remedies.
    pub fn to_text(&self) -> String {
        format!("{}\nwhat would help: {}", MemoryPlan::new(self), what_helps(&self.remedies()))
    }

    /// Returns whether the backward recomputes activations. Results are bitwise equal either way.
    pub fn recomputes_layers(&self) -> bool {
        let known = self.recipe.train.recompute_layers.or(self.recompute_layers);
        known.unwrap_or_else(|| self.saved_bytes() > KEPT_BYTES_MAX)
    }

    /// Returns the bytes of all activations of the passes that run at once.
    fn saved_bytes(&self) -> u64 {
        let (tokens, adapted) = (self.recipe.train.micro_batch_tokens, self.adapter.is_some());
        let pass = PassShape { config: self.config, tokens, targets: tokens, adapted, on_gpu: false };
        let saved = pass.forward_backward(false);
        match self.processes {
            _ if self.gpu_sequences.is_some() => saved,
            1 => passes_at_once(self.weight_bytes(), self.threads).saturating_mul(saved),
            // A graph of all layers holds all their weights; the base of an adapter only if it is sharded.
            _ if !adapted || !self.sharded_packed_tensors().is_empty() => saved + self.weight_bytes(),
            _ => saved,
        }
    }

    /// Returns whether the plan, with all activations kept, nearly fills the `available` memory.
    pub fn recomputes_within(&self, available: &AvailableMemory) -> bool {
        let kept = MemoryPlan::new(&PlanInput { recompute_layers: Some(false), ..self.clone() });
        kept.peak_bytes() as f64 > WARNED_SHARE * available.bytes as f64
    }

    /// Returns the policy's trainable tensors in `stage`.
    fn trainable_tensors(&self, stage: Stage) -> Vec<TrainableTensor> {
        match &self.adapter {
            Some(adapter) if stage == Stage::Reinforcement || !adapter.after_cold_start => {
                select_trainable(adapter.specs.clone(), &adapter.trainable, self.formats.len())
            }
            _ => select_trainable(parameter_specs(self.config), &self.trainable, 0),
        }
    }

    /// Returns the policy's tensors that are trainable in any stage.
    fn ever_trainable_tensors(&self) -> Vec<TrainableTensor> {
        let mut found = self.trainable_tensors(Stage::Reinforcement);
        if self.adapter.as_ref().is_some_and(|adapter| adapter.after_cold_start) {
            found.extend(self.trainable_tensors(Stage::ColdStart));
        }
        found
    }

    /// Returns the largest total of any process. A process's total is the sum of `bytes(spec, n)` over
    /// `tensors`, where `n` is the number of elements in its shard.
    fn max_process_bytes(
        &self,
        tensors: &[TrainableTensor],
        bytes: impl Fn(&ParameterSpec, usize) -> u64,
    ) -> u64 {
        let of = |rank: usize| -> u64 {
            let shard_elements = |spec: &ParameterSpec, index: usize| {
                shard_range(spec.element_count(), index, rank, self.processes).len()
            };
            tensors.iter().map(|(index, spec)| bytes(spec, shard_elements(spec, *index))).sum()
        };
        (0..self.processes).map(of).max().unwrap_or(0)
    }

    /// Returns the bytes of the largest shard of `tensors` in f32.
    fn f32_shard_bytes(&self, tensors: &[TrainableTensor]) -> u64 {
        self.max_process_bytes(tensors, |_, shard_elements| shard_elements as u64 * size_of::<f32>() as u64)
    }

    /// Returns the bytes of optimizer state and master weights in the largest shard.
    fn optimizer(&self, settings: &OptimizerSettings, tensors: &[TrainableTensor]) -> u64 {
        let rounds_weights = self.recipe.model.dtype.is_bf16();
        self.max_process_bytes(tensors, |spec, shard_elements| {
            // An adapter stays in f32.
            let has_master = rounds_weights && spec.role != TensorRole::AdapterFactor;
            let master = if has_master { (shard_elements * size_of::<f32>()) as u64 } else { 0 };
            master + state_bytes(settings, spec.element_count(), shard_elements)
        })
    }

    /// Returns the bytes that a process gathers in a pass: weights and exchanged gradients. With
    /// recomputation, it gathers the sharded weights layer by layer. Without, the graph holds all layers at
    /// once.
    fn gathered_bytes(&self, tensors: &[TrainableTensor], recomputes: bool) -> u64 {
        let largest =
            tensors.iter().map(|(_, spec)| spec.resident_bytes(WeightFormat::F32)).max().unwrap_or(0);
        let sharded: Vec<ShardedTensor> = tensors
            .iter()
            .cloned()
            .map(ShardedTensor::from_trainable)
            .chain(self.sharded_packed_tensors())
            .collect();
        // A layer is held twice while it arrives, and the next one is prefetched.
        let weights = if recomputes {
            gather_peak_bytes(&sharded)
        } else {
            unsharded_bytes(&sharded).max(gather_peak_bytes(&sharded))
        };
        weights + largest + exchange_bytes_max(gathered_bytes(tensors)).max(2 * largest)
    }

    fn resident(&self) -> Vec<MemoryItem> {
        let recipe = self.recipe;
        let weights = match self.streamed {
            true => MemoryItem { name: "weights, a layer at a time", bytes: self.streamed_weights() },
            false => MemoryItem { name: "weights", bytes: self.local_weight_bytes() },
        };
        let mut parts = self.program();
        parts.push(weights);
        let mut part = |name, bytes| parts.push(MemoryItem { name, bytes });
        if self.command.trains() {
            // Gradients and optimizer of the stage that needs more memory.
            let stages = [
                (Stage::ColdStart, recipe.cold_start.steps, &recipe.cold_start.optimizer),
                (Stage::Reinforcement, recipe.train.steps, &recipe.train.optimizer),
            ];
            let kept = stages.into_iter().filter(|(_, steps, _)| *steps > 0).map(|(stage, _, optimizer)| {
                let tensors = self.trainable_tensors(stage);
                (self.f32_shard_bytes(&tensors), self.optimizer(optimizer, &tensors))
            });
            let (gradients, optimizer) = kept.max_by_key(|(a, b)| a + b).unwrap_or_default();
            part("gradients", gradients);
            part("optimizer", optimizer);
            if let (Some(critic), Some(trainable)) = (&recipe.critic, &self.critic_trainable) {
                let tensors = self.critic_trainable_tensors(trainable);
                let all = self.critic_weights(trainable).saturating_sub(gathered_bytes(&tensors));
                part("critic's weights", all + self.f32_shard_bytes(&tensors));
                part("critic's gradients", self.f32_shard_bytes(&tensors));
                part("critic's optimizer", self.optimizer(&critic.optimizer, &tensors));
            }
            // With an adapter, the reference is the model without it.
            if recipe.policy.kl.place != KlPlacement::None && self.adapter.is_none() {
                // The reference is sharded like the trainable weights.
                let tensors = self.trainable_tensors(Stage::Reinforcement);
                let all = self.unpacked_weight_bytes().saturating_sub(gathered_bytes(&tensors));
                part("reference", all + self.f32_shard_bytes(&tensors));
            }
        }
        match self.command {
            ModelCommand::CheckMismatch(SecondWeights::Rounded(rounding)) => {
                part("weights, rounded", self.rounded_weights(rounding));
            }
            ModelCommand::CheckMismatch(SecondWeights::Changed) => {
                part("weights, changed", self.changed_weights())
            }
            // While training samples, the weights rounded by ablations exist only in the sampling phase.
            ModelCommand::Train | ModelCommand::Rollout | ModelCommand::Eval | ModelCommand::Chat => {}
        }
        parts
    }

    /// Returns the critic's trainable tensors: its own, and the factors of its adapter.
    fn critic_trainable_tensors(&self, trainable: &[bool]) -> Vec<TrainableTensor> {
        let factors = self.adapter.iter().flat_map(|adapter| adapter.specs.iter().cloned());
        select_trainable(value_model_specs(self.config).into_iter().chain(factors), trainable, 0)
    }

    /// Returns the tokens of the longest sequence: prompt, samples and tool replies, limited by the context.
    fn longest_sequence(&self) -> usize {
        let rollout = &self.recipe.rollout;
        let replies = if self.python_workers > 0 { rollout.turns_max.saturating_sub(1) } else { 0 };
        let reply = self.recipe.interpreter.output_chars_max + REPLY_FRAME_TOKENS;
        let tokens = rollout.prompt_tokens_max + rollout.response_tokens_max + replies * reply;
        tokens.min(self.config.max_position_embeddings)
    }

    fn phases(&self) -> Vec<(&'static str, Vec<MemoryItem>)> {
        let recipe = self.recipe;
        let mut phases = vec![];
        let steps = if self.command.trains() { recipe.train.steps } else { 1 };
        if steps > 0 {
            phases.push(("sampling", self.sampling()));
        }
        let trajectories = match self.command {
            ModelCommand::Eval | ModelCommand::Rollout | ModelCommand::Chat => return phases,
            _ => recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
        };
        let tokens = recipe
            .train
            .micro_batch_tokens
            .max(self.longest_sequence())
            .min(trajectories * self.longest_sequence());
        let tokens = if self.processes > 1 { tokens.div_ceil(recipe.parallel.sequence) } else { tokens };
        let pass = PassShape {
            config: self.config,
            tokens,
            targets: tokens,
            adapted: self.adapter.is_some(),
            on_gpu: false,
        };
        // Passes of several processes exchange data, so each process runs one at a time.
        let exchanges = self.processes > 1;
        let at_once = if exchanges { 1 } else { passes_at_once(self.weight_bytes(), self.threads) };
        if matches!(self.command, ModelCommand::CheckMismatch(_)) {
            phases.push(("comparison", vec![MemoryItem { name: "activations", bytes: pass.forward() }]));
            return phases;
        }
        let recomputes = self.recomputes_layers();
        let bytes = at_once * pass.forward_backward(recomputes);
        let name = if recomputes { "activations, recomputed" } else { "activations, all kept" };
        let critic = self.critic_trainable.as_ref().map(|trainable| self.critic_trainable_tensors(trainable));
        let tensors = [self.ever_trainable_tensors(), critic.unwrap_or_default()];
        let gathered =
            tensors.iter().map(|tensors| self.gathered_bytes(tensors, recomputes)).max().unwrap_or(0);
        let gathered = if exchanges { gathered } else { 0 };
        let gathered = MemoryItem { name: "gathered weights, exchanged gradients", bytes: gathered };
        phases.push(("update", vec![MemoryItem { name, bytes }, gathered]));
        phases
    }

    /// Returns the number of prompts of a rollout, and of samples per prompt.
    pub fn rollout_size(&self) -> (usize, usize) {
        let recipe = self.recipe;
        match self.command {
            ModelCommand::Eval => (recipe.eval.problems_max, recipe.eval.samples),
            ModelCommand::Chat => (1, 1),
            _ => (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt),
        }
    }

    /// Returns the number of engines that decode in parallel.
    fn engines(&self) -> usize {
        match self.effective_rollout_weights() {
            RolloutWeightPlacement::Whole => engine_count(self.weight_bytes(), self.threads),
            _ => 1,
        }
    }

    /// Returns the number of sequences that this process samples together, in a rollout or an evaluation.
    fn concurrent_sequences(&self) -> usize {
        let (rollout, eval) = (&self.recipe.rollout, &self.recipe.eval);
        let own =
            |(prompts, samples): (usize, usize)| prompts.div_ceil(self.processes).saturating_mul(samples);
        let evaluates = self.command.trains() && (eval.every_steps > 0 || eval.before_training);
        let evaluated = if evaluates { own((eval.problems_max, eval.samples)) } else { 0 };
        (rollout.sequences_max * self.engines()).min(own(self.rollout_size()).max(evaluated))
    }

    /// Returns the memory of sampling: KV caches at full length, one forward pass, and the logits.
    fn sampling(&self) -> Vec<MemoryItem> {
        let (recipe, config) = (self.recipe, self.config);
        let is_sharded = self.processes > 1 && self.command.trains();
        let gathered = is_sharded.then(|| self.sampling_gather_item());
        let is_distributed = self.effective_rollout_weights() != RolloutWeightPlacement::Whole;
        let rounded = match self.command {
            // Weights gathered per expert are rounded on arrival, without a second set.
            ModelCommand::Train if is_distributed => 0,
            ModelCommand::Train | ModelCommand::Rollout => {
                self.rounded_weights(WeightRounding::from_ablations(&recipe.arms))
            }
            ModelCommand::Eval | ModelCommand::Chat | ModelCommand::CheckMismatch(_) => 0,
        };
        let (engines, sequences) = (self.engines(), self.concurrent_sequences());
        let tokens = FORWARD_TOKENS_MAX.min(sequences * self.longest_sequence());
        // The sampling thread copies each row of logits once.
        let drawn = (self.threads * config.vocab_size * size_of::<f32>()) as u64;
        let targets = sequences.div_ceil(engines);
        let adapted = self.adapter.is_some();
        let forward = PassShape { config, tokens, targets, adapted, on_gpu: false }.forward();
        let parts = vec![
            MemoryItem {
                name: "keys and values",
                bytes: sequences as u64 * SequenceCache::bytes(config, self.longest_sequence()),
            },
            MemoryItem { name: "one forward and its logits", bytes: engines as u64 * forward + drawn },
            MemoryItem { name: "weights, rounded", bytes: rounded },
        ];
        parts.into_iter().chain(gathered).collect()
    }
}

#[cfg(test)]
mod tests;
