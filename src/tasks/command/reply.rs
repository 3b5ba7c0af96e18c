//! Replies of a task program: each request's keys and their types, checked as strictly as a recipe, and the
//! request's id.

use crate::settings::closest_word;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Map, Value};

/// Maximum number of characters of a request shown in an error.
const REQUEST_CHARS_MAX: usize = 400;

/// The keys of the answer to each request; `error` is allowed in all.
const KEYS: [(&str, &[&str]); 5] = [
    ("describe", &["version", "name", "validation_problems", "python", "tools", "functions", "turns"]),
    ("problem", &["prompt", "messages", "answer", "id"]),
    ("call", &["content"]),
    ("turn", &["content"]),
    ("reward", &["reward", "success"]),
];

const ERROR: &str = "error";
/// Key of a request's id, which the answer repeats since version 2.
pub(super) const REQUEST_ID: &str = "request_id";

/// A program's answer without unknown keys. A key with the value null counts as absent.
pub(super) struct ProgramReply(Map<String, Value>);

impl ProgramReply {
    /// Returns the answer to `request`; the inner error is a failure that the program itself reports.
    ///
    /// # Errors
    /// For an answer to another request, and for an unknown key, with the most similar known key.
    pub(super) fn new(request: &Value, answer: Value) -> Result<Result<Self>> {
        let Value::Object(mut answer) = answer else { bail!("the answer is not a JSON object") };
        answer.retain(|_, value| !value.is_null());
        let name = request["request"].as_str().unwrap_or_default();
        // Version 1 describes itself by an answer without id and version.
        let first = name == "describe" && !answer.contains_key("version");
        match (&request[REQUEST_ID], answer.remove(REQUEST_ID)) {
            (Value::Null, None) => {}
            (_, None) if first => {}
            (asked, None) => bail!("the answer has no `{REQUEST_ID}`; repeat {asked}, the request's"),
            (_, Some(_)) if first => {
                bail!("the answer has `{REQUEST_ID}` but no `version`; add \"version\": 2 to it")
            }
            (asked, Some(answered)) if *asked != answered => {
                bail!("the answer is to request {answered}, not to {asked}")
            }
            (_, Some(_)) => {}
        }
        if let Some(error) = answer.get(ERROR) {
            let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
            return Ok(Err(anyhow!("the program says: {text}")));
        }
        let known = KEYS.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, keys)| keys);
        if let Some(key) = answer.keys().find(|key| !known.contains(&key.as_str())) {
            match closest_word(key, known.iter().copied()) {
                Some(near) => bail!("unknown key `{key}` in the answer; did you mean `{near}`?"),
                None => bail!("unknown key `{key}` in the answer; it may hold {}", known.join(", ")),
            }
        }
        Ok(Ok(Self(answer)))
    }

    /// Removes and returns the value of `key`, if there is one.
    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.read(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "a boolean", Value::as_bool)
    }

    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, "a whole number of at least 0", Value::as_u64)
    }

    /// Returns a required number.
    pub(super) fn number(&self, key: &str) -> Result<f32> {
        let number = |value: &Value| value.as_f64().map(|n| n as f32).filter(|n| n.is_finite());
        self.read(key, "a number", number)?.with_context(|| format!("the answer has no `{key}`"))
    }

    fn read<T>(&self, key: &str, kind: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let value = self.0.get(key);
        value
            .map(|value| read(value).with_context(|| format!("`{key}` of the answer is {value}, not {kind}")))
            .transpose()
    }
}

/// Adds the request to `error`.
pub(super) fn with_request(error: anyhow::Error, request: &Value) -> anyhow::Error {
    let text = request.to_string();
    let shown: String = text.chars().take(REQUEST_CHARS_MAX).collect();
    let rest = if shown.len() < text.len() { "…" } else { "" };
    anyhow!("{error:#}; the request was {shown}{rest}")
}
