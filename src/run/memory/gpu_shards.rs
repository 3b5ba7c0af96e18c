//! Memory plan of one of several GPUs: shards, and the tensors that are gathered from them.

use super::{MemoryItem, MemoryPlanInput, TrainableTensor, gathered_bytes};
use crate::dist::shard_length;
use crate::learner::OptimizerSettings;
use crate::learner::gradients::exchange_bytes_max;
use crate::learner::optimizer::state_bytes;
use crate::model::expert_exchange::GATHERED_ROWS_MAX;
use crate::model::names::{ParameterSpec, TensorRole};
use std::collections::BTreeMap;

/// Returns the bytes of a value in the forward pass: bf16 for matrices, f32 for other tensors.
fn value_bytes(spec: &ParameterSpec) -> usize {
    if spec.is_matrix() { size_of::<half::bf16>() } else { size_of::<f32>() }
}

/// Returns the bytes of a tensor in the dtype of the forward pass.
pub(super) fn working_bytes(spec: &ParameterSpec) -> u64 {
    (spec.element_count() * value_bytes(spec)) as u64
}

/// Returns the f32 bytes of the largest tensor.
fn largest_gradient(tensors: &[TrainableTensor]) -> u64 {
    let bytes = |(_, spec): &TrainableTensor| (spec.element_count() * size_of::<f32>()) as u64;
    tensors.iter().map(bytes).max().unwrap_or(0)
}

impl MemoryPlanInput<'_> {
    /// Returns the bytes of the shards of `tensors` in the dtypes of the forward pass. For one process, these
    /// are the whole tensors.
    pub(super) fn working_shard_bytes(&self, tensors: &[TrainableTensor]) -> u64 {
        self.max_process_bytes(tensors, |spec, values| (values * value_bytes(spec)) as u64)
    }

    /// Returns the bytes of master weights and optimizer state of the shards of `tensors`.
    pub(super) fn gpu_optimizer_bytes(
        &self,
        settings: &OptimizerSettings,
        tensors: &[TrainableTensor],
    ) -> u64 {
        self.max_process_bytes(tensors, |spec, values| {
            let master = if spec.is_matrix() { values * size_of::<f32>() } else { 0 };
            master as u64 + state_bytes(settings, spec, values)
        })
    }

    /// Returns the bytes of a gathered tensor. Each rank's part has the length of a whole shard.
    fn gathered_tensor_bytes(&self, spec: &ParameterSpec) -> u64 {
        let values = self.processes * shard_length(spec.element_count(), self.processes);
        (values * value_bytes(spec)) as u64
    }

    /// Returns the memory of the weights that several GPUs gather for sampling.
    pub(super) fn gpu_sampling_gather(&self) -> Option<MemoryItem> {
        let by_expert = self.samples_by_expert();
        let bytes = |(_, spec): &TrainableTensor| match by_expert && spec.has_expert_axis() {
            true => working_bytes(&spec.with_expert_count(self.local_experts())),
            false => self.gathered_tensor_bytes(spec),
        };
        let bytes = self.ever_trainable_tensors().iter().map(bytes).sum();
        let name = if by_expert { "weights, gathered except experts" } else { "weights, gathered" };
        self.has_gpu_shards().then_some(MemoryItem { name, bytes })
    }

    /// Returns the memory of expert rows in a layer of a pass with `tokens` tokens of each GPU, beyond the
    /// rows of its own tokens. `None` if GPUs do not exchange them.
    ///
    /// At worst, all tokens have experts of one GPU. Its rows are received, dispatched, multiplied, ordered
    /// as they came, and returned.
    pub(super) fn exchanged_row_item(&self, tokens: usize) -> Option<MemoryItem> {
        let c = self.config;
        let (all, top_k) = (self.processes * tokens, c.num_experts_per_tok);
        let gathered = all.min(GATHERED_ROWS_MAX) * top_k;
        let sent = if all > GATHERED_ROWS_MAX { all * top_k.min(self.local_experts()) } else { 0 };
        let received = gathered.max(sent) * (4 * c.hidden_size + 3 * c.intermediate_size);
        let own = 2 * tokens * top_k * c.hidden_size;
        let bytes = ((received + own) * size_of::<half::bf16>()) as u64;
        self.samples_by_expert().then_some(MemoryItem { name: "rows of experts, exchanged", bytes })
    }

    /// Returns whether several GPUs shard the trainable tensors.
    pub(super) fn has_gpu_shards(&self) -> bool {
        self.processes > 1 && self.command.trains()
    }

    /// Returns the memory of gathered weights and of whole gradients in a pass of several GPUs. With
    /// recomputation, two layers are gathered at a time: the current one and the next. Without it, the graph
    /// has the weights of all layers.
    pub(super) fn gpu_update_gather(&self) -> Option<MemoryItem> {
        let pass = |tensors: &[TrainableTensor]| {
            let (mut outside, mut layers) = (0, BTreeMap::<usize, u64>::new());
            for (_, spec) in tensors {
                let bytes = self.gathered_tensor_bytes(spec);
                match spec.layer.filter(|_| spec.role != TensorRole::AdapterFactor) {
                    Some(layer) => *layers.entry(layer).or_default() += bytes,
                    None => outside += bytes,
                }
            }
            let gathered = match self.recomputes_layers() {
                true => 2 * layers.values().max().unwrap_or(&0),
                false => layers.values().sum(),
            };
            // A whole gradient, and gradients that are sent and received.
            let largest = largest_gradient(tensors);
            let sent = exchange_bytes_max(gathered_bytes(tensors)).max(2 * largest);
            outside + gathered + largest + sent
        };
        let critic = self.critic_trainable.as_ref().map(|trainable| self.critic_trainable_tensors(trainable));
        let bytes = pass(&self.ever_trainable_tensors()).max(pass(&critic.unwrap_or_default()));
        self.has_gpu_shards().then_some(MemoryItem { name: "gathered weights, exchanged gradients", bytes })
    }
}
