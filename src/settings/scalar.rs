//! Scalar values of a key: reading, validation, writing and description of each type.

use super::{Choice, Entry, Field, KeyDoc, Limits, ParsedKey, Reader, closest_word, from};
use serde_json::{Value as Json, json};
use std::path::PathBuf;
use toml::Value;
use toml::de::DeValue;

/// A parsed value. For `--set` also its text, which may be a string without quotes.
pub(crate) struct ParsedValue<'a> {
    pub value: &'a DeValue<'a>,
    pub unquoted: Option<&'a str>,
    /// Whether the value is another trainer's word, whose meaning is known. Then no similar word is proposed.
    pub is_foreign: bool,
}

impl ParsedValue<'_> {
    /// Returns the value as a word, in quotes or not.
    fn word(&self) -> Option<&str> {
        self.value.as_str().or(self.unquoted)
    }
}

/// A type of a key's value.
pub(crate) trait Scalar: Sized {
    /// Returns the type and range in words, to follow "give ".
    fn kind(limits: Option<Limits>) -> String;

    /// Reads a value.
    ///
    /// # Errors
    /// Describes the mistake and the remedy.
    fn parse(value: &ParsedValue, limits: Option<Limits>) -> Result<Self, String>;

    /// Returns the value as TOML; reading it gives the same value.
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
            is_foreign: false,
        };
        let name = written.path.rsplit('.').next().unwrap_or_default();
        let ours = found.word().and_then(|word| (reader.foreign)(name, Some(word)));
        found.is_foreign = ours.is_some();
        match T::parse(&found, limits) {
            Ok(value) => {
                *self = value;
                reader.accept(written);
            }
            Err(what) => {
                let ours = ours.map(|ours| format!("; {ours}")).unwrap_or_default();
                reader.refuse(written, what + &ours);
            }
        }
    }

    fn list(&self, path: String, note: KeyDoc, entries: &mut Vec<Entry>) {
        entries.push(Entry::Key {
            path,
            doc: note.doc.trim(),
            kind: T::kind(note.limits),
            schema: T::schema(note.limits),
            value: note.present.then(|| self.to_toml()),
            meanings: T::meanings(),
        });
    }
}

impl<T: Choice> Scalar for T {
    fn kind(_limits: Option<Limits>) -> String {
        alternatives(&words::<T>())
    }

    fn parse(found: &ParsedValue, _limits: Option<Limits>) -> Result<Self, String> {
        let index = word_index(found, &words::<T>())?;
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

/// Returns a number's type with its limits as JSON Schema.
fn with_limits(kind: &str, limits: Limits) -> Json {
    let mut schema = json!({ "type": kind });
    schema.as_object_mut().into_iter().for_each(|schema| schema.extend(limits.to_schema()));
    schema
}

fn words<T: Choice>() -> Vec<&'static str> {
    T::all().into_iter().map(T::name).collect()
}

impl Scalar for bool {
    fn kind(_limits: Option<Limits>) -> String {
        "true or false".to_owned()
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        found.value.as_bool().ok_or_else(|| wrong_type::<Self>(found, limits))
    }

