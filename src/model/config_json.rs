//! `config.json` of a Hugging Face folder, to and from [`Config`].
//!
//! Two dialects are read: the released one (`rope_theta` with `rope_scaling`, `torch_dtype`,
//! `experts_per_token`) and the newer one (`rope_parameters`, `dtype`, `num_experts_per_tok`). Where a
//! file speaks both, they must agree. What is written loads under both. Keys that only one family has are read for it alone.

use super::config::{Config, Form, LayerType, Rope, SIZE_MAX, SWIGLU_ALPHA};
use super::family::Family;
use super::settings::Yarn;
use crate::bad_input;
use crate::settings::Choice;
use anyhow::Result;
use serde_json::{Map, Value, json};

impl Config {
    /// Reads a parsed `config.json`. The error lists every mistake by key.
    pub fn from_json(value: &Value) -> Result<Self> {
        let Value::Object(map) = value else { return Err(bad_input!("not a JSON object")) };
        let mut keys = Keys { map, mistakes: Vec::new() };
        // First, and alone: what else must be there depends on it.
        let family = keys.family()?;
        let config = Self {
            family,
            vocab_size: keys.size("vocab_size"),
            hidden_size: keys.size("hidden_size"),
            num_hidden_layers: keys.size("num_hidden_layers"),
            num_attention_heads: keys.size("num_attention_heads"),
            num_key_value_heads: keys.size("num_key_value_heads"),
            head_dim: keys.head_dim(family),
            intermediate_size: keys.size("intermediate_size"),
            num_local_experts: if family.has_experts() { keys.size("num_local_experts") } else { 0 },
            num_experts_per_tok: if family.has_experts() {
                keys.size_of_either("num_experts_per_tok", "experts_per_token")
            } else {
                0
            },
            sliding_window: keys.sliding_window(family),
            layer_types: keys.layer_types(family),
            rope: keys.rope(family),
            rms_norm_eps: keys.number("rms_norm_eps"),
            swiglu_limit: if family.has_experts() { keys.number("swiglu_limit") } else { 0.0 },
            tie_word_embeddings: keys.tie_word_embeddings(family),
            max_position_embeddings: keys.count("max_position_embeddings", u64::from(u32::MAX)),
            bos_token_id: keys.token_ids("bos_token_id").first().copied(),
            eos_token_ids: keys.token_ids("eos_token_id"),
            pad_token_id: keys.token_ids("pad_token_id").first().copied(),
        };
        keys.check_fixed(family);
        let mut mistakes = keys.mistakes;
        if mistakes.is_empty() {
            mistakes = config.mistakes();
        }
        if mistakes.is_empty() { Ok(config) } else { Err(bad_input!("{}", mistakes.join("; "))) }
    }

    /// The content of `config.json` for weights saved in `form`, for readers of either dialect.
    pub fn to_json(&self, form: Form) -> Value {
        let rope_scaling = match &self.rope.yarn {
            // Newer readers take an absent or null entry for YaRN in GPT-OSS, so plain RoPE is said aloud there.
            None if self.family == Family::GptOss => json!({ "rope_type": "default" }),
            None => Value::Null,
            Some(yarn) => json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_position_embeddings,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
            }),
        };
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            several => json!(several),
        };
        let own = match self.family {
            Family::GptOss => json!({
                "num_local_experts": self.num_local_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "experts_per_token": self.num_experts_per_tok,
                "sliding_window": self.sliding_window,
                "layer_types": self.layer_types.iter().map(|t| t.name()).collect::<Vec<_>>(),
                "swiglu_limit": self.swiglu_limit,
                "attention_bias": true,
            }),
            Family::Qwen2 => json!({
                "sliding_window": Value::Null,
                "use_sliding_window": false,
                "max_window_layers": self.num_hidden_layers,
            }),
        };
        let mut json = json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.name(),
            "torch_dtype": if form == Form::F32 { "float32" } else { "bfloat16" },
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "rope_theta": self.rope.theta,
            "rope_scaling": rope_scaling,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": true,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
        });
        if let (Value::Object(json), Value::Object(own)) = (&mut json, own) {
            json.extend(own);
        }
        if form == Form::Mxfp4 {
            json["quantization_config"] = json!({
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
                ],
            });
        }
        json
    }
}

/// The keys of one JSON object, read one by one; what is wrong with them gathers in `mistakes`.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    mistakes: Vec<String>,
}

impl<'a> Keys<'a> {
    /// The value of `key`, `None` where it is absent or null.
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn family(&self) -> Result<Family> {
        let Some(value) = self.value("model_type") else {
            return Err(bad_input!("key `model_type` is missing; {}", Family::known()));
        };
        let family = value.as_str().and_then(Family::named);
        family.ok_or_else(|| bad_input!("model_type = {value} is not supported; {}", Family::known()))
    }

