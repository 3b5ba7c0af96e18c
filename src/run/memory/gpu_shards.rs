//! Memory plan of one of several GPUs: shards, and the tensors that are gathered from them.

use super::{MemoryItem, MemoryPlanInput, TrainableTensor, gathered_bytes};
use crate::dist::shard_length;
use crate::learner::OptimizerSettings;
use crate::learner::gradients::{EXCHANGE_BYTES_MIN, exchange_bytes_max};
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

    /// Returns the memory of expert rows in a forward and backward pass with `tokens` tokens of each GPU,
    /// beyond the rows of its own tokens. `None` if GPUs do not exchange them.
    ///
    /// At worst, all tokens have experts of one GPU. Of each layer whose activations are kept, the graph has
    /// the rows as received, dispatched, multiplied, ordered as they came, and returned. The backward pass of
    /// a product has its input and its output's gradient in both orders.
    pub(super) fn trained_row_item(&self, tokens: usize) -> Option<MemoryItem> {
        let c = self.config;
        let experts = c.num_local_experts.div_ceil(self.processes);
        let received = self.processes * tokens * c.num_experts_per_tok.min(experts);
        let layers = if self.recomputes_layers() { 1 } else { c.num_hidden_layers };
        let kept = layers * (4 * c.hidden_size + 3 * c.intermediate_size);
        let backward = 3 * c.hidden_size + 6 * c.intermediate_size;
        let bytes = (received * (kept + backward) * size_of::<half::bf16>()) as u64;
        self.trains_by_expert().then_some(MemoryItem { name: "rows of experts, exchanged", bytes })
    }

    /// Returns whether several GPUs shard the trainable tensors.
    pub(super) fn has_gpu_shards(&self) -> bool {
        self.processes > 1 && self.command.trains()
    }

    /// Returns the memory of gathered weights and of whole gradients in a pass of several GPUs, beside the
    /// activations of all layers. With recomputation, two layers are gathered at a time: the current one and
    /// the next. Without it, the graph has the weights of all layers. The backward pass frees them, and
    /// `saved_layer_bytes` of activations with each layer, while gradients are made.
    pub(super) fn gpu_update_gather(&self, saved_layer_bytes: u64) -> Option<MemoryItem> {
        let sharding = self.sharding();
        let is_gathered = |(_, spec): &TrainableTensor| !spec.is_sharded_by_expert(sharding);
        let pass = |tensors: Vec<TrainableTensor>| {
            let tensors: Vec<TrainableTensor> = tensors.into_iter().filter(is_gathered).collect();
            let (mut outside, mut layers) = (LayerMemory::default(), BTreeMap::new());
            for (_, spec) in &tensors {
                let memory = match spec.layer.filter(|_| spec.role != TensorRole::AdapterFactor) {
                    Some(layer) => layers.entry(layer).or_default(),
                    None => &mut outside,
                };
                memory.weights += self.gathered_tensor_bytes(spec);
                memory.gradients += gradient_bytes(spec);
            }
            let layers: Vec<LayerMemory> = layers.into_values().collect();
            // Before and while the backward pass runs through each layer.
            let backward = (0..=layers.len()).rev().map(|left| {
                let weights = match self.recomputes_layers() {
                    true => 2 * layers.iter().map(|layer| layer.weights).max().unwrap_or(0),
                    false => layers[..left].iter().map(|layer| layer.weights).sum(),
                };
                let made: u64 = layers[left.saturating_sub(1)..].iter().map(|layer| layer.gradients).sum();
                let freed = if self.recomputes_layers() { 0 } else { layers.len() - left };
                let made = self.exchanged_gradient_bytes(outside.gradients + made, &tensors);
                (outside.weights + weights + made).saturating_sub(freed as u64 * saved_layer_bytes)
            });
            backward.max().unwrap_or(0)
        };
        let critic = self.critic_trainable.as_ref().map(|trainable| self.critic_trainable_tensors(trainable));
        let bytes = pass(self.ever_trainable_tensors()).max(pass(critic.unwrap_or_default()));
        self.has_gpu_shards().then_some(MemoryItem { name: "gathered weights, exchanged gradients", bytes })
    }

    /// Returns the bytes of whole gradients and of received shards, if a pass has made gradients of `made`
    /// bytes. Gradients of the pass before may still be there.
    fn exchanged_gradient_bytes(&self, made: u64, tensors: &[TrainableTensor]) -> u64 {
        let with_received = |bytes: u64| bytes + bytes / self.processes as u64 * (self.processes as u64 - 1);
        let largest = tensors.iter().map(|(_, spec)| gradient_bytes(spec)).max().unwrap_or(0);
        let pass_bytes = gathered_bytes(tensors);
        // Of bytes in flight, half are counted as received.
        let in_flight = with_received(exchange_bytes_max(pass_bytes) / 2).max(with_received(largest));
        let waiting = EXCHANGE_BYTES_MIN.min(pass_bytes) + largest;
        match self.passes_max() {
            1 => with_received(made).min(in_flight + waiting),
            _ => in_flight + waiting,
        }
    }
}

/// The memory of one layer's tensors in a pass: gathered weights, and whole gradients.
#[derive(Default, Clone, Copy)]
struct LayerMemory {
    weights: u64,
    gradients: u64,
}

/// Returns the f32 bytes of a tensor's gradient.
fn gradient_bytes(spec: &ParameterSpec) -> u64 {
    (spec.element_count() * size_of::<f32>()) as u64
}
