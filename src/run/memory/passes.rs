//! What a forward or a pass in both directions takes beside weights and gradients, bytes. Letters as in [`crate::ops`].

use crate::model::config::Config;
use crate::ops::logits::{device_logits_rows, logits_rows_max};

const F32: u64 = 4;
const BF16: u64 = 2;

/// A pass over packed sequences.
#[derive(Debug, Clone, Copy)]
pub struct PassShape<'a> {
    pub config: &'a Config,
    /// Tokens fed.
    pub tokens: usize,
    /// Rows that the head reads.
    pub targets: usize,
    /// Whether matrices have adapters, which give each product's result a second time.
    pub adapted: bool,
    /// Whether rows are bf16, as on a GPU; logits are f32 everywhere.
    pub on_gpu: bool,
}

impl PassShape<'_> {
    /// `rows × width` values.
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

    /// Rows of the experts, `T·K`, times `width`.
    fn routed(&self, width: usize) -> u64 {
        self.values(self.tokens * self.config.num_experts_per_tok, width)
    }

    /// Log-sum-exps, router logits, shares, routes and the plan of one layer.
    fn small(&self) -> u64 {
        let c = self.config;
        let width = c.num_attention_heads + c.num_local_experts + 4 * c.num_experts_per_tok;
        (self.tokens * width) as u64 * F32
    }

    /// What the graph of one layer holds until its backward.
    fn layer_kept(&self) -> u64 {
        self.plain_layer_kept() + self.adapted_products()
    }

    /// What adapters add: q, k, v, o, gate_up or gate and up, and down, without the correction.
    fn adapted_products(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        match self.adapted {
            true => self.queries() + 2 * self.keys() + self.hidden() + self.routed(2 * i + h),
            false => 0,
        }
    }

    fn plain_layer_kept(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        // Both norms, o, both sums, the experts' mix; q twice and its mix; k, v and their pair.
        6 * self.hidden() + 3 * self.queries() + 4 * self.keys() + self.small() + self.routed(2 * h + 3 * i)
    }

    /// The most that one layer's forward holds when nothing is kept of it, its input not counted.
    fn layer_forward(&self) -> u64 {
        let (h, i) = (self.config.hidden_size, self.config.intermediate_size);
        let attention = 2 * self.hidden() + 2 * self.queries() + 6 * self.keys();
        let experts = 4 * self.hidden() + self.routed(3 * i + h);
        // An adapter's product lies beside the base's.
        let adapted = if self.adapted { self.routed(2 * i).max(self.queries()) } else { 0 };
        attention.max(experts) + self.small() + adapted
    }

    /// The most that one layer's backward holds beside the graph.
    ///
    /// Gradients of an op's input and output at once come to `2I + H`, under an adapter, whose product gives its input a second one and
    /// their sum, to `2I + 3H`. What is planned is what candle's walk took, which was more where `H` is not much above `I`; no peak
    /// has been measured from which less could be promised.
    fn layer_backward(&self) -> u64 {
        2 * self.hidden() + self.routed(7 * self.config.intermediate_size)
    }

    /// Logits, a chunk of rows at a time.
    fn logits(&self) -> u64 {
        let vocabulary = self.config.vocab_size;
        match self.on_gpu {
            // Their gradient lies beside them.
            true => {
                self.targets.min(device_logits_rows(vocabulary)) as u64 * vocabulary as u64 * (F32 + BF16)
            }
            false => self.values(self.targets.min(logits_rows_max(vocabulary)), vocabulary),
        }
    }

    /// The rows that the head reads, before and after the last norm.
    fn head_rows(&self) -> u64 {
        2 * self.values(self.targets, self.config.hidden_size)
    }

    /// Log-probabilities alone.
    pub fn forward(&self) -> u64 {
        self.hidden() + self.layer_forward().max(self.head_rows() + self.logits())
    }

    /// Forward and backward: all layers' graphs, or, with `recompute_layers`, all layers' inputs and one layer's graph.
    pub fn both_ways(&self, recompute_layers: bool) -> u64 {
        let layers = self.config.num_hidden_layers as u64;
        // Hidden states that go two ways have two gradients and their sum.
        let head = self.head_rows() + (self.logits() + self.head_rows()).max(3 * self.hidden());
        if recompute_layers {
            let inputs = layers * self.hidden();
            let layer = 2 * self.hidden() + self.layer_kept() + self.layer_backward();
            inputs + (self.hidden() + head).max(layer).max(self.layer_forward())
        } else {
            let graph = self.hidden() + layers * self.layer_kept() + self.head_rows();
            graph + (self.logits() + self.head_rows()).max(3 * self.hidden()).max(self.layer_backward())
        }
    }
}
