//! The names and shapes of the tensors of a GGUF file.

use crate::model::families::Family;
use crate::model::names::ParameterSpec;

/// A tensor of a GGUF file that holds a parameter or a part of it.
pub(super) struct GgufTensorSpec {
    pub(super) name: String,
    /// The shape, with the outermost dimension first.
    pub(super) shape: Vec<usize>,
}

/// The names of the tensors of a layer in a Hugging Face folder and in GGUF.
const LAYER_NAMES: [(&str, &str); 16] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.sinks", "attn_sinks"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
];

/// Returns the GGUF tensors of the parameter `spec`. Experts have separate GGUF tensors for gate and up; the
/// parameter alternates the rows of both. GGUF stores every matrix as [.., out, in].
pub(super) fn parts(spec: &ParameterSpec, family: Family) -> Vec<GgufTensorSpec> {
    let [experts, output, input] = geometry(spec);
    let names = part_names(&spec.name, family);
    let output = output / names.len();
    let shape = match (spec.is_expert_parameter(), spec.is_matrix()) {
        (true, true) => vec![experts, output, input],
        (true, false) => vec![experts, output],
        (false, true) => vec![output, input],
        (false, false) => vec![output],
    };
    names.into_iter().map(|name| GgufTensorSpec { name, shape: shape.clone() }).collect()
}

/// Returns the shape `[experts, out, in]` of a parameter. For a vector, `in` is 1.
pub(super) fn geometry(spec: &ParameterSpec) -> [usize; 3] {
    match (spec.is_matrix(), spec.stored_shape.as_slice()) {
        (true, &[experts, input, output]) => [experts, output, input],
        (true, &[output, input]) => [1, output, input],
        (_, &[experts, output]) => [experts, output, 1],
        (_, shape) => [1, shape.iter().product(), 1],
    }
}

fn part_names(name: &str, family: Family) -> Vec<String> {
    let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
        let name = match name {
            "model.embed_tokens.weight" => "token_embd.weight",
            "model.norm.weight" => "output_norm.weight",
            _ => "output.weight",
        };
        return vec![name.into()];
    };
    // Names of expert matrices have no suffix, and names of their biases end with `_bias`.
    let (stem, kind) = match (rest.rsplit_once('.'), rest.strip_suffix("_bias")) {
        (_, Some(stem)) => (stem, "bias"),
        (Some((stem, kind @ ("weight" | "bias"))), _) => (stem, kind),
        _ => (rest, "weight"),
    };
    let named = |stem: &str| format!("blk.{layer}.{stem}.{kind}");
    match stem {
        "mlp.experts.gate_up_proj" => vec![named("ffn_gate_exps"), named("ffn_up_exps")],
        "post_attention_layernorm" if family.gguf == "gpt-oss" => vec![named("post_attention_norm")],
        "post_attention_layernorm" => vec![named("ffn_norm")],
        _ => {
            let found = LAYER_NAMES.iter().find(|(theirs, _)| *theirs == stem);
            vec![named(found.map_or(stem, |(_, gguf)| gguf))]
        }
    }
}
