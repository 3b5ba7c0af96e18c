//! Communication in one training step: the bytes that each process receives, computed from recipe and config.
//! CPUs exchange weights and heads in f32, GPUs as the forward pass has them: matrices and heads in bf16.

use super::gpu_shards::working_bytes;
use super::weights::ShardedTensor;
use super::{MemoryPlanInput, TrainingStage, gathered_bytes};
use crate::actor::optimizer::device_received_bytes;
use crate::dist::RolloutWeightPlacement;
use crate::metrics::TextTable;
use crate::model::names::{ParameterSpec, TensorRole, parameter_specs};
use crate::model::parallel::expert_exchange::GATHERED_ROWS_MAX;

const F32: u64 = 4;
const BF16: u64 = 2;
/// Bandwidth of NVLink 4 in one direction, in bytes per second. Both directions together have 900 GB/s.
const NODE_BYTES_PER_S: f64 = 450e9;
/// Bandwidth of a 400 Gb/s network card, in bytes per second.
const NETWORK_BYTES_PER_S: f64 = 50e9;
/// Speed of a GPU in matrix products, in operations per second. An H100 was measured at twice this in
/// products of one large matrix.
const PRODUCT_FLOP_PER_S: f64 = 400e12;

/// Bytes that one process receives in a step of reinforcement learning with one update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Number of micro-batch passes per process, if all sequences have full length.
    pub passes: u64,
    /// Name and bytes of each exchange.
    pub parts: Vec<(&'static str, u64)>,
    /// Computing and exchanges that run at the same time. `None` on CPUs, and if nothing is exchanged.
    pub overlap: Option<Overlap>,
}

/// Computing of a step's forward and backward passes of the policy, and the exchanges that run beside it: the
/// next layer's weights are gathered while a layer computes, and gradients are sent while the layers below
/// compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// Operations of forward and of backward passes, these with recomputation.
    pub flop: [u64; 2],
    /// Bytes of weights that forward passes gather, and of weights and gradients in backward passes.
    pub bytes: [u64; 2],
}

impl Overlap {
    /// Returns the seconds of computing.
    fn seconds(self) -> [f64; 2] {
        self.flop.map(|flop| flop as f64 / PRODUCT_FLOP_PER_S)
    }

    /// Returns the share of the exchanges' time that computing hides, if `bytes_per_s` are received.
    pub fn hidden_share(self, bytes_per_s: f64) -> f64 {
        let exchanged = self.bytes.map(|bytes| bytes as f64 / bytes_per_s);
        let hidden = exchanged.iter().zip(self.seconds()).map(|(time, computed)| time.min(computed));
        hidden.sum::<f64>() / exchanged.iter().sum::<f64>()
    }
}

