//! Memory plan of one of several GPUs: shards, and the tensors that are gathered from them.

use super::passes::BackwardStage;
use super::{MemoryItem, MemoryPlanInput, PassShape, TrainableTensor, gathered_bytes};
use crate::actor::OptimizerSettings;
use crate::actor::gradients::{EXCHANGE_BYTES_MIN, exchange_bytes_max};
use crate::actor::optimizer::state_bytes;
use crate::dist::shard_length;
use crate::model::config::Config;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::parallel::expert_exchange::GATHERED_ROWS_MAX;
use std::collections::VecDeque;

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
        let values = self.shard_ranks() * shard_length(spec.element_count(), self.shard_ranks());
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
        self.has_gpu_shards().then_some(MemoryItem::new(name, bytes))
    }

    /// Returns the memory of expert rows in a layer of a pass with `tokens` tokens of each GPU, beyond the
    /// rows of its own tokens. `None` if GPUs do not exchange them.
    ///
    /// At worst, all tokens have experts of one GPU. Its rows are received, dispatched, multiplied, ordered
    /// as they came, and returned.
    pub(super) fn exchanged_row_item(&self, tokens: usize) -> Option<MemoryItem> {
        let c = self.config;
        let (all, top_k) = (self.shard_ranks() * tokens, c.num_experts_per_tok);
        let gathered = all.min(GATHERED_ROWS_MAX) * top_k;
        let sent = if all > GATHERED_ROWS_MAX { all * top_k.min(self.local_experts()) } else { 0 };
        let received = gathered.max(sent) * (4 * c.hidden_size + 3 * c.intermediate_size);
        let bytes = ((received + 2 * tokens * top_k * c.hidden_size) * size_of::<half::bf16>()) as u64;
        self.samples_by_expert().then_some(MemoryItem::new("rows of experts, exchanged", bytes))
    }

    /// Returns the memory of expert rows in a forward and backward pass with `tokens` tokens of each GPU,
    /// beyond the rows of its own tokens. `None` if GPUs do not exchange them.
    ///
    /// At worst, all tokens have experts of one GPU. Of each layer whose activations are kept, the graph has
    /// the rows as received, dispatched, multiplied, ordered as they came, and returned. The backward pass of
    /// a product has its input and its output's gradient in both orders.
    pub(super) fn trained_row_item(&self, tokens: usize) -> Option<MemoryItem> {
        let c = self.config;
        let experts = c.num_local_experts.div_ceil(self.shard_ranks());
        let received = self.shard_ranks() * tokens * c.num_experts_per_tok.min(experts);
        let layers = if self.recomputes_layers() { 1 } else { c.num_hidden_layers };
        let kept = layers * (4 * c.hidden_size + 3 * c.intermediate_size);
        let backward = 3 * c.hidden_size + 6 * c.intermediate_size;
        let bytes = (received * (kept + backward) * size_of::<half::bf16>()) as u64;
        self.trains_by_expert().then_some(MemoryItem::new("rows of experts, exchanged", bytes))
    }

    /// Returns whether several GPUs shard the trainable tensors.
    pub(super) fn has_gpu_shards(&self) -> bool {
        self.shard_ranks() > 1 && self.command.trains()
    }

    /// Returns the memory that several GPUs need in `pass` beside its activations of `activation_bytes`:
    /// gathered weights and whole gradients. With recomputation, two layers are gathered at a time: the
    /// current one and the next. Without it, the graph has the weights of all layers. The backward pass frees
    /// them, and activations, while gradients are made.
    pub(super) fn gpu_update_gather(&self, pass: &PassShape, activation_bytes: u64) -> Option<MemoryItem> {
        let recomputes = self.recomputes_layers();
        let sharding = self.sharding();
        let total = |mut tensors: Vec<TrainableTensor>| {
            tensors.retain(|(_, spec)| !spec.is_sharded_by_expert(sharding));
            let tensors = &tensors[..];
            let gathered = |held: &dyn Fn(BackwardStage) -> bool| -> u64 {
                let held = tensors.iter().filter(|(_, spec)| held(weight_stage(spec)));
                held.map(|(_, spec)| self.gathered_tensor_bytes(spec)).sum()
            };
            let layer_weights = |layer| {
                let parts = [BackwardStage::Experts(layer), BackwardStage::Attention(layer)];
                gathered(&|stage| parts.contains(&stage))
            };
            let largest_layer = (0..self.config.num_hidden_layers).map(layer_weights).max().unwrap_or(0);
            let outside =
                gathered(&|stage| stage == BackwardStage::Head || stage == BackwardStage::Embedding);
            let stages = BackwardStage::all(self.config.num_hidden_layers);
            let gradients = self.exchanged_gradient_bytes(tensors, &stages);
            let bytes = stages.iter().zip(gradients).map(|(&stage, gradients)| {
                let place = |stage: BackwardStage| stages.iter().position(|&other| other == stage);
                let weights = match stage {
                    BackwardStage::Exchange => 0,
                    _ if recomputes => outside + 2 * largest_layer,
                    _ => outside + gathered(&|part| part.is_in_layer() && place(part) >= place(stage)),
                };
                let activations = match stage {
                    BackwardStage::Exchange => 0,
                    _ if recomputes => activation_bytes,
                    _ => pass.device_backward_bytes(stage),
                };
                activations + weights + gradients
            });
            bytes.max().unwrap_or(0)
        };
        let total = total(self.ever_trainable_tensors()).max(total(self.critic_tensors()));
        let bytes = total.saturating_sub(activation_bytes);
        self.has_gpu_shards().then_some(MemoryItem::new("gathered weights, exchanged gradients", bytes))
    }

    /// Returns the largest number of passes of a process in one update. A micro-batch may have room for part
    /// of a sequence, which the next one gets.
    fn passes_max(&self) -> u64 {
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

    /// Returns, for each stage of a backward pass, the largest bytes of whole gradients and of received
    /// shards. A pass makes gradients in the reverse order of the tensors. Gradients of the pass before may
    /// still be there.
    fn exchanged_gradient_bytes(&self, tensors: &[TrainableTensor], stages: &[BackwardStage]) -> Vec<u64> {
        let received = |spec: &ParameterSpec| {
            let values = (self.shard_ranks() - 1) * shard_length(spec.element_count(), self.shard_ranks());
            (values * size_of::<f32>()) as u64
        };
        let pass_bytes = gathered_bytes(tensors);
        let (mut waiting, mut in_flight) = ((0, 0), VecDeque::<(u64, u64)>::new());
        let mut peaks = vec![0; stages.len()];
        let total = |waiting: u64, in_flight: &VecDeque<(u64, u64)>| -> u64 {
            waiting + in_flight.iter().map(|(whole, received)| whole + received).sum::<u64>()
        };
        // No more is in flight than a pass makes, so later passes are like the third.
        for _ in 0..self.passes_max().min(3) {
            for (&stage, peak) in stages.iter().zip(&mut peaks) {
                *peak = total(waiting.0, &in_flight).max(*peak);
                for (_, spec) in
                    tensors.iter().rev().filter(|(_, spec)| makes_gradient(spec, stage, self.config))
                {
                    waiting = (waiting.0 + gradient_bytes(spec), waiting.1 + received(spec));
                    *peak = total(waiting.0, &in_flight).max(*peak);
                    if waiting.0 >= EXCHANGE_BYTES_MIN {
                        send(&mut waiting, &mut in_flight, exchange_bytes_max(pass_bytes));
                        *peak = total(0, &in_flight).max(*peak);
                    }
                }
                // An exchange has gradients of one pass.
                if stage == BackwardStage::Exchange {
                    send(&mut waiting, &mut in_flight, exchange_bytes_max(pass_bytes));
                    *peak = total(0, &in_flight).max(*peak);
                }
            }
        }
        peaks
    }
}

