//! Qwen3 with experts: the attention of Qwen3, and SwiGLU experts without biases.
//!
//! With `norm_topk_prob` the weights of the selected experts are a softmax over all experts, renormalised
//! over the selected experts. This equals a softmax over the selected experts. A model folder has three
//! matrices per expert. In memory, each of the three is one tensor for all experts.

use super::FamilyEntry;
use super::qwen2::{AttentionForm, QwenAttention, attention_specs};
use super::qwen3;
use crate::model::config::Config;
use crate::model::config_json::ConfigReader;
use crate::model::layer::{AttentionWeights, Experts, Layer, LayerOutput, LayerPass, SwigluMlp};
use crate::model::matrix::LayerTensors;
use crate::model::names::{ParameterSpec, TensorRole};
use anyhow::Result;
use candle_core::Tensor;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) const ENTRY: FamilyEntry = FamilyEntry {
    name: "qwen3_moe",
    meaning: "Qwen3 with experts; conversations in ChatML with thinking.",
    architecture: "Qwen3MoeForCausalLM",
    gguf: "qwen3moe",
    has_experts: true,
    read,
    own_keys,
    layer_specs,
    layer,
    ..qwen3::ENTRY
};

fn read(keys: &mut ConfigReader) -> Config {
    if !keys.flag("norm_topk_prob", false) {
        keys.record_mistake("norm_topk_prob must be true: weights of the selected experts must sum to 1")
    }
    keys.require_value("decoder_sparse_step", &json!(1));
    keys.require_value("mlp_only_layers", &json!([]));
    Config {
        intermediate_size: keys.size("moe_intermediate_size"),
        num_local_experts: keys.size_with_alias("num_experts", "num_local_experts"),
        num_experts_per_tok: keys.size("num_experts_per_tok"),
        ..qwen3::read(keys)
    }
}

fn own_keys(config: &Config) -> Value {
    let mut own = qwen3::own_keys(config);
    own["moe_intermediate_size"] = json!(config.intermediate_size);
    own["num_experts"] = json!(config.num_local_experts);
    own["num_experts_per_tok"] = json!(config.num_experts_per_tok);
    own["norm_topk_prob"] = json!(true);
    own["decoder_sparse_step"] = json!(1);
    own["mlp_only_layers"] = json!([]);
    own
}

/// Returns the tensors of layer `layer`: attention, then experts. Shape letters are those of
/// [`crate::model::names`].
fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    let (h, e, i) = (config.hidden_size, config.num_local_experts, config.intermediate_size);
    let mut specs = attention_specs(config, layer, AttentionForm::HeadNorms);
    specs.push("mlp.gate.weight", TensorRole::Router, &[e, h]);
    specs.push("mlp.experts.gate_proj.weight", TensorRole::InputProjection, &[e, h, i]);
    specs.push("mlp.experts.up_proj.weight", TensorRole::InputProjection, &[e, h, i]);
    specs.push("mlp.experts.down_proj.weight", TensorRole::OutputProjection, &[e, i, h]);
    specs.into_vec()
}

/// A layer: attention, then experts.
struct Qwen3MoeLayer {
    attention: QwenAttention,
    experts: Experts,
}

/// Builds the layer from `tensors`.
fn layer(tensors: &LayerTensors) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(Qwen3MoeLayer {
        attention: QwenAttention::from_tensors(tensors, AttentionForm::HeadNorms)?,
        experts: Experts {
            router: tensors.linear_without_bias("mlp.gate")?,
            mlp: Arc::new(SwigluMlp::from_tensors(tensors, "mlp.experts")?),
            expert_parallel: tensors.expert_parallel(),
        },
    }))
}

impl Layer for Qwen3MoeLayer {
    fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<LayerOutput> {
        let [x, h] = self.attention.forward(x, pass)?;
        self.experts.forward(&x, &h, pass)
    }

    fn attention(&self) -> &AttentionWeights {
        &self.attention.weights
    }

    fn experts(&self) -> Option<&Experts> {
        Some(&self.experts)
    }

    fn without_gradient(&self) -> Arc<dyn Layer> {
        let (attention, experts) = (self.attention.without_gradient(), self.experts.without_gradient());
        Arc::new(Self { attention, experts })
    }
}
