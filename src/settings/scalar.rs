//! Scalar values of a key: how each type is parsed, validated, written and described.

use super::{Choice, Entry, Field, KeyDoc, Limits, ParsedKey, Reader, closest_word, from};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use toml::Value;
use toml::de::{DeString, DeValue};

/// A parsed value. For `--set` it also has the text, which may be a string without quotes.
pub(crate) struct ParsedValue<'a> {
    pub value: &'a DeValue<'a>,
    pub unquoted: Option<&'a str>,
    /// Whether the value is a known word of another trainer. Then no similar word is proposed.
    pub is_other_trainers_word: bool,
}

impl ParsedValue<'_> {
    /// Returns the value as a word. The word may be in quotes or not.
    fn word(&self) -> Option<&str> {
        self.value.as_str().or(self.unquoted)
    }
}

/// A type of a key's value.
pub(crate) trait Scalar: Sized {
    /// Returns the type and range in words that can follow "give ".
    fn describe_type(limits: Option<Limits>) -> String;

    /// Reads a value.
    ///
    /// # Errors
    /// Describes the mistake and the remedy.
    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String>;

    /// Returns the value as TOML. The text parses to the same value.
    fn to_toml(&self) -> String;

    /// Returns the type and range as JSON Schema.
    fn schema(limits: Option<Limits>) -> Json;

    /// Returns the allowed words, each with its meaning.
    fn meanings() -> Vec<(&'static str, &'static str)> {
        Vec::new()
    }
}

impl<T: Scalar> Field for T {
    fn read(&mut self, limits: Option<Limits>, written: &ParsedKey, reader: &mut Reader) {
        let mut found = ParsedValue {
            value: written.value.get_ref(),
            unquoted: reader.unquoted_text(written.value.span()),
            is_other_trainers_word: false,
        };
        let name = written.path.rsplit('.').next().unwrap_or_default();
        let our_name = found.word().and_then(|word| (reader.other_trainer_key)(name, Some(word)));
        found.is_other_trainers_word = our_name.is_some();
        match T::parse(&found, limits) {
            Ok(value) => {
                *self = value;
                reader.accept(written);
            }
            Err(message) => {
                let our_name = our_name.map(|our_name| format!("; {our_name}")).unwrap_or_default();
                reader.refuse(written, message + &our_name);
            }
        }
    }

    fn append_entries(&self, path: String, key_doc: KeyDoc, entries: &mut Vec<Entry>) {
        entries.push(Entry::Key {
            path,
            doc: key_doc.doc.trim(),
            kind: T::describe_type(key_doc.limits),
            schema: T::schema(key_doc.limits),
            value: key_doc.present.then(|| self.to_toml()),
            meanings: T::meanings(),
        });
    }
}

impl<T: Choice> Scalar for T {
    fn describe_type(_limits: Option<Limits>) -> String {
        alternatives(&words::<T>())
    }

    fn parse(value: &ParsedValue, _limits: Option<Limits>) -> Result<Self, String> {
        let index = word_index(value, &words::<T>())?;
        Ok(T::all()[index])
    }

    fn schema(_limits: Option<Limits>) -> Json {
        json!({ "enum": words::<T>() })
    }

    fn to_toml(&self) -> String {
        format!("\"{}\"", self.name())
    }

    fn meanings() -> Vec<(&'static str, &'static str)> {
        T::all().into_iter().map(|value| (value.name(), value.meaning())).collect()
    }
}

/// Returns the JSON Schema of a number: its type and its limits.
fn with_limits(type_name: &str, limits: Limits) -> Json {
    let mut schema = json!({ "type": type_name });
    schema.as_object_mut().into_iter().for_each(|schema| schema.extend(limits.to_schema()));
    schema
}

fn words<T: Choice>() -> Vec<&'static str> {
    T::all().into_iter().map(T::name).collect()
}

impl Scalar for bool {
    fn describe_type(_limits: Option<Limits>) -> String {
        "true or false".to_owned()
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        value.value.as_bool().ok_or_else(|| wrong_type::<Self>(value, limits))
    }

