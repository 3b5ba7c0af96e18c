//! Dense Qwen3: the layer of Qwen2 with a norm of each query head and each key head, and without biases.

use super::FamilyEntry;
use crate::chat::ChatFormat;
use crate::model::config::{Config, LayerType, Rope};
use crate::model::config_json::ConfigReader;
use crate::model::layer::{AttentionWeights, Layer, LayerOutput, LayerPass, SwigluMlp};
use crate::model::matrix::LayerTensors;
use crate::model::names::{LayerSpecs, ParameterSpec, TensorRole};
use crate::ops::Parameter;
use crate::ops::graph::reshape;
use anyhow::Result;
use candle_core::Tensor;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) const ENTRY: FamilyEntry = FamilyEntry {
    name: "qwen3",
    meaning: "Dense Qwen3; conversations in ChatML with thinking.",
    architecture: "Qwen3ForCausalLM",
    gguf: "qwen3",
    gguf_pre_tokenizer: "qwen2",
    chat: ChatFormat::ThinkingChatMl,
    has_experts: false,
    has_sinks: false,
    has_windows: false,
    has_swiglu_limit: false,
    has_mxfp4: false,
    may_tie_embeddings: true,
    layer_types: |layers| vec![LayerType::Full; layers],
    read,
    own_keys,
    layer_specs,
    layer,
};

/// Reads the keys of both Qwen3 families. Refuses keys of GPT-OSS, and windows.
pub(super) fn read(keys: &mut ConfigReader) -> Config {
    keys.require_value("attention_bias", &json!(false));
    for key in ["swiglu_limit", "swiglu_alpha"] {
        keys.require_value(key, &Value::Null);
    }
    // `config.json` has a window width even if no layer has a window, so the width is not checked.
    if keys.flag("use_sliding_window", false) {
        keys.record_mistake(
            "use_sliding_window = true is not supported: every layer of this family has full attention; \
             use a model without windows",
        )
    }
    let rope = keys.rope().unwrap_or_else(|| Rope { theta: keys.number("rope_theta"), yarn: None });
    Config { head_dim: keys.size("head_dim"), rope, ..keys.common_config() }
}

/// Returns the keys of `config.json` that both Qwen3 families write.
pub(super) fn own_keys(config: &Config) -> Value {
    json!({
        "attention_bias": false,
        "sliding_window": Value::Null,
        "use_sliding_window": false,
        "max_window_layers": config.num_hidden_layers,
    })
}

/// Returns the tensors of layer `layer`: attention, then the MLP. Shape letters are those of
/// [`crate::model::names`].
fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    let (h, i) = (config.hidden_size, config.intermediate_size);
    let mut specs = attention_specs(config, layer);
    specs.push("mlp.gate_proj.weight", TensorRole::InputProjection, &[i, h]);
    specs.push("mlp.up_proj.weight", TensorRole::InputProjection, &[i, h]);
    specs.push("mlp.down_proj.weight", TensorRole::OutputProjection, &[h, i]);
    specs.into_vec()
}

/// Returns the tensors of layer `layer` up to the norm before the MLP.
pub(super) fn attention_specs(config: &Config, layer: usize) -> LayerSpecs {
    let (h, d) = (config.hidden_size, config.head_dim);
    let (q, k) = (config.num_attention_heads * d, config.num_key_value_heads * d);
    let mut specs = LayerSpecs::new(layer);
    specs.push("input_layernorm.weight", TensorRole::Norm(1), &[h]);
    for (name, out) in [("q_proj", q), ("k_proj", k), ("v_proj", k)] {
        specs.push(&format!("self_attn.{name}.weight"), TensorRole::InputProjection, &[out, h]);
    }
    specs.push("self_attn.q_norm.weight", TensorRole::Norm(config.num_attention_heads), &[d]);
    specs.push("self_attn.k_norm.weight", TensorRole::Norm(config.num_key_value_heads), &[d]);
    specs.push("self_attn.o_proj.weight", TensorRole::OutputProjection, &[h, q]);
    specs.push("post_attention_layernorm.weight", TensorRole::Norm(1), &[h]);
    specs
}

