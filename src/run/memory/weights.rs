//! The weights in a memory plan: resident weights, weights read on demand, gathered weights, and second sets.

use super::{
    AdapterInput, MemoryItem, MemoryPlanInput, TrainableTensor, f32_bytes, gathered_bytes, gigabytes,
};
use crate::actor::replica_sum::exchanged_bytes_max;
use crate::dist::{ExpertPlacement, PackedWeightPlacement, RolloutWeightPlacement, Sharding, shard_range};
use crate::model::config::Config;
use crate::model::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use crate::model::rounding::WeightRounding;
use crate::model::settings::Dtype;
use crate::model::storage::StoredFormat;
use crate::ops::packed_weights::BlockType;
use std::collections::{BTreeMap, BTreeSet};

/// A tensor that is sharded over the processes, and its format in memory.
pub(super) struct ShardedTensor {
    pub index: usize,
    pub spec: ParameterSpec,
    pub format: StoredFormat,
}

impl ShardedTensor {
    /// Creates the entry of a trainable tensor, which is stored in f32.
    pub fn from_trainable((index, spec): TrainableTensor) -> Self {
        Self { index, spec, format: StoredFormat::F32 }
    }

    /// Returns the bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        self.spec.resident_bytes(self.format)
    }

    /// Returns the tensor's layer, if the tensor is gathered together with its layer. `None` for adapter
    /// factors and tensors outside layers, which are gathered before the forward pass.
    fn layer(&self) -> Option<usize> {
        self.spec.layer.filter(|_| self.spec.role != TensorRole::AdapterFactor)
    }
}

/// Returns the bytes of all `sharded` tensors, unsharded.
pub(super) fn unsharded_bytes(sharded: &[ShardedTensor]) -> u64 {
    sharded.iter().map(ShardedTensor::bytes).sum()
}

/// Returns the peak bytes of gathering `sharded` layer by layer: tensors outside layers, one layer twice (its
/// shards and the whole, while shards arrive), and the next layer, which is prefetched.
pub(super) fn gather_peak_bytes(sharded: &[ShardedTensor]) -> u64 {
    let (mut outside, mut layers) = (0, BTreeMap::<usize, u64>::new());
    for tensor in sharded {
        match tensor.layer() {
            Some(layer) => *layers.entry(layer).or_default() += tensor.bytes(),
            None => outside += tensor.bytes(),
        }
    }
    outside + 3 * layers.into_values().max().unwrap_or(0)
}

/// Returns the bytes of the weights of `config` if layers are read on demand: all tensors outside layers, and
/// the largest layer.
pub(super) fn on_demand_bytes(config: &Config, formats: &[StoredFormat]) -> u64 {
    let specs = parameter_specs(config);
    let mut layers: BTreeMap<Option<usize>, u64> = BTreeMap::new();
    for (spec, format) in specs.iter().zip(formats) {
        *layers.entry(spec.layer).or_default() += spec.resident_bytes(*format);
    }
    layers.remove(&None).unwrap_or(0) + layers.into_values().max().unwrap_or(0)
}

