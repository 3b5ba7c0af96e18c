//! The memory of a forward pass and of a forward and backward pass, without weights and their gradients.
//! Shapes have the names of [`crate::ops`].

use super::MemoryPlanInput;
use crate::model::config::Config;
use crate::model::names::layer_norm_width;
use crate::ops::logits::{device_logits_rows, logits_rows_max};

const F32: u64 = 4;
const BF16: u64 = 2;

/// The shape of a pass over packed sequences.
#[derive(Debug, Clone, Copy)]
pub struct PassShape<'a> {
    pub config: &'a Config,
    /// Number of input tokens of this process.
    pub tokens: usize,
    /// Number of rows for which the head computes logits.
    pub targets: usize,
    /// Whether matrices have adapters. Each adapter computes a second product of the same shape.
    pub has_adapter: bool,
    /// Whether the pass runs on a GPU, where rows are bf16. Logits are f32 on every device.
    pub on_gpu: bool,
    /// The config of the teacher that the head compares the policy with.
    pub teacher: Option<&'a Config>,
    /// Number of processes that share the sequences; 1 without sequence parallelism.
    pub sequence_ranks: usize,
}

/// A stage of the backward pass of a GPU that keeps all activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BackwardStage {
    Head,
    /// The experts of a layer, or its MLP, with the norm before them.
    Experts(usize),
    /// The attention of a layer, with the norm before it.
    Attention(usize),
    Embedding,
    /// Several GPUs exchange the last gradients.
    Exchange,
}

impl BackwardStage {
    /// Returns all stages of a model with `layers` layers, in order.
    pub(super) fn all(layers: usize) -> Vec<Self> {
        let in_layers = (0..layers).rev().flat_map(|layer| [Self::Experts(layer), Self::Attention(layer)]);
        std::iter::once(Self::Head).chain(in_layers).chain([Self::Embedding, Self::Exchange]).collect()
    }

    /// Returns whether the stage goes back through a part of a layer.
    pub(super) fn is_in_layer(self) -> bool {
        matches!(self, BackwardStage::Experts(_) | BackwardStage::Attention(_))
    }
}

