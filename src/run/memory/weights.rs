//! The weights in a memory plan: resident, streamed from disk, gathered, and second sets.

use super::{AdapterInput, MemoryItem, PlanInput, TrainableTensor, f32_bytes, gathered_bytes};
use crate::dist::shard_range;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::config::WeightFormat;
use crate::model::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use crate::model::rounding::WeightRounding;
use std::collections::BTreeMap;

/// A tensor sharded over the processes, and its format in memory.
pub(super) struct ShardedTensor {
    pub index: usize,
    pub spec: ParameterSpec,
    pub format: WeightFormat,
}

impl ShardedTensor {
    /// Creates the entry of a trainable tensor, held in f32.
    pub fn from_trainable((index, spec): TrainableTensor) -> Self {
        Self { index, spec, format: WeightFormat::F32 }
    }

    /// Returns the bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        self.spec.resident_bytes(self.format)
    }

    /// Returns the layer with which the tensor is gathered. `None` for adapter factors and tensors outside
    /// layers, which are gathered before the forward pass.
    pub fn layer(&self) -> Option<usize> {
        self.spec.layer.filter(|_| self.spec.role != TensorRole::AdapterFactor)
    }
}

/// Returns the bytes of all `sharded` tensors, unsharded.
pub(super) fn unsharded_bytes(sharded: &[ShardedTensor]) -> u64 {
    sharded.iter().map(ShardedTensor::bytes).sum()
}

/// Returns the peak of gathering `sharded` layer by layer: tensors outside layers, a layer held twice
/// while it arrives, and the prefetched next one.
pub(super) fn gather_peak_bytes(sharded: &[ShardedTensor]) -> u64 {
    let (mut outside, mut layers) = (0, BTreeMap::<usize, u64>::new());
    for one in sharded {
        match one.layer() {
            Some(layer) => *layers.entry(layer).or_default() += one.bytes(),
            None => outside += one.bytes(),
        }
    }
    outside + 3 * layers.into_values().max().unwrap_or(0)
}

