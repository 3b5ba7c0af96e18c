//! Dense Qwen2 and Qwen2.5: attention and a SwiGLU MLP. Other Qwen families have parts of it.

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
    name: "qwen2",
    meaning: "Dense Qwen2 and Qwen2.5; conversations in ChatML.",
    architecture: "Qwen2ForCausalLM",
    gguf: "qwen2",
    gguf_pre_tokenizer: "qwen2",
    chat: ChatFormat::ChatMl,
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

fn read(keys: &mut ConfigReader) -> Config {
    keys.require_value("use_mrope", &json!(false));
    let config = read_dense(keys);
    Config { head_dim: keys.head_dim_or_default(), ..config }
}

/// Reads the keys of all Qwen families, except the size of a head.
pub(super) fn read_dense(keys: &mut ConfigReader) -> Config {
    if keys.flag("use_sliding_window", false) {
        keys.record_mistake(
            "use_sliding_window = true is not supported: every layer of this family has full attention; \
             use a model without windows",
        )
    }
    let rope = keys.rope().unwrap_or_else(|| Rope { theta: keys.number("rope_theta"), yarn: None });
    Config { rope, ..keys.common_config() }
}

pub(super) fn own_keys(config: &Config) -> Value {
    json!({
        "sliding_window": Value::Null,
        "use_sliding_window": false,
        "max_window_layers": config.num_hidden_layers,
    })
}

/// The parameters of a Qwen family's attention besides its matrices.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AttentionForm {
    /// Biases of q, k and v.
    Biases,
    /// A norm of each query head and one of each key head.
    HeadNorms,
}

fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    dense_specs(config, layer, AttentionForm::Biases)
}

/// Returns the tensors of layer `layer`: attention, then the MLP. Shape letters are those of
/// [`crate::model::names`].
pub(super) fn dense_specs(config: &Config, layer: usize, form: AttentionForm) -> Vec<ParameterSpec> {
    let (h, i) = (config.hidden_size, config.intermediate_size);
    let mut specs = attention_specs(config, layer, form);
    specs.push("mlp.gate_proj.weight", TensorRole::InputProjection, &[i, h]);
    specs.push("mlp.up_proj.weight", TensorRole::InputProjection, &[i, h]);
    specs.push("mlp.down_proj.weight", TensorRole::OutputProjection, &[h, i]);
    specs.into_vec()
}

/// Returns the tensors of the attention of layer `layer`, and those of both norms.
pub(super) fn attention_specs(config: &Config, layer: usize, form: AttentionForm) -> LayerSpecs {
    let (h, d) = (config.hidden_size, config.head_dim);
    let (q, k) = (config.num_attention_heads * d, config.num_key_value_heads * d);
    let mut specs = LayerSpecs::new(layer);
    specs.push("input_layernorm.weight", TensorRole::Norm(1), &[h]);
    for (name, out) in [("q_proj", q), ("k_proj", k), ("v_proj", k)] {
        specs.push(&format!("self_attn.{name}.weight"), TensorRole::InputProjection, &[out, h]);
        if form == AttentionForm::Biases {
            specs.push(&format!("self_attn.{name}.bias"), TensorRole::Bias, &[out]);
        }
    }
    if form == AttentionForm::HeadNorms {
        specs.push("self_attn.q_norm.weight", TensorRole::Norm(config.num_attention_heads), &[d]);
        specs.push("self_attn.k_norm.weight", TensorRole::Norm(config.num_key_value_heads), &[d]);
    }
    specs.push("self_attn.o_proj.weight", TensorRole::OutputProjection, &[h, q]);
    specs.push("post_attention_layernorm.weight", TensorRole::Norm(1), &[h]);
    specs
}

/// The attention of a layer, and the norms before and after it.
pub(super) struct QwenAttention {
    input_norm: Parameter,
    pub(super) weights: AttentionWeights,
    /// The norms of query heads and of key heads, if the family has them.
    head_norms: Option<[Parameter; 2]>,
    post_attention_norm: Parameter,
}

impl QwenAttention {
    /// Builds the attention from `tensors`.
    pub(super) fn from_tensors(tensors: &LayerTensors, form: AttentionForm) -> Result<Self> {
        let projection = |name: &str| match form {
            AttentionForm::Biases => tensors.linear(name),
            AttentionForm::HeadNorms => tensors.linear_without_bias(name),
        };
        let head_norms = match form {
            AttentionForm::Biases => None,
            AttentionForm::HeadNorms => {
                Some([tensors.vector("self_attn.q_norm.weight")?, tensors.vector("self_attn.k_norm.weight")?])
            }
        };
        Ok(Self {
            input_norm: tensors.vector("input_layernorm.weight")?,
            weights: AttentionWeights {
                q: projection("self_attn.q_proj")?,
                k: projection("self_attn.k_proj")?,
                v: projection("self_attn.v_proj")?,
                o: tensors.linear_without_bias("self_attn.o_proj")?,
                sinks: None,
            },
            head_norms,
            post_attention_norm: tensors.vector("post_attention_layernorm.weight")?,
        })
    }

    /// Returns `x` plus the attention's output, and its norm, the input of the MLP.
    pub(super) fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<[Tensor; 2]> {
        let (h, weights) = (pass.norm(x, &self.input_norm)?, &self.weights);
        let [mut q, mut k, v] = weights.project(&h)?;
        if let Some([q_norm, k_norm]) = &self.head_norms {
            (q, k) = (norm_heads(&q, q_norm, pass)?, norm_heads(&k, k_norm, pass)?);
        }
        let output = weights.attend([q, k, v], pass)?;
        pass.add_and_norm(x, &output, &self.post_attention_norm)
    }

    /// Returns the attention without gradients.
    pub(super) fn without_gradient(&self) -> Self {
        let head_norms =
            self.head_norms.as_ref().map(|norms| norms.each_ref().map(Parameter::without_gradient));
        Self {
            input_norm: self.input_norm.without_gradient(),
            weights: self.weights.without_gradient(),
            head_norms,
            post_attention_norm: self.post_attention_norm.without_gradient(),
        }
    }
}

/// Normalises each head of rows `x [T, heads · d]`.
fn norm_heads(x: &Tensor, weight: &Parameter, pass: &LayerPass) -> Result<Tensor> {
    let (tokens, width) = x.dims2()?;
    let d = pass.model.config.head_dim;
    let normed = pass.norm(&reshape(x, (tokens * (width / d), d))?, weight)?;
    Ok(reshape(&normed, (tokens, width))?)
}

/// A layer: attention, then a SwiGLU MLP.
struct DenseLayer {
    attention: QwenAttention,
    mlp: SwigluMlp,
}

fn layer(tensors: &LayerTensors) -> Result<Arc<dyn Layer>> {
    dense_layer(tensors, AttentionForm::Biases)
}

/// Builds a dense layer from `tensors`.
pub(super) fn dense_layer(tensors: &LayerTensors, form: AttentionForm) -> Result<Arc<dyn Layer>> {
    let attention = QwenAttention::from_tensors(tensors, form)?;
    Ok(Arc::new(DenseLayer { attention, mlp: SwigluMlp::from_tensors(tensors, "mlp")? }))
}

impl Layer for DenseLayer {
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