impl PassShape<'_> {
    /// Returns the bytes of a matrix of `rows × width` values.
    fn value_bytes(&self, rows: usize, width: usize) -> u64 {
        rows as u64 * width as u64 * if self.on_gpu { BF16 } else { F32 }
    }

    /// Returns the bytes of the hidden states, `[T, H]`.
    fn hidden_bytes(&self) -> u64 {
        self.value_bytes(self.tokens, self.config.hidden_size)
    }

    /// Returns the bytes of the queries of all heads.
    fn query_bytes(&self) -> u64 {
        self.value_bytes(self.tokens, self.config.num_attention_heads * self.config.head_dim)
    }

    /// Returns the bytes of the keys of all heads. The values have the same size.
    fn key_bytes(&self) -> u64 {
        self.value_bytes(self.tokens, self.config.num_key_value_heads * self.config.head_dim)
    }

    /// Returns the bytes of `T·K` expert rows of `width` values. An MLP counts as one expert.
    fn expert_rows_bytes(&self, width: usize) -> u64 {
        self.value_bytes(self.tokens * self.config.num_experts_per_tok.max(1), width)
    }

    /// Returns the bytes of one layer's small tensors: log-sum-exps, router logits, routing weights, expert
    /// indices and dispatch plan.
    fn small_tensor_bytes(&self) -> u64 {
        let c = self.config;
        let width = c.num_attention_heads + c.num_local_experts + 4 * c.num_experts_per_tok;
        // On a GPU also the experts' first rows, and f32 copies of the vectors that have gradients.
        let vectors = match self.on_gpu {
            true => c.num_local_experts + 1 + 2 * c.hidden_size + 2 * c.head_dim + c.num_attention_heads,
            false => 0,
        };
        (self.tokens * width + vectors) as u64 * F32
    }

    /// Returns the bytes that one layer's graph saves for the backward pass.
    pub(super) fn saved_layer_bytes(&self) -> u64 {
        self.saved_base_layer_bytes() + self.adapter_product_bytes() + self.saved_exchange_bytes()
    }

    /// Returns the bytes of the keys of this process's heads, for the rows of all processes. With fewer heads
    /// than processes, each process has a whole head.
    fn exchanged_key_bytes(&self) -> u64 {
        let (heads, ranks) = (self.config.num_key_value_heads, self.sequence_ranks);
        self.value_bytes(self.tokens * ranks, (heads / ranks).max(1) * self.config.head_dim)
    }

    /// Returns the bytes that sequence parallelism adds to one layer's graph: queries, keys with values and
    /// the output of attention, for this process's heads; router logits and routed experts of all rows.
    fn saved_exchange_bytes(&self) -> u64 {
        if self.sequence_ranks == 1 {
            return 0;
        }
        let c = self.config;
        let routed = (self.tokens * self.sequence_ranks) as u64
            * (c.num_local_experts + 4 * c.num_experts_per_tok) as u64;
        2 * self.query_bytes() + 2 * self.exchanged_key_bytes() + routed * F32
    }

    /// Returns the bytes of the parts that an exchange of sequence parallelism sends and receives, with its
    /// result: those of queries, or of keys with values.
    fn exchange_bytes(&self) -> u64 {
        match self.sequence_ranks {
            1 => 0,
            _ => 3 * self.query_bytes().max(2 * self.exchanged_key_bytes()),
        }
    }

    /// Returns the bytes that GPUs with a shared key-value head gather in the backward pass: queries and
    /// output gradients of all its query heads, with copies that are ordered by rows.
    fn shared_head_bytes(&self) -> u64 {
        match self.sequence_ranks / self.config.num_key_value_heads {
            sharing @ 2.. if self.on_gpu => 4 * sharing as u64 * self.query_bytes(),
            _ => 0,
        }
    }

    /// Returns the bytes of the adapters' products in one layer: q, k, v, o, gate_up (or gate and up) and
    /// down. The low-rank intermediate values are too small to count.
    fn adapter_product_bytes(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        match self.has_adapter {
            true => {
                self.query_bytes()
                    + 2 * self.key_bytes()
                    + self.hidden_bytes()
                    + self.expert_rows_bytes(2 * i + h)
            }
            false => 0,
        }
    }

    /// Returns the bytes of the outputs of one layer's norms: two of the hidden size, and those of heads.
    fn norm_bytes(&self) -> u64 {
        self.value_bytes(self.tokens, layer_norm_width(self.config))
    }

    fn saved_base_layer_bytes(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        // Tensors of the hidden size: o, both residual sums, the experts' output. Tensors of the
        // query size: q twice, and
        // attention's output. Tensors of the key size: k, v, and their pair.
        4 * self.hidden_bytes()
            + self.norm_bytes()
            + 3 * self.query_bytes()
            + 4 * self.key_bytes()
            + self.small_tensor_bytes()
            + self.expert_rows_bytes(2 * h + 3 * i)
    }

    /// Returns the peak bytes of one layer's forward pass if nothing is saved. The layer's input is not
    /// included.
    fn layer_forward_bytes(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        // o has the size of the norm after attention, which does not exist yet.
        let attention = self.norm_bytes()
            + 2 * self.query_bytes()
            + 6 * self.key_bytes()
            + self.saved_exchange_bytes()
            + self.exchange_bytes();
        let experts = 4 * self.hidden_bytes() + self.expert_rows_bytes(3 * i + h);
        // An adapter's product is held together with the base's product.
        let adapter =
            if self.has_adapter { self.expert_rows_bytes(2 * i).max(self.query_bytes()) } else { 0 };
        attention.max(experts) + self.small_tensor_bytes() + adapter
    }

    /// Returns the peak bytes of one layer's backward pass, without the graph. On a CPU the plan has `7I`
    /// values per expert row, which was measured with candle's backward pass.
    fn layer_backward_bytes(&self) -> u64 {
        let experts = match self.on_gpu {
            true => self.device_expert_gradient_bytes(),
            false => self.expert_rows_bytes(7 * self.config.intermediate_size),
        };
        let attention = match self.sequence_ranks {
            1 => 0,
            _ => {
                let moved = self.exchange_bytes().max(self.shared_head_bytes());
                2 * self.query_bytes() + 2 * self.exchanged_key_bytes() + moved
            }
        };
        2 * self.hidden_bytes() + experts.max(attention)
    }

    /// Returns the peak bytes that a GPU needs beyond the graph while it goes back through the experts of a
    /// layer. The layer's output is freed, and its gradient exists. An op's output is freed when its backward
    /// is done. The peak is at one of three ops:
    /// - the weighted sum: the gradient of the experts' output, `H` values per row;
    /// - the down matrix, or its adapter: that gradient and the one of its input, `H + I`. The sum is freed;
    /// - SwiGLU: gradients of its output and its input, `3I`. The experts' output is freed. With an adapter
    ///   the peak is one op earlier: two gradients of the input of down, and the sum of the two, beside that
    ///   of the output.
    fn device_expert_gradient_bytes(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        let sum = if self.config.num_experts_per_tok > 0 { self.hidden_bytes() } else { 0 };
        let down = self.expert_rows_bytes(h + i).saturating_sub(sum);
        let unit = self.expert_rows_bytes(if self.has_adapter { 3 * i } else { (3 * i).saturating_sub(h) });
        self.expert_rows_bytes(h).max(down).max(unit)
    }

    /// Returns the bytes of the graph that are left when a GPU has gone back through the experts of the
    /// `layers`-th layer, with the gradients of its attention: at most four of the hidden size, three of
    /// queries, two of keys and values.
    fn device_attention_backward_bytes(&self, layers: u64) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        let adapter = if self.has_adapter { self.expert_rows_bytes(2 * i + h) } else { 0 };
        let freed = self.hidden_bytes() + self.expert_rows_bytes(2 * h + 3 * i) + adapter;
        let gradients = 4 * self.hidden_bytes() + 3 * self.query_bytes() + 4 * self.key_bytes();
        self.hidden_bytes() + (layers * self.saved_layer_bytes() + gradients).saturating_sub(freed)
    }

    /// Returns the peak bytes of a GPU's pass without recomputation, while its backward pass is in a stage.
    pub(super) fn device_backward_bytes(&self, stage: BackwardStage) -> u64 {
        let graph = |layers: u64| self.hidden_bytes() + layers * self.saved_layer_bytes();
        match stage {
            BackwardStage::Head => {
                let gradients = (self.logit_bytes() + self.head_row_bytes()).max(self.hidden_bytes());
                graph(self.config.num_hidden_layers as u64) + self.head_row_bytes() + gradients
            }
            BackwardStage::Experts(layer) | BackwardStage::Attention(layer) if self.sequence_ranks > 1 => {
                graph(layer as u64 + 1) + self.layer_backward_bytes()
            }
            BackwardStage::Experts(layer) => {
                let routing = (self.tokens * self.config.num_experts_per_tok) as u64 * F32;
                let layers = layer as u64 + 1;
                (graph(layers) + self.device_expert_gradient_bytes() + routing)
                    .max(self.device_attention_backward_bytes(layers))
            }
            BackwardStage::Attention(layer) => self.device_attention_backward_bytes(layer as u64 + 1),
            BackwardStage::Embedding => 3 * self.hidden_bytes(),
            BackwardStage::Exchange => 0,
        }
    }

    /// Returns the bytes of the logits of one chunk of rows.
    fn logit_bytes(&self) -> u64 {
        let vocabulary = self.config.vocab_size;
        match self.on_gpu {
            // The logits and their gradient.
            true => {
                self.targets.min(device_logits_rows(vocabulary)) as u64 * vocabulary as u64 * (F32 + BF16)
            }
            false => {
                // The teacher's logits of the rows are in memory together with the policy's.
                let columns = vocabulary + self.teacher.map_or(0, |teacher| teacher.vocab_size);
                self.value_bytes(self.targets.min(logits_rows_max(vocabulary)), columns)
            }
        }
    }

    /// Returns the bytes of the head's input rows, before and after the final norm.
    fn head_row_bytes(&self) -> u64 {
        2 * self.value_bytes(self.targets, self.config.hidden_size)
    }

    /// Returns the peak bytes of a forward pass that computes only log-probabilities.
    pub fn forward_bytes(&self) -> u64 {
        self.hidden_bytes() + self.layer_forward_bytes().max(self.head_row_bytes() + self.logit_bytes())
    }

    /// Returns the peak bytes of a forward pass that ends before the head.
    pub fn head_input_bytes(&self) -> u64 {
        self.hidden_bytes() + self.layer_forward_bytes().max(self.head_row_bytes())
    }

    /// Returns the peak bytes of a forward and backward pass. With `recompute_layers`, the inputs of all
    /// layers and the graph of one layer are saved. Otherwise the graphs of all layers are saved.
    pub fn forward_backward_bytes(&self, recompute_layers: bool) -> u64 {
        let layers = self.config.num_hidden_layers as u64;
        // A hidden state that is used twice has two gradients and their sum.
        let head =
            self.head_row_bytes() + (self.logit_bytes() + self.head_row_bytes()).max(3 * self.hidden_bytes());
        let own = if recompute_layers {
            let inputs = layers * self.hidden_bytes();
            let layer = 2 * self.hidden_bytes() + self.saved_layer_bytes() + self.layer_backward_bytes();
            inputs + (self.hidden_bytes() + head).max(layer).max(self.layer_forward_bytes())
        } else if self.on_gpu {
            let last = self.config.num_hidden_layers.saturating_sub(1);
            let stages = [BackwardStage::Head, BackwardStage::Experts(last)];
            stages.map(|stage| self.device_backward_bytes(stage)).into_iter().max().unwrap_or(0)
        } else {
            let graph = self.hidden_bytes() + layers * self.saved_layer_bytes() + self.head_row_bytes();
            graph
                + (self.logit_bytes() + self.head_row_bytes())
                    .max(3 * self.hidden_bytes())
                    .max(self.layer_backward_bytes())
        };
        // The teacher leaves rows for the head.
        own + self.teacher.map_or(0, |teacher| self.value_bytes(self.targets, teacher.hidden_size))
    }
}