    /// A whole number in 1..=`max`; 0, with a mistake noted, where there is none.
    fn count(&mut self, key: &str, max: u64) -> usize {
        match self.value(key) {
            None => self.mistakes.push(format!("key `{key}` is missing")),
            Some(value) => match value.as_u64() {
                Some(n) if (1..=max).contains(&n) => return n as usize,
                _ => self.mistakes.push(format!("{key} = {value} must be a whole number in 1..={max}")),
            },
        }
        0
    }

    fn size(&mut self, key: &str) -> usize {
        self.count(key, SIZE_MAX)
    }

    /// One size under two names; both may be there if they agree.
    fn size_of_either(&mut self, newer: &str, released: &str) -> usize {
        if self.value(newer).is_none() && self.value(released).is_some() {
            return self.size(released);
        }
        let size = self.size(newer);
        if let Some(other) = self.value(released).filter(|v| v.as_u64() != Some(size as u64)) {
            self.mistakes.push(format!("{released} = {other} contradicts {newer} = {size}"));
        }
        size
    }

    /// A finite number; 0, with a mistake noted, where there is none.
    fn number(&mut self, key: &str) -> f64 {
        match self.value(key) {
            None => self.mistakes.push(format!("key `{key}` is missing")),
            Some(value) => match value.as_f64() {
                Some(number) => return number,
                None => self.mistakes.push(format!("{key} = {value} must be a number")),
            },
        }
        0.0
    }

    /// A token id or a list of them; none where the key is absent.
    fn token_ids(&mut self, key: &str) -> Vec<u32> {
        let Some(value) = self.value(key) else { return Vec::new() };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let ids: Option<Vec<u32>> = list.iter().map(|v| v.as_u64()?.try_into().ok()).collect();
        ids.unwrap_or_else(|| {
            self.mistakes.push(format!("{key} = {value} must be a token id or a list of them"));
            Vec::new()
        })
    }

    /// Qwen2 may leave it out.
    fn head_dim(&mut self, family: Family) -> usize {
        let size = |key| self.value(key).and_then(Value::as_u64).filter(|&n| n > 0);
        match (size("hidden_size"), size("num_attention_heads")) {
            (Some(hidden), Some(heads)) if family == Family::Qwen2 && self.value("head_dim").is_none() => {
                if hidden % heads != 0 {
                    self.mistakes.push(format!(
                        "head_dim is absent, and hidden_size = {hidden} is no multiple of num_attention_heads = {heads}"
                    ));
                }
                (hidden / heads) as usize
            }
            _ => self.size("head_dim"),
        }
    }

