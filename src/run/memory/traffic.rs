//! Communication in one training step: the bytes that each process receives, computed from recipe and config.
//! CPUs exchange weights and heads in f32, GPUs as the forward pass has them: matrices and heads in bf16.

use super::gpu_shards::working_bytes;
use super::weights::ShardedTensor;
use super::{MemoryPlanInput, TrainingStage, gathered_bytes};
use crate::dist::RolloutWeightPlacement;
use crate::learner::optimizer::device_received_bytes;
use crate::metrics::TextTable;
use crate::model::expert_exchange::GATHERED_ROWS_MAX;
use crate::model::names::ParameterSpec;

const F32: u64 = 4;
const BF16: u64 = 2;
/// Bandwidth of NVLink 4 in one direction, in bytes per second. Both directions together have 900 GB/s.
const NODE_BYTES_PER_S: f64 = 450e9;
/// Bandwidth of a 400 Gb/s network card, in bytes per second.
const NETWORK_BYTES_PER_S: f64 = 50e9;

/// Bytes that one process receives in a step of reinforcement learning with one update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Number of micro-batch passes per process, if all sequences have full length.
    pub passes: u64,
    /// Name and bytes of each exchange.
    pub parts: Vec<(&'static str, u64)>,
}

impl Traffic {
    /// Computes the traffic of `input`.
    pub fn new(input: &MemoryPlanInput) -> Self {
        let (recipe, config, ranks) = (input.recipe, input.config, input.processes as u64);
        let sequence_parallel_size = input.sequence_ranks() as u64;
        let tensors = input.trainable_tensors(TrainingStage::ReinforcementLearning);
        let is_gathered = |spec: &ParameterSpec| !spec.is_sharded_by_expert(input.sharding());
        let gathered: Vec<_> = tensors.iter().filter(|(_, spec)| is_gathered(spec)).cloned().collect();
        let gradients = gathered_bytes(&gathered);
        let sharded = input.sharded_tensors();
        let bytes_of = |tensor: &ShardedTensor| exchanged_bytes(input, tensor);
        let weight_bytes = sharded.iter().map(bytes_of).sum();
        let passed = || sharded.iter().filter(|tensor| is_gathered(&tensor.spec));
        let pass_bytes: u64 = passed().map(bytes_of).sum();
        let layer_bytes: u64 = passed().filter(|tensor| tensor.layer().is_some()).map(bytes_of).sum();
        let trajectories = (recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt) as u64;
        let longest = input.longest_sequence() as u64;
        let rows = (recipe.train.micro_batch_tokens as u64).max(longest);
        let batches = (trajectories * longest).div_ceil(rows);
        let passes = batches.div_ceil(ranks / sequence_parallel_size);
        // A process already has its own shard.
        let bytes_from_others = |bytes: u64| bytes - bytes / ranks;
        // The forward pass, recomputation and the backward pass each move queries, keys, values and
        // attention's output of every layer. With fewer key-value heads than processes, heads are shared.
        let kv_heads = config.num_key_value_heads.max(input.sequence_ranks());
        let width = 2 * config.num_attention_heads + 2 * kv_heads;
        let value_bytes = if input.gpu_sequences.is_some() { BF16 } else { F32 };
        let values = rows.div_ceil(sequence_parallel_size)
            * (width * config.head_dim * config.num_hidden_layers) as u64;
        let heads = 3 * value_bytes * (values - values / sequence_parallel_size);
        // GPUs that share a head also gather its queries and the output's gradients, in the backward pass.
        let others = match input.sequence_ranks() / config.num_key_value_heads {
            sharing @ 2.. if input.gpu_sequences.is_some() => sharing - 1,
            _ => 0,
        };
        let row_width = (config.num_attention_heads * config.head_dim * config.num_hidden_layers) as u64;
        let heads = heads + 2 * others as u64 * BF16 * rows.div_ceil(sequence_parallel_size) * row_width;
        let muon = match input.gpu_sequences {
            Some(_) => {
                let tensors = tensors.iter().map(|(index, spec)| (*index, spec));
                device_received_bytes(&recipe.train.optimizer, tensors, input.sharding())
            }
            None => 0,
        };
        // The forward pass, recomputation and the backward pass each send rows to their experts and back.
        let row_values =
            rows * (config.num_experts_per_tok * config.hidden_size * config.num_hidden_layers) as u64;
        let trained_rows =
            if input.trains_by_expert() { 3 * 2 * bytes_from_others(row_values * BF16) } else { 0 };
        let [weights, rows] = sampling_bytes(input, weight_bytes);
        Self {
            passes,
            parts: vec![
                ("weights, for sampling", weights),
                ("rows to experts and back, in sampling", rows),
                ("weights, layer by layer", passes * bytes_from_others(pass_bytes + layer_bytes)),
                ("rows to experts and back, in training", passes * trained_rows),
                ("gradients", passes * bytes_from_others(gradients)),
                ("attention heads, sequence parallel", passes * heads),
                ("matrices of Muon", muon),
            ],
        }
    }

