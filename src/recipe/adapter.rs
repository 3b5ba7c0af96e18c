//! `[adapter]`: a low-rank adapter learns in place of the model's own weights.

use super::limits::{above, from};
use super::table::table;

table! {
    /// The adapter.
    pub struct AdapterConfig {
        /// Rank of the correction that each matrix gets.
        pub rank: usize = 16 => from(1.0).to(4096.0),
        /// The correction is scaled by `alpha / rank`.
        pub alpha: f64 = 32.0 => above(0.0).to(1e6),
        /// Scale by `alpha / √rank` instead (rsLoRA), which keeps its size over ranks.
        pub rslora: bool = false,
        /// The matrices with an adapter, as patterns over parameters' names in which `*` stands for any characters. Empty means
        /// all that can have one: q, k, v, o, and both expert matrices of GPT-OSS or the three of the MLP of Qwen2.5.
        pub targets: Vec<String> = Vec::new(),
        /// Whether the cold start too trains the adapter. If not, it trains the whole model, which is then the adapter's base, kept
        /// in the run's folder; for models that begin at random.
        pub cold_start: bool = true,
        /// Only 0: dropout would make training's forward another one than the rollout's.
        pub dropout: f64 = 0.0 => from(0.0).below(1.0),
    }
}
