//! Reads the config of a GGUF file.

use super::file::MetadataValue;
use super::weights::GgufWeights;
use crate::bad_input;
use crate::chat::chatml::TemplateSource;
use crate::model::config::Config;
use crate::model::families::Family;
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

/// An open GGUF file whose config and tokenizer were checked.
pub struct GgufModel {
    pub weights: GgufWeights,
    pub config: Config,
    pub vocabulary: Vocabulary,
    /// The chat templates, with the texts of special tokens.
    pub template: TemplateSource,
}

impl GgufModel {
    /// Opens the model in `path`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is damaged, or has unsupported tensors or metadata.
    pub fn open(path: &Path) -> Result<Self> {
        let (mut weights, metadata) = GgufWeights::open(path)?;
        let metadata = Metadata { place: path, values: &metadata };
        let config = metadata.config(&weights)?;
        weights.family = config.family;
        weights.check(&config)?;
        let vocabulary = metadata.vocabulary()?;
        let text = |key: &str| metadata.text(key).map(str::to_owned);
        let mut template = TemplateSource {
            default: text("tokenizer.chat_template").unwrap_or_default(),
            tool_use: text("tokenizer.chat_template.tool_use"),
            ..TemplateSource::default()
        };
        for (name, key) in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")] {
            let id = metadata.json(&format!("tokenizer.ggml.{key}_token_id"));
            let bytes = id.as_u64().and_then(|id| vocabulary.token_bytes(u32::try_from(id).ok()?));
            let word = bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned().into());
            template.variables.extend(word.map(|word: Json| (name.to_owned(), word)));
        }
        Ok(Self { weights, config, vocabulary, template })
    }
}

/// Maximum length of a word of the metadata, in bytes. No known word is as long.
const WORD_BYTES_MAX: usize = 100;

pub(super) struct Metadata<'a> {
    pub(super) place: &'a Path,
    pub(super) values: &'a HashMap<String, MetadataValue>,
}

impl Metadata<'_> {
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        if let Some(MetadataValue::Text(text)) = self.values.get(key) { Some(text) } else { None }
    }

    /// Returns the start of a text, for a word that is one of a few.
    pub(super) fn word(&self, key: &str) -> Option<&str> {
        self.text(key).map(|text| &text[..text.floor_char_boundary(WORD_BYTES_MAX)])
    }

    /// Returns a number, a flag or a word as JSON; null if the key is absent.
    fn json(&self, key: &str) -> Json {
        match self.values.get(key) {
            Some(MetadataValue::Integer(n)) => {
                u64::try_from(*n).map_or_else(|_| json!(*n as i64), |n| json!(n))
            }
            Some(MetadataValue::Float(x)) => json!(x),
            Some(MetadataValue::Bool(flag)) => json!(flag),
            Some(MetadataValue::Text(_)) => json!(self.word(key)),
            _ => Json::Null,
        }
    }

    /// Returns the config of the model, derived from the metadata and the shape of the embedding.
    fn config(&self, weights: &GgufWeights) -> Result<Config> {
        let shown = self.place.display();
        let architecture = self.word("general.architecture").unwrap_or_default();
        let family = Family::from_gguf(architecture).map_err(|e| bad_input!("{shown}: {e}"))?;
        let of = |key: &str| self.json(&format!("{architecture}.{key}"));
        let embedding = weights.find("token_embd.weight").and_then(|(_, tensor)| tensor.shape.first());
        let mut json = json!({
            "model_type": family.name,
            "vocab_size": embedding,
            "hidden_size": of("embedding_length"),
            "num_hidden_layers": of("block_count"),
            "num_attention_heads": of("attention.head_count"),
            "num_key_value_heads": of("attention.head_count_kv"),
            "head_dim": of("attention.key_length"),
            "intermediate_size": of("feed_forward_length"),
            "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": of("context_length"),
            "rope_theta": of("rope.freq_base"),
            "rope_scaling": {"rope_type": "default"},
            "tie_word_embeddings": weights.find("output.weight").is_none(),
            "bos_token_id": self.json("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.json("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.json("tokenizer.ggml.padding_token_id"),
        });
        let scaling = of("rope.scaling.type");
        if !matches!(scaling.as_str(), None | Some("none")) {
            let mut rope = json!({
                "rope_type": scaling,
                "factor": of("rope.scaling.factor"),
                "original_max_position_embeddings": of("rope.scaling.original_context_length"),
                // llama.cpp has no key for this value. It is false in the released GPT-OSS.
                "truncate": of("rope.scaling.truncate").as_bool().unwrap_or(family.gguf != "gpt-oss"),
            });
            for (key, value) in [
                ("beta_fast", of("rope.scaling.yarn_beta_fast")),
                ("beta_slow", of("rope.scaling.yarn_beta_slow")),
            ] {
                if !value.is_null() {
                    rope[key] = value;
                }
            }
            json["rope_scaling"] = rope;
        }
        if family.has_experts {
            json["intermediate_size"] = match of("expert_feed_forward_length") {
                Json::Null => of("feed_forward_length"),
                found => found,
            };
            json["moe_intermediate_size"] = json["intermediate_size"].clone();
            json["num_local_experts"] = of("expert_count");
            json["num_experts_per_tok"] = of("expert_used_count");
            // llama.cpp always renormalises the weights of the selected experts of Qwen3.
            json["norm_topk_prob"] = json!(true);
        }
        if family.has_windows {
            json["sliding_window"] = of("attention.sliding_window");
        }
        if family.has_swiglu_limit {
            // The clamp of SwiGLU is a constant in llama.cpp.
            json["swiglu_limit"] = json!(7.0);
        }
        Config::from_json(&json)
            .map_err(|e| bad_input!("{shown}: its metadata does not describe a supported model: {e}"))
    }
}