/// The first half of a layer: attention, and the norms before and after it. Both Qwen3 families use it.
pub(super) struct NormedAttention {
    input_norm: Parameter,
    pub(super) weights: AttentionWeights,
    /// `[D]`. The next field has the same shape.
    q_norm: Parameter,
    k_norm: Parameter,
    post_attention_norm: Parameter,
}

impl NormedAttention {
    /// Builds the attention from the tensors of [`attention_specs`].
    ///
    /// # Errors
    /// When a tensor is missing.
    pub(super) fn from_tensors(tensors: &LayerTensors) -> Result<Self> {
        Ok(Self {
            input_norm: tensors.vector("input_layernorm.weight")?,
            weights: AttentionWeights {
                q: tensors.linear_without_bias("self_attn.q_proj")?,
                k: tensors.linear_without_bias("self_attn.k_proj")?,
                v: tensors.linear_without_bias("self_attn.v_proj")?,
                o: tensors.linear_without_bias("self_attn.o_proj")?,
                sinks: None,
            },
            q_norm: tensors.vector("self_attn.q_norm.weight")?,
            k_norm: tensors.vector("self_attn.k_norm.weight")?,
            post_attention_norm: tensors.vector("post_attention_layernorm.weight")?,
        })
    }

    /// Returns the residual stream after attention and the input of the MLP, both `[T, H]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub(super) fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<[Tensor; 2]> {
        let (h, weights) = (pass.norm(x, &self.input_norm)?, &self.weights);
        let [q, k, v] = weights.project(&h)?;
        let (q, k) = (norm_heads(&q, &self.q_norm, pass)?, norm_heads(&k, &self.k_norm, pass)?);
        let output = weights.attend([q, k, v], pass)?;
        pass.add_and_norm(x, &output, &self.post_attention_norm)
    }

    pub(super) fn without_gradient(&self) -> Self {
        Self {
            input_norm: self.input_norm.without_gradient(),
            weights: self.weights.without_gradient(),
            q_norm: self.q_norm.without_gradient(),
            k_norm: self.k_norm.without_gradient(),
            post_attention_norm: self.post_attention_norm.without_gradient(),
        }
    }
}

/// Applies the norm with `weight [D]` to each head of `x [T, heads · D]`.
fn norm_heads(x: &Tensor, weight: &Parameter, pass: &LayerPass) -> Result<Tensor> {
    let (tokens, width) = x.dims2()?;
    let d = pass.model.config.head_dim;
    let normed = pass.norm(&reshape(x, (tokens * (width / d), d))?, weight)?;
    Ok(reshape(&normed, (tokens, width))?)
}

/// A layer: attention, then a SwiGLU MLP.
struct Qwen3Layer {
    attention: NormedAttention,
    mlp: SwigluMlp,
}

/// Builds the layer from `tensors`.
fn layer(tensors: &LayerTensors) -> Result<Arc<dyn Layer>> {
    let (attention, mlp) = (NormedAttention::from_tensors(tensors)?, SwigluMlp::from_tensors(tensors)?);
    Ok(Arc::new(Qwen3Layer { attention, mlp }))
}

impl Layer for Qwen3Layer {
    fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<LayerOutput> {
        let [x, h] = self.attention.forward(x, pass)?;
        Ok(LayerOutput { hidden: self.mlp.forward(&x, &h, pass.options)?, routing: None })
    }

    fn attention(&self) -> &AttentionWeights {
        &self.attention.weights
    }

    fn without_gradient(&self) -> Arc<dyn Layer> {
        let (attention, mlp) = (self.attention.without_gradient(), self.mlp.without_gradient());
        Arc::new(Self { attention, mlp })
    }
}
