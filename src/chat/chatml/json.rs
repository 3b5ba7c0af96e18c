//! JSON in the format that Python's `json.dumps(value, ensure_ascii=False)` and chat templates write.

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};
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

    /// Writes `value` with the shortest digits that parse to it. A magnitude below 1e-4, or of 1e16 or more,
    /// is written with an exponent.
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or_default();
        if (-4..16).contains(&exponent) {
            return write!(writer, "{value:?}");
        }
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(writer, "{digits}e{sign}{:02}", exponent.abs())
    }
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
        assert_eq!(escape("print(\"a\")\n"), "print(\\\"a\\\")\\n");
    }
}
