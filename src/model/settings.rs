//! `[model]`, `[adapter]` and `device`: the model, its number format, its adapter, and the device that
//! computes.

use super::families::Family;
use super::init::InitSettings;
use crate::settings::{Limits, ParsedValue, Scalar, Table, above, choice, from, table};
use std::path::PathBuf;

table! {
    /// The model and its tokenizer: a folder, or an architecture with random weights.
    pub struct ModelSettings {
        /// Path of a Hugging Face model folder, a GGUF file, a checkpoint folder or a run folder (its last
        /// checkpoint). If a folder has `config.json` but no weights, weights are random.
        pub path: Option<PathBuf> = None,
        /// Folder of an adapter to start from: in PEFT format (LoRA), or a checkpoint or run folder. Its base
        /// is `path`, which has no adapter itself. `[adapter]`, if present, must be equal.
        pub adapter: Option<PathBuf> = None,
        /// Vocabulary of a model without `path`: `"embedded"` (272 tokens: bytes, and the Harmony or ChatML
        /// tokens of the family), or the path of a `tokenizer.json` or of its folder. Default `"embedded"`.
        /// Refused together with `path`, because the folder `path` has a tokenizer.
        pub tokenizer: Option<Tokenizer> = None,
        /// Type of the weights in the forward pass. `"bf16"` rounds the weights to bf16, and the optimizer
        /// keeps f32 master weights. `"bf16_dot"` also multiplies in bf16, on a CPU with AVX-512 BF16: in
        /// forward and backward passes the inputs of matmuls are rounded to bf16, and sums are f32. The
        /// router, attention, norms and the values of a critic stay f32.
        pub dtype: Dtype = Dtype::F32,
        /// Shape of a model without `path`. Refused together with `path`.
        pub architecture: Option<Architecture>,
        /// Random weights of a model that has no weights on disk.
        pub init: InitSettings,
    }
}

table! {
    /// Shape of the model. Keys have the names of `config.json`. In GPT-OSS even layers have a sliding
    /// window, and odd layers have full attention. In Qwen all layers have full attention, and only
    /// `qwen3_moe` has experts.
    pub struct Architecture {
        /// The family. It determines the layers and the format of conversations.
        pub model_type: Family = Family::default(),
        /// Width of the residual stream.
        pub hidden_size: usize = 64 => from(1.0).to(65536.0),
        /// Number of decoder layers.
        pub num_hidden_layers: usize = 4 => from(1.0).to(1024.0),
        /// Number of query heads per layer.
        pub num_attention_heads: usize = 4 => from(1.0).to(1024.0),
        /// Number of key-value heads per layer. It must divide `num_attention_heads`.
        pub num_key_value_heads: usize = 2 => from(1.0).to(1024.0),
        /// Width of a head. It must be even.
        pub head_dim: usize = 16 => from(2.0).to(1024.0),
        /// Width of the MLP of an expert or of a dense layer.
        pub intermediate_size: usize = 64 => from(1.0).to(1048576.0),
        /// Number of experts per layer. This key and the next apply to families with experts.
        pub num_local_experts: usize = 4 => from(1.0).to(65535.0),
        /// Number of experts per token.
        pub num_experts_per_tok: usize = 2 => from(1.0).to(1024.0),
        /// Number of keys that a query of a sliding layer attends to, its own included. GPT-OSS only.
        pub sliding_window: usize = 16 => from(1.0).to(16777216.0),
        /// Whether the embedding and the LM head share a matrix. Qwen only.
        pub tie_word_embeddings: bool = false,
        /// Maximum length of a sequence, in tokens.
        pub max_position_embeddings: usize = 160 => from(2.0).to(16777216.0),
        /// Base of the rotary embedding.
        pub rope_theta: f64 = 10_000.0 => above(1.0).to(1e12),
        /// The epsilon that every RMSNorm adds to the mean square.
        pub rms_norm_eps: f64 = 1e-5 => from(1e-12).to(0.1),
        /// Limit of the inputs of SwiGLU. The gate is clamped to at most this value, and the up projection to
        /// ± this value. GPT-OSS only.
        pub swiglu_limit: f64 = 7.0 => above(0.0).to(1e6),
        /// YaRN context extension. If absent, the rotary embedding is plain.
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
        /// A frequency with more rotations than this within the original context is not scaled. It must
        /// exceed `beta_slow`.
        pub beta_fast: f64 = 32.0 => above(0.0).to(1e6),
        /// A frequency with fewer rotations than this within the original context is divided by `factor`.
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

/// Returns the limits of a number of an architecture, in a recipe or a `config.json`. Keys of YaRN have the
/// form `yarn.KEY`.
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

/// A contradiction between two keys of an architecture.
pub struct Contradiction {
    /// Keys below `model.architecture`. The first is the one to change.
    pub keys: [&'static str; 2],
    /// The value of the first key.
    pub value: String,
    /// The mistake in the value and the remedy.
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
            "is odd, but the rotary embedding rotates pairs of dimensions; give an even number".to_owned(),
        );
        unless(
            self.num_experts_per_tok <= self.num_local_experts,
            ["num_experts_per_tok", "num_local_experts"],
            &self.num_experts_per_tok,
            format!(
                "is more than the {} experts of a layer; give at most this number",
                self.num_local_experts
            ),
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
        /// bfloat16, multiplied by the bf16 dot-product instructions of a CPU.
        Bf16Dot = "bf16_dot",
    }
}

impl Dtype {
    /// Returns whether weights are rounded to bf16, with f32 master weights.
    pub fn is_bf16(self) -> bool {
        self != Dtype::F32
    }
}

/// The source of the vocabulary of a model without `path`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Tokenizer {
    /// The vocabulary of 272 tokens in the binary.
    #[default]
    Embedded,
    /// The path of a `tokenizer.json`, or of a folder that has one.
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
        if let Tokenizer::Path(path) = self { path.to_toml() } else { "\"embedded\"".to_owned() }
    }
}

