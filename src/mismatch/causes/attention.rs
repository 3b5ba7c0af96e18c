//! Causes in attention: sinks, windows, biases.

use super::{Cause, Change, WeightEdit, missing_biases, select_columns};
use crate::model::config::{Config, LayerType};
use crate::model::layers_on_demand::WeightChange;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::ops::weight::Weight;
use anyhow::Context;
use std::collections::HashMap;
use std::sync::Arc;

/// Experiments that decide between causes.
const FIRST_TOKENS: &str = "the first tokens of rows, where sinks take the largest share of the softmax";
const LONG_ROWS: &str = "rows longer than the sliding window";

pub(super) fn causes(config: &Config) -> Vec<Cause> {
    let mut causes = vec![];
    if config.family.has_sinks {
        causes.extend(sinks(config));
    }
    if config.layer_types.contains(&LayerType::Sliding) {
        causes.extend(windows(config));
    }
    let name = "attention biases missing";
    causes.extend([
        missing_biases(
            name,
            "the biases of q, k, v and o are 0",
            &["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"],
        ),
        missing_biases(
            name,
            "the biases of q, k and v are 0",
            &["q_proj.bias", "k_proj.bias", "v_proj.bias"],
        ),
        missing_biases(name, "the biases of o are 0", &["o_proj.bias"]),
    ]);
    causes
}

fn is_sinks(spec: &ParameterSpec) -> bool {
    spec.role == TensorRole::Sinks
}

fn sinks(config: &Config) -> Vec<Cause> {
    let (heads, kv, layers) =
        (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers);
    let group = heads / kv;
    let mut causes = vec![
        Cause::in_forward(
            "sinks missing",
            "the attention leaves them out of the softmax",
            FIRST_TOKENS,
            |variant| variant.forward.sinks = false,
        ),
        Cause::in_tensors(
            "sinks loaded as 0",
            "they count in the softmax as e^0",
            FIRST_TOKENS,
            is_sinks,
            |values| Ok(values.zeros_like()?),
        ),
    ];
    let mut per_kv_head = |detail: &str, sink_index: &dyn Fn(usize) -> usize| {
        let order: Vec<u32> = (0..heads).map(|head| sink_index(head) as u32).collect();
        let change = move |values: &_| select_columns(values, &order);
        causes.push(Cause::in_tensors("sinks per KV head", detail, FIRST_TOKENS, is_sinks, change));
    };
    per_kv_head("query head h takes sink h / group", &|h| h / group);
    per_kv_head("query head h takes sink h mod KV heads", &|h| h % kv);
    per_kv_head("query head h takes the sink of its group's first head", &|h| h / group * group);
    let other_layers = layers.saturating_sub(1);
    causes.extend([1, other_layers].into_iter().take(other_layers).map(|offset| {
        let detail = format!("layer i has the sinks of layer (i + {offset}) mod {layers}");
        let change = Change::Weights(sinks_of_layer(offset, layers));
        Cause::new("sinks of another layer", detail, FIRST_TOKENS, change)
    }));
    causes
}

/// Returns the edit that gives layer i the sinks of layer (i + `offset`) mod `layers`.
fn sinks_of_layer(offset: usize, layers: usize) -> WeightEdit {
    Arc::new(move |parameters| {
        let mut sinks_by_layer = HashMap::new();
        for spec in parameters.specs.iter().filter(|spec| is_sinks(spec)) {
            sinks_by_layer.insert(spec.layer, parameters.read_weight(spec)?.decode(&spec.working_shape())?);
        }
        let change: WeightChange = Arc::new(move |spec, weight| {
            if !is_sinks(spec) {
                return Ok(weight);
            }
            let other = spec.layer.map(|layer| (layer + offset) % layers);
            Ok(Weight::dense(
                sinks_by_layer.get(&other).with_context(|| format!("no sinks for {}", spec.name))?,
            ))
        });
        Ok(change)
    })
}

fn windows(config: &Config) -> Vec<Cause> {
    let mut causes = vec![Cause::in_forward(
        "full attention everywhere",
        "sliding layers see past their window",
        LONG_ROWS,
        |variant| variant.config.layer_types.fill(LayerType::Full),
    )];
    let window = config.sliding_window;
    causes.extend([1, -1].into_iter().filter(|change| *change > 0 || window > 1).map(|change| {
        let detail = format!("sliding layers see {change:+} keys");
        Cause::in_forward("window off by one", detail, LONG_ROWS, move |variant| {
            variant.config.sliding_window = window.saturating_add_signed(change).max(1);
        })
    }));
    if config.layer_types.contains(&LayerType::Full) {
        causes.push(Cause::in_forward(
            "sliding and full layers swapped",
            "sliding layers are full and full ones slide",
            LONG_ROWS,
            |variant| {
                variant.config.layer_types.iter_mut().for_each(|layer| {
                    *layer = match layer {
                        LayerType::Sliding => LayerType::Full,
                        LayerType::Full => LayerType::Sliding,
                    };
                });
            },
        ));
    }
    causes
}