impl MemoryPlanInput<'_> {
    /// Returns the bytes of the policy's weights in memory, with its adapter, unsharded.
    pub(super) fn weight_bytes(&self) -> u64 {
        let is_trainable = |index: usize| self.command.trains() && self.trainable.policy[index];
        let specs = parameter_specs(self.config).into_iter().zip(self.formats).enumerate();
        let tensor_bytes = |(index, (spec, format)): (usize, (ParameterSpec, &StoredFormat))| {
            spec.resident_bytes(if is_trainable(index) { StoredFormat::F32 } else { *format })
        };
        specs.map(tensor_bytes).sum::<u64>() + self.trainable.adapter.as_ref().map_or(0, AdapterInput::bytes)
    }

    /// Returns the bytes of the policy's weights in this process: its shards of sharded tensors, and all
    /// other tensors.
    pub(super) fn local_weight_bytes(&self) -> u64 {
        if self.shard_ranks() == 1 || !self.command.trains() {
            return self.weight_bytes();
        }
        let (tensors, packed) = (self.ever_trainable_tensors(), self.sharded_packed_tensors());
        let sharded = gathered_bytes(&tensors) + unsharded_bytes(&packed);
        let packed_shard_bytes = |rank: usize| -> u64 {
            let shard_bytes = |tensor: &ShardedTensor| {
                shard_range(tensor.bytes() as usize, tensor.index, rank, self.shard_ranks()).len() as u64
            };
            packed.iter().map(shard_bytes).sum()
        };
        let packed_shard_bytes = (0..self.shard_ranks()).map(packed_shard_bytes).max().unwrap_or(0);
        self.weight_bytes() - sharded + self.f32_shard_bytes(&tensors) + packed_shard_bytes
    }

    /// Returns the number of processes that share a copy of the weights.
    pub fn shard_ranks(&self) -> usize {
        match self.recipe.parallel.shard_size {
            0 => self.placement.processes,
            size => size.min(self.placement.processes),
        }
    }

    /// Returns the phase in which the gradients of several copies of the weights are added. A process has
    /// `buffers` buffers of the gradients that are exchanged together: on a host, parts that are sent and
    /// received, of gradients and of sums.
    pub(super) fn copies_phase(&self, buffers: u64) -> Option<(&'static str, Vec<MemoryItem>)> {
        let sum = |tensors: Vec<TrainableTensor>| {
            let bytes = |rank: usize| {
                let shard = |(index, spec): &TrainableTensor| {
                    (spec.shard_range(*index, rank, self.sharding()).len() * size_of::<f32>()) as u64
                };
                exchanged_bytes_max(tensors.iter().map(shard))
            };
            (0..self.shard_ranks()).map(bytes).max().unwrap_or(0)
        };
        let bytes = buffers * sum(self.ever_trainable_tensors()).max(sum(self.critic_tensors()));
        let item = MemoryItem::new("gradients, exchanged", bytes);
        (self.placement.processes > self.shard_ranks()).then(|| ("sum of all copies", vec![item]))
    }

    /// Returns how the trainable tensors are sharded.
    pub fn sharding(&self) -> Sharding {
        Sharding { ranks: self.shard_ranks(), by_expert: self.trains_by_expert() }
    }

    /// Returns whether GPUs exchange rows of experts in training.
    pub fn trains_by_expert(&self) -> bool {
        let by_expert = self.recipe.parallel.experts == ExpertPlacement::ByExpert;
        by_expert && self.shard_ranks() > 1 && self.choices.gpu_sequences.is_some() && self.command.trains()
    }

    /// Returns the policy's packed tensors that are sharded.
    pub(super) fn sharded_packed_tensors(&self) -> Vec<ShardedTensor> {
        if self.shard_ranks() == 1
            || !self.command.trains()
            || self.placement.packed_weights != PackedWeightPlacement::Sharded
        {
            return vec![];
        }
        let specs = parameter_specs(self.config).into_iter().enumerate();
        let packed = specs.filter(|(index, spec)| self.is_packed(spec, *index));
        packed.map(|(index, spec)| ShardedTensor { index, spec, format: self.formats[index] }).collect()
    }

    /// Returns the policy's sharded tensors: the tensors that are trainable in any stage, and the packed ones
    /// if they are sharded.
    pub(super) fn sharded_tensors(&self, trainable: Vec<TrainableTensor>) -> Vec<ShardedTensor> {
        let trainable = trainable.into_iter().map(ShardedTensor::from_trainable);
        trainable.chain(self.sharded_packed_tensors()).collect()
    }

    /// Returns how a process holds the weights while it samples. This is `Whole` if weights are not sharded,
    /// or if other processes cannot compute experts.
    pub(super) fn effective_rollout_weights(&self) -> RolloutWeightPlacement {
        match self.placement.rollout_weights {
            _ if self.shard_ranks() == 1 || !self.command.trains() => RolloutWeightPlacement::Whole,
            RolloutWeightPlacement::ByExpert if !self.has_remote_experts() => RolloutWeightPlacement::Whole,
            RolloutWeightPlacement::Auto => RolloutWeightPlacement::Whole,
            placement => placement,
        }
    }

    /// Returns whether processes exchange rows of experts while they sample.
    pub fn samples_by_expert(&self) -> bool {
        self.effective_rollout_weights() == RolloutWeightPlacement::ByExpert
    }

    /// Returns the largest number of experts of a process that samples.
    pub(super) fn local_experts(&self) -> usize {
        let processes = if self.samples_by_expert() { self.shard_ranks() } else { 1 };
        self.config.num_local_experts.div_ceil(processes)
    }

    /// Returns the memory of the weights that a process gathers from the others for sampling.
    pub(super) fn sampling_gather_item(&self) -> MemoryItem {
        let sharded = self.sharded_tensors(self.ever_trainable_tensors());
        match self.effective_rollout_weights() {
            RolloutWeightPlacement::Auto | RolloutWeightPlacement::Whole => {
                MemoryItem::new("weights, gathered", unsharded_bytes(&sharded))
            }
            RolloutWeightPlacement::ByExpert => {
                let (experts, rest): (Vec<ShardedTensor>, Vec<ShardedTensor>) =
                    sharded.into_iter().partition(|tensor| tensor.spec.has_expert_axis());
                let bytes = |tensor: &ShardedTensor| {
                    tensor.spec.with_expert_count(self.local_experts()).resident_bytes(tensor.format)
                };
                MemoryItem::new(
                    "weights, gathered except experts",
                    unsharded_bytes(&rest) + experts.iter().map(bytes).sum::<u64>(),
                )
            }
        }
    }

    /// Returns whether processes can send rows to each other, so that each process computes only its own
    /// experts. Rows are not sent if each process has all experts in packed form.
    pub fn has_remote_experts(&self) -> bool {
        let mut specs = parameter_specs(self.config).into_iter().enumerate();
        let is_packed = |(index, spec): (usize, ParameterSpec)| {
            spec.is_expert_parameter() && self.is_packed(&spec, index)
        };
        let is_sharded = self.placement.packed_weights == PackedWeightPlacement::Sharded;
        self.config.family.has_experts && (is_sharded || !specs.any(is_packed))
    }

    /// Returns whether the command can shard packed weights: whether it trains and the model has packed
    /// weights.
    pub fn can_shard_packed(&self) -> bool {
        let mut specs = parameter_specs(self.config).into_iter().enumerate();
        self.command.trains() && specs.any(|(index, spec)| self.is_packed(&spec, index))
    }

    /// Returns whether the policy's tensor `index` stays packed.
    pub(super) fn is_packed(&self, spec: &ParameterSpec, index: usize) -> bool {
        let is_trainable = self.command.trains() && self.trainable.policy[index];
        !is_trainable && spec.packed_format(self.formats[index]).is_some()
    }

    /// Returns the type of the first blocks of a GGUF file that stay packed.
    pub fn packed_block_type(&self) -> Option<BlockType> {
        let specs = parameter_specs(self.config);
        specs.iter().enumerate().find_map(|(index, spec)| match self.formats[index] {
            StoredFormat::Blocks(kind) if self.is_packed(spec, index) => Some(kind),
            _ => None,
        })
    }

    /// Returns a line about the blocks of a GGUF file: that they stay packed, or what decoding them costs.
    /// `None` if the model has no blocks.
    pub fn blocks_note(&self) -> Option<String> {
        let specs = parameter_specs(self.config);
        let blocks = specs.iter().enumerate().filter_map(|(index, spec)| match self.formats[index] {
            StoredFormat::Blocks(kind) => Some((index, spec, kind)),
            _ => None,
        });
        let blocks: Vec<_> = blocks.collect();
        let names: BTreeSet<&str> = blocks.iter().map(|(.., kind)| kind.name()).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        let packed: u64 =
            blocks.iter().map(|(_, spec, kind)| spec.resident_bytes(StoredFormat::Blocks(*kind))).sum();
        let unpacked = blocks.iter().filter(|(index, spec, _)| !self.is_packed(spec, *index));
        let unpacked: u64 = unpacked.map(|(_, spec, _)| spec.resident_bytes(StoredFormat::F32)).sum();
        match (blocks.is_empty(), unpacked) {
            (true, _) => None,
            (false, 0) => {
                Some(format!("The weights stay packed as in the file, in {names}: {}.", gigabytes(packed)))
            }
            (false, _) => Some(format!(
                "Training decodes weights in {names}: {} for {} packed; with an adapter ([adapter]) they stay packed.",
                gigabytes(unpacked),
                gigabytes(packed)
            )),
        }
    }

    /// Returns the bytes of the policy's unpacked weights, which a reference policy copies.
    pub(super) fn unpacked_weight_bytes(&self) -> u64 {
        let specs = parameter_specs(self.config).into_iter().enumerate();
        let unpacked = specs.filter(|(index, spec)| !self.is_packed(spec, *index));
        unpacked.map(|(_, spec)| spec.resident_bytes(StoredFormat::F32)).sum()
    }

    /// Returns the bytes of the critic's own weights. The critic shares packed tensors, and the base of an
    /// adapter, with the policy.
    pub(super) fn critic_weight_bytes(&self, trainable: &[bool]) -> u64 {
        let specs = value_model_specs(self.config);
        if let Some(adapter) = &self.trainable.adapter {
            let head: Vec<ParameterSpec> =
                specs.into_iter().filter(|spec| spec.name.starts_with("score.")).collect();
            return f32_bytes(&head) + adapter.bytes();
        }
        let policy = parameter_specs(self.config);
        let is_shared = |spec: &ParameterSpec| {
            let index = policy.iter().position(|other| other.name == spec.name);
            index.is_some_and(|index| self.is_packed(spec, index))
        };
        let copied = specs
            .into_iter()
            .zip(trainable)
            .filter(|(spec, is_trainable)| **is_trainable || !is_shared(spec));
        copied.map(|(spec, _)| spec.resident_bytes(StoredFormat::F32)).sum()
    }

    /// Returns the bytes of the second set of weights: rounded weights for the ablations. A layer that is
    /// read on demand is rounded during reading, so no second copy of it exists.
    pub(super) fn rounded_weight_bytes(&self, rounding: WeightRounding) -> u64 {
        let specs = parameter_specs(self.config).into_iter().enumerate();
        let copied = specs.filter(|(_, spec)| !self.placement.layers_on_demand || spec.layer.is_none());
        let copy_bytes = |(index, spec): (usize, ParameterSpec)| {
            let format = if self.is_packed(&spec, index) { self.formats[index] } else { StoredFormat::F32 };
            rounding.copy_bytes(&spec, format)
        };
        copied.map(copy_bytes).sum()
    }

    /// Returns the bytes of the bf16 copies that decode reads if products are in bf16. Layers that are read
    /// on demand have none.
    pub(super) fn bf16_copy_bytes(&self) -> u64 {
        if self.recipe.model.dtype != Dtype::Bf16Dot || self.choices.gpu_sequences.is_some() {
            return 0;
        }
        let local_experts = self.local_experts();
        let is_copied = |(index, spec): &(usize, ParameterSpec)| {
            let is_head = spec.role != TensorRole::Embedding || self.config.tie_word_embeddings;
            let is_resident = !self.placement.layers_on_demand || spec.layer.is_none();
            spec.is_matrix() && is_head && is_resident && !self.is_packed(spec, *index)
        };
        let elements = |spec: ParameterSpec| match spec.has_expert_axis() {
            true => spec.with_expert_count(local_experts).element_count(),
            false => spec.element_count(),
        };
        let copied = parameter_specs(self.config).into_iter().enumerate().filter(is_copied);
        copied.map(|(_, spec)| (elements(spec) * size_of::<u16>()) as u64).sum()
    }

    /// Returns the peak bytes of weights that a possible cause of mismatch changes: a decoded layer and a
    /// copy of its largest tensor, or the head and its transpose.
    pub(super) fn changed_weight_bytes(&self) -> u64 {
        let mut layers = BTreeMap::<usize, (u64, u64)>::new();
        let mut head = 0;
        for spec in parameter_specs(self.config) {
            let bytes = spec.resident_bytes(StoredFormat::F32);
            match spec.layer {
                Some(layer) => {
                    let (sum, largest) = layers.entry(layer).or_default();
                    (*sum, *largest) = (*sum + bytes, (*largest).max(bytes));
                }
                None => head = head.max(2 * bytes),
            }
        }
        layers.into_values().map(|(sum, largest)| sum + largest).fold(head, u64::max)
    }
}