    /// Returns the total in bytes.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl MemoryPlanInput<'_> {
    /// Returns the largest number of passes of a process in one update. A micro-batch may have room for part
    /// of a sequence, which the next one gets.
    pub(super) fn passes_max(&self) -> u64 {
        let passes = |sequences: usize, longest: usize| {
            // The last token of a sequence is no input.
            let longest = longest.saturating_sub(1).max(1);
            let in_micro_batch = (self.recipe.train.micro_batch_tokens / longest).max(1);
            let batches = sequences.div_ceil(in_micro_batch);
            batches.div_ceil(self.processes / self.sequence_ranks()) as u64
        };
        let (prompts, samples) = self.rollout_size();
        let sampled = passes(prompts.saturating_mul(samples), self.longest_sequence());
        let row = self.sft_row_tokens_max.unwrap_or(self.longest_sequence());
        let has_warm_up = self.recipe.cold_start.steps > 0;
        sampled.max(if has_warm_up { passes(self.recipe.cold_start.batch_size, row) } else { 0 })
    }
}

/// Returns the bytes of a gathered tensor.
fn exchanged_bytes(input: &MemoryPlanInput, tensor: &ShardedTensor) -> u64 {
    match input.gpu_sequences {
        Some(_) => working_bytes(&tensor.spec),
        None => tensor.bytes(),
    }
}

/// Returns the bytes of weights and of expert rows that a process receives during sampling. `weight_bytes` is
/// the size of all sharded weights.
fn sampling_bytes(input: &MemoryPlanInput, weight_bytes: u64) -> [u64; 2] {
    let (rollout, config, ranks) = (&input.recipe.rollout, input.config, input.processes as u64);
    let bytes_from_others = |bytes: u64| bytes - bytes / ranks;
    let local_sequences =
        (rollout.prompts_per_step as u64).div_ceil(ranks) * rollout.samples_per_prompt as u64;
    let longest = input.longest_sequence() as u64;
    match input.effective_rollout_weights() {
        RolloutWeightPlacement::Auto | RolloutWeightPlacement::Whole => [bytes_from_others(weight_bytes), 0],
        RolloutWeightPlacement::ByExpert => {
            let expert_bytes: u64 = input
                .sharded_tensors()
                .iter()
                .filter(|tensor| tensor.spec.has_expert_axis())
                .map(|tensor| exchanged_bytes(input, tensor))
                .sum();
            let width = (config.hidden_size * config.num_hidden_layers) as u64;
            let top_k = config.num_experts_per_tok as u64;
            // A row is sent to its expert, and the result is sent back.
            let value_bytes = if input.gpu_sequences.is_some() { BF16 } else { F32 };
            let sent = |tokens: u64| 2 * bytes_from_others(tokens * top_k * width * value_bytes);
            let drawn = match gathers_in_decode(input, local_sequences) {
                true => longest.saturating_sub(rollout.prompt_tokens_max as u64),
                false => 0,
            };
            // GPUs gather the rows of all ranks, and receive an output of each rank for each slot.
            let gathered = local_sequences * drawn * (ranks - 1) * (1 + top_k) * width * BF16;
            [
                bytes_from_others(weight_bytes - expert_bytes) + expert_bytes / ranks,
                sent(local_sequences * (longest - drawn)) + gathered,
            ]
        }
    }
}

/// Returns whether GPUs gather rows in decode, because each samples few sequences.
fn gathers_in_decode(input: &MemoryPlanInput, local_sequences: u64) -> bool {
    let limits = [input.recipe.rollout.sequences_max as u64, local_sequences];
    let few = |capacity: usize| {
        let sequences = limits.into_iter().fold(capacity as u64, u64::min);
        sequences * input.processes as u64 <= GATHERED_ROWS_MAX as u64
    };
    input.gpu_sequences.is_some_and(few)
}

impl std::fmt::Display for Traffic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table =
            TextTable::new(["received per process and step", "GB", "s by NVLink", "s by 400 Gb/s"]);
        let mut row = |name: &str, bytes: u64| {
            let seconds = |rate: f64| format!("{:.2}", bytes as f64 / rate);
            table.add_row([
                name.to_owned(),
                super::plain_gigabytes(bytes),
                seconds(NODE_BYTES_PER_S),
                seconds(NETWORK_BYTES_PER_S),
            ]);
        };
        self.parts.iter().filter(|(_, bytes)| *bytes > 0).for_each(|(name, bytes)| row(name, *bytes));
        row("total", self.bytes());
        write!(f, "{table}")
    }
}
