//! What engines write, recognised by its shape: one file an engine. docs/MISMATCH.md shows each.

mod llama_cpp;
mod npy;
mod openai;
mod own;
pub mod prime_rl;
mod sglang;
mod texts;
mod verifiers;
mod verl;

use crate::vocabulary::Vocabulary;
use serde_json::Value;
pub use texts::TokenTexts;

/// A row as an engine wrote it, not checked yet.
#[derive(Debug, Default)]
pub struct RawRow {
    pub tokens: Vec<u64>,
    /// One a token; `None` where there is none.
    pub log_probs: Vec<Option<f64>>,
    /// What a trainer computed for the same tokens, where the file has it.
    pub trainer_log_probs: Option<Vec<Option<f64>>>,
    pub temperature: Option<f64>,
    pub routes: Option<RawRoutes>,
    /// Text of tokens, by place, where the file gives it beside the id.
    pub texts: Vec<(usize, String)>,
    /// Ids were found from texts.
    pub from_texts: bool,
}

/// Experts chosen, one value a (token, layer, slot), tokens first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawRoutes {
    pub experts: Vec<u32>,
    /// Where the file says it: tokens, layers, slots.
    pub shape: Option<[usize; 3]>,
}

/// Whose shape a record has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Own,
    Completions,
    Chat,
    SgLang,
    LlamaCpp,
    PrimeRl,
    Verifiers,
    Slime,
    Verl,
}

impl Shape {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Shape::Own => "rows of tokens and logprobs",
            Shape::Completions => "responses of /v1/completions (vLLM, llama-cpp-python)",
            Shape::Chat => "responses of /v1/chat/completions (vLLM)",
            Shape::SgLang => "responses of SGLang's /generate",
            Shape::LlamaCpp => "responses of llama.cpp's /completion",
            Shape::PrimeRl => "prime-rl's token exports",
            Shape::Verifiers => "verifiers' traces",
            Shape::Slime => "slime's samples",
            Shape::Verl => "verl's agent-loop rows",
        }
    }

    /// Whose record `value` is; or what it lacks to be one.
    ///
    /// # Errors
    /// With the remedy, for a shape without token ids or log-probs, and for an unknown one.
    pub fn of(value: &Value) -> Result<Self, String> {
        let has = |key: &str| value.get(key).is_some();
        let texts = |keys: [&str; 2]| keys.iter().all(|key| value.get(*key).is_some_and(Value::is_string));
        Ok(match value {
            _ if has("choices") => openai::shape(value)?,
            _ if has("meta_info") => Shape::SgLang,
            _ if has("completion_probabilities") => Shape::LlamaCpp,
            _ if has("inference_logprobs") => Shape::PrimeRl,
            _ if has("nodes") => Shape::Verifiers,
            _ if has("tokens") && has("logprobs") => Shape::Own,
            _ if has("tokens") && has("rollout_log_probs") => Shape::Slime,
            _ if has("response_logprobs") || has("rollout_log_probs") => Shape::Verl,
            _ if texts(["input", "output"]) => return Err(verl::TEXT_ALONE.into()),
            _ if texts(["prompt", "completion"]) => return Err(verl::TRL_TEXT_ALONE.into()),
            _ if has("content") && has("stop_type") => return Err(llama_cpp::NO_LOG_PROBS.into()),
            _ if has("tokens") || has("token_ids") => {
                return Err("tokens without log-probs; write one a token, null where there is none".into());
            }
            _ => {
                return Err(format!(
                    "no shape that is known; write rows like {EXAMPLE}, or see docs/MISMATCH.md"
                ));
            }
        })
    }

    /// The rows of one record.
    ///
    /// # Errors
    /// Says what is missing or wrong, and the remedy.
    pub fn rows(
        self,
        value: Value,
        tokenizer: &Vocabulary,
        texts: &TokenTexts,
    ) -> Result<Vec<RawRow>, String> {
        match self {
            Shape::Own => own::row(value).map(|row| vec![row]),
            Shape::Completions => openai::completions(value, texts),
            Shape::Chat => openai::chat(value, texts),
            Shape::SgLang => sglang::row(value).map(|row| vec![row]),
            Shape::LlamaCpp => llama_cpp::row(value, tokenizer).map(|row| vec![row]),
            Shape::PrimeRl => prime_rl::row(value).map(|row| vec![row]),
            Shape::Verifiers => verifiers::rows(value),
            Shape::Slime => verl::slime(value).map(|row| vec![row]),
            Shape::Verl => verl::row(value).map(|row| vec![row]),
        }
    }
}

/// A row of our own.
pub const EXAMPLE: &str = r#"{"tokens": [1, 5], "logprobs": [null, -0.7], "temperature": 1.0}"#;

/// For slime's files, which candle's reader of pickles, made for tensors, does not take.
pub const TORCH_FILE: &str = "a file of torch.save: lists of numbers in a pickle are not read here; convert it with\n  \
    import json, torch\n  \
    for s in torch.load(FILE, weights_only=False)[\"samples\"]:\n      \
    print(json.dumps({k: s.get(k) for k in (\"tokens\", \"response_length\", \"loss_mask\", \"rollout_log_probs\")}))";

/// `value` as `T`, or what about it is wrong.
fn parsed<T: serde::de::DeserializeOwned>(value: Value, what: &str) -> Result<T, String> {
    serde_json::from_value(value).map_err(|e| format!("not {what}: {e}; see docs/MISMATCH.md for the shape"))
}

/// A prompt without log-probs before a response with them.
fn prompt_and_response(prompt: Vec<u64>, response: Vec<u64>, log_probs: Vec<Option<f64>>) -> RawRow {
    let mut all = vec![None; prompt.len()];
    all.extend(log_probs);
    RawRow { tokens: [prompt, response].concat(), log_probs: all, ..RawRow::default() }
}