/// Moves the waiting gradients, whole and received bytes, to those in flight. At most `bytes_max` are in
/// flight.
fn send(waiting: &mut (u64, u64), in_flight: &mut VecDeque<(u64, u64)>, bytes_max: u64) {
    let sent = std::mem::take(waiting);
    while in_flight.iter().map(|(whole, _)| 2 * whole).sum::<u64>() > bytes_max.saturating_sub(2 * sent.0) {
        in_flight.pop_front();
    }
    in_flight.push_back(sent);
}

/// Returns the part of the pass that holds the gathered tensor. Factors of adapters are held by the whole
/// pass.
fn weight_stage(spec: &ParameterSpec) -> BackwardStage {
    if let TensorRole::AdapterFactor = spec.role { BackwardStage::Head } else { gradient_stage(spec) }
}

/// Returns the stage of the backward pass in which a tensor gets its gradient.
fn gradient_stage(spec: &ParameterSpec) -> BackwardStage {
    match spec.layer {
        Some(layer) if is_of_attention(spec) => BackwardStage::Attention(layer),
        Some(layer) => BackwardStage::Experts(layer),
        None if spec.role == TensorRole::Embedding => BackwardStage::Embedding,
        None => BackwardStage::Head,
    }
}

/// Returns whether a layer's tensor belongs to attention or to the norm before it.
fn is_of_attention(spec: &ParameterSpec) -> bool {
    [".self_attn.", ".input_layernorm."].iter().any(|part| spec.name.contains(part))
}

