//! JSON in the format that Python's `json.dumps(value, ensure_ascii=False)` and chat templates write.

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};
use std::borrow::Cow;
use std::io::{self, Write};

/// Serialises `value` on one line, with a space after each comma and colon.
pub fn to_text(value: &Value) -> String {
    let mut bytes = Vec::new();
    // Writing to a vector cannot fail, and JSON is UTF-8.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut bytes, SpacedFormatter));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns `text` with the escapes of a JSON string, without the quotes around it.
pub(super) fn escape(text: &str) -> String {
    let quoted = to_text(&Value::from(text));
    quoted[1..quoted.len() - 1].to_owned()
}

struct SpacedFormatter;

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_number_str<W: ?Sized + Write>(&mut self, writer: &mut W, value: &str) -> io::Result<()> {
        writer.write_all(python_number(value).as_bytes())
    }
}

/// Returns whether two values are the same JSON, also where a client has written a number in another way.
pub fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => python_number(a.as_str()) == python_number(b.as_str()),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let has = |(key, a): (&String, &Value)| b.get(key).is_some_and(|b| is_same(a, b));
            a.len() == b.len() && a.iter().all(has)
        }
        _ => a == b,
    }
}

/// Returns a JSON number as Python writes it: an integer with its digits, another number with the shortest
/// digits that parse to it, and with an exponent if its magnitude is below 1e-4, or 1e16 or more. A number
/// whose digits an f64 does not keep is returned as it is.
pub(in super::super) fn python_number(number: &str) -> Cow<'_, str> {
    let parsed = number.parse::<f64>().ok().filter(|_| number.contains(['.', 'e', 'E']));
    let Some(value) = parsed.filter(|value| digits(number) == digits(&format!("{value:e}"))) else {
        return number.into();
    };
    let text = format!("{value:e}");
    let (shortest, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.parse::<i32>().unwrap_or_default() {
        -4..16 => format!("{value:?}").into(),
        exponent => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{shortest}e{sign}{:02}", exponent.abs()).into()
        }
    }
}

/// Returns the digits of a number without zeros at either end, which its exponent can stand for.
fn digits(number: &str) -> String {
    let mantissa = number.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    digits.trim_matches('0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Python wrote the expected strings.
    #[test]
    fn json_is_formatted_as_python_formats_it() {
        let value = json!({"a": [1, 2.0, -0.5, 1e16, 1e-5, 1.5e300, 0.0001, 123456.75], "é\u{1f}": {"\"\\\n\t": null}, "": [[], {}]});
        assert_eq!(
            to_text(&value),
            r#"{"a": [1, 2.0, -0.5, 1e+16, 1e-05, 1.5e+300, 0.0001, 123456.75], "é\u001f": {"\"\\\n\t": null}, "": [[], {}]}"#
        );
        let long = r#"{"a": 98765432109876543210987, "b": -0, "c": 0.12345678901234567890, "d": 1e400, "e": 2.50, "f": 1E2}"#;
        let kept = r#"{"a": 98765432109876543210987, "b": -0, "c": 0.12345678901234567890, "d": 1e+400, "e": 2.5, "f": 100.0}"#;
        assert_eq!(to_text(&serde_json::from_str(long).unwrap()), kept);
        assert_eq!(escape("print(\"a\")\n"), "print(\\\"a\\\")\\n");
    }
}
