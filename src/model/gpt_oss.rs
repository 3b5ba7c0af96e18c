//! GPT-OSS: the names and shapes of a layer's tensors, and the layer made of them.

use super::config::Config;
use super::held::Weight;
use super::layer::{AttentionWeights, Experts, FeedForward, Layer};
use super::names::{LayerSpecs, ParameterSpec, TensorRole};
use anyhow::Result;

/// The tensors of layer `layer`: attention, then experts. Letters as in [`super::names`].
pub(super) fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    let h = config.hidden_size;
    let q = config.num_attention_heads * config.head_dim;
    let k = config.num_key_value_heads * config.head_dim;
    let (e, i) = (config.num_local_experts, config.intermediate_size);
    let mut specs = LayerSpecs::new(layer);
    let mut push = |name: &str, role, shape: &[usize]| specs.push(name, role, shape);
    push("input_layernorm.weight", TensorRole::Norm, &[h]);
    for (name, out) in [("q_proj", q), ("k_proj", k), ("v_proj", k)] {
        push(&format!("self_attn.{name}.weight"), TensorRole::InputProjection, &[out, h]);
        push(&format!("self_attn.{name}.bias"), TensorRole::Bias, &[out]);
    }
    push("self_attn.sinks", TensorRole::Sinks, &[config.num_attention_heads]);
    push("self_attn.o_proj.weight", TensorRole::OutputProjection, &[h, q]);
    push("self_attn.o_proj.bias", TensorRole::Bias, &[h]);
    push("post_attention_layernorm.weight", TensorRole::Norm, &[h]);
    push("mlp.router.weight", TensorRole::InputProjection, &[e, h]);
    push("mlp.router.bias", TensorRole::Bias, &[e]);
    push("mlp.experts.gate_up_proj", TensorRole::InputProjection, &[e, h, 2 * i]);
    push("mlp.experts.gate_up_proj_bias", TensorRole::Bias, &[e, 2 * i]);
    push("mlp.experts.down_proj", TensorRole::OutputProjection, &[e, i, h]);
    push("mlp.experts.down_proj_bias", TensorRole::Bias, &[e, h]);
    specs.into_vec()
}

/// Layer `layer` of the tensors that `find` knows by name.
pub(super) fn layer(layer: usize, find: &dyn Fn(&str) -> Result<Weight>) -> Result<Layer> {
    let tensor = |rest: &str| find(&format!("model.layers.{layer}.{rest}"));
    let vector = |rest: &str| tensor(rest)?.parameter();
    let pair = |weight: &str, bias: &str| tensor(weight)?.projection(Some(vector(bias)?));
    let linear = |stem: &str| pair(&format!("{stem}.weight"), &format!("{stem}.bias"));
    let experts = |stem: &str| pair(&format!("mlp.experts.{stem}"), &format!("mlp.experts.{stem}_bias"));
    Ok(Layer {
        input_norm: vector("input_layernorm.weight")?,
        attention: AttentionWeights {
            q: linear("self_attn.q_proj")?,
            k: linear("self_attn.k_proj")?,
            v: linear("self_attn.v_proj")?,
            o: linear("self_attn.o_proj")?,
            sinks: Some(vector("self_attn.sinks")?),
        },
        post_attention_norm: vector("post_attention_layernorm.weight")?,
        feed_forward: FeedForward::Experts(Experts {
            router: linear("mlp.router")?,
            gate_up: experts("gate_up_proj")?,
            down: experts("down_proj")?,
            ranks: None,
        }),
    })
}