    fn schema(_limits: Option<Limits>) -> Json {
        json!({ "type": "boolean" })
    }

    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl Scalar for u64 {
    fn describe_type(limits: Option<Limits>) -> String {
        format!("an integer, {}", limits.unwrap_or(from(0.0)))
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let integer = value.value.as_integer().ok_or_else(|| wrong_type::<Self>(value, limits))?;
        // TOML integers are signed, and the resolved recipe must be readable again.
        let signed = i64::from_str_radix(integer.as_str(), integer.radix()).map_err(|_| {
            format!("{integer} does not fit in a signed 64-bit integer; give {}", Self::describe_type(limits))
        })?;
        u64::try_from(signed)
            .ok()
            .filter(|&number| limits.is_none_or(|limits| limits.contains(number as f64)))
            .ok_or_else(|| out_of_range::<Self>(integer, limits))
    }

    fn schema(limits: Option<Limits>) -> Json {
        with_limits("integer", limits.unwrap_or(from(0.0)))
    }

    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl Scalar for usize {
    fn describe_type(limits: Option<Limits>) -> String {
        u64::describe_type(limits)
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let integer = u64::parse(value, limits)?;
        usize::try_from(integer).map_err(|_| out_of_range::<Self>(&integer, limits))
    }

    fn schema(limits: Option<Limits>) -> Json {
        u64::schema(limits)
    }

    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl Scalar for f64 {
    fn describe_type(limits: Option<Limits>) -> String {
        if let Some(limits) = limits { format!("a number, {limits}") } else { "a number".to_owned() }
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let number: f64 = match value.value {
            DeValue::Float(number) => number.as_str().parse().ok(),
            DeValue::Integer(integer) => {
                i64::from_str_radix(integer.as_str(), integer.radix()).ok().map(|integer| integer as f64)
            }
            _ => None,
        }
        .ok_or_else(|| wrong_type::<Self>(value, limits))?;
        let allowed = number.is_finite() && limits.is_none_or(|limits| limits.contains(number));
        if allowed { Ok(number) } else { Err(out_of_range::<Self>(&number, limits)) }
    }

    fn schema(limits: Option<Limits>) -> Json {
        limits.map_or(json!({ "type": "number" }), |limits| with_limits("number", limits))
    }

    fn to_toml(&self) -> String {
        // `Debug` always writes a decimal point or an exponent, as TOML requires. Limits exclude infinity and
        // NaN.
        format!("{self:?}")
    }
}

impl Scalar for String {
    fn describe_type(_limits: Option<Limits>) -> String {
        "a string".to_owned()
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        match (value.word(), value.value) {
            (Some(text), _) => Ok(text.to_owned()),
            (None, DeValue::Array(_) | DeValue::Table(_)) => Err(wrong_type::<Self>(value, limits)),
            (None, other) => Err(format!("found {0} without quotes; write \"{0}\"", show(other))),
        }
    }

    fn schema(_limits: Option<Limits>) -> Json {
        json!({ "type": "string" })
    }

    fn to_toml(&self) -> String {
        Value::String(self.clone()).to_string()
    }
}

impl Scalar for PathBuf {
    fn describe_type(_limits: Option<Limits>) -> String {
        "a path".to_owned()
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let text = String::parse(value, limits)?;
        if text.is_empty() {
            return Err("the path is empty; name a file or folder, or remove the key".to_owned());
        }
        absolute(&text)
    }

    fn schema(limits: Option<Limits>) -> Json {
        String::schema(limits)
    }

    fn to_toml(&self) -> String {
        // A path in a recipe is UTF-8, because `absolute` rejects other paths.
        Value::String(self.to_string_lossy().into_owned()).to_string()
    }
}

/// Makes the path absolute, relative to the working directory.
fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = std::path::absolute(text)
        .map_err(|e| format!("cannot make the path {text:?} absolute: {e}; give an absolute path"))?;
    match path.to_str() {
        Some(_) => Ok(path),
        None => {
            Err("the path of the working directory is not valid UTF-8; run from another folder".to_owned())
        }
    }
}

impl<T: Scalar> Scalar for Vec<T> {
    fn describe_type(limits: Option<Limits>) -> String {
        format!("an array, each element {}", T::describe_type(limits))
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let elements = value.value.as_array().ok_or_else(|| wrong_type::<Self>(value, limits))?;
        let read = |element: &DeValue| {
            T::parse(&ParsedValue { value: element, unquoted: None, is_other_trainers_word: false }, limits)
        };
        elements
            .iter()
            .enumerate()
            .map(|(i, element)| {
                read(element.get_ref()).map_err(|message| format!("element {}: {message}", i + 1))
            })
            .collect()
    }

    fn schema(limits: Option<Limits>) -> Json {
        json!({ "type": "array", "items": T::schema(limits) })
    }

    fn to_toml(&self) -> String {
        let elements: Vec<String> = self.iter().map(Scalar::to_toml).collect();
        format!("[{}]", elements.join(", "))
    }
}

impl<T: Scalar> Scalar for BTreeMap<String, T> {
    fn describe_type(limits: Option<Limits>) -> String {
        format!("a table of names, each {}", T::describe_type(limits))
    }

    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let values = value.value.as_table().ok_or_else(|| wrong_type::<Self>(value, limits))?;
        let read = |(name, value): (&toml::Spanned<DeString>, &toml::Spanned<DeValue>)| {
            let value = ParsedValue { value: value.get_ref(), unquoted: None, is_other_trainers_word: false };
            let parsed =
                T::parse(&value, limits).map_err(|message| format!("{}: {message}", name.get_ref()))?;
            Ok((name.get_ref().to_string(), parsed))
        };
        values.iter().map(read).collect()
    }

    fn schema(limits: Option<Limits>) -> Json {
        json!({ "type": "object", "additionalProperties": T::schema(limits) })
    }

    fn to_toml(&self) -> String {
        let values: Vec<String> = self
            .iter()
            .map(|(name, value)| format!("{} = {}", Value::String(name.clone()), value.to_toml()))
            .collect();
        if values.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", values.join(", ")) }
    }
}

/// Returns the index of the parsed word in `words`.
pub(crate) fn word_index(value: &ParsedValue, words: &[&str]) -> Result<usize, String> {
    let give = alternatives(words);
    let text = value.word().ok_or_else(|| format!("found {}; give {give}", show(value.value)))?;
    words.iter().position(|word| *word == text).ok_or_else(|| {
        match closest_word(text, words.iter().copied()).filter(|_| !value.is_other_trainers_word) {
            Some(word) => format!("no such value {text:?}, did you mean \"{word}\"? Give {give}"),
            None => format!("no such value {text:?}; give {give}"),
        }
    })
}

/// Returns `"a", "b" or "c"`.
pub(crate) fn alternatives(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

fn wrong_type<T: Scalar>(value: &ParsedValue, limits: Option<Limits>) -> String {
    format!("found {}; give {}", show(value.value), T::describe_type(limits))
}

fn out_of_range<T: Scalar>(number: &dyn std::fmt::Display, limits: Option<Limits>) -> String {
    format!("{number} is out of range; give {}", T::describe_type(limits))
}

/// Returns a value as it appears in a message: a number, a flag or a date as written, others by their type.
fn show(value: &DeValue) -> String {
    match value {
        DeValue::Integer(integer) => integer.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(date) => date.to_string(),
        DeValue::String(text) => format!("the string {text:?}"),
        DeValue::Array(_) => "an array".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}
