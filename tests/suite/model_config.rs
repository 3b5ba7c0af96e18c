//! `config.json`: both dialects are read, mistakes are told by key.

use crate::model_files::{config, refused};
use rloss::model::config::{Config, WeightFormat};
use rloss::model::settings::Yarn;
use serde_json::{Value, json};

/// A config.json with `changes` made: a null removes the key.
fn changed(changes: Value) -> anyhow::Result<Config> {
    let mut json = config().to_json(WeightFormat::Bf16);
    let map = json.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        map.insert(key.clone(), value.clone());
    }
    Config::from_json(&json)
}

#[test]
fn both_dialects_of_config_are_read() {
    let config = config();
    assert_eq!(changed(json!({})).unwrap(), config);
    let newer = json!({
        "rope_theta": null, "rope_scaling": null, "experts_per_token": null, "torch_dtype": null, "dtype": "bfloat16",
        "rope_parameters": { "rope_type": "default", "rope_theta": 10000 },
    });
    assert_eq!(changed(newer).unwrap(), config);
    let released =
        json!({ "num_experts_per_tok": null, "eos_token_id": [6], "layer_types": null, "rope_theta": 10000 });
    assert_eq!(changed(released).unwrap(), config);
    let yarn = changed(json!({
        "rope_theta": 150000,
        "rope_scaling": { "type": "yarn", "factor": 32, "original_max_position_embeddings": 4096 },
    }))
    .unwrap();
    let expected = Yarn {
        factor: 32.0,
        original_max_position_embeddings: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
    };
    assert_eq!(yarn.rope.yarn, Some(expected));
}

#[test]
fn broken_configs_are_refused_by_key() {
    for (changes, parts) in [
        (json!({ "hidden_size": null }), &["`hidden_size` is missing"][..]),
        (json!({ "hidden_size": 0 }), &["hidden_size = 0"]),
        (json!({ "hidden_size": -64 }), &["hidden_size = -64"]),
        (
            json!({ "hidden_size": 64.5, "vocab_size": "many" }),
            &["hidden_size = 64.5", "vocab_size = \"many\""],
        ),
        (json!({ "vocab_size": 1e300 }), &["vocab_size"]),
        (
            json!({ "hidden_size": 1 << 16, "num_local_experts": 65535, "intermediate_size": 1 << 20 }),
            &["parameters"],
        ),
        // The same limits as a recipe's.
        (json!({ "hidden_size": 1 << 17 }), &["hidden_size = 131072 must be 1 to 65536"]),
        (json!({ "rope_theta": 1.0 }), &["rope_theta = 1 must be above 1"]),
        (json!({ "num_attention_heads": 5 }), &["num_key_value_heads = 2", "5 query heads"]),
        (json!({ "head_dim": 15 }), &["head_dim = 15"]),
        (json!({ "experts_per_token": 3 }), &["experts_per_token = 3 contradicts num_experts_per_tok = 2"]),
        (
            json!({ "num_experts_per_tok": 9, "experts_per_token": 9 }),
            &["num_experts_per_tok = 9", "4 experts"],
        ),
        (json!({ "layer_types": ["full_attention"] }), &["layer_types has 1", "num_hidden_layers = 2"]),
        (json!({ "layer_types": ["full_attention", "round"] }), &["layer_types", "sliding_attention"]),
        (json!({ "rope_scaling": null }), &["neither rope_scaling nor rope_parameters"]),
        (json!({ "rope_theta": null }), &["rope_theta", "missing"]),
        (json!({ "rope_parameters": { "rope_theta": 9 } }), &["rope_parameters", "contradict"]),
        (json!({ "rope_scaling": { "rope_type": "llama3" } }), &["rope_scaling", "llama3"]),
        (json!({ "rope_scaling": { "rope_type": "yarn", "mscale": 2 } }), &["factor", "mscale = 2"]),
        (json!({ "tie_word_embeddings": true }), &["tie_word_embeddings = true"]),
        (json!({ "model_type": "llama" }), &["model_type", "llama"]),
        (json!({ "swiglu_alpha": 2.0 }), &["swiglu_alpha"]),
        (json!({ "quantization_config": { "quant_method": "awq" } }), &["awq"]),
        (json!({ "eos_token_id": 272 }), &["eos_token_id = 272", "vocab_size"]),
        (json!({ "rms_norm_eps": 0.0 }), &["rms_norm_eps"]),
    ] {
        refused(changed(changes), parts);
    }
    let folder = tempfile::tempdir().unwrap();
    refused(Config::read(folder.path()), &["config.json", "cannot be read"]);
    std::fs::write(folder.path().join("config.json"), "{\n  \"hidden_size\": NaN\n}").unwrap();
    refused(Config::read(folder.path()), &["config.json", "line 2"]);
}

/// A file of another family once got a list of every key that this one has and that one lacks.
#[test]
fn an_unknown_family_is_refused_by_name_before_any_missing_key() {
    for (file, word) in
        [(json!({ "model_type": "qwen7" }), "\"qwen7\""), (json!({}), "`model_type` is missing")]
    {
        let error = Config::from_json(&file).err().unwrap().to_string();
        assert!(error.contains(word) && error.contains("known: \"gpt_oss\", \"qwen2\""), "{error}");
        assert!(!error.contains("hidden_size"), "{error}");
    }
}
