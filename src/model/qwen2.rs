//! Dense Qwen2 and Qwen2.5: the names and shapes of a layer's tensors, and the layer made of them.

use super::config::Config;
use super::held::Weight;
use super::layer::{AttentionWeights, FeedForward, Gated, Layer};
use super::names::{LayerSpecs, ParameterSpec, TensorRole};
use anyhow::Result;

/// The tensors of layer `layer`: attention, then the gated unit. Letters as in [`super::names`]. Only q, k and v have biases.
pub(super) fn layer_specs(config: &Config, layer: usize) -> Vec<ParameterSpec> {
    let h = config.hidden_size;
    let q = config.num_attention_heads * config.head_dim;
    let k = config.num_key_value_heads * config.head_dim;
    let i = config.intermediate_size;
    let mut specs = LayerSpecs::new(layer);
    let mut push = |name: &str, role, shape: &[usize]| specs.push(name, role, shape);
    push("input_layernorm.weight", TensorRole::Norm, &[h]);
    for (name, out) in [("q_proj", q), ("k_proj", k), ("v_proj", k)] {
        push(&format!("self_attn.{name}.weight"), TensorRole::InputProjection, &[out, h]);
        push(&format!("self_attn.{name}.bias"), TensorRole::Bias, &[out]);
    }
    push("self_attn.o_proj.weight", TensorRole::OutputProjection, &[h, q]);
    push("post_attention_layernorm.weight", TensorRole::Norm, &[h]);
    push("mlp.gate_proj.weight", TensorRole::InputProjection, &[i, h]);
    push("mlp.up_proj.weight", TensorRole::InputProjection, &[i, h]);
    push("mlp.down_proj.weight", TensorRole::OutputProjection, &[h, i]);
    specs.into_vec()
}

/// Layer `layer` of the tensors that `find` knows by name.
pub(super) fn layer(layer: usize, find: &dyn Fn(&str) -> Result<Weight>) -> Result<Layer> {
    let tensor = |rest: &str| find(&format!("model.layers.{layer}.{rest}"));
    let vector = |rest: &str| tensor(rest)?.parameter();
    let bare = |stem: &str| tensor(&format!("{stem}.weight"))?.projection(None);
    let biased = |stem: &str| {
        let bias = vector(&format!("{stem}.bias"))?;
        tensor(&format!("{stem}.weight"))?.projection(Some(bias))
    };
    Ok(Layer {
        input_norm: vector("input_layernorm.weight")?,
        attention: AttentionWeights {
            q: biased("self_attn.q_proj")?,
            k: biased("self_attn.k_proj")?,
            v: biased("self_attn.v_proj")?,
            o: bare("self_attn.o_proj")?,
            sinks: None,
        },
        post_attention_norm: vector("post_attention_layernorm.weight")?,
        feed_forward: FeedForward::Gated(Gated {
            gate: bare("mlp.gate_proj")?,
            up: bare("mlp.up_proj")?,
            down: bare("mlp.down_proj")?,
        }),
    })
}