impl PlanInput<'_> {
    /// Returns the bytes of the policy's weights in memory, with its adapter, unsharded.
    pub(super) fn weight_bytes(&self) -> u64 {
        let is_trainable = |index: usize| self.command.trains() && self.trainable[index];
        let specs = parameter_specs(self.config).into_iter().zip(self.formats).enumerate();
        let of = |(index, (spec, format)): (usize, (ParameterSpec, &WeightFormat))| {
            spec.resident_bytes(if is_trainable(index) { WeightFormat::F32 } else { *format })
        };
        specs.map(of).sum::<u64>() + self.adapter.as_ref().map_or(0, AdapterInput::bytes)
    }

    /// Returns the bytes of the policy's weights in this process: shards of trainable and sharded packed
    /// tensors, and all others.
    pub(super) fn local_weight_bytes(&self) -> u64 {
        if self.processes == 1 || !self.command.trains() {
            return self.weight_bytes();
        }
        let (tensors, packed) = (self.ever_trainable_tensors(), self.sharded_packed_tensors());
        let shared = gathered_bytes(&tensors) + unsharded_bytes(&packed);
        let of = |rank: usize| -> u64 {
            let shard_elements = |one: &ShardedTensor| {
                shard_range(one.bytes() as usize, one.index, rank, self.processes).len() as u64
            };
            packed.iter().map(shard_elements).sum()
        };
        let packed_share = (0..self.processes).map(of).max().unwrap_or(0);
        self.weight_bytes() - shared + self.f32_shard_bytes(&tensors) + packed_share
    }

    /// Returns the policy's packed tensors that are sharded.
    pub(super) fn sharded_packed_tensors(&self) -> Vec<ShardedTensor> {
        if self.processes == 1
            || !self.command.trains()
            || self.packed_weights != PackedWeightPlacement::Sharded
        {
            return vec![];
        }
        let specs = parameter_specs(self.config).into_iter().enumerate();
        let packed = specs.filter(|(index, spec)| self.is_packed(spec, *index));
        packed.map(|(index, spec)| ShardedTensor { index, spec, format: self.formats[index] }).collect()
    }

    /// Returns all of the policy's sharded tensors: those trainable in any stage, and packed ones if sharded.
    pub(super) fn sharded_tensors(&self) -> Vec<ShardedTensor> {
        self.ever_trainable_tensors()
            .into_iter()
            .map(ShardedTensor::from_trainable)
            .chain(self.sharded_packed_tensors())
            .collect()
    }

    /// Returns how a process holds the weights while it samples. `Whole` without sharding, and if experts
    /// cannot be remote.
    pub(super) fn effective_rollout_weights(&self) -> RolloutWeightPlacement {
        match self.rollout_weights {
            _ if self.processes == 1 || !self.command.trains() => RolloutWeightPlacement::Whole,
            RolloutWeightPlacement::ByExpert if !self.has_remote_experts() => RolloutWeightPlacement::Whole,
            RolloutWeightPlacement::Auto => RolloutWeightPlacement::Whole,
            held => held,
        }
    }

    /// Returns the memory of weights that a process gathers from the others for sampling.
    pub(super) fn sampling_gather_item(&self) -> MemoryItem {
        let sharded = self.sharded_tensors();
        match self.effective_rollout_weights() {
            RolloutWeightPlacement::Auto | RolloutWeightPlacement::Whole => {
                MemoryItem { name: "weights, gathered", bytes: unsharded_bytes(&sharded) }
            }
            RolloutWeightPlacement::ByExpert => {
                let (experts, rest): (Vec<ShardedTensor>, Vec<ShardedTensor>) =
                    sharded.into_iter().partition(|one| one.spec.has_expert_axis());
                let own = self.config.num_local_experts.div_ceil(self.processes);
                let bytes = |one: &ShardedTensor| one.spec.with_expert_count(own).resident_bytes(one.format);
                MemoryItem {
                    name: "weights, gathered except experts",
                    bytes: unsharded_bytes(&rest) + experts.iter().map(bytes).sum::<u64>(),
                }
            }
        }
    }

    /// Returns whether rows can be sent to experts on other processes. Not possible if each process holds all
    /// experts, packed.
    pub fn has_remote_experts(&self) -> bool {
        let mut specs = parameter_specs(self.config).into_iter().enumerate();
        let is_packed = |(index, spec): (usize, ParameterSpec)| {
            spec.is_expert_parameter() && self.is_packed(&spec, index)
        };
        let is_cut = self.packed_weights == PackedWeightPlacement::Sharded;
        self.config.family.has_experts && (is_cut || !specs.any(is_packed))
    }

    /// Returns whether the command can shard packed weights: it trains, and some are packed.
    pub fn can_shard_packed(&self) -> bool {
        let mut specs = parameter_specs(self.config).into_iter().enumerate();
        self.command.trains() && specs.any(|(index, spec)| self.is_packed(&spec, index))
    }

    /// Returns the bytes of streamed weights: all tensors outside layers, and the largest layer.
    pub(super) fn streamed_weights(&self) -> u64 {
        let specs = parameter_specs(self.config);
        let mut places: BTreeMap<Option<usize>, u64> = BTreeMap::new();
        for (spec, format) in specs.iter().zip(self.formats) {
            *places.entry(spec.layer).or_default() += spec.resident_bytes(*format);
        }
        let outside = places.remove(&None).unwrap_or(0);
        outside + places.into_values().max().unwrap_or(0)
    }

    /// Returns whether the policy's tensor `index` stays packed.
    pub(super) fn is_packed(&self, spec: &ParameterSpec, index: usize) -> bool {
        let is_trainable = self.command.trains() && self.trainable[index];
        !is_trainable && spec.packed_format(self.formats[index]).is_some()
    }

    /// Returns the bytes of the policy's unpacked weights, which a reference copies.
    pub(super) fn unpacked_weight_bytes(&self) -> u64 {
        let specs = parameter_specs(self.config).into_iter().enumerate();
        let plain = specs.filter(|(index, spec)| !self.is_packed(spec, *index));
        plain.map(|(_, spec)| spec.resident_bytes(WeightFormat::F32)).sum()
    }

    /// Returns the bytes of the critic's own weights. It shares packed tensors and an adapter's base with the
    /// policy.
    pub(super) fn critic_weights(&self, trainable: &[bool]) -> u64 {
        let own = value_model_specs(self.config);
        if let Some(adapter) = &self.adapter {
            let head: Vec<ParameterSpec> =
                own.into_iter().filter(|spec| spec.name.starts_with("score.")).collect();
            return f32_bytes(&head) + adapter.bytes();
        }
        let policy = parameter_specs(self.config);
        let shared = |spec: &ParameterSpec| {
            let at = policy.iter().position(|other| other.name == spec.name);
            at.is_some_and(|at| self.is_packed(spec, at))
        };
        let held =
            own.into_iter().zip(trainable).filter(|(spec, is_trainable)| **is_trainable || !shared(spec));
        held.map(|(spec, _)| spec.resident_bytes(WeightFormat::F32)).sum()
    }

    /// Returns the bytes of the second set of weights, with which ablations sample. A streamed layer is
    /// rounded when it is read and needs no copy.
    pub(super) fn rounded_weights(&self, rounding: WeightRounding) -> u64 {
        let specs = parameter_specs(self.config).into_iter().enumerate();
        let shard_elements = specs.filter(|(_, spec)| !self.streamed || spec.layer.is_none());
        let of = |(index, spec): (usize, ParameterSpec)| {
            let format = if self.is_packed(&spec, index) { self.formats[index] } else { WeightFormat::F32 };
            rounding.copy_bytes(&spec, format)
        };
        shard_elements.map(of).sum()
    }

    /// Returns the peak of weights changed by a mismatch cause: a decoded layer and a copy of its largest
    /// tensor, or an embedding as head with its transpose.
    pub(super) fn changed_weights(&self) -> u64 {
        let mut layers = BTreeMap::<usize, (u64, u64)>::new();
        let mut head = 0;
        for spec in parameter_specs(self.config) {
            let bytes = spec.resident_bytes(WeightFormat::F32);
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
