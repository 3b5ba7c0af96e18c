//! Memory of a forward pass, alone or with its backward, in bytes, without weights and gradients. Shapes are
//! named as in [`crate::ops`].

use crate::model::config::Config;
use crate::ops::logits::{device_logits_rows, logits_rows_max};

const F32: u64 = 4;
const BF16: u64 = 2;

/// The shape of a pass over packed sequences.
#[derive(Debug, Clone, Copy)]
pub struct PassShape<'a> {
    pub config: &'a Config,
    /// Number of input tokens.
    pub tokens: usize,
    /// Number of rows that the head reads.
    pub targets: usize,
    /// True when matrices have adapters, each with a second product of the same shape.
    pub adapted: bool,
    /// True on a GPU, where rows are bf16. Logits are f32 everywhere.
    pub on_gpu: bool,
}

impl PassShape<'_> {
    /// Returns the bytes of `rows × width` values.
    fn values(&self, rows: usize, width: usize) -> u64 {
        rows as u64 * width as u64 * if self.on_gpu { BF16 } else { F32 }
    }

    fn hidden(&self) -> u64 {
        self.values(self.tokens, self.config.hidden_size)
    }

    fn queries(&self) -> u64 {
        self.values(self.tokens, self.config.num_attention_heads * self.config.head_dim)
    }

    fn keys(&self) -> u64 {
        self.values(self.tokens, self.config.num_key_value_heads * self.config.head_dim)
    }

    /// Returns the bytes of `T·K` expert rows of `width` values. An MLP counts as one expert.
    fn expert_rows_bytes(&self, width: usize) -> u64 {
        self.values(self.tokens * self.config.num_experts_per_tok.max(1), width)
    }

    /// Returns the bytes of one layer's log-sum-exps, router logits, routing weights, expert indices and
    /// dispatch plan.
    fn small(&self) -> u64 {
        let c = self.config;
        let width = c.num_attention_heads + c.num_local_experts + 4 * c.num_experts_per_tok;
        (self.tokens * width) as u64 * F32
    }

    /// Returns the bytes that one layer's graph saves for the backward.
    fn saved_layer_bytes(&self) -> u64 {
        self.saved_base_layer_bytes() + self.adapted_products()
    }

    /// Returns the bytes that adapters add: products of q, k, v, o, gate_up (or gate and up) and down,
    /// without the low-rank part.
    fn adapted_products(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        match self.adapted {
            true => self.queries() + 2 * self.keys() + self.hidden() + self.expert_rows_bytes(2 * i + h),
            false => 0,
        }
    }

    /// Returns the bytes of normed queries and keys.
    fn head_norms(&self) -> u64 {
        if self.config.family.has_head_norms { self.queries() + self.keys() } else { 0 }
    }

    fn saved_base_layer_bytes(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        // Both norms, o, both residual sums, experts' output; q twice and attention's output; k, v and their
        // pair.
        6 * self.hidden()
            + 3 * self.queries()
            + 4 * self.keys()
            + self.small()
            + self.head_norms()
            + self.expert_rows_bytes(2 * h + 3 * i)
    }

    /// Returns the peak of one layer's forward when nothing is saved, without its input.
    fn layer_forward(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        let attention = 2 * self.hidden() + 2 * self.queries() + 6 * self.keys() + self.head_norms();
        let experts = 4 * self.hidden() + self.expert_rows_bytes(3 * i + h);
        // An adapter's product is held beside the base's.
        let adapted = if self.adapted { self.expert_rows_bytes(2 * i).max(self.queries()) } else { 0 };
        attention.max(experts) + self.small() + adapted
    }

    /// Returns the peak of one layer's backward beside the graph.
    ///
    /// The gradients of one op's input and output take `2I + H` per expert row, or `2I + 3H` with an adapter.
    /// An adapter gives the input a second gradient, and a sum. The plan uses a larger number, the peak
    /// measured with candle's backward, because no peak of this backward was measured to justify less.
    fn layer_backward(&self) -> u64 {
        2 * self.hidden() + self.expert_rows_bytes(7 * self.config.intermediate_size)
    }

    /// Returns the bytes of the logits, one chunk of rows at a time.
    fn logits(&self) -> u64 {
        let vocabulary = self.config.vocab_size;
        match self.on_gpu {
            // The logits and their gradient.
            true => {
                self.targets.min(device_logits_rows(vocabulary)) as u64 * vocabulary as u64 * (F32 + BF16)
            }
            false => self.values(self.targets.min(logits_rows_max(vocabulary)), vocabulary),
        }
    }

    /// Returns the bytes of the head's input rows, before and after the final norm.
    fn head_rows(&self) -> u64 {
        2 * self.values(self.targets, self.config.hidden_size)
    }

    /// Returns the peak of a forward that computes log-probabilities only.
    pub fn forward(&self) -> u64 {
        self.hidden() + self.layer_forward().max(self.head_rows() + self.logits())
    }

    /// Returns the peak of forward and backward. With `recompute_layers`, all layers' inputs are saved and
    /// one layer's graph; otherwise all layers' graphs.
    pub fn forward_backward(&self, recompute_layers: bool) -> u64 {
        let layers = self.config.num_hidden_layers as u64;
        // Hidden states used twice have two gradients and their sum.
        let head = self.head_rows() + (self.logits() + self.head_rows()).max(3 * self.hidden());
        if recompute_layers {
            let inputs = layers * self.hidden();
            let layer = 2 * self.hidden() + self.saved_layer_bytes() + self.layer_backward();
            inputs + (self.hidden() + head).max(layer).max(self.layer_forward())
        } else {
            let graph = self.hidden() + layers * self.saved_layer_bytes() + self.head_rows();
            graph + (self.logits() + self.head_rows()).max(3 * self.hidden()).max(self.layer_backward())
        }
    }
}