choice! {
    /// The device of a run.
    pub enum DeviceKind {
        /// A GPU, if build and recipe allow it; otherwise, and with several processes, the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// NVIDIA GPUs of compute capability 9.0, one per process. They need `model.dtype = "bf16"`, heads of
        /// width 64 or 128, and sizes divisible by 8.
        Cuda = "cuda",
    }
}

table! {
    /// A low-rank adapter (LoRA). Training changes only the adapter; the weights of the model stay frozen,
    /// packed or dense. The reference of `policy.kl` is then the model without the adapter. The critic is a
    /// second adapter with a value head. Suitable learning rates are about ten times those of full
    /// training.
    pub struct AdapterSettings {
        /// Rank of the adapter of each matrix.
        pub rank: usize = 16 => from(1.0).to(4096.0),
        /// Scale of the output of the adapter: the factor is `alpha / rank`.
        pub alpha: f64 = 32.0 => above(0.0).to(1e6),
        /// Scale by `alpha / √rank` instead (rsLoRA). The size of the output then does not depend on the
        /// rank.
        pub rslora: bool = false,
        /// The matrices with an adapter, as patterns of parameter names. `*` matches any characters. An empty
        /// list means all matrices of the layers that can have an adapter. These are q, k, v, o, and the MLP
        /// matrices: both expert matrices in GPT-OSS, the three MLP matrices in dense Qwen, the three
        /// matrices of each expert in `qwen3_moe`. `lm_head.weight` names the head, also a tied one; on a
        /// CPU.
        pub targets: Vec<String> = Vec::new(),
        /// Whether SFT warm-up (`[cold_start]`) trains only the adapter. If false, SFT warm-up trains the
        /// whole model, which then becomes the base of the adapter and is saved in the run folder. False
        /// suits models with random weights.
        pub cold_start: bool = true,
        /// Only 0 is allowed, because dropout would make the forward passes of training and rollout differ.
        pub dropout: f64 = 0.0 => from(0.0).below(1.0),
    }
}