impl Traffic {
    /// Computes the traffic of `input`.
    pub fn new(input: &MemoryPlanInput) -> Self {
        let (recipe, config, ranks) = (input.recipe, input.config, input.shard_ranks() as u64);
        let copies = input.placement.processes as u64 / ranks;
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
        let passes = batches.div_ceil(input.placement.processes as u64 / sequence_parallel_size);
        // With sequence parallelism, a process has a part of the rows.
        let local_rows = rows.div_ceil(sequence_parallel_size);
        // The backward pass gathers the layers again if it recomputes them.
        let recomputes = input.recomputes_layers();
        let backward_bytes = if recomputes { layer_bytes } else { 0 };
        // A process already has its own shard.
        let bytes_from_others = |bytes: u64| bytes - bytes / ranks;
        // The forward pass, recomputation and the backward pass each move queries, keys, values and
        // attention's output of every layer. With fewer key-value heads than processes, heads are shared.
        let kv_heads = config.num_key_value_heads.max(input.sequence_ranks());
        let width = 2 * config.num_attention_heads + 2 * kv_heads;
        let value_bytes = if input.choices.gpu_sequences.is_some() { BF16 } else { F32 };
        let values = local_rows * (width * config.head_dim * config.num_hidden_layers) as u64;
        let heads = 3 * value_bytes * (values - values / sequence_parallel_size);
        // GPUs that share a head also gather its queries and the output's gradients, in the backward pass.
        let others = match input.sequence_ranks() / config.num_key_value_heads {
            sharing @ 2.. if input.choices.gpu_sequences.is_some() => sharing - 1,
            _ => 0,
        };
        let row_width = (config.num_attention_heads * config.head_dim * config.num_hidden_layers) as u64;
        let heads = heads + 2 * others as u64 * BF16 * local_rows * row_width;
        let muon = match input.choices.gpu_sequences {
            Some(_) => {
                let tensors = tensors.iter().map(|(index, spec)| (*index, spec));
                device_received_bytes(&recipe.train.optimizer, tensors, input.sharding())
            }
            None => 0,
        };
        // The forward pass, recomputation and the backward pass each send rows to their experts and back.
        let row_values =
            local_rows * (config.num_experts_per_tok * config.hidden_size * config.num_hidden_layers) as u64;
        let trained_rows =
            if input.trains_by_expert() { 3 * 2 * bytes_from_others(row_values * BF16) } else { 0 };
        let [weights, sampled_rows] = sampling_bytes(input, weight_bytes);
        // Each process adds its part of the gradients of all copies, and receives the other parts.
        let shard_bytes = gathered_bytes(&tensors) / ranks;
        let summed = 2 * (shard_bytes - shard_bytes / copies);
        let gradients = passes * bytes_from_others(gradients);
        let flop = |values: u64| passes * 2 * local_rows * values;
        let [all, trained] = active_values(input);
        let recomputed = if recomputes { flop(all) } else { 0 };
        let overlap = Overlap {
            flop: [flop(all), recomputed + flop(all) + flop(trained)],
            bytes: [
                passes * bytes_from_others(pass_bytes),
                passes * bytes_from_others(backward_bytes) + gradients,
            ],
        };
        let is_exchanged = input.choices.gpu_sequences.is_some() && overlap.bytes[0] > 0;
        Self {
            passes,
            overlap: is_exchanged.then_some(overlap),
            parts: vec![
                ("weights, for sampling", weights),
                ("rows to experts and back, in sampling", sampled_rows),
                ("weights, layer by layer", passes * bytes_from_others(pass_bytes + backward_bytes)),
                ("rows to experts and back, in training", passes * trained_rows),
                ("gradients", gradients),
                ("gradients of all copies", summed),
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
            batches.div_ceil(self.placement.processes / self.sequence_ranks()) as u64
        };
        let (prompts, samples) = self.rollout_size();
        let sampled = passes(prompts.saturating_mul(samples), self.longest_sequence());
        let row = self.sft_row_tokens_max.unwrap_or(self.longest_sequence());
        let has_warm_up = self.recipe.cold_start.steps > 0;
        sampled.max(if has_warm_up { passes(self.recipe.cold_start.batch_size, row) } else { 0 })
    }
}

/// Returns the number of weights of the layers that a token is multiplied with: of all, and of those that are
/// trained in reinforcement learning. Factors of adapters do not count.
fn active_values(input: &MemoryPlanInput) -> [u64; 2] {
    let config = input.config;
    let (experts, top_k) = (config.num_local_experts.max(1), config.num_experts_per_tok.max(1));
    let values = |spec: &ParameterSpec| match spec.has_expert_axis() {
        true => spec.element_count() / experts * top_k.min(experts),
        false => spec.element_count(),
    };
    let counts = |spec: &&ParameterSpec| {
        spec.layer.is_some() && spec.is_matrix() && spec.role != TensorRole::AdapterFactor
    };
    let total = |specs: &mut dyn Iterator<Item = ParameterSpec>| -> u64 {
        specs.filter(|spec| counts(&spec)).map(|spec| values(&spec) as u64).sum()
    };
    let trained = input.trainable_tensors(TrainingStage::ReinforcementLearning);
    [total(&mut parameter_specs(config).into_iter()), total(&mut trained.into_iter().map(|(_, spec)| spec))]
}

/// Returns the bytes of a gathered tensor.
fn exchanged_bytes(input: &MemoryPlanInput, tensor: &ShardedTensor) -> u64 {
    match input.choices.gpu_sequences {
        Some(_) => working_bytes(&tensor.spec),
        None => tensor.bytes(),
    }
}

/// Returns the bytes of weights and of expert rows that a process receives during sampling. `weight_bytes` is
/// the size of all sharded weights.
fn sampling_bytes(input: &MemoryPlanInput, weight_bytes: u64) -> [u64; 2] {
    let (rollout, config, ranks) = (&input.recipe.rollout, input.config, input.shard_ranks() as u64);
    let bytes_from_others = |bytes: u64| bytes - bytes / ranks;
    let local_sequences = (rollout.prompts_per_step as u64).div_ceil(input.placement.processes as u64)
        * rollout.samples_per_prompt as u64;
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
            let value_bytes = if input.choices.gpu_sequences.is_some() { BF16 } else { F32 };
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
        sequences * input.shard_ranks() as u64 <= GATHERED_ROWS_MAX as u64
    };
    input.choices.gpu_sequences.is_some_and(few)
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
        write!(f, "{table}")?;
        let Some(overlap) = self.overlap else { return Ok(()) };
        let seconds: f64 = overlap.seconds().iter().sum();
        let percent = |rate: f64| 100.0 * overlap.hidden_share(rate);
        write!(
            f,
            "\nAt {:.0} TFLOP/s the policy's layers take {seconds:.2} s. They hide {:.0}% of the exchange of weights and gradients by NVLink, {:.0}% by 400 Gb/s.",
            PRODUCT_FLOP_PER_S / 1e12,
            percent(NODE_BYTES_PER_S),
            percent(NETWORK_BYTES_PER_S)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::ExpertPlacement;
    use crate::metrics::Console;
    use crate::recipe::resolve;
    use crate::run::memory::{MemoryPlan, ModelCommand};
    use crate::run::startup::Startup;
    use std::path::Path;

    /// Calls `check` with the input of a plan of one of `processes` GPUs.
    fn with_input<R>(more: &str, processes: usize, check: impl FnOnce(&MemoryPlanInput) -> R) -> R {
        let text = "task.name = \"format_rules\"\ncold_start.steps = 0\n\
                    model.architecture.hidden_size = 512\nrollout.prompts_per_step = 8\n";
        let plan = resolve(Path::new("a.toml"), &format!("{text}{more}"), &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        (input.choices.gpu_sequences, input.placement.processes) = (Some(4), processes);
        check(&input)
    }

    #[test]
    fn copies_of_the_weights_exchange_gradients_once_a_step() {
        let find = |more: &str| {
            with_input(more, 8, |input| {
                let traffic = Traffic::new(input);
                let bytes = |wanted| traffic.parts.iter().find(|(name, _)| *name == wanted).unwrap().1;
                let parts = ["weights, layer by layer", "gradients", "gradients of all copies"].map(bytes);
                let resident = MemoryPlan::new(input).resident_bytes();
                (traffic.passes, parts, resident)
            })
        };
        let (passes, [weights, gradients, none], shard) = find("");
        let (same, [fewer_weights, fewer_gradients, summed], larger_shard) = find("parallel.shard_size = 2");
        assert_eq!((passes, none), (same, 0));
        // A rank of two has half of a copy, and receives the other half.
        assert!((fewer_weights as f64 / weights as f64 / (4.0 / 7.0) - 1.0).abs() < 1e-3);
        assert!((fewer_gradients as f64 / gradients as f64 / (4.0 / 7.0) - 1.0).abs() < 1e-3);
        assert!(larger_shard > 3 * shard, "{larger_shard} and {shard}");
        // Of four copies, a rank receives three quarters of its half twice: parts to add, and sums.
        let a_pass = fewer_gradients / passes;
        assert!((summed as f64 / a_pass as f64 / 1.5 - 1.0).abs() < 1e-3, "{summed} and {a_pass}");
    }

    #[test]
    fn computing_hides_what_is_exchanged_at_the_same_time() {
        let overlap = |flop| Overlap { flop, bytes: [100, 300] };
        let flop = PRODUCT_FLOP_PER_S as u64;
        // At 100 bytes a second: 1 s of weights, then 3 s of weights and gradients.
        assert_eq!(overlap([flop, 3 * flop]).hidden_share(100.0), 1.0);
        assert_eq!(overlap([10 * flop, 0]).hidden_share(100.0), 0.25);
        assert_eq!(overlap([flop / 2, flop]).hidden_share(100.0), 0.375);
        let plan = |more: &str, processes| with_input(more, processes, Traffic::new);
        // Recomputation is another forward pass, and gathers the layers again. Frozen weights have no
        // gradient.
        let of = |more: &str| plan(more, 2).overlap.unwrap();
        let (kept, recomputed) = (of("train.recompute_layers = false"), of("train.recompute_layers = true"));
        assert_eq!(kept.flop[1], 2 * kept.flop[0]);
        assert_eq!(recomputed.flop, [kept.flop[0], 3 * kept.flop[0]]);
        assert!(recomputed.bytes[1] > kept.bytes[1] && recomputed.bytes[0] == kept.bytes[0]);
        let frozen = of("train.recompute_layers = false\ntrain.freeze = [\"*.mlp.experts.*\"]");
        assert!(frozen.flop[0] == kept.flop[0] && frozen.flop[1] < kept.flop[1]);
        // A token meets the experts that it is routed to.
        with_input("", 2, |input| {
            let all: usize = parameter_specs(input.config)
                .iter()
                .filter(|spec| spec.layer.is_some() && spec.is_matrix())
                .map(ParameterSpec::element_count)
                .sum();
            let [active, trained] = active_values(input);
            assert!(active == trained && active < all as u64 && active > all as u64 / 4);
        });
        // One GPU a copy exchanges nothing in its passes.
        assert_eq!(plan("parallel.shard_size = 1", 2).overlap, None);
    }

    /// The rows of experts were those of a whole micro-batch.
    #[test]
    fn gpus_that_share_a_sequence_send_the_rows_that_they_have() {
        let rows = |sequence: usize| {
            with_input(&format!("parallel.sequence = {sequence}"), 4, |input| {
                // A recipe with this key is refused where there is no GPU.
                let mut recipe = input.recipe.clone();
                recipe.parallel.experts = ExpertPlacement::ByExpert;
                let traffic = Traffic::new(&MemoryPlanInput { recipe: &recipe, ..input.clone() });
                let (_, bytes) =
                    traffic.parts.iter().find(|(name, _)| name.ends_with("in training")).unwrap();
                (*bytes, traffic.passes)
            })
        };
        let ((whole, passes), (half, more_passes)) = (rows(1), rows(2));
        let (a_pass, half_a_pass) = ((whole / passes) as f64, (half / more_passes) as f64);
        assert!((half_a_pass / a_pass - 0.5).abs() < 0.01, "{half_a_pass} and {a_pass}");
    }
}
