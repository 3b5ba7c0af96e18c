//! Memory plan of a GPU: bf16 matrices with f32 masters and gradients, and a paged KV cache.

use super::{
    AvailableMemory, MemoryItem, MemoryPlan, ModelCommand, PassShape, PlanInput, Stage, TrainableTensor,
    WARNED_SHARE, gathered_bytes, gigabytes,
};
use crate::learner::OptimizerSettings;
use crate::learner::optimizer::state_bytes;
use crate::model::cache::CacheCapacity;
use crate::model::names::{ParameterSpec, parameter_specs, value_model_specs};
use crate::ops::packed_weights::PackedFormat;
use crate::ops::sink_attention::kernels::CHUNK_KEYS;
use crate::ops::sink_attention::plan::PARTS_BYTES_MAX;
use crate::policy::KlPlacement;
use crate::rollout::FORWARD_TOKENS_MAX;

/// Number of sequences that `check-mismatch` decodes together.
const DECODED_SEQUENCES: usize = 64;

/// Returns the bytes of a tensor in the dtype of the forward pass: bf16 for matrices, f32 for others.
fn working_bytes(spec: &ParameterSpec) -> u64 {
    let width = if spec.is_matrix() { size_of::<half::bf16>() } else { size_of::<f32>() };
    (spec.element_count() * width) as u64
}

fn all_bytes<'a>(specs: impl IntoIterator<Item = &'a ParameterSpec>) -> u64 {
    specs.into_iter().map(working_bytes).sum()
}

/// Returns the bytes of master weights and optimizer state.
fn optimizer_bytes(settings: &OptimizerSettings, tensors: &[TrainableTensor]) -> u64 {
    let kept = |(_, spec): &TrainableTensor| {
        let values = spec.element_count();
        let master = if spec.is_matrix() { values * size_of::<f32>() } else { 0 };
        master as u64 + state_bytes(settings, values, values)
    };
    tensors.iter().map(kept).sum()
}

