//! The fields of a request's body. Each is read by name and type; unknown fields are counted.

use super::api_error::ApiError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

type Found<T> = Result<Option<T>, ApiError>;

/// The fields of a JSON object. A null counts as absent.
pub(crate) struct Fields<'v> {
    map: &'v Map<String, Value>,
    /// Names of the fields that the server read or ignores on purpose.
    known: RefCell<BTreeSet<&'static str>>,
}

impl<'v> Fields<'v> {
    pub fn new(body: &'v Value) -> Result<Self, ApiError> {
        let map = body.as_object();
        let map = map.ok_or_else(|| ApiError::invalid(None, "the body is not a JSON object".to_owned()))?;
        Ok(Self { map, known: RefCell::default() })
    }

    /// Returns the number of the body's fields that the server does not read.
    pub fn unknown_count(&self) -> usize {
        let known = self.known.borrow();
        self.map.keys().filter(|name| !known.contains(name.as_str())).count()
    }

    pub fn value(&self, name: &'static str) -> Option<&'v Value> {
        self.known.borrow_mut().insert(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(&self, name: &'static str, what: &str, read: impl Fn(&'v Value) -> Option<T>) -> Found<T> {
        let Some(value) = self.value(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| ApiError::invalid(Some(name), format!("{name:?} must be {what}")))
    }

    pub fn text(&self, name: &'static str) -> Found<&'v str> {
        self.read(name, "a text", Value::as_str)
    }

    pub fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn list(&self, name: &'static str) -> Found<&'v [Value]> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// Returns a number from `low` to `high`.
    pub fn number(&self, name: &'static str, low: f64, high: f64) -> Found<f64> {
        let what = format!("a number from {low} to {high}");
        self.read(name, &what, |value| value.as_f64().filter(|number| (low..=high).contains(number)))
    }

    /// Returns a whole number from `low` to `high`.
    pub fn whole(&self, name: &'static str, low: i64, high: i64) -> Found<i64> {
        let what = format!("a whole number from {low} to {high}");
        let read = |value: &Value| value.as_i64().filter(|number| (low..=high).contains(number));
        self.read(name, &what, read)
    }

    /// Refuses field `name`, which this server does not support. A value that does not change the answer is
    /// allowed: `is_neutral` returns true for it.
    pub fn refuse(&self, name: &'static str, is_neutral: impl Fn(&Value) -> bool) -> Result<(), ApiError> {
        match self.value(name) {
            Some(value) if !is_neutral(value) => {
                Err(ApiError::invalid(Some(name), format!("{name:?} is not supported; leave it out")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses fields of vLLM and SGLang that would change the answer.
    pub fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let is_empty = |value: &Value| value.as_object().is_some_and(Map::is_empty);
        self.refuse("chat_template_kwargs", is_empty)?;
        self.refuse("continue_final_message", |value| value == false)?;
        self.refuse("add_generation_prompt", |value| value == true)?;
        self.refuse("min_tokens", |value| value == 0)?;
        self.refuse("prompt_logprobs", |_| false)?;
        for name in ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"] {
            self.refuse(name, |_| false)?;
        }
        Ok(())
    }

    /// Marks fields as known without reading them. They do not change the answer.
    pub fn ignore(&self, names: &[&'static str]) {
        self.known.borrow_mut().extend(names);
    }
}
