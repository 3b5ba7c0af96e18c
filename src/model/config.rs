//! The architecture of a model. `config_json` reads it from `config.json` and writes it.

use super::families::Family;
use super::names::parameter_count;
use super::settings::{Contradiction, Sizes, Yarn, architecture_limits};
use crate::bad_input;
use crate::bounded_file::{self, JSON_BYTES_MAX};
use crate::settings::choice;
use anyhow::Result;
use serde_json::Value;
use std::path::Path;

/// The gain of the sigmoid in the experts' SwiGLU; a constant of GPT-OSS.
pub const SWIGLU_ALPHA: f64 = 1.702;
/// Upper limit of every size, so that a product of three sizes never overflows.
pub(super) const SIZE_MAX: u64 = 1 << 20;
/// Upper limit of the parameter count, so that a count of bytes never overflows.
const PARAMETERS_MAX: u128 = 1 << 44;

/// The earlier positions that a layer attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// Position i sees j with 0 <= i − j < `sliding_window`.
    Sliding,
    /// Position i sees every j <= i.
    Full,
}

impl LayerType {
    pub(super) fn name(self) -> &'static str {
        match self {
            LayerType::Sliding => "sliding_attention",
            LayerType::Full => "full_attention",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [LayerType::Sliding, LayerType::Full].into_iter().find(|t| t.name() == name)
    }

    /// Returns the layer types of GPT-OSS: even layers slide, odd layers are full.
    pub fn alternate(num_hidden_layers: usize) -> Vec<LayerType> {
        [LayerType::Sliding, LayerType::Full].into_iter().cycle().take(num_hidden_layers).collect()
    }
}

/// Rotary position embedding over the whole head, half-split.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rope {
    pub theta: f64,
    /// `None`: plain RoPE.
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
    /// 0 in a family without experts, as is the next field.
    pub num_local_experts: usize,
    pub num_experts_per_tok: usize,
    /// Unused when no layer slides.
    pub sliding_window: usize,
    /// One entry for each layer.
    pub layer_types: Vec<LayerType>,
    pub rope: Rope,
    pub rms_norm_eps: f64,
    /// The clamp in the experts' SwiGLU MLP; 0 in a family without it.
    pub swiglu_limit: f64,
    /// Whether the LM head shares the embedding's matrix.
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<u32>,
    /// Empty when the file names none.
    pub eos_token_ids: Vec<u32>,
    pub pad_token_id: Option<u32>,
}

choice! {
    /// The format of weights on disk.
    pub enum WeightFormat {
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16, the released format of all tensors but the experts.
        Bf16 = "bf16",
        /// The released format: the experts' matrices in MXFP4, rounded to nearest, the other tensors in
        /// bfloat16.
        Mxfp4 = "mxfp4",
    }
}

impl Config {
    /// Reads `config.json` in `folder`. One `BadInput` lists every mistake in the file by its key.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = bounded_file::read_text(&path, JSON_BYTES_MAX).map_err(|e| {
            bad_input!("{}: cannot be read ({e}); model.path must name a Hugging Face folder", path.display())
        })?;
        let value: Value = serde_json::from_str(&text).map_err(|e| {
            bad_input!("{}: not valid JSON: {e}; correct or fetch the file again", path.display())
        })?;
        Self::from_json(&value).map_err(|e| bad_input!("{}: {e}", path.display()))
    }

    /// Checks a config that was built from values. A `BadInput` names the keys that contradict each other.
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
        let mut unless = |holds: bool, mistake: String| {
            if !holds {
                mistakes.push(mistake);
            }
        };
        let (types, layers) = (self.layer_types.len(), self.num_hidden_layers);
        unless(
            types == layers,
            format!("layer_types has {types} entries, but num_hidden_layers = {layers}: one entry a layer"),
        );
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

    /// Returns every number that has limits of its own, with its recipe key.
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
