//! Dense Qwen3: the layer of Qwen2 with a norm of each query head and each key head, and without biases.

use super::FamilyEntry;
use super::qwen2::{self, AttentionForm, dense_layer, dense_specs, read_dense};
use crate::chat::ChatFormat;
use crate::model::config::Config;
use crate::model::config_json::ConfigReader;
use serde_json::{Value, json};

pub(super) const ENTRY: FamilyEntry = FamilyEntry {
    name: "qwen3",
    meaning: "Dense Qwen3; conversations in ChatML with thinking.",
    architecture: "Qwen3ForCausalLM",
    gguf: "qwen3",
    chat: ChatFormat::ThinkingChatMl,
    read,
    own_keys,
    layer_specs: |config, layer| dense_specs(config, layer, AttentionForm::HeadNorms),
    layer: |tensors| dense_layer(tensors, AttentionForm::HeadNorms),
    ..qwen2::ENTRY
};

pub(super) fn read(keys: &mut ConfigReader) -> Config {
    keys.require_value("attention_bias", &json!(false));
    for key in ["swiglu_limit", "swiglu_alpha"] {
        keys.require_value(key, &Value::Null);
    }
    let config = read_dense(keys);
    Config { head_dim: keys.size("head_dim"), ..config }
}

pub(super) fn own_keys(config: &Config) -> Value {
    let mut own = qwen2::own_keys(config);
    own["attention_bias"] = json!(false);
    own
}