/// Returns whether `stage` makes a gradient of a tensor. A tied embedding has one of the head, too.
fn makes_gradient(spec: &ParameterSpec, stage: BackwardStage, config: &Config) -> bool {
    let is_tied_head = spec.role == TensorRole::Embedding && config.tie_word_embeddings;
    gradient_stage(spec) == stage || is_tied_head && stage == BackwardStage::Head
}

/// Returns the f32 bytes of a tensor's gradient.
fn gradient_bytes(spec: &ParameterSpec) -> u64 {
    (spec.element_count() * size_of::<f32>()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::SHARD_ALIGNMENT;
    use crate::metrics::Console;
    use crate::recipe::resolve;
    use crate::run::memory::{MemoryPlan, ModelCommand, TrainingStage};
    use crate::run::startup::Startup;
    use std::path::Path;

    const SHORT: &str = "task.name = \"format_rules\"\ntrain.recompute_layers = false\n\
                         rollout.prompts_per_step = 1\nrollout.samples_per_prompt = 4\n\
                         rollout.prompt_tokens_max = 50\nrollout.response_tokens_max = 8\n\
                         rollout.turns_max = 1\n";

    /// Calls `check` with the input of a plan of one of `processes` GPUs.
    fn with_input<R>(more: &str, processes: usize, check: impl FnOnce(&MemoryPlanInput) -> R) -> R {
        let plan = resolve(Path::new("a.toml"), &format!("{SHORT}{more}"), &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        (input.choices.gpu_sequences, input.placement.processes) = (Some(4), processes);
        check(&input)
    }

    #[test]
    fn whole_gradients_of_one_pass_add_up_and_their_shards_come_with_an_exchange() {
        let more =
            "cold_start.steps = 0\ntrain.micro_batch_tokens = 232\nmodel.architecture.hidden_size = 512\n";
        with_input(more, 2, |input| {
            assert_eq!(input.passes_max(), 1);
            let tensors = input.trainable_tensors(TrainingStage::ReinforcementLearning);
            let stages = BackwardStage::all(input.config.num_hidden_layers);
            let peaks = input.exchanged_gradient_bytes(&tensors, &stages);
            assert!(peaks.is_sorted() && peaks[0] > 0, "{peaks:?}");
            let whole: u64 = tensors.iter().map(|(_, spec)| gradient_bytes(spec)).sum();
            assert!(whole > 2 * EXCHANGE_BYTES_MIN, "several exchanges");
            // At the end all gradients are there, and the half of them that the other GPU has sent. Before,
            // what waits for an exchange has no shard yet.
            let (last, before) = (peaks[peaks.len() - 1], peaks[peaks.len() - 2]);
            // A shard has whole blocks.
            let padding = (tensors.len() * SHARD_ALIGNMENT * size_of::<f32>()) as u64;
            assert!(last >= whole * 3 / 2 && last <= whole * 3 / 2 + padding, "{last} of {whole}");
            assert!(
                before + EXCHANGE_BYTES_MIN / 2 + padding >= last && before <= last,
                "{before} and {last}"
            );
        });
    }

    #[test]
    fn fewer_ranks_of_a_copy_have_larger_shards() {
        let resident = |more: &str| {
            let more = format!("model.architecture.hidden_size = 512\n{more}");
            with_input(&more, 8, |input| MemoryPlan::new(input).resident_bytes())
        };
        let (shard, larger) = (resident(""), resident("parallel.shard_size = 2"));
        assert!(larger > 3 * shard, "{larger} and {shard}");
    }

    #[test]
    fn a_pass_has_the_inputs_and_the_targets_of_its_sequences() {
        let shape =
            |more: &str| with_input(more, 1, |input| [input.local_inputs_max(), input.local_targets_max()]);
        // The last token of a sequence is no input. Only sampled tokens are targets.
        assert_eq!(shape("cold_start.steps = 0\ntrain.micro_batch_tokens = 1000"), [4 * 57, 4 * 8]);
        assert_eq!(shape("cold_start.steps = 0\ntrain.micro_batch_tokens = 100"), [100, 32]);
        assert_eq!(shape("cold_start.steps = 0\ntrain.micro_batch_tokens = 20"), [57, 32]);
        // Demonstrations may be targets as a whole.
        let [inputs, targets] = shape("cold_start.steps = 1\ntrain.micro_batch_tokens = 100");
        assert_eq!(inputs, targets);
    }
}