    fn schema(_limits: Option<Limits>) -> Json {
        json!({ "type": "boolean" })
    }

    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl Scalar for u64 {
    fn kind(limits: Option<Limits>) -> String {
        format!("an integer, {}", limits.unwrap_or(from(0.0)))
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let integer = found.value.as_integer().ok_or_else(|| wrong_type::<Self>(found, limits))?;
        // TOML integers are signed, and the resolved recipe must be readable again.
        let signed = i64::from_str_radix(integer.as_str(), integer.radix()).map_err(|_| {
            format!("{integer} does not fit 64 bits with a sign; give {}", Self::kind(limits))
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
    fn kind(limits: Option<Limits>) -> String {
        u64::kind(limits)
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let integer = u64::parse(found, limits)?;
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
    fn kind(limits: Option<Limits>) -> String {
        match limits {
            Some(limits) => format!("a number, {limits}"),
            None => "a number".to_owned(),
        }
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let number: f64 = match found.value {
            DeValue::Float(number) => number.as_str().parse().ok(),
            DeValue::Integer(integer) => {
                i64::from_str_radix(integer.as_str(), integer.radix()).ok().map(|integer| integer as f64)
            }
            _ => None,
        }
        .ok_or_else(|| wrong_type::<Self>(found, limits))?;
        let allowed = number.is_finite() && limits.is_none_or(|limits| limits.contains(number));
        if allowed { Ok(number) } else { Err(out_of_range::<Self>(&number, limits)) }
    }

    fn schema(limits: Option<Limits>) -> Json {
        limits.map_or(json!({ "type": "number" }), |limits| with_limits("number", limits))
    }

    fn to_toml(&self) -> String {
        // `Debug` always has a point or an exponent, as TOML requires; limits exclude values that are not
        // finite.
        format!("{self:?}")
    }
}

impl Scalar for String {
    fn kind(_limits: Option<Limits>) -> String {
        "a string".to_owned()
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        match (found.value, found.unquoted) {
            (DeValue::String(text), _) => Ok(text.to_string()),
            (_, Some(text)) => Ok(text.to_owned()),
            (value, None) => Err(match show(value) {
                ValueExcerpt::Plain(text) => format!("found {text} without quotes; write \"{text}\""),
                ValueExcerpt::Other(_) => wrong_type::<Self>(found, limits),
            }),
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
    fn kind(_limits: Option<Limits>) -> String {
        "a path".to_owned()
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let text = String::parse(found, limits)?;
        if text.is_empty() {
            return Err("the path is empty; name a file or folder, or leave the key out".to_owned());
        }
        absolute(&text)
    }

    fn schema(limits: Option<Limits>) -> Json {
        String::schema(limits)
    }

    fn to_toml(&self) -> String {
        // A path in a recipe is UTF-8: `absolute` refuses others.
        Value::String(self.to_string_lossy().into_owned()).to_string()
    }
}

/// Resolves the path against the working directory.
fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = std::path::absolute(text)
        .map_err(|e| format!("cannot make the path {text:?} absolute: {e}; give an absolute path"))?;
    match path.to_str() {
        Some(_) => Ok(path),
        None => {
            Err("the working directory's name is not valid UTF-8; run from a folder whose name is".to_owned())
        }
    }
}

impl<T: Scalar> Scalar for Vec<T> {
    fn kind(limits: Option<Limits>) -> String {
        format!("an array, each element {}", T::kind(limits))
    }

    fn parse(found: &ParsedValue, limits: Option<Limits>) -> Result<Self, String> {
        let elements = found.value.as_array().ok_or_else(|| wrong_type::<Self>(found, limits))?;
        let read = |element: &DeValue| {
            T::parse(&ParsedValue { value: element, unquoted: None, is_foreign: false }, limits)
        };
        elements
            .iter()
            .enumerate()
            .map(|(i, element)| read(element.get_ref()).map_err(|what| format!("element {}: {what}", i + 1)))
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

/// Returns the index of the written word in `words`.
pub(crate) fn word_index(found: &ParsedValue, words: &[&str]) -> Result<usize, String> {
    let give = alternatives(words);
    let text = match (found.value, found.unquoted) {
        (DeValue::String(text), _) => text.as_ref(),
        (_, Some(text)) => text,
        (value, None) => return Err(format!("found {}; give {give}", show(value))),
    };
    words.iter().position(|word| *word == text).ok_or_else(|| {
        match closest_word(text, words.iter().copied()).filter(|_| !found.is_foreign) {
            Some(word) => format!("no such value {text:?}, did you mean \"{word}\"? Give {give}"),
            None => format!("no such value {text:?}; give {give}"),
        }
    })
}

/// `"a", "b" or "c"`.
pub(crate) fn alternatives(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

fn wrong_type<T: Scalar>(found: &ParsedValue, limits: Option<Limits>) -> String {
    format!("found {}; give {}", show(found.value), T::kind(limits))
}

fn out_of_range<T: Scalar>(number: &dyn std::fmt::Display, limits: Option<Limits>) -> String {
    format!("{number} is out of range; give {}", T::kind(limits))
}

/// A value in a message: a simple one as written, another one by its type.
enum ValueExcerpt {
    Plain(String),
    Other(String),
}

fn show(value: &DeValue) -> ValueExcerpt {
    match value {
        DeValue::Integer(integer) => ValueExcerpt::Plain(integer.to_string()),
        DeValue::Float(number) => ValueExcerpt::Plain(number.to_string()),
        DeValue::Boolean(flag) => ValueExcerpt::Plain(flag.to_string()),
        DeValue::Datetime(date) => ValueExcerpt::Plain(date.to_string()),
        DeValue::String(text) => ValueExcerpt::Other(format!("the string {text:?}")),
        DeValue::Array(_) => ValueExcerpt::Other("an array".to_owned()),
        DeValue::Table(_) => ValueExcerpt::Other("a table".to_owned()),
    }
}

impl std::fmt::Display for ValueExcerpt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ValueExcerpt::Plain(text) | ValueExcerpt::Other(text)) = self;
        f.write_str(text)
    }
}
