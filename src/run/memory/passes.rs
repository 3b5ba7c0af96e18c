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
        (self.tokens * width) as u64 * F32
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

    /// Returns the peak bytes of one layer's backward pass, without the graph.
    ///
    /// On a GPU, the gradients of the activation and of gate and up take `3I` values per expert row, that of
    /// the experts' output `H`. What the graph frees in the meantime is not subtracted. With an adapter they
    /// take `2I + 3H`: there is a second gradient of the input, and the sum of the two. On a CPU the plan has
    /// `7I`, which was measured with candle's backward pass.
    fn layer_backward_bytes(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        let experts = self.expert_rows_bytes(match (self.on_gpu, self.has_adapter) {
            (true, false) => h.max(3 * i),
            (true, true) => 3 * (h + i),
            (false, _) => 7 * i,
        });
        let attention = match self.sequence_ranks {
            1 => 0,
            _ => {
                let moved = self.exchange_bytes().max(self.shared_head_bytes());
                2 * self.query_bytes() + 2 * self.exchanged_key_bytes() + moved
            }
        };
        2 * self.hidden_bytes() + experts.max(attention)
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

    /// Returns the bytes of the rows that a teacher leaves for the head.
    fn teacher_row_bytes(&self) -> u64 {
        self.teacher.map_or(0, |teacher| self.value_bytes(self.targets, teacher.hidden_size))
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
        } else {
            let graph = self.hidden_bytes() + layers * self.saved_layer_bytes() + self.head_row_bytes();
            graph
                + (self.logit_bytes() + self.head_row_bytes())
                    .max(3 * self.hidden_bytes())
                    .max(self.layer_backward_bytes())
        };
        own + self.teacher_row_bytes()
    }
}

impl MemoryPlanInput<'_> {
    /// Returns the number of processes that share the sequences of a pass.
    pub(super) fn sequence_ranks(&self) -> usize {
        if self.processes > 1 { self.recipe.parallel.sequence } else { 1 }
    }

    /// Returns the maximum number of tokens of a micro-batch that this process computes.
    pub(super) fn local_micro_batch_tokens(&self) -> usize {
        self.micro_batch_tokens().div_ceil(self.sequence_ranks())
    }

    /// Returns the maximum number of tokens of a micro-batch: that of the recipe or, if it is longer, one
    /// sequence. A batch of fewer tokens is one micro-batch.
    pub fn micro_batch_tokens(&self) -> usize {
        let recipe = self.recipe;
        let tokens = |longest: usize, sequences: usize| {
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