impl MemoryPlanInput<'_> {
    /// Returns the number of processes that share the sequences of a pass.
    pub(super) fn sequence_ranks(&self) -> usize {
        if self.placement.processes > 1 { self.recipe.parallel.sequence } else { 1 }
    }

    /// Returns the maximum number of tokens of a micro-batch that this process computes.
    pub(super) fn local_micro_batch_tokens(&self) -> usize {
        self.micro_batch_tokens().div_ceil(self.sequence_ranks())
    }

    /// Returns the maximum number of tokens of a micro-batch of this process for which the head computes
    /// logits. In reinforcement learning these are sampled tokens.
    pub(super) fn local_targets_max(&self) -> usize {
        let recipe = self.recipe;
        let tokens = self.local_inputs_max();
        let is_sampled = recipe.train.trajectories.is_none() && !self.plays_agent();
        if !is_sampled || self.command.trains() && recipe.cold_start.steps > 0 {
            return tokens;
        }
        let (prompts, samples) = self.rollout_size();
        let sequences = prompts.saturating_mul(samples);
        tokens.min(sequences.saturating_mul(recipe.rollout.response_tokens_max))
    }

    /// Returns the maximum number of tokens of a micro-batch: that of the recipe or, if it is longer, one
    /// sequence. A batch of fewer tokens is one micro-batch.
    pub fn micro_batch_tokens(&self) -> usize {
        self.micro_batch_tokens_without(0)
    }

    /// Returns the maximum number of input tokens of a micro-batch of this process. The last token of a
    /// sequence is only a target.
    pub(super) fn local_inputs_max(&self) -> usize {
        self.micro_batch_tokens_without(1).div_ceil(self.sequence_ranks())
    }

    /// Returns the maximum number of tokens of a micro-batch, without `last` tokens of each sequence.
    fn micro_batch_tokens_without(&self, last: usize) -> usize {
        let recipe = self.recipe;
        let tokens = |longest: usize, sequences: usize| {
            let longest = longest.saturating_sub(last);
            recipe.train.micro_batch_tokens.max(longest).min(longest.saturating_mul(sequences))
        };
        let rollout = &recipe.rollout;
        let sampled = rollout.prompts_per_step.saturating_mul(rollout.samples_per_prompt);
        let sampled = tokens(self.longest_sequence(), sampled);
        let has_sft = self.command.trains() && recipe.cold_start.steps > 0;
        let sft = self.sft_row_tokens_max.filter(|_| has_sft);
        match sft.map(|longest| tokens(longest, recipe.cold_start.batch_size)) {
            Some(sft) if recipe.train.steps == 0 => sft,
            sft => sampled.max(sft.unwrap_or(0)),
        }
    }
}
