//! Converts between `config.json` of a Hugging Face folder and [`Config`].
//!
//! There are two dialects. The released dialect has `rope_theta` with `rope_scaling`, `torch_dtype` and
//! `experts_per_token`. The newer dialect has `rope_parameters`, `dtype` and `num_experts_per_tok`. If a file
//! has keys of both dialects, they must agree. Readers of either dialect can load the files that this module
//! writes. The module of each family reads the keys that only this family has.

use super::config::{Config, LayerType, Rope, SIZE_MAX, SWIGLU_ALPHA, WeightFormat};
use super::families::Family;
use super::settings::Yarn;
use crate::bad_input;
use crate::settings::Choice;
use anyhow::Result;
use serde_json::{Map, Value, json};

impl Config {
    /// Reads a parsed `config.json`. The error lists every mistake with its key.
    pub fn from_json(value: &Value) -> Result<Self> {
        let Value::Object(map) = value else { return Err(bad_input!("not a JSON object")) };
        let mut keys = ConfigReader { map, family: Family::default(), mistakes: Vec::new() };
        // The family is read first, because the required keys depend on it.
        keys.family = keys.family()?;
        let config = (keys.family.read)(&mut keys);
        let mut mistakes = keys.mistakes;
        if mistakes.is_empty() {
            mistakes = config.mistakes();
        }
        if mistakes.is_empty() { Ok(config) } else { Err(bad_input!("{}", mistakes.join("; "))) }
    }

