//! Values as Python writes and compares them.

use crate::chat::chatml::python_number;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Maximum depth of a value: of lists in lists.
pub(super) const DEPTH_MAX: usize = 64;

pub(super) fn error(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// Returns a JSON value as the engine's. Numbers become integers or floats, as Python reads them.
///
/// # Errors
/// A number that is too large.
pub(super) fn from_json(value: &Json) -> Result<Value, Error> {
    Ok(match value {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::String(text) => Value::from(text.as_str()),
        Json::Number(number) => {
            let text = number.as_str();
            let float = || text.parse::<f64>().ok().filter(|_| text.contains(['.', 'e', 'E']));
            match (text.parse::<i64>(), text.parse::<i128>(), float()) {
                (Ok(number), ..) => Value::from(number),
                (_, Ok(number), _) => Value::from(number),
                (.., Some(number)) if number.is_finite() => Value::from(number),
                _ => return Err(error(format!("the number {text} is too large"))),
            }
        }
        Json::Array(list) => Value::from(list.iter().map(from_json).collect::<Result<Vec<Value>, Error>>()?),
        Json::Object(map) => {
            let pairs = map.iter().map(|(key, value)| Ok((key.clone(), from_json(value)?)));
            Value::from_iter(pairs.collect::<Result<Vec<(String, Value)>, Error>>()?)
        }
    })
}

/// How values are written. Bounded: it stops at a number of bytes.
pub(super) struct Writer {
    pub text: String,
    bytes_max: usize,
    /// JSON rather than Python's own form.
    json: bool,
    ascii: bool,
    sorted: bool,
    /// Separators between items, and after a key.
    separators: [String; 2],
    /// The text of one level of indentation.
    indent: Option<String>,
}

impl Writer {
    pub fn python(bytes_max: usize) -> Self {
        let (text, separators) = (String::new(), [", ".into(), ": ".into()]);
        Self { text, bytes_max, json: false, ascii: false, sorted: false, separators, indent: None }
    }

    /// Returns a writer of JSON with the arguments of `json.dumps`.
    pub fn json(bytes_max: usize, options: &Kwargs) -> Result<Self, Error> {
        let mut writer = Self { json: true, ..Self::python(bytes_max) };
        writer.ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
        writer.sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
        if let Some(indent) = options.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
            let spaces = || Some(" ".repeat(usize::try_from(indent.as_i64()?.max(0)).ok()?.min(256)));
            let text = indent.as_str().map(str::to_owned).or_else(spaces);
            writer.indent = Some(text.ok_or_else(|| error("tojson: \"indent\" must be a number"))?);
            writer.separators[0] = ",".into();
        }
        if let Some(separators) = options.get::<Option<Vec<String>>>("separators")? {
            writer.separators =
                separators.try_into().map_err(|_| error("tojson: \"separators\" must be two texts"))?;
        }
        options.assert_all_used()?;
        Ok(writer)
    }

    fn put(&mut self, text: &str) -> Result<(), Error> {
        self.text.push_str(text);
        if self.text.len() > self.bytes_max { Err(super::too_large()) } else { Ok(()) }
    }

    /// Writes a value; a text at the top without quotes, if it is no JSON.
    pub fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) if !self.json => self.put(text),
            _ if value.is_undefined() && !self.json => Ok(()),
            _ => self.item(value, 0),
        }
    }

    fn item(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(super::too_deep());
        }
        let words = if self.json { ["null", "false", "true"] } else { ["None", "False", "True"] };
        match value.kind() {
            ValueKind::None => self.put(words[0]),
            ValueKind::Bool => self.put(words[1 + usize::from(value.is_true())]),
            ValueKind::Number => self.put(&number(value, self.json)),
            ValueKind::String => {
                let text = value.as_str().unwrap_or_default();
                let quoted = if self.json { self.json_text(text) } else { repr(text) };
                self.put(&quoted)
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                let [open, close] = ["[", "]"];
                self.put(open)?;
                for (index, item) in items.iter().enumerate() {
                    self.between(index, depth)?;
                    self.item(item, depth + 1)?;
                }
                self.close(close, items.is_empty(), depth)
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.put("{")?;
                for (index, key) in keys.iter().enumerate() {
                    self.between(index, depth)?;
                    match key.as_str() {
                        None if self.json => {
                            let mut text = Writer { text: String::new(), ..Writer::python(self.bytes_max) };
                            text.json = true;
                            text.item(key, DEPTH_MAX)?;
                            self.put(&self.json_text(&text.text))?;
                        }
                        _ => self.item(key, depth + 1)?,
                    }
                    self.put(&self.separators[1].clone())?;
                    self.item(&value.get_item(key)?, depth + 1)?;
                }
                self.close("}", keys.is_empty(), depth)
            }
            kind => Err(error(format!("a value of type {kind} cannot be written"))),
        }
    }

    fn between(&mut self, index: usize, depth: usize) -> Result<(), Error> {
        if index > 0 {
            self.put(&self.separators[0].clone())?;
        }
        self.line(depth + 1)
    }

    fn close(&mut self, bracket: &str, is_empty: bool, depth: usize) -> Result<(), Error> {
        if !is_empty {
            self.line(depth)?;
        }
        self.put(bracket)
    }

    fn line(&mut self, depth: usize) -> Result<(), Error> {
        match &self.indent {
            Some(indent) => self.put(&format!("\n{}", indent.repeat(depth))),
            None => Ok(()),
        }
    }

    fn json_text(&self, text: &str) -> String {
        let quoted = Json::from(text).to_string();
        if !self.ascii {
            return quoted;
        }
        let mut units = [0; 2];
        let escape = |c: char| match c.is_ascii() {
            true => c.to_string(),
            false => c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
        };
        quoted.chars().map(escape).collect()
    }
}

/// Returns a number as Python writes it.
fn number(value: &Value, json: bool) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => match float {
            _ if float.is_nan() => if json { "NaN" } else { "nan" }.into(),
            f64::INFINITY => if json { "Infinity" } else { "inf" }.into(),
            f64::NEG_INFINITY => if json { "-Infinity" } else { "-inf" }.into(),
            _ => python_number(&format!("{float:?}")).into_owned(),
        },
        _ => value.to_string(),
    }
}

/// Returns a text between quotes, as Python's `repr`.
fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        let code = u32::from(c);
        let is_format = matches!(code, 0xad | 0x200b..=0x200f | 0x202a..=0x202e | 0x2060..=0x206f | 0xfeff)
            || matches!(code, 0xe000..=0xf8ff | 0xfff0..=0xfffb | 0xf_0000..);
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() || (c.is_whitespace() && c != ' ') || is_format => {
                out.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                });
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Returns whether two values are equal in Python, where `True == 1`.
pub(super) fn is_equal(a: &Value, b: &Value) -> bool {
    let float = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    };
    match (a.kind(), b.kind()) {
        (ValueKind::Bool, ValueKind::Number) | (ValueKind::Number, ValueKind::Bool) => float(a) == float(b),
        (x, y) if x != y => false,
        _ => a == b,
    }
}
