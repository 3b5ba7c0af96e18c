//! `[model]` and `device`: the model, its number format, and the device it computes on.

use super::families::Family;
use super::init::InitSettings;
use crate::settings::{Limits, ParsedValue, Scalar, Table, above, choice, from, table};
use std::path::PathBuf;

table! {
    /// The model and its tokenizer: a folder, or an architecture with random weights.
    pub struct ModelSettings {
        /// Folder of a Hugging Face model, a GGUF file, a checkpoint folder or a run folder (its last
        /// checkpoint). A folder with `config.json` but no weights gives random weights.
        pub path: Option<PathBuf> = None,
        /// Folder of an adapter in PEFT format (LoRA) to start from, or a checkpoint or run folder with an
        /// adapter. Its base is `path`. Not needed if `path` is itself such a checkpoint or run.
        pub adapter: Option<PathBuf> = None,
        /// Vocabulary of a model without `path`: `"embedded"` (272 tokens: bytes, and the family's Harmony
        /// or ChatML), or the path of a `tokenizer.json` or of its folder. Default `"embedded"`. Refused
        /// together with `path`, whose folder has a tokenizer.
        pub tokenizer: Option<Tokenizer> = None,
        /// Type of the weights in the forward pass. `"bf16"` rounds them there, and the optimizer keeps f32
        /// masters. `"bf16_dot"` also multiplies in bf16 on a CPU with AVX-512 BF16, in forward and
        /// backward passes: inputs of matmuls are rounded to bf16, and sums are f32. The router, attention,
        /// norms and a critic's values stay f32.
        pub dtype: Dtype = Dtype::F32,
        /// Shape of a model without `path`. Refused together with `path`.
        pub architecture: Option<Architecture>,
        /// Random weights, for a model without weights.
        pub init: InitSettings,
    }
}

table! {
    /// Shape of the model, under the names of `config.json`. In GPT-OSS even layers have a sliding window
    /// and odd layers full attention. In Qwen all layers have full attention; only `qwen3_moe` has experts.
    pub struct Architecture {
        /// The family, which decides the layers and the format of conversations.
        pub model_type: Family = Family::default(),
        /// Width of the residual stream.
        pub hidden_size: usize = 64 => from(1.0).to(65536.0),
        /// Decoder layers.
        pub num_hidden_layers: usize = 4 => from(1.0).to(1024.0),
        /// Query heads of a layer.
        pub num_attention_heads: usize = 4 => from(1.0).to(1024.0),
        /// Key and value heads of a layer; divides `num_attention_heads`.
        pub num_key_value_heads: usize = 2 => from(1.0).to(1024.0),
        /// Width of a head; even.
        pub head_dim: usize = 16 => from(2.0).to(1024.0),
        /// Width of an expert, or of a dense layer's MLP.
        pub intermediate_size: usize = 64 => from(1.0).to(1048576.0),
        /// Experts of a layer. This key and the next are for families with experts.
        pub num_local_experts: usize = 4 => from(1.0).to(65535.0),
        /// Experts that a token uses.
        pub num_experts_per_tok: usize = 2 => from(1.0).to(1024.0),
        /// Keys that a query of a sliding layer sees, itself included. GPT-OSS only.
        pub sliding_window: usize = 16 => from(1.0).to(16777216.0),
        /// Whether the embedding and the LM head share a matrix. Qwen only.
        pub tie_word_embeddings: bool = false,
        /// Longest sequence, in tokens.
        pub max_position_embeddings: usize = 160 => from(2.0).to(16777216.0),
        /// Base of the rotary embedding.
        pub rope_theta: f64 = 10_000.0 => above(1.0).to(1e12),
        /// Added to the mean square in every RMSNorm.
        pub rms_norm_eps: f64 = 1e-5 => from(1e-12).to(0.1),
        /// Limit of the inputs of SwiGLU: the gate is clamped from above, the up projection on both sides.
        /// GPT-OSS only.
        pub swiglu_limit: f64 = 7.0 => above(0.0).to(1e6),
        /// YaRN context extension; absent means plain rotary embedding.
        pub yarn: Option<Yarn>,
    }
}

table! {
    /// YaRN scaling of the rotary embedding (Peng et al. 2023), as in GPT-OSS's `rope_scaling`.
    pub struct Yarn {
        /// Context extension factor.
        pub factor: f64 = 32.0 => from(1.0).to(1e6),
        /// Context length before the extension, in tokens.
        pub original_max_position_embeddings: usize = 4096 => from(1.0).to(16777216.0),
        /// Rotations above which a frequency is not scaled.
        pub beta_fast: f64 = 32.0 => above(0.0).to(1e6),
        /// Rotations below which a frequency is divided by `factor`.
        pub beta_slow: f64 = 1.0 => above(0.0).to(1e6),
        /// Whether the bounds of the ramp are rounded to whole dimensions.
        pub truncate: bool = false,
    }
}

impl Architecture {
    pub(crate) fn sizes(&self) -> Sizes<'_> {
        Sizes {
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            num_local_experts: self.num_local_experts,
            num_experts_per_tok: self.num_experts_per_tok,
            yarn: self.yarn.as_ref(),
        }
    }
}