    /// Returns the content of `config.json` for weights saved in `format`. Readers of either dialect can load
    /// it.
    pub fn to_json(&self, format: WeightFormat) -> Value {
        let rope_scaling = match &self.rope.yarn {
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
        let mut json = json!({
            "architectures": [self.family.architecture],
            "model_type": self.family.name(),
            "torch_dtype": if format == WeightFormat::F32 { "float32" } else { "bfloat16" },
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
        if let (Value::Object(json), Value::Object(own)) = (&mut json, (self.family.own_keys)(self)) {
            json.extend(own);
        }
        if format == WeightFormat::Mxfp4 {
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

/// Reads the keys of one JSON object, and collects the mistakes in them.
pub(super) struct ConfigReader<'a> {
    map: &'a Map<String, Value>,
    family: Family,
    mistakes: Vec<String>,
}

impl<'a> ConfigReader<'a> {
    /// Returns the value of `key`; `None` when the key is absent or null.
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn family(&self) -> Result<Family> {
        let Some(value) = self.value("model_type") else {
            return Err(bad_input!("key `model_type` is missing; {}", Family::supported_names()));
        };
        let family = value.as_str().and_then(Family::from_name);
        family
            .ok_or_else(|| bad_input!("model_type = {value} is not supported; {}", Family::supported_names()))
    }

    /// Records a mistake and returns a placeholder value, which nobody uses.
    pub(super) fn record_mistake<T: Default>(&mut self, mistake: &str) -> T {
        self.mistakes.push(mistake.to_owned());
        T::default()
    }

    /// Reads the keys that every family has. The other fields are 0 or absent, and the family sets them.
    pub(super) fn common_config(&mut self) -> Config {
        let config = Config {
            family: self.family,
            vocab_size: self.size("vocab_size"),
            hidden_size: self.size("hidden_size"),
            num_hidden_layers: self.size("num_hidden_layers"),
            num_attention_heads: self.size("num_attention_heads"),
            num_key_value_heads: self.size("num_key_value_heads"),
            head_dim: 0,
            intermediate_size: self.size("intermediate_size"),
            num_local_experts: 0,
            num_experts_per_tok: 0,
            sliding_window: 0,
            layer_types: self.layer_types(),
            rope: Rope::default(),
            rms_norm_eps: self.number("rms_norm_eps"),
            swiglu_limit: 0.0,
            tie_word_embeddings: self.tie_word_embeddings(),
            max_position_embeddings: self.count("max_position_embeddings", u64::from(u32::MAX)),
            bos_token_id: self.token_ids("bos_token_id").first().copied(),
            eos_token_ids: self.token_ids("eos_token_id"),
            pad_token_id: self.token_ids("pad_token_id").first().copied(),
        };
        self.check_fixed();
        config
    }

    /// Reads a whole number in 1..=`max`. If there is none, records a mistake and returns 0.
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

    pub(super) fn size(&mut self, key: &str) -> usize {
        self.count(key, SIZE_MAX)
    }

    /// Reads a size that has two names. If both keys are present, they must agree.
    pub(super) fn size_with_alias(&mut self, newer: &str, released: &str) -> usize {
        if self.value(newer).is_none() && self.value(released).is_some() {
            return self.size(released);
        }
        let size = self.size(newer);
        if let Some(other) = self.value(released).filter(|v| v.as_u64() != Some(size as u64)) {
            self.mistakes.push(format!("{released} = {other} contradicts {newer} = {size}"));
        }
        size
    }

    /// Reads a finite number. If there is none, records a mistake and returns 0.
    pub(super) fn number(&mut self, key: &str) -> f64 {
        match self.value(key) {
            None => self.mistakes.push(format!("key `{key}` is missing")),
            Some(value) => match value.as_f64() {
                Some(number) => return number,
                None => self.mistakes.push(format!("{key} = {value} must be a number")),
            },
        }
        0.0
    }

    /// Reads a token id or a list of token ids. For an absent key, returns an empty list.
    fn token_ids(&mut self, key: &str) -> Vec<u32> {
        let Some(value) = self.value(key) else { return Vec::new() };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let ids: Option<Vec<u32>> = list.iter().map(|v| v.as_u64()?.try_into().ok()).collect();
        ids.unwrap_or_else(|| {
            self.mistakes.push(format!("{key} = {value} must be a token id or a list of token ids"));
            Vec::new()
        })
    }

    /// Reads `head_dim`. If the key is absent, returns the hidden size divided by the number of heads.
    pub(super) fn head_dim_or_default(&mut self) -> usize {
        let size = |key| self.value(key).and_then(Value::as_u64).filter(|&n| n > 0);
        match (size("hidden_size"), size("num_attention_heads")) {
            (Some(hidden), Some(heads)) if self.value("head_dim").is_none() => {
                if hidden % heads != 0 {
                    self.mistakes.push(format!(
                        "head_dim is absent, and hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}"
                    ));
                }
                (hidden / heads) as usize
            }
            _ => self.size("head_dim"),
        }
    }

    /// Reads true or false. For an absent key, returns `default`.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(value) = self.value(key) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.mistakes.push(format!("{key} = {value} must be true or false"));
            default
        })
    }

    fn tie_word_embeddings(&mut self) -> bool {
        let tied = self.flag("tie_word_embeddings", false);
        if tied && !self.family.may_tie_embeddings {
            self.mistakes.push("tie_word_embeddings = true is not supported; it must be false".into());
        }
        tied
    }

    fn layer_types(&mut self) -> Vec<LayerType> {
        let types = self.listed_layer_types();
        if !self.family.has_windows && types.contains(&LayerType::Sliding) {
            self.mistakes
                .push("layer_types has \"sliding_attention\", which this family does not support".into());
        }
        types
    }

    fn listed_layer_types(&mut self) -> Vec<LayerType> {
        let layers = self.value("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(SIZE_MAX);
        let usual = (self.family.layer_types)(layers as usize);
        let Some(value) = self.value("layer_types") else { return usual };
        let types = value.as_array().and_then(|names| {
            names.iter().map(|name| LayerType::from_name(name.as_str()?)).collect::<Option<Vec<_>>>()
        });
        types.unwrap_or_else(|| {
            self.mistakes.push(format!(
                "layer_types must list one of \"sliding_attention\", \"full_attention\" for each layer, not {value}"
            ));
            usual
        })
    }

    /// Reads RoPE in either dialect, if the file has it. If the file has both dialects, they must agree.
    pub(super) fn rope(&mut self) -> Option<Rope> {
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
        found
    }

    fn rope_table(&mut self, key: &str, map: &Map<String, Value>, outer_theta: Option<f64>) -> Rope {
        let mut inner = ConfigReader { map, family: self.family, mistakes: Vec::new() };
        let theta = match (inner.value("rope_theta").is_some(), outer_theta) {
            (false, Some(theta)) => theta,
            (_, outer) => {
                let theta = inner.number("rope_theta");
                if outer.is_some_and(|outer| outer != theta) {
                    inner.mistakes.push(format!("rope_theta = {theta} contradicts the outer rope_theta"));
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
        const KNOWN: &str = "rope_type type rope_theta factor original_max_position_embeddings beta_fast \
            beta_slow truncate";
        for (name, value) in map {
            let is_neutral = name == "partial_rotary_factor" && value.as_f64() == Some(1.0);
            if !KNOWN.split(' ').any(|known| known == name) && !value.is_null() && !is_neutral {
                inner.mistakes.push(format!("{name} = {value} is not supported"));
            }
        }
        self.mistakes.extend(inner.mistakes.into_iter().map(|mistake| format!("{key}: {mistake}")));
        Rope { theta, yarn }
    }

    /// Reads the keys of YaRN. Optional keys have the defaults of the reference implementation.
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

    /// Checks a key whose value the architecture fixes. The key must be absent, or its value equal to
    /// `wanted`.
    pub(super) fn require_value(&mut self, key: &str, wanted: &Value) {
        if let Some(value) = self.value(key).filter(|v| *v != wanted) {
            self.mistakes.push(format!("{key} = {value} is not supported; it must be {wanted}"));
        }
    }

    /// Checks the keys whose values are fixed in every family.
    fn check_fixed(&mut self) {
        let has_mxfp4 = self.family.has_mxfp4;
        self.require_value("hidden_act", &json!("silu"));
        for (key, wanted) in [("swiglu_alpha", SWIGLU_ALPHA), ("attention_dropout", 0.0)] {
            if let Some(value) = self.value(key).filter(|v| v.as_f64() != Some(wanted)) {
                self.mistakes.push(format!("{key} = {value} is not supported; it must be {wanted}"));
            }
        }
        let method = self.value("quantization_config").and_then(|q| q.get("quant_method"));
        let known = |method: &Value| has_mxfp4 && *method == json!("mxfp4");
        if let Some(method) = method.filter(|m| !known(m)) {
            let instead = if has_mxfp4 { "\"mxfp4\" is, or bf16 weights" } else { "bf16 weights are" };
            self.mistakes
                .push(format!("quantization_config.quant_method = {method} is not supported; {instead}"));
        }
    }
}
