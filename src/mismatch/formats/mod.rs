//! Formats of other engines' files, recognised by their JSON structure. Each engine has one source file.
//! docs/AGAINST.md shows each format.

mod llama_cpp;
mod npy;
mod openai;
pub mod prime_rl;
mod rloss;
mod sglang;
mod texts;
mod verifiers;
mod verl;

use crate::ops::token_set::TokenSet;
use serde_json::Value;
pub use texts::TokenTexts;

/// A row as an engine wrote it, before any check.
#[derive(Debug, Default)]
pub struct RawRow {
    pub tokens: Vec<u64>,
    /// One value per token; `None` if the engine gave no value.
    pub log_probs: Vec<Option<f64>>,
    /// A trainer's log-probs of the same tokens, if the file has them.
    pub trainer_log_probs: Option<Vec<Option<f64>>>,
    pub temperature: Option<f64>,
    /// The tokens that each token was drawn from; empty if the file has no such sets.
    pub kept_tokens: Vec<Option<TokenSet>>,
    /// Number of prompt tokens at the start whose log-probs are raw: at temperature 1 and without filters,
    /// because these tokens were not sampled.
    pub raw_tokens: usize,
    pub routed_experts: Option<RawRoutedExperts>,
    /// Index and text of tokens, if the file has texts in addition to ids.
    pub texts: Vec<(usize, String)>,
    /// Whether the ids were derived from texts.
    pub from_texts: bool,
}

/// Routed experts as an engine wrote them, `[token][layer][slot]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawRoutedExperts {
    pub experts: Vec<u32>,
    /// Tokens, layers and slots, if the file gives them.
    pub shape: Option<[usize; 3]>,
}

/// A format of records: how it is recognised, and its reader.
pub struct RecordFormat {
    /// Name for messages.
    pub name: &'static str,
    matches: fn(&Value) -> bool,
    read: fn(Value, &TokenTexts) -> Result<Vec<RawRow>, String>,
}

const fn format(
    name: &'static str,
    matches: fn(&Value) -> bool,
    read: fn(Value, &TokenTexts) -> Result<Vec<RawRow>, String>,
) -> RecordFormat {
    RecordFormat { name, matches, read }
}

/// The formats, in the order in which a record is compared with them.
static FORMATS: [RecordFormat; 10] = [
    format(
        "verbose responses of llama.cpp's /v1 endpoints",
        |value| has(&value[llama_cpp::VERBOSE], "completion_probabilities"),
        |mut value, texts| llama_cpp::rows(value[llama_cpp::VERBOSE].take(), texts),
    ),
    format("responses of /v1/chat/completions (vLLM)", openai::is_chat, openai::chat),
    format(
        "responses of /v1/completions (vLLM, llama-cpp-python)",
        openai::is_completion,
        openai::completions,
    ),
    format("responses of SGLang's /generate", |value| has(value, "meta_info"), sglang::rows),
    format(
        "responses of llama.cpp's /completion",
        |value| has(value, "completion_probabilities"),
        llama_cpp::rows,
    ),
    format("prime-rl's token exports", |value| has(value, "inference_logprobs"), prime_rl::rows),
    format("verifiers' traces", |value| has(value, "nodes"), verifiers::rows),
    format("rows of tokens and logprobs", |value| has_all(value, ["tokens", "logprobs"]), rloss::rows),
    format("slime's samples", |value| has_all(value, ["tokens", "rollout_log_probs"]), verl::slime_rows),
    format(
        "verl's agent-loop rows",
        |value| has(value, "response_logprobs") || has(value, "rollout_log_probs"),
        verl::rows,
    ),
];

fn has_all(value: &Value, keys: [&str; 2]) -> bool {
    keys.iter().all(|key| has(value, key))
}

fn has(value: &Value, key: &str) -> bool {
    value.get(key).is_some()
}

impl RecordFormat {
    /// Returns the format of `value`.
    ///
    /// # Errors
    /// For an unknown format, and for one without token ids or log-probs; the message names the remedy.
    pub fn recognize(value: &Value) -> Result<&'static Self, String> {
        let has_texts =
            |keys: [&str; 2]| keys.iter().all(|key| value.get(*key).is_some_and(Value::is_string));
        if let Some(format) = FORMATS.iter().find(|format| (format.matches)(value)) {
            return Ok(format);
        }
        Err(match value {
            _ if has(value, "choices") => openai::log_probs_remedy(value).into(),
            _ if has_texts(["input", "output"]) => verl::TEXT_ONLY.into(),
            _ if has_texts(["prompt", "completion"]) => verl::TRL_TEXT_ONLY.into(),
            _ if has(value, "content") && has(value, "stop_type") => llama_cpp::NO_LOG_PROBS.into(),
            _ if has(value, "tokens") || has(value, "token_ids") => {
                "tokens without log-probs; write one log-prob per token, or null where there is none".into()
            }
            _ => format!("unknown format; write rows like {EXAMPLE}, or see docs/AGAINST.md"),
        })
    }

    /// Reads the rows of one record.
    ///
    /// # Errors
    /// The message names the missing or wrong part, and the remedy.
    pub fn rows(&self, value: Value, texts: &TokenTexts) -> Result<Vec<RawRow>, String> {
        (self.read)(value, texts)
    }
}

/// An example row of rloss's own format.
pub const EXAMPLE: &str = r#"{"tokens": [1, 5], "logprobs": [null, -0.7], "temperature": 1.0}"#;

/// The message for files of `torch.save`, which slime writes. candle's pickle reader reads only tensors.
pub const TORCH_FILE: &str = "a file of torch.save: lists of numbers in a pickle cannot be read; convert it with\n  \
    import json, torch\n  \
    for s in torch.load(FILE, weights_only=False)[\"samples\"]:\n      \
    print(json.dumps({k: s.get(k) for k in (\"tokens\", \"response_length\", \"loss_mask\", \"rollout_log_probs\")}))";

/// Parses `value` as `T`. Messages call the value `what`.
fn parse<T: serde::de::DeserializeOwned>(value: Value, what: &str) -> Result<T, String> {
    serde_json::from_value(value).map_err(|e| format!("not {what}: {e}; see docs/AGAINST.md for the format"))
}

/// Joins a prompt without log-probs and a response with log-probs.
fn prompt_and_response(prompt: Vec<u64>, response: Vec<u64>, log_probs: Vec<Option<f64>>) -> RawRow {
    let mut all_log_probs = vec![None; prompt.len()];
    all_log_probs.extend(log_probs);
    RawRow { tokens: [prompt, response].concat(), log_probs: all_log_probs, ..RawRow::default() }
}