/// Returns the limits of a number of an architecture, in a recipe or a `config.json`; YaRN's keys are
/// `yarn.KEY`.
pub(crate) fn architecture_limits(key: &str) -> Option<Limits> {
    match key.strip_prefix("yarn.") {
        Some(key) => Yarn::limits_of(key),
        None => Architecture::limits_of(key),
    }
}

/// The sizes of an architecture that can contradict each other, in a recipe or in a `config.json`.
pub struct Sizes<'a> {
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub num_local_experts: usize,
    pub num_experts_per_tok: usize,
    pub yarn: Option<&'a Yarn>,
}

/// Two keys of an architecture that contradict each other.
pub struct Contradiction {
    /// Keys below `model.architecture`. The first is the one to change.
    pub keys: [&'static str; 2],
    /// The value of the first key.
    pub value: String,
    /// The mistake in the value, and the remedy.
    pub what: String,
}

impl Sizes<'_> {
    /// Returns every contradiction.
    pub fn contradictions(&self) -> Vec<Contradiction> {
        let mut found = Vec::new();
        let mut unless = |holds: bool, keys, value: &dyn std::fmt::Display, what| {
            if !holds {
                found.push(Contradiction { keys, value: value.to_string(), what });
            }
        };
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        unless(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            ["num_key_value_heads", "num_attention_heads"],
            &kv_heads,
            format!("does not divide the {heads} query heads; give a divisor"),
        );
        unless(
            self.head_dim.is_multiple_of(2),
            ["head_dim", "head_dim"],
            &self.head_dim,
            "is odd, and the rotary embedding turns pairs; give an even number".to_owned(),
        );
        unless(
            self.num_experts_per_tok <= self.num_local_experts,
            ["num_experts_per_tok", "num_local_experts"],
            &self.num_experts_per_tok,
            format!("is more than the {} experts of a layer; give at most that many", self.num_local_experts),
        );
        if let Some(Yarn { beta_fast, beta_slow, .. }) = self.yarn {
            unless(
                beta_fast > beta_slow,
                ["yarn.beta_fast", "yarn.beta_slow"],
                beta_fast,
                format!("must be above beta_slow, {beta_slow}; GPT-OSS has 32 and 1"),
            );
        }
        found
    }
}

choice! {
    /// Number formats of weights and arithmetic.
    pub enum Dtype {
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16.
        Bf16 = "bf16",
        /// bfloat16, multiplied with a CPU's dot-product instructions.
        Bf16Dot = "bf16_dot",
    }
}

impl Dtype {
    /// Whether weights are rounded to bf16, with masters in f32.
    pub fn is_bf16(self) -> bool {
        self != Dtype::F32
    }
}

/// The source of the vocabulary of a model without a folder.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Tokenizer {
    /// The 272-token vocabulary inside the binary.
    #[default]
    Embedded,
    /// A `tokenizer.json`, or a folder that holds one.
    Path(PathBuf),
}

impl Scalar for Tokenizer {
    fn describe_type(limits: Option<Limits>) -> String {
        format!("\"embedded\" or {}", PathBuf::describe_type(limits))
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        match String::parse(found, limits)?.as_str() {
            "embedded" => Ok(Tokenizer::Embedded),
            _ => PathBuf::parse(found, limits).map(Tokenizer::Path),
        }
    }

    fn schema(limits: Option<Limits>) -> serde_json::Value {
        PathBuf::schema(limits)
    }

    fn to_toml(&self) -> String {
        match self {
            Tokenizer::Embedded => "\"embedded\"".to_owned(),
            Tokenizer::Path(path) => path.to_toml(),
        }
    }
}

choice! {
    /// Where a run computes.
    pub enum DeviceKind {
        /// A GPU, if there is one that the build supports and that can run the recipe; else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// An NVIDIA GPU of compute capability 9.0, one for each process. It needs `model.dtype = "bf16"`
        /// and heads 64 wide.
        Cuda = "cuda",
    }
}

table! {
    /// A low-rank adapter (LoRA). It is trained, and the model's own weights stay frozen, packed or not.
    /// The reference of `policy.kl` is then the model without the adapter, and the critic is a second
    /// adapter with a value head. Learning rates are about ten times those of full training.
    pub struct AdapterSettings {
        /// Rank of each matrix's adapter.
        pub rank: usize = 16 => from(1.0).to(4096.0),
        /// The adapter's output is scaled by `alpha / rank`.
        pub alpha: f64 = 32.0 => above(0.0).to(1e6),
        /// Scale by `alpha / √rank` instead (rsLoRA), which keeps the output's size the same at every rank.
        pub rslora: bool = false,
        /// The matrices with an adapter, as patterns of parameter names; `*` matches any characters. Empty
        /// means all that can have one: q, k, v, o, and both expert matrices of GPT-OSS, the three MLP
        /// matrices of dense Qwen or the three matrices of each Qwen3 expert.
        pub targets: Vec<String> = Vec::new(),
        /// Whether SFT warm-up (`[cold_start]`) also trains the adapter. If not, it trains the whole model,
        /// which becomes the adapter's base and is kept in the run folder. That suits models with random
        /// weights.
        pub cold_start: bool = true,
        /// Only 0 is allowed: dropout would make the forward pass of training differ from that of rollout.
        pub dropout: f64 = 0.0 => from(0.0).below(1.0),
    }
}
