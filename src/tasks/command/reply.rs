//! What a program may answer: the keys of each request's answer and their types, checked as strictly as a recipe.

use crate::settings::closest;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Map, Value};

/// Of a request that is shown beside what is wrong with its answer, characters.
const REQUEST_CHARS_MAX: usize = 400;

/// The keys of an answer by its request; `error` may stand in each.
const KEYS: [(&str, &[&str]); 5] = [
    ("describe", &["name", "validation_problems", "python", "functions", "turns"]),
    ("problem", &["prompt", "messages", "answer", "id"]),
    ("call", &["content"]),
    ("turn", &["content"]),
    ("reward", &["reward", "success"]),
];

const ERROR: &str = "error";

/// A program's answer with no key that its request does not know. A key that holds null is absent.
pub(super) struct Reply(Map<String, Value>);

impl Reply {
    /// # Errors
    /// When the program says that it failed, or for an unknown key, with the nearest that is known.
    pub(super) fn new(request: &str, answer: Value) -> Result<Self> {
        let Value::Object(mut answer) = answer else { bail!("the answer is not a JSON object") };
        answer.retain(|_, value| !value.is_null());
        if let Some(error) = answer.get(ERROR) {
            bail!("the program says: {}", error.as_str().map_or_else(|| error.to_string(), str::to_owned));
        }
        let known = KEYS.iter().find(|(name, _)| *name == request).map_or(&[][..], |(_, keys)| keys);
        if let Some(key) = answer.keys().find(|key| !known.contains(&key.as_str())) {
            match closest(key, known.iter().copied()) {
                Some(near) => bail!("unknown key `{key}` in the answer; did you mean `{near}`?"),
                None => bail!("unknown key `{key}` in the answer; it may hold {}", known.join(", ")),
            }
        }
        Ok(Self(answer))
    }

    /// The value of `key`, if there is one.
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

    /// A number that must be there.
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

/// `error` with the request that it is about.
pub(super) fn with_request(error: anyhow::Error, request: &Value) -> anyhow::Error {
    let text = request.to_string();
    let shown: String = text.chars().take(REQUEST_CHARS_MAX).collect();
    let rest = if shown.len() < text.len() { "…" } else { "" };
    anyhow!("{error:#}; the request was {shown}{rest}")
}
