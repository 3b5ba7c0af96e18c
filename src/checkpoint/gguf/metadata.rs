//! Reads the config and the tokenizer of a GGUF file, in the formats of a Hugging Face folder.

use super::file::MetadataValue;
use super::weights::GgufWeights;
use crate::bad_input;
use crate::model::config::Config;
use crate::model::families::Family;
use anyhow::Result;
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

/// The numbers of token kinds in `tokenizer.ggml.token_type`.
pub(super) const NORMAL: i32 = 1;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;
pub(super) const UNUSED: i32 = 5;

/// A pre-tokenizer of GGUF: the steps of a tokenizer before its merges.
pub(super) struct PreTokenizer {
    /// The name in `tokenizer.ggml.pre`.
    pub(super) name: &'static str,
    /// The regular expression that splits a text.
    pub(super) pattern: &'static str,
    /// Whether a text is normalized to NFC before the split.
    normalizes: bool,
    /// Whether merges are skipped for a part of the text that is itself an entry of the vocabulary.
    ignores_merges: bool,
}

pub(super) const PRE_TOKENIZERS: [PreTokenizer; 2] = [
    PreTokenizer {
        name: "qwen2",
        pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizes: true,
        ignores_merges: false,
    },
    PreTokenizer {
        name: "gpt-4o",
        pattern: r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizes: false,
        ignores_merges: true,
    },
];

/// An open GGUF file whose config and tokenizer were checked.
pub struct GgufModel {
    pub weights: GgufWeights,
    pub config: Config,
    /// The tokenizer in the format of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// The chat template. This program never executes it.
    pub template: Option<String>,
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
        weights.set_family(config.family);
        weights.check(&config)?;
        let tokenizer = metadata.tokenizer()?;
        let template = metadata.text("tokenizer.chat_template").map(str::to_owned);
        Ok(Self { weights, config, tokenizer, template })
    }
}

struct Metadata<'a> {
    place: &'a Path,
    values: &'a HashMap<String, MetadataValue>,
}

impl Metadata<'_> {
    fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key) {
            Some(MetadataValue::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns a number, a flag or a string as JSON; null if the key is absent.
    fn json(&self, key: &str) -> Json {
        match self.values.get(key) {
            Some(MetadataValue::Integer(n)) => {
                u64::try_from(*n).map_or_else(|_| json!(*n as i64), |n| json!(n))
            }
            Some(MetadataValue::Float(x)) => json!(x),
            Some(MetadataValue::Bool(flag)) => json!(flag),
            Some(MetadataValue::Text(text)) => json!(text),
            _ => Json::Null,
        }
    }

    /// Returns the config of the model, derived from the metadata and the shape of the embedding.
    fn config(&self, weights: &GgufWeights) -> Result<Config> {
        let shown = self.place.display();
        let architecture = self.text("general.architecture").unwrap_or_default();
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

    /// Returns the tokenizer in the format of `tokenizer.json`.
    fn tokenizer(&self) -> Result<Vec<u8>> {
        let refused = |what: String| bad_input!("{}: {what}", self.place.display());
        let (model, pre) = (self.text("tokenizer.ggml.model"), self.text("tokenizer.ggml.pre"));
        let pre_tokenizer = PRE_TOKENIZERS.iter().find(|known| pre == Some(known.name));
        let (Some("gpt2"), Some(pre_tokenizer)) = (model, pre_tokenizer) else {
            let known: Vec<&str> = PRE_TOKENIZERS.iter().map(|known| known.name).collect();
            return Err(refused(format!(
                "its tokenizer is {:?} with the pre-tokenizer {:?}; only \"gpt2\" with {} is supported; use the model's Hugging Face folder",
                model.unwrap_or("absent"),
                pre.unwrap_or("absent"),
                known.join(" or ")
            )));
        };
        let lists =
            ["tokens", "token_type", "merges"].map(|key| self.values.get(&format!("tokenizer.ggml.{key}")));
        let [
            Some(MetadataValue::Texts(tokens)),
            Some(MetadataValue::Integers(kinds)),
            Some(MetadataValue::Texts(merges)),
        ] = lists
        else {
            return Err(refused(
                "tokenizer.ggml.tokens, token_type or merges is absent or has the wrong type; fetch the file again".into(),
            ));
        };
        if tokens.len() != kinds.len() {
            return Err(refused(format!(
                "the tokenizer has {} tokens, but {} token types; fetch the file again",
                tokens.len(),
                kinds.len()
            )));
        }
        let mut added = vec![];
        for (id, (token, kind)) in tokens.iter().zip(kinds).enumerate() {
            if [CONTROL, USER_DEFINED].contains(kind) {
                added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": *kind == CONTROL,
                }));
            }
        }
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let split = json!({"type": "Split", "pattern": {"Regex": pre_tokenizer.pattern}, "behavior": "Isolated", "invert": false});
        let tokenizer = TokenizerJson {
            version: "1.0",
            added_tokens: added,
            normalizer: if pre_tokenizer.normalizes { json!({"type": "NFC"}) } else { Json::Null },
            pre_tokenizer: json!({"type": "Sequence", "pretokenizers": [split, byte_level]}),
            post_processor: byte_level.clone(),
            decoder: byte_level,
            model: Bpe {
                kind: "BPE",
                ignore_merges: pre_tokenizer.ignores_merges,
                vocab: Entries { tokens, kinds },
                merges: Merges(merges),
            },
        };
        Ok(serde_json::to_vec(&tokenizer)?)
    }
}

/// A `tokenizer.json`. It is written without intermediate values, because a vocabulary has hundreds of
/// thousands of entries.
#[derive(Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: Bpe<'a>,
}

#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    ignore_merges: bool,
    vocab: Entries<'a>,
    merges: Merges<'a>,
}

/// The entries of the vocabulary: each token that is in use, with its id. Added tokens are entries too.
/// Otherwise readers of the file would renumber the other tokens.
struct Entries<'a> {
    tokens: &'a [String],
    kinds: &'a [i32],
}

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let entries = self.tokens.iter().zip(self.kinds).enumerate();
        to.collect_map(entries.filter(|(_, (_, kind))| **kind != UNUSED).map(|(id, (token, _))| (token, id)))
    }
}

/// The merges, each as a list of its two parts.
struct Merges<'a>(&'a [String]);

impl Serialize for Merges<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|merge| merge.splitn(2, ' ').collect::<Vec<_>>()))
    }
}
