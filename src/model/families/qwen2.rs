//! Dense Qwen2 and Qwen2.5: attention and a SwiGLU MLP.

use super::FamilyEntry;
use crate::chat::ChatFormat;
use crate::model::config::{Config, LayerType, Rope};
use crate::model::config_json::ConfigReader;
use crate::model::layer::{AttentionWeights, Layer, LayerOutput, LayerPass, SwigluMlp};
use crate::model::matrix::LayerTensors;
use crate::model::names::{LayerSpecs, ParameterSpec, TensorRole};
use crate::ops::Parameter;
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
    // `config.json` has a window width even if no layer has a window, so the width is not checked.
    if keys.flag("use_sliding_window", false) {
        keys.record_mistake(
            "use_sliding_window = true is not supported: every layer of this family has full attention; \
             use a model without windows",
        )
    }
    let rope = keys.rope().unwrap_or_else(|| Rope { theta: keys.number("rope_theta"), yarn: None });
    Config { head_dim: keys.head_dim_or_default(), rope, ..keys.common_config() }
}

fn own_keys(config: &Config) -> Value {
    json!({
        "sliding_window": Value::Null,
        "use_sliding_window": false,
        "max_window_layers": config.num_hidden_layers,
    })
}

/// Returns the tensors of layer `layer`: attention, then the MLP. Only q, k and v have biases. Shape letters
/// are those of [`crate::model::names`].
fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    let h = config.hidden_size;
    let q = config.num_attention_heads * config.head_dim;
    let k = config.num_key_value_heads * config.head_dim;
    let i = config.intermediate_size;
    let mut specs = LayerSpecs::new(layer);
    let mut push = |name: &str, role, shape: &[usize]| specs.push(name, role, shape);
    push("input_layernorm.weight", TensorRole::Norm(1), &[h]);
    for (name, out) in [("q_proj", q), ("k_proj", k), ("v_proj", k)] {
        push(&format!("self_attn.{name}.weight"), TensorRole::InputProjection, &[out, h]);
        push(&format!("self_attn.{name}.bias"), TensorRole::Bias, &[out]);
    }
    push("self_attn.o_proj.weight", TensorRole::OutputProjection, &[h, q]);
    push("post_attention_layernorm.weight", TensorRole::Norm(1), &[h]);
    push("mlp.gate_proj.weight", TensorRole::InputProjection, &[i, h]);
    push("mlp.up_proj.weight", TensorRole::InputProjection, &[i, h]);
    push("mlp.down_proj.weight", TensorRole::OutputProjection, &[h, i]);
    specs.into_vec()
}

/// A layer: attention, then a SwiGLU MLP.
struct Qwen2Layer {
    input_norm: Parameter,
    attention: AttentionWeights,
    post_attention_norm: Parameter,
    mlp: SwigluMlp,
}

/// Builds the layer from `tensors`.
fn layer(tensors: &LayerTensors) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(Qwen2Layer {
        input_norm: tensors.vector("input_layernorm.weight")?,
        attention: AttentionWeights {
            q: tensors.linear("self_attn.q_proj")?,
            k: tensors.linear("self_attn.k_proj")?,
            v: tensors.linear("self_attn.v_proj")?,
            o: tensors.linear_without_bias("self_attn.o_proj")?,
            sinks: None,
        },
        post_attention_norm: tensors.vector("post_attention_layernorm.weight")?,
        mlp: SwigluMlp::from_tensors(tensors)?,
    }))
}

impl Layer for Qwen2Layer {
    fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<LayerOutput> {
        let h = pass.norm(x, &self.input_norm)?;
        let output = self.attention.forward(&h, pass)?;
        let [x, h] = pass.add_and_norm(x, &output, &self.post_attention_norm)?;
        Ok(LayerOutput { hidden: self.mlp.forward(&x, &h, pass.options)?, routing: None })
    }

    fn attention(&self) -> &AttentionWeights {
        &self.attention
    }

    fn without_gradient(&self) -> Arc<dyn Layer> {
        Arc::new(Self {
            input_norm: self.input_norm.without_gradient(),
            attention: self.attention.without_gradient(),
            post_attention_norm: self.post_attention_norm.without_gradient(),
            mlp: self.mlp.without_gradient(),
        })
    }
}
