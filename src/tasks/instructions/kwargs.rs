//! The arguments of an instruction. They are parsed strictly: every error names the instruction and the key.

use super::CountRelation;
use crate::bad_input;
use anyhow::Result;
use serde_json::Value;

/// The `kwargs` object of one instruction. `null` means that a value is missing: in published files every row
/// has every key.
pub(super) struct Kwargs<'a> {
    id: &'a str,
    object: Option<&'a serde_json::Map<String, Value>>,
}

impl<'a> Kwargs<'a> {
    /// Returns the arguments of instruction `id`. Keys outside `keys` are rejected.
    ///
    /// # Errors
    /// When `value` is neither an object nor null, or has another key with a value.
    pub(super) fn new(id: &'a str, value: &'a Value, keys: &[&str]) -> Result<Self> {
        let object = match value {
            Value::Null => None,
            Value::Object(object) => Some(object),
            _ => return Err(bad_input!("{id}: kwargs is {value}; give an object such as {{}}")),
        };
        let strange =
            object.into_iter().flatten().find(|(key, v)| !v.is_null() && !keys.contains(&key.as_str()));
        match (strange, keys) {
            (None, _) => Ok(Self { id, object }),
            (Some((key, _)), []) => Err(bad_input!("{id}: takes no kwargs, but `{key}` is given; remove it")),
            (Some((key, _)), _) => {
                Err(bad_input!("{id}: unknown kwarg `{key}`; it takes {}", keys.join(", ")))
            }
        }
    }

    /// Returns the value of `key`. A missing value is an error. IFEval's reference implementation would
    /// replace it by a random value, so a response could not be graded later.
    fn get(&self, key: &str) -> Result<&'a Value> {
        let value = self.object.and_then(|object| object.get(key)).filter(|value| !value.is_null());
        value.ok_or_else(|| bad_input!("{}: kwarg `{key}` is missing; give it a value", self.id))
    }

    fn refuse<T>(&self, key: &str, value: &Value, wanted: &str) -> Result<T> {
        Err(bad_input!("{}: kwarg `{key}` is {value}; give {wanted}", self.id))
    }

    /// Returns a whole number of at least `min`. `3.0` is accepted as 3.
    pub(super) fn count(&self, key: &str, min: u64) -> Result<u64> {
        let value = self.get(key)?;
        let whole = value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..=1e9).contains(x)).map(|x| x as u64);
        match whole.filter(|&n| n >= min) {
            Some(n) => Ok(n),
            None => self.refuse(key, value, &format!("a whole number from {min} to 1000000000")),
        }
    }

    pub(super) fn relation(&self, key: &str) -> Result<CountRelation> {
        match self.get(key)? {
            Value::String(name) if name == "at least" => Ok(CountRelation::AtLeast),
            Value::String(name) if name == "less than" => Ok(CountRelation::LessThan),
            value => self.refuse(key, value, "\"at least\" or \"less than\""),
        }
    }

    /// Returns a string that is not blank.
    pub(super) fn text(&self, key: &str) -> Result<&'a str> {
        match self.get(key)? {
            Value::String(text) if !text.trim().is_empty() => Ok(text),
            value => self.refuse(key, value, "a string that is not empty"),
        }
    }

    /// Returns one or more strings that are not blank.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<&'a str>> {
        let value = self.get(key)?;
        let list = value.as_array().filter(|list| !list.is_empty());
        match list.and_then(|list| list.iter().map(|v| v.as_str().filter(|s| !s.trim().is_empty())).collect())
        {
            Some(texts) => Ok(texts),
            None => self.refuse(key, value, "a list of one or more strings"),
        }
    }

    /// Returns one character. IFEval's reference implementation replaces a character outside a-z by a random
    /// letter; this function returns the character itself.
    pub(super) fn character(&self, key: &str) -> Result<char> {
        let text = self.text(key)?;
        let mut characters = text.chars().flat_map(char::to_lowercase);
        match (characters.next(), characters.next()) {
            (Some(only), None) => Ok(only),
            _ => self.refuse(key, &Value::from(text), "one character"),
        }
    }

    /// Returns the code of a detectable language.
    pub(super) fn language(&self, key: &str) -> Result<&'static str> {
        let code = self.text(key)?;
        match super::LANGUAGES.iter().find(|known| **known == code) {
            Some(known) => Ok(known),
            None => self.refuse(key, &Value::from(code), &format!("one of {}", super::LANGUAGES.join(" "))),
        }
    }
}
