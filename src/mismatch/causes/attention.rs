//! Mistakes of attention: sinks, windows, biases.

use super::{Cause, WeightEdit, missing_biases, select_columns};
use crate::model::config::{Config, LayerType};
use crate::model::layers_on_demand::WeightChange;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::ops::weight::Weight;
use anyhow::Context;
use std::collections::HashMap;
use std::sync::Arc;

const SINKS: &str = "the first tokens of rows, where sinks take the largest share";
const WINDOW: &str = "rows longer than the sliding window";

pub(super) fn causes(config: &Config) -> Vec<Cause> {
    let mut found = vec![];
    if config.family.has_sinks {
        found.extend(sinks(config));
    }
    if config.layer_types.contains(&LayerType::Sliding) {
        found.extend(windows(config));
    }
    let name = "attention biases missing";
    found.extend([
        missing_biases(
            name,
            "those of q, k, v and o are 0",
            &["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"],
        ),
        missing_biases(name, "those of q, k and v are 0", &["q_proj.bias", "k_proj.bias", "v_proj.bias"]),
        missing_biases(name, "those of o are 0", &["o_proj.bias"]),
    ]);
    found
}

fn is_sinks(spec: &ParameterSpec) -> bool {
    spec.role == TensorRole::Sinks
}

fn sinks(config: &Config) -> Vec<Cause> {
    let (heads, kv, layers) =
        (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers);
    let group = heads / kv;
    let mut found = vec![
        Cause::in_forward(
            "sinks missing",
            "the attention leaves them out of the softmax",
            SINKS,
            |variant| variant.forward.sinks = false,
        ),
        Cause::in_values(
            "sinks loaded as 0",
            "they count in the softmax as e^0",
            SINKS,
            is_sinks,
            |values| Ok(values.zeros_like()?),
        ),
    ];
    let mut per_kv_head = |detail: &str, sink: &dyn Fn(usize) -> usize| {
        let order: Vec<u32> = (0..heads).map(|head| sink(head) as u32).collect();
        let change = move |values: &_| select_columns(values, &order);
        found.push(Cause::in_values("sinks per KV head", detail, SINKS, is_sinks, change));
    };
    per_kv_head("query head h takes sink h / group", &|h| h / group);
    per_kv_head("query head h takes sink h mod KV heads", &|h| h % kv);
    per_kv_head("query head h takes that of its group's first head", &|h| h / group * group);
    let others = layers.saturating_sub(1);
    found.extend([1, others].into_iter().take(others).map(|by| {
        let detail = format!("layer i has those of layer i + {by}, around");
        Cause::in_weights("sinks of another layer", detail, SINKS, sinks_of_layer(by, layers))
    }));
    found
}

/// Gives layer i the sinks of layer i + `by`, modulo `layers`.
fn sinks_of_layer(by: usize, layers: usize) -> WeightEdit {
    Arc::new(move |parameters| {
        let mut all = HashMap::new();
        for spec in parameters.specs.iter().filter(|spec| is_sinks(spec)) {
            all.insert(spec.layer, parameters.read_weight(spec)?.decode(&spec.working_shape())?);
        }
        let change: WeightChange = Arc::new(move |spec, weight| {
            if !is_sinks(spec) {
                return Ok(weight);
            }
            let other = spec.layer.map(|layer| (layer + by) % layers);
            Ok(Weight::dense(all.get(&other).with_context(|| format!("no sinks for {}", spec.name))?))
        });
        Ok(change)
    })
}

fn windows(config: &Config) -> Vec<Cause> {
    let mut found = vec![Cause::in_forward(
        "full attention everywhere",
        "sliding layers see past their window",
        WINDOW,
        |variant| variant.config.layer_types.fill(LayerType::Full),
    )];
    let window = config.sliding_window;
    found.extend([1, -1].into_iter().filter(|by| *by > 0 || window > 1).map(|by| {
        let detail = format!("sliding layers see {by:+} keys");
        Cause::in_forward("window off by one", detail, WINDOW, move |variant| {
            variant.config.sliding_window = window.saturating_add_signed(by).max(1);
        })
    }));
    if config.layer_types.contains(&LayerType::Full) {
        found.push(Cause::in_forward(
            "sliding and full layers swapped",
            "sliding layers are full and full ones slide",
            WINDOW,
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
    found
}
