//! The architecture of a model. `config_json` reads and writes it as `config.json`.

use super::families::Family;
use super::names::parameter_count;
use super::settings::{Contradiction, Sizes, Yarn, architecture_limits};
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use crate::settings::choice;
use anyhow::Result;
use serde_json::Value;
use std::path::Path;

/// The gain of the sigmoid in the SwiGLU of experts, a constant of GPT-OSS.
pub const SWIGLU_ALPHA: f64 = 1.702;
/// Maximum of every size. It keeps products of three sizes from overflowing.
pub(super) const SIZE_MAX: u64 = 1 << 20;
/// Maximum number of parameters. It keeps counts of bytes from overflowing.
const PARAMETERS_MAX: u128 = 1 << 44;

choice! {
    /// The range of positions that a layer attends to.
    pub enum LayerType {
        /// Position i attends to every j with 0 <= i − j < `sliding_window`.
        Sliding = "sliding_attention",
        /// Position i attends to every j <= i.
        Full = "full_attention",
    }
}

impl LayerType {
    /// Returns the layer types of GPT-OSS: even layers have sliding windows, odd layers full attention.
    pub fn alternate(num_hidden_layers: usize) -> Vec<LayerType> {
        [LayerType::Sliding, LayerType::Full].into_iter().cycle().take(num_hidden_layers).collect()
    }
}

/// Rotary position embedding over all dimensions of a head. It pairs dimension i with dimension i + D/2.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rope {
    pub theta: f64,
    /// `None` means plain RoPE.
    pub yarn: Option<Yarn>,
}

/// The architecture of a model. Field names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `model_type`.
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    /// 0 in a family without experts. The same holds for the next field.
    pub num_local_experts: usize,
    pub num_experts_per_tok: usize,
    /// Unused when no layer has a sliding window.
    pub sliding_window: usize,
    /// One entry per layer.
    pub layer_types: Vec<LayerType>,
    pub rope: Rope,
    pub rms_norm_eps: f64,
    /// The clamp in the SwiGLU of experts; 0 in a family without a clamp.
    pub swiglu_limit: f64,
    /// Whether the LM head shares the matrix of the embedding.
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<u32>,
    /// Empty when the file has no such id.
    pub eos_token_ids: Vec<u32>,
    pub pad_token_id: Option<u32>,
}

choice! {
    /// The format of weights on disk.
    pub enum WeightFormat {
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16. The released checkpoints use it for all tensors except the experts.
        Bf16 = "bf16",
        /// The format of released GPT-OSS, for that family alone: expert matrices in MXFP4, rounded to
        /// nearest, and other tensors in bfloat16.
        Mxfp4 = "mxfp4",
    }
}

impl Config {
    /// Reads `config.json` in `folder`. A `BadInput` error lists every mistake in the file with its key.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = bounded_file::read_text(&path, SMALL_FILE_BYTES_MAX).map_err(|e| {
            bad_input!("{}: cannot be read ({e}); model.path must name a Hugging Face folder", path.display())
        })?;
        let value: Value = serde_json::from_str(&text).map_err(|e| {
            bad_input!("{}: not valid JSON: {e}; correct the file or fetch it again", path.display())
        })?;
        Self::from_json(&value).map_err(|e| bad_input!("{}: {e}", path.display()))
    }

    /// Checks a config whose fields were set by code, not read from a file. A `BadInput` error names the keys
    /// that contradict each other.
    pub fn check(&self) -> Result<()> {
        let mistakes = self.mistakes();
        if mistakes.is_empty() { Ok(()) } else { Err(bad_input!("{}", mistakes.join("; "))) }
    }

    pub(super) fn mistakes(&self) -> Vec<String> {
        let mut mistakes = self.values_out_of_range();
        let sizes = Sizes {
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            num_local_experts: self.num_local_experts,
            num_experts_per_tok: self.num_experts_per_tok,
            yarn: self.rope.yarn.as_ref(),
        };
        for Contradiction { keys: [key, _], value, what } in sizes.contradictions() {
            mistakes.push(format!("{} = {value} {what}", key.replace("yarn.", "rope_scaling.")));
        }
        let (types, layers) = (self.layer_types.len(), self.num_hidden_layers);
        if types != layers {
            mistakes.push(format!(
                "layer_types has {types} entries, but num_hidden_layers = {layers}; give one entry per layer"
            ));
        }
        if mistakes.is_empty() && parameter_count(self) > PARAMETERS_MAX {
            let count = parameter_count(self);
            mistakes.push(format!("the sizes imply {count} parameters, more than {PARAMETERS_MAX}"));
        }
        mistakes
    }

    fn values_out_of_range(&self) -> Vec<String> {
        let mut mistakes = Vec::new();
        if !(1..=SIZE_MAX).contains(&(self.vocab_size as u64)) {
            mistakes.push(format!("vocab_size = {} must lie in 1..={SIZE_MAX}", self.vocab_size));
        }
        for (key, value) in self.numbers() {
            if let Some(limits) = architecture_limits(key).filter(|limits| !limits.contains(value)) {
                let key = key.replace("yarn.", "rope_scaling.");
                mistakes.push(format!("{key} = {value} must be {limits}"));
            }
        }
        let token_ids = [
            ("bos_token_id", self.bos_token_id.as_slice()),
            ("eos_token_id", &self.eos_token_ids),
            ("pad_token_id", self.pad_token_id.as_slice()),
        ];
        for (key, ids) in token_ids {
            for id in ids.iter().filter(|id| **id as usize >= self.vocab_size) {
                mistakes.push(format!("{key} = {id} must be below vocab_size = {}", self.vocab_size));
            }
        }
        mistakes
    }

    /// Returns each number that has limits, with its recipe key.
    fn numbers(&self) -> Vec<(&'static str, f64)> {
        let mut numbers = vec![
            ("hidden_size", self.hidden_size as f64),
            ("num_hidden_layers", self.num_hidden_layers as f64),
            ("num_attention_heads", self.num_attention_heads as f64),
            ("num_key_value_heads", self.num_key_value_heads as f64),
            ("head_dim", self.head_dim as f64),
            ("intermediate_size", self.intermediate_size as f64),
            ("max_position_embeddings", self.max_position_embeddings as f64),
            ("rope_theta", self.rope.theta),
            ("rms_norm_eps", self.rms_norm_eps),
        ];
        if self.family.has_experts {
            numbers.extend([
                ("num_local_experts", self.num_local_experts as f64),
                ("num_experts_per_tok", self.num_experts_per_tok as f64),
            ]);
        }
        if self.family.has_swiglu_limit {
            numbers.push(("swiglu_limit", self.swiglu_limit));
        }
        if self.layer_types.contains(&LayerType::Sliding) {
            numbers.push(("sliding_window", self.sliding_window as f64));
        }
        if let Some(yarn) = &self.rope.yarn {
            numbers.extend([
                ("yarn.factor", yarn.factor),
                ("yarn.beta_fast", yarn.beta_fast),
                ("yarn.beta_slow", yarn.beta_slow),
                ("yarn.original_max_position_embeddings", yarn.original_max_position_embeddings as f64),
            ]);
        }
        numbers
    }
}