    /// True or false; `default` where the key is absent.
    fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(value) = self.value(key) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.mistakes.push(format!("{key} = {value} must be true or false"));
            default
        })
    }

    fn tie_word_embeddings(&mut self, family: Family) -> bool {
        let tied = self.flag("tie_word_embeddings", false);
        if tied && family == Family::GptOss {
            self.mistakes.push("tie_word_embeddings = true is not supported; it must be false".into());
        }
        tied
    }

    /// Qwen2 says a window's width whether or not there is one.
    fn sliding_window(&mut self, family: Family) -> usize {
        match family {
            Family::GptOss => self.size("sliding_window"),
            Family::Qwen2 => {
                if self.flag("use_sliding_window", false) {
                    self.mistakes.push(
                        "use_sliding_window = true is not built: every layer of this family attends to all before it; \
                         take a model without windows"
                            .into(),
                    );
                }
                0
            }
        }
    }

    fn layer_types(&mut self, family: Family) -> Vec<LayerType> {
        let types = self.listed_layer_types(family);
        if family == Family::Qwen2 && types.contains(&LayerType::Sliding) {
            self.mistakes
                .push("layer_types has \"sliding_attention\", which is not built for this family".into());
        }
        types
    }

    fn listed_layer_types(&mut self, family: Family) -> Vec<LayerType> {
        let layers = self.value("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(SIZE_MAX);
        let usual = family.layer_types(layers as usize);
        let Some(value) = self.value("layer_types") else { return usual };
        let types = value.as_array().and_then(|names| {
            names.iter().map(|name| LayerType::from_name(name.as_str()?)).collect::<Option<Vec<_>>>()
        });
        types.unwrap_or_else(|| {
            self.mistakes.push(format!(
                "layer_types must list one of \"sliding_attention\", \"full_attention\" a layer, not {value}"
            ));
            usual
        })
    }

    /// Both dialects of RoPE; where the file has both, they must agree.
    fn rope(&mut self, family: Family) -> Rope {
        let outer_theta = self.value("rope_theta").is_some().then(|| self.number("rope_theta"));
        let mut found: Option<Rope> = None;
        for key in ["rope_parameters", "rope_scaling"] {
            let rope = match self.value(key) {
                None => continue,
                Some(Value::Object(map)) => self.rope_table(key, map, outer_theta),
                Some(other) => {
                    self.mistakes.push(format!("{key} must be an object, not {other}"));
                    continue;
                }
            };
            if found.as_ref().is_some_and(|first| *first != rope) {
                self.mistakes.push("rope_parameters and rope_scaling contradict each other".into());
            }
            found = Some(rope);
        }
        if let (None, Family::Qwen2) = (&found, family) {
            let theta = outer_theta.unwrap_or_else(|| self.number("rope_theta"));
            return Rope { theta, yarn: None };
        }
        found.unwrap_or_else(|| {
            self.mistakes.push(
                "neither rope_scaling nor rope_parameters is there, which some readers take for plain RoPE and \
                 others for YaRN; say which: \"rope_scaling\": {\"rope_type\": \"default\"} is plain"
                    .into(),
            );
            Rope { theta: 1.0, yarn: None }
        })
    }

    fn rope_table(&mut self, key: &str, map: &Map<String, Value>, outer_theta: Option<f64>) -> Rope {
        let mut inner = Keys { map, mistakes: Vec::new() };
        let theta = match (inner.value("rope_theta").is_some(), outer_theta) {
            (false, Some(theta)) => theta,
            (_, outer) => {
                let theta = inner.number("rope_theta");
                if outer.is_some_and(|outer| outer != theta) {
                    inner.mistakes.push(format!("rope_theta = {theta} contradicts the rope_theta outside"));
                }
                theta
            }
        };
        let kind =
            inner.value("rope_type").or(inner.value("type")).and_then(Value::as_str).unwrap_or("default");
        let yarn = match kind {
            "default" => None,
            "yarn" => Some(inner.yarn()),
            other => {
                inner
                    .mistakes
                    .push(format!("rope_type \"{other}\" is not supported; \"yarn\" and \"default\" are"));
                None
            }
        };
        const KNOWN: [&str; 8] = [
            "rope_type",
            "type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "truncate",
        ];
        for (name, value) in map {
            let is_neutral = name == "partial_rotary_factor" && value.as_f64() == Some(1.0);
            if !KNOWN.contains(&name.as_str()) && !value.is_null() && !is_neutral {
                inner.mistakes.push(format!("{name} = {value} is not supported"));
            }
        }
        self.mistakes.extend(inner.mistakes.into_iter().map(|mistake| format!("{key}: {mistake}")));
        Rope { theta, yarn }
    }

    /// YaRN's keys; the optional ones default as in the reference implementation.
    fn yarn(&mut self) -> Yarn {
        let truncate = self.value("truncate").map(|v| {
            v.as_bool().unwrap_or_else(|| {
                self.mistakes.push(format!("truncate = {v} must be true or false"));
                true
            })
        });
        let mut optional =
            |key: &str, default: f64| if self.value(key).is_some() { self.number(key) } else { default };
        let (beta_fast, beta_slow) = (optional("beta_fast", 32.0), optional("beta_slow", 1.0));
        let factor = self.number("factor");
        if factor < 1.0 {
            self.mistakes.push(format!("factor = {factor} must be at least 1"));
        }
        Yarn {
            factor,
            original_max_position_embeddings: self
                .count("original_max_position_embeddings", u64::from(u32::MAX)),
            beta_fast,
            beta_slow,
            truncate: truncate.unwrap_or(true),
        }
    }

    /// Keys that the architecture fixes: absent, or at the one value that is implemented.
    fn check_fixed(&mut self, family: Family) {
        let own = match family {
            Family::GptOss => ("attention_bias", json!(true)),
            Family::Qwen2 => ("use_mrope", json!(false)),
        };
        let fixed = [("hidden_act", json!("silu")), own];
        for (key, wanted) in fixed {
            if let Some(value) = self.value(key).filter(|v| **v != wanted) {
                self.mistakes.push(format!("{key} = {value} is not supported; it must be {wanted}"));
            }
        }
        for (key, wanted) in [("swiglu_alpha", SWIGLU_ALPHA), ("attention_dropout", 0.0)] {
            if let Some(value) = self.value(key).filter(|v| v.as_f64() != Some(wanted)) {
                self.mistakes.push(format!("{key} = {value} is not supported; it must be {wanted}"));
            }
        }
        let method = self.value("quantization_config").and_then(|q| q.get("quant_method"));
        let known = |method: &Value| family.has_experts() && *method == json!("mxfp4");
        if let Some(method) = method.filter(|m| !known(m)) {
            let instead =
                if family.has_experts() { "\"mxfp4\" is, or bf16 weights" } else { "bf16 weights are" };
            self.mistakes
                .push(format!("quantization_config.quant_method = {method} is not supported; {instead}"));
        }
    }
}
