//! GPT-OSS: attention with sinks, sliding windows in every other layer, and experts.

use super::FamilyEntry;
use crate::chat::ChatFormat;
use crate::model::config::{Config, LayerType};
use crate::model::config_json::ConfigReader;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::layer::{AttentionWeights, ExpertMlp, Experts, Layer, LayerOutput, LayerPass};
use crate::model::matrix::{LayerTensors, Matrix};
use crate::model::names::{LayerSpecs, ParameterSpec, TensorRole};
use crate::ops::{Dispatch, Parameter};
use crate::settings::Choice as _;
use anyhow::Result;
use candle_core::Tensor;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) const ENTRY: FamilyEntry = FamilyEntry {
    name: "gpt_oss",
    meaning: "Experts, attention sinks, windows in every other layer; conversations in Harmony.",
    architecture: "GptOssForCausalLM",
    gguf: "gpt-oss",
    gguf_pre_tokenizer: "gpt-4o",
    chat: ChatFormat::Harmony,
    has_experts: true,
    has_sinks: true,
    has_windows: true,
    has_swiglu_limit: true,
    has_mxfp4: true,
    may_tie_embeddings: false,
    layer_types: LayerType::alternate,
    read,
    own_keys,
    layer_specs,
    layer,
};

fn read(keys: &mut ConfigReader) -> Config {
    keys.require_value("attention_bias", &json!(true));
    let rope = keys.rope().unwrap_or_else(|| {
        keys.record_mistake(
            "neither rope_scaling nor rope_parameters is present: some readers then use plain RoPE, other \
             readers YaRN; add \"rope_scaling\": {\"rope_type\": \"default\"} for plain RoPE",
        )
    });
    Config {
        head_dim: keys.size("head_dim"),
        num_local_experts: keys.size("num_local_experts"),
        num_experts_per_tok: keys.size_with_alias("num_experts_per_tok", "experts_per_token"),
        sliding_window: keys.size("sliding_window"),
        swiglu_limit: keys.number("swiglu_limit"),
        rope,
        ..keys.common_config()
    }
}

fn own_keys(config: &Config) -> Value {
    let mut own = json!({
        "num_local_experts": config.num_local_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "experts_per_token": config.num_experts_per_tok,
        "sliding_window": config.sliding_window,
        "layer_types": config.layer_types.iter().map(|t| t.name()).collect::<Vec<_>>(),
        "swiglu_limit": config.swiglu_limit,
        "attention_bias": true,
    });
    if config.rope.yarn.is_none() {
        // Newer readers use YaRN if the entry is absent or null, so plain RoPE is written explicitly.
        own["rope_scaling"] = json!({ "rope_type": "default" });
    }
    own
}

/// Returns the tensors of layer `layer`: attention, then experts. Shape letters are those of
/// [`crate::model::names`].
fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    let h = config.hidden_size;
    let q = config.num_attention_heads * config.head_dim;
    let k = config.num_key_value_heads * config.head_dim;
    let (e, i) = (config.num_local_experts, config.intermediate_size);
    let mut specs = LayerSpecs::new(layer);
    let mut push = |name: &str, role, shape: &[usize]| specs.push(name, role, shape);
    push("input_layernorm.weight", TensorRole::Norm(1), &[h]);
    for (name, out) in [("q_proj", q), ("k_proj", k), ("v_proj", k)] {
        push(&format!("self_attn.{name}.weight"), TensorRole::InputProjection, &[out, h]);
        push(&format!("self_attn.{name}.bias"), TensorRole::Bias, &[out]);
    }
    push("self_attn.sinks", TensorRole::Sinks, &[config.num_attention_heads]);
    push("self_attn.o_proj.weight", TensorRole::OutputProjection, &[h, q]);
    push("self_attn.o_proj.bias", TensorRole::Bias, &[h]);
    push("post_attention_layernorm.weight", TensorRole::Norm(1), &[h]);
    push("mlp.router.weight", TensorRole::Router, &[e, h]);
    push("mlp.router.bias", TensorRole::Bias, &[e]);
    push("mlp.experts.gate_up_proj", TensorRole::InputProjection, &[e, h, 2 * i]);
    push("mlp.experts.gate_up_proj_bias", TensorRole::Bias, &[e, 2 * i]);
    push("mlp.experts.down_proj", TensorRole::OutputProjection, &[e, i, h]);
    push("mlp.experts.down_proj_bias", TensorRole::Bias, &[e, h]);
    specs.into_vec()
}

/// A layer: attention with sinks, then experts.
struct GptOssLayer {
    input_norm: Parameter,
    attention: AttentionWeights,
    post_attention_norm: Parameter,
    experts: Experts,
}

/// Builds the layer from `tensors`.
fn layer(tensors: &LayerTensors) -> Result<Arc<dyn Layer>> {
    Ok(Arc::new(GptOssLayer {
        input_norm: tensors.vector("input_layernorm.weight")?,
        attention: AttentionWeights {
            q: tensors.linear("self_attn.q_proj")?,
            k: tensors.linear("self_attn.k_proj")?,
            v: tensors.linear("self_attn.v_proj")?,
            o: tensors.linear("self_attn.o_proj")?,
            sinks: Some(tensors.vector("self_attn.sinks")?),
        },
        post_attention_norm: tensors.vector("post_attention_layernorm.weight")?,
        experts: Experts {
            router: tensors.linear("mlp.router")?,
            mlp: Arc::new(ClampedMlp {
                gate_up: tensors.expert_matrices("mlp.experts.gate_up_proj")?,
                down: tensors.expert_matrices("mlp.experts.down_proj")?,
            }),
            expert_parallel: tensors.expert_parallel(),
        },
    }))
}

/// The experts' MLPs: SwiGLU with a clamp.
struct ClampedMlp {
    /// The projection to width `2I`. Columns of gate and up are interleaved.
    gate_up: Matrix,
    down: Matrix,
}

impl ExpertMlp for ClampedMlp {
    fn forward(
        &self,
        h: &Tensor,
        plan: &Dispatch,
        model: &Model,
        options: &ForwardOptions,
    ) -> Result<Tensor> {
        let unit = (model.config.swiglu_limit, options.swiglu_alpha);
        self.down.grouped_matmul(&self.gate_up.dispatch_to_swiglu(h, plan, unit)?, plan)
    }

    fn without_gradient(&self) -> Arc<dyn ExpertMlp> {
        let (gate_up, down) = (self.gate_up.without_gradient(), self.down.without_gradient());
        Arc::new(Self { gate_up, down })
    }
}

impl Layer for GptOssLayer {
    fn forward(&self, x: &Tensor, pass: &mut LayerPass) -> Result<LayerOutput> {
        let h = pass.norm(x, &self.input_norm)?;
        let output = self.attention.forward(&h, pass)?;
        let [x, h] = pass.add_and_norm(x, &output, &self.post_attention_norm)?;
        self.experts.forward(&x, &h, pass)
    }

    fn attention(&self) -> &AttentionWeights {
        &self.attention
    }

    fn experts(&self) -> Option<&Experts> {
        Some(&self.experts)
    }

    fn without_gradient(&self) -> Arc<dyn Layer> {
        Arc::new(Self {
            input_norm: self.input_norm.without_gradient(),
            attention: self.attention.without_gradient(),
            post_attention_norm: self.post_attention_norm.without_gradient(),
            experts: self.experts.without_gradient(),
        })
    }
}