impl PlanInput<'_> {
    /// Returns the capacity of the GPU's KV cache for `sequences`.
    pub fn cache_capacity(&self, sequences: usize) -> CacheCapacity {
        let fed_tokens_max = FORWARD_TOKENS_MAX + self.recipe.rollout.sequences_max;
        CacheCapacity { sequences, tokens: self.longest_sequence(), fed_tokens_max }
    }

    /// Returns the bytes of the policy's tensor `index`. A frozen MXFP4 tensor stays packed.
    fn gpu_bytes(&self, spec: &ParameterSpec, index: usize) -> u64 {
        let format = self.formats[index];
        match self.is_packed(spec, index) && spec.packed_format(format) == Some(PackedFormat::Mxfp4) {
            true => spec.resident_bytes(format),
            false => working_bytes(spec),
        }
    }

    /// Returns how many sampled sequences fit into `available` memory, at least 1.
    pub fn sequence_capacity(&self, available: &AvailableMemory) -> usize {
        let (prompts, samples) = self.rollout_size();
        let fits = |sequences: usize| {
            let input = PlanInput { gpu_sequences: Some(sequences), ..self.clone() };
            MemoryPlan::new(&input).peak_bytes() as f64 <= WARNED_SHARE * available.bytes as f64
        };
        let (mut fitting, mut beyond) = (1, prompts.saturating_mul(samples).max(1) + 1);
        while fitting + 1 < beyond {
            let middle = fitting + (beyond - fitting) / 2;
            if fits(middle) { fitting = middle } else { beyond = middle }
        }
        fitting
    }

    /// Returns the bytes of host memory: the program, and the weights as they are read; with several
    /// processes, this one's shards too.
    pub fn host_bytes(&self) -> u64 {
        match self.processes {
            1 => self.program().iter().map(|part| part.bytes).sum::<u64>() + self.weight_bytes(),
            _ => self.resident().iter().map(|part| part.bytes).sum(),
        }
    }

    /// Describes the KV cache of one sequence, the least that a GPU needs for sampling.
    pub fn describe_sequence_cache(&self) -> String {
        let capacity = self.cache_capacity(1);
        let bytes = capacity.device_bytes(self.config);
        format!(
            "the KV cache of a single sequence takes {}: {} tokens, {} key-value heads of width {}, {} layers",
            gigabytes(bytes),
            capacity.tokens,
            self.config.num_key_value_heads,
            self.config.head_dim,
            self.config.num_hidden_layers
        )
    }

    pub(super) fn gpu_resident(&self) -> Vec<MemoryItem> {
        let recipe = self.recipe;
        let own = parameter_specs(self.config);
        let weights: u64 = own.iter().enumerate().map(|(index, spec)| self.gpu_bytes(spec, index)).sum();
        let factors: &[ParameterSpec] = self.adapter.as_ref().map_or(&[], |adapter| &adapter.specs);
        let mut parts = vec![MemoryItem { name: "weights", bytes: weights + all_bytes(factors) }];
        let mut part = |name, bytes| parts.push(MemoryItem { name, bytes });
        let table = self.config.max_position_embeddings * self.config.head_dim * size_of::<f32>();
        part("rotary embedding's table", table as u64);
        let rollout = &recipe.rollout;
        if self.samples() && rollout.cuda_graphs && !rollout.keep_routes && self.processes == 1 {
            // A CUDA graph has memory of its own, which the driver keeps.
            let forward = self.pass(rollout.sequences_max, 0).forward();
            part("CUDA graph", forward + self.attention_in_parts_bytes());
        }
        if !self.command.trains() {
            return parts;
        }
        let stages = [
            (Stage::ColdStart, recipe.cold_start.steps, &recipe.cold_start.optimizer),
            (Stage::Reinforcement, recipe.train.steps, &recipe.train.optimizer),
        ];
        let kept = stages.into_iter().filter(|(_, steps, _)| *steps > 0).map(|(stage, _, optimizer)| {
            let tensors = self.trainable_tensors(stage);
            (gathered_bytes(&tensors), optimizer_bytes(optimizer, &tensors))
        });
        let (gradients, optimizer) = kept.max_by_key(|(a, b)| a + b).unwrap_or_default();
        // With several processes, each keeps its shards in host memory, and one whole gradient at a time on
        // the GPU.
        let is_alone = self.processes == 1;
        let largest = |tensors: &[TrainableTensor]| {
            let bytes = tensors.iter().map(|(_, spec)| (spec.element_count() * size_of::<f32>()) as u64);
            bytes.max().unwrap_or(0)
        };
        part("gradients", if is_alone { gradients } else { largest(&self.ever_trainable_tensors()) });
        part("optimizer", if is_alone { optimizer } else { 0 });
        if let (Some(critic), Some(trainable)) = (&recipe.critic, &self.critic_trainable) {
            let tensors = self.critic_trainable_tensors(trainable);
            let values = value_model_specs(self.config);
            let head = values.iter().filter(|spec| spec.name.starts_with("score."));
            let weights = match self.adapter {
                Some(_) => all_bytes(head.chain(factors)),
                None => all_bytes(&values),
            };
            part("critic's weights", weights);
            part("critic's gradients", if is_alone { gathered_bytes(&tensors) } else { largest(&tensors) });
            part(
                "critic's optimizer",
                if is_alone { optimizer_bytes(&critic.optimizer, &tensors) } else { 0 },
            );
        }
        // With an adapter, the reference is the model without it.
        if recipe.policy.kl.place != KlPlacement::None && self.adapter.is_none() {
            let copied = own.iter().enumerate().filter(|(index, spec)| !self.is_packed(spec, *index));
            part("reference", all_bytes(copied.map(|(_, spec)| spec)));
        }
        parts
    }

    fn samples(&self) -> bool {
        !self.command.trains() || self.recipe.train.steps > 0
    }

    fn pass(&self, tokens: usize, targets: usize) -> PassShape<'_> {
        PassShape { config: self.config, tokens, targets, adapted: self.adapter.is_some(), on_gpu: true }
    }

    /// Returns the bytes of partial attention results, when few long sequences are decoded by many blocks.
    fn attention_in_parts_bytes(&self) -> u64 {
        let chunks = self.longest_sequence().div_ceil(CHUNK_KEYS) * self.recipe.rollout.sequences_max;
        let values = chunks * self.config.num_attention_heads * (self.config.head_dim + 2);
        ((values * size_of::<f32>()) as u64).min(PARTS_BYTES_MAX as u64)
    }

    pub(super) fn gpu_phases(&self, sequences: usize) -> Vec<(&'static str, Vec<MemoryItem>)> {
        let (recipe, config) = (self.recipe, self.config);
        let caches = |capacity: CacheCapacity| MemoryItem {
            name: "keys and values",
            bytes: capacity.device_bytes(config),
        };
        let mut phases = vec![];
        if self.samples() {
            let capacity = self.cache_capacity(sequences);
            let forward = self.pass(capacity.fed_tokens_max, recipe.rollout.sequences_max).forward();
            let spread = self.attention_in_parts_bytes();
            let parts = [
                caches(capacity),
                MemoryItem { name: "one forward and its logits", bytes: forward },
                MemoryItem { name: "partial attention results", bytes: spread },
            ];
            phases.push(("sampling", parts.to_vec()));
        }
        let (prompts, samples) = self.rollout_size();
        let tokens = recipe.train.micro_batch_tokens.max(self.longest_sequence());
        let tokens = tokens.min(prompts.saturating_mul(samples).saturating_mul(self.longest_sequence()));
        match self.command {
            ModelCommand::Eval | ModelCommand::Rollout | ModelCommand::Chat => {}
            ModelCommand::CheckMismatch(_) => {
                let decoded = DECODED_SEQUENCES.min(prompts * samples);
                let capacity = CacheCapacity {
                    sequences: decoded,
                    tokens: self.longest_sequence(),
                    fed_tokens_max: decoded,
                };
                let activations =
                    MemoryItem { name: "activations", bytes: self.pass(tokens, tokens).forward() };
                phases.push(("comparison", vec![caches(capacity), activations]));
            }
            ModelCommand::Train => {
                let recomputes = self.recomputes_layers();
                let name = if recomputes { "activations, recomputed" } else { "activations, all kept" };
                let bytes = self.pass(tokens, tokens).forward_backward(recomputes);
                phases.push(("update", vec![MemoryItem { name, bytes }]));
            }
        }
        phases
    }
}
