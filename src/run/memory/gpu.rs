//! Memory plan of a GPU: bf16 matrices with f32 masters and gradients, and a paged KV cache.

use super::gpu_shards::working_bytes;
use super::{
    AvailableMemory, MemoryChoices, MemoryItem, MemoryPlanInput, ModelCommand, PassShape, TrainingStage,
    gigabytes,
};
use crate::engine::FORWARD_TOKENS_MAX;
use crate::model::cache::CacheCapacity;
use crate::model::decode::Decoder;
use crate::model::decode_rows::padded_rows;
use crate::model::names::{ParameterSpec, parameter_specs, value_model_specs};
use crate::ops::packed_weights::PackedFormat;
use crate::ops::sink_attention::kernels::CHUNK_KEYS;
use crate::ops::sink_attention::plan::{PARTS_BYTES_MAX, padded_chunks, part_bytes};

/// Maximum number of sequences that `check-mismatch` decodes together.
const DECODE_SEQUENCES_MAX: usize = 64;

/// Returns the bytes of tensors in the dtypes of the forward pass.
fn total_working_bytes<'a>(specs: impl IntoIterator<Item = &'a ParameterSpec>) -> u64 {
    specs.into_iter().map(working_bytes).sum()
}

impl MemoryPlanInput<'_> {
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

    /// Returns the number of sequences whose KV cache fits in `available` memory. At least 1.
    pub fn sequence_capacity(&self, available: &AvailableMemory) -> usize {
        let (prompts, samples) = self.rollout_size();
        let fits = |sequences: usize| {
            let choices = MemoryChoices { gpu_sequences: Some(sequences), ..self.choices };
            MemoryPlanInput { choices, ..self.clone() }.fits_without_warning(available)
        };
        let (mut fitting, mut too_many) = (1, prompts.saturating_mul(samples).max(1) + 1);
        while fitting + 1 < too_many {
            let middle = fitting + (too_many - fitting) / 2;
            if fits(middle) { fitting = middle } else { too_many = middle }
        }
        fitting
    }

    /// Returns the bytes of host memory: the program, and the weights while they are read.
    pub fn host_bytes(&self) -> u64 {
        self.program().iter().map(|item| item.bytes).sum::<u64>() + self.weight_bytes()
    }

    /// Describes the KV cache of one sequence. A GPU needs at least this cache to sample.
    pub fn describe_sequence_cache(&self) -> String {
        let capacity = self.cache_capacity(1);
        let bytes = capacity.device_bytes(self.config);
        format!(
            "the KV cache of one sequence takes {}: {} tokens, {} key-value heads of size {}, {} layers",
            gigabytes(bytes),
            capacity.tokens,
            self.config.num_key_value_heads,
            self.config.head_dim,
            self.config.num_hidden_layers
        )
    }

    /// Returns the GPU memory that is used during the whole run.
    pub(super) fn gpu_resident(&self) -> Vec<MemoryItem> {
        let recipe = self.recipe;
        let specs = parameter_specs(self.config);
        let weights: u64 = specs.iter().enumerate().map(|(index, spec)| self.gpu_bytes(spec, index)).sum();
        let factors: &[ParameterSpec] = self.trainable.adapter.as_ref().map_or(&[], |adapter| &adapter.specs);
        let weights = weights + total_working_bytes(factors);
        let trainable = if self.command.trains() { self.ever_trainable_tensors() } else { vec![] };
        let whole = total_working_bytes(trainable.iter().map(|(_, spec)| spec));
        let weights = weights - whole + self.working_shard_bytes(&trainable);
        let mut items = vec![MemoryItem::new("weights", weights)];
        let mut add = |name, bytes| items.push(MemoryItem::new(name, bytes));
        let table = self.config.max_position_embeddings * self.config.head_dim * size_of::<f32>();
        let beside = self.samples_beside_the_update() && recipe.train.steps > 0;
        // The second stream has a table of its own.
        add("rotary embedding's table", table as u64 * if beside { 2 } else { 1 });
        if beside {
            let tensors = self.trainable_tensors(TrainingStage::ReinforcementLearning);
            let copied = total_working_bytes(tensors.iter().map(|(_, spec)| spec));
            add("weights that sample ahead", copied);
        }
        let rollout = &recipe.rollout;
        if self.samples() && rollout.cuda_graphs && !rollout.keep_routes && !self.samples_by_expert() {
            // A CUDA graph has its own memory, which the driver does not free.
            let sequences = self.decoded_sequences();
            let forward = self.pass_shape(padded_rows(sequences), 0).forward_bytes();
            add("CUDA graph", forward + self.partial_attention_bytes(sequences));
        }
        if !self.command.trains() {
            return items;
        }
        let (gradients, optimizer) = self.largest_stage(Self::gpu_optimizer_bytes);
        add("gradients", gradients);
        add("optimizer", optimizer);
        if let (Some(critic), Some(_)) = (&recipe.critic, &self.trainable.critic) {
            let tensors = self.critic_tensors();
            let critic_specs = value_model_specs(self.config);
            let head = critic_specs.iter().filter(|spec| spec.name.starts_with("score."));
            let weights = match self.trainable.adapter {
                Some(_) => total_working_bytes(head.chain(factors)),
                None => total_working_bytes(&critic_specs),
            };
            let whole = total_working_bytes(tensors.iter().map(|(_, spec)| spec));
            add("critic's weights", weights - whole + self.working_shard_bytes(&tensors));
            add("critic's gradients", self.f32_shard_bytes(&tensors));
            add("critic's optimizer", self.gpu_optimizer_bytes(&critic.optimizer, &tensors));
        }
        if self.needs_reference() {
            let copied = specs.iter().enumerate().filter(|(index, spec)| !self.is_packed(spec, *index));
            let copied = total_working_bytes(copied.map(|(_, spec)| spec));
            // The reference is sharded like the trainable weights.
            let tensors = self.trainable_tensors(TrainingStage::ReinforcementLearning);
            let whole = total_working_bytes(tensors.iter().map(|(_, spec)| spec));
            add("reference", copied - whole + self.working_shard_bytes(&tensors));
        }
        items
    }

    /// Returns whether the command samples.
    fn samples(&self) -> bool {
        !self.command.trains() || self.recipe.train.steps > 0
    }

    /// Returns the bytes of the products of adapters' factors in the backward pass: rows of the rank's width,
    /// and their gradients.
    fn low_rank_bytes(&self, tokens: usize) -> u64 {
        let factors = self.trainable.adapter.iter().flat_map(|adapter| &adapter.specs);
        let rank = |spec: &ParameterSpec| spec.stored_shape.iter().rev().take(2).min().copied();
        let rank = factors.filter_map(rank).max().unwrap_or(0);
        (2 * tokens * self.config.num_experts_per_tok.max(1) * rank * size_of::<half::bf16>()) as u64
    }

    /// Returns the maximum number of sequences of a decode step.
    fn decoded_sequences(&self) -> usize {
        self.recipe.rollout.sequences_max.min(self.choices.gpu_sequences.unwrap_or(usize::MAX))
    }

    /// Returns the maximum number of rows of a forward pass whose logits are needed. The server scores the
    /// tokens of prompts too.
    pub(super) fn sampled_rows_max(&self) -> usize {
        let drawn = self.decoded_sequences();
        if self.command == ModelCommand::Serve { drawn.max(FORWARD_TOKENS_MAX) } else { drawn }
    }

    /// Returns the maximum number of tokens that a forward pass feeds. No pass feeds more than all sequences
    /// have. With one turn, samples of a prompt share its prefill. Beside the update a run used 0.4% more
    /// than this predicts, for a reason not known yet, so there each sample counts.
    fn fed_tokens_max(&self, sequences: usize) -> usize {
        let capacity = self.cache_capacity(sequences);
        let fed = capacity.fed_tokens_max.min(sequences.saturating_mul(capacity.tokens));
        let rollout = &self.recipe.rollout;
        let has_one_turn = self.command.trains() && rollout.turns_max == 1 && !self.plays_agent();
        // A partial trajectory is fed again as a whole.
        if !has_one_turn || rollout.step_tokens_max > 0 || self.samples_beside_the_update() {
            return fed;
        }
        let prompts = self.prompts_max().min(sequences);
        fed.min(prompts.saturating_mul(rollout.prompt_tokens_max).saturating_add(sequences))
    }

    /// Returns the bytes of partial attention results. When few long sequences are decoded, several thread
    /// blocks share a sequence, and their partial results are merged.
    fn partial_attention_bytes(&self, sequences: usize) -> u64 {
        let chunks = self.longest_sequence().div_ceil(CHUNK_KEYS) * sequences;
        let (heads, head_dim) = (self.config.num_attention_heads, self.config.head_dim);
        part_bytes(padded_chunks(chunks), heads, head_dim).min(PARTS_BYTES_MAX) as u64
    }

    /// Returns the GPU memory of each phase, with `sequences` sequences in the KV cache.
    pub(super) fn gpu_phases(&self, sequences: usize) -> Vec<(&'static str, Vec<MemoryItem>)> {
        let (recipe, config) = (self.recipe, self.config);
        let cache_item =
            |capacity: CacheCapacity| MemoryItem::new("keys and values", capacity.device_bytes(config));
        let mut phases = vec![];
        if self.samples() {
            let capacity = self.cache_capacity(sequences);
            let fed = self.fed_tokens_max(sequences);
            let forward = self.pass_shape(fed, self.sampled_rows_max().min(fed)).forward_bytes();
            let decoded =
                CacheCapacity { sequences: sequences.min(recipe.rollout.sequences_max), ..capacity };
            let bytes = Decoder::device_bytes(config, decoded);
            let items = [
                cache_item(capacity),
                MemoryItem::new("page tables and rows of decode", bytes),
                MemoryItem::new("one forward pass and its logits", forward),
                MemoryItem::new(
                    "partial attention results",
                    self.partial_attention_bytes(self.decoded_sequences()),
                ),
            ];
            let exchanged = self.exchanged_row_item(capacity.fed_tokens_max);
            let items = items.into_iter().chain(self.gpu_sampling_gather()).chain(exchanged);
            phases.push(("sampling", items.collect::<Vec<_>>()));
        }
        let sampling = phases.first().map(|(_, items)| items.clone());
        let (prompts, samples) = self.rollout_size();
        let tokens = self.micro_batch_tokens();
        match self.command {
            ModelCommand::Eval | ModelCommand::Rollout | ModelCommand::Chat | ModelCommand::Serve => {}
            ModelCommand::CheckMismatch(_) => {
                let sequences = DECODE_SEQUENCES_MAX.min(prompts * samples);
                let capacity =
                    CacheCapacity { sequences, tokens: self.longest_sequence(), fed_tokens_max: sequences };
                let bytes = self.pass_shape(tokens, tokens).forward_bytes();
                let activations = MemoryItem::new("activations", bytes);
                phases.push(("comparison", vec![cache_item(capacity), activations]));
            }
            ModelCommand::Train => {
                let recomputes = self.recomputes_layers();
                let name = if recomputes { "activations, recomputed" } else { "activations, all kept" };
                let tokens = self.local_inputs_max();
                let pass = self.pass_shape(tokens, self.local_targets_max());
                let pass = PassShape { sequence_ranks: self.sequence_ranks(), ..pass };
                let bytes = pass.forward_backward_bytes(recomputes) + self.low_rank_bytes(tokens);
                let gathered = self.gpu_update_gather(&pass, bytes);
                let rows = self.trained_row_item(tokens);
                let update: Vec<MemoryItem> =
                    [MemoryItem::new(name, bytes)].into_iter().chain(gathered).chain(rows).collect();
                let sampling = sampling.filter(|_| self.samples_beside_the_update());
                if let Some(sampling) = &sampling {
                    phases.push(("sampling beside the update", [sampling.clone(), update.clone()].concat()));
                }
                phases.push(("update", update));
                phases.extend(self.copies_phase(1));
                phases.extend(self.optimizer_phase(sampling));
            }
        }
        phases
    }
}
