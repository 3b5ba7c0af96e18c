//! The canonical string of an answer for exact comparison.

use super::normalise::{replace_command, without_unit};
use crate::tasks::number::Number;

/// Returns the string that `task.answer = "exact"` compares.
///
/// As in Hendrycks et al. 2021 (MATH), spellings are unified (`\tfrac12`, `1/2`, `.5`, `\$10`, `10\%`,
/// `10\text{ units}`, `x = 10`). A decimal is read as a number, as AIME and verl do (`033`, `+7`, `1,234`,
/// `3.0`). Other values are not unified: `4, 2` differs from `2, 4`, and `2/4` from `1/2`.
pub fn canonical_text(text: &str) -> String {
    if text.len() > super::ANSWER_BYTES_MAX {
        return text.trim().to_owned();
    }
    let mut out = text.replace('\n', "").replace("\\!", "").replace("\\\\", "\\");
    for (from, to) in [("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"), ("\\left", ""), ("\\right", "")] {
        out = replace_command(&out, from, to);
    }
    for gone in ["^{\\circ}", "^\\circ", "°", "\\(", "\\)", "\\$", "$", "\\%", "%"] {
        out = out.replace(gone, "");
    }
    // A unit is at the end, after a space: `10\text{ cm}`.
    if let Some((number, unit)) = out.rsplit_once("\\text{ ")
        && !number.trim().is_empty()
        && unit.trim_end_matches(['^', '2', '3']).ends_with('}')
        && !unit.starts_with("or ")
        && !unit.starts_with("and ")
    {
        out = number.to_owned();
    }
    // In `k = 3` the answer is 3.
    if let Some((name, value)) = out.split_once('=')
        && name.trim().chars().count() <= 2
        && !value.contains('=')
    {
        out = value.to_owned();
    }
    let out = add_leading_zeros(&out);
    let out: String = add_braces(&out).chars().filter(|c| !c.is_whitespace()).collect();
    let out = decimal(&out).map_or(out, |number| number.to_string());
    match out.split_once('/') {
        _ if out == "0.5" => "\\frac{1}{2}".into(),
        Some((a, b)) if integer(a) && integer(b) => format!("\\frac{{{a}}}{{{b}}}"),
        _ => out,
    }
}

/// Returns the number of `5`, `5cm^2` and `5\,\text{cm}`.
fn decimal(text: &str) -> Option<Number> {
    let mut plain = text.to_owned();
    for gone in ["\\text", "\\mathrm", "\\,", "\\;", "\\ ", "{", "}"] {
        plain = plain.replace(gone, "");
    }
    let unit = plain.strip_suffix("^2").or(plain.strip_suffix("^3")).unwrap_or(&plain);
    let number = without_unit(unit);
    Number::parse(text).or_else(|| Number::parse(number).filter(|_| number.len() < unit.len()))
}

fn integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

/// Writes `.5` as `0.5`.
fn add_leading_zeros(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 4);
    let mut before = None;
    for c in text.chars() {
        if c == '.' && !before.is_some_and(|b: char| b.is_ascii_digit()) {
            out.push('0');
        }
        out.push(c);
        before = Some(c);
    }
    out
}

/// Adds the braces around the arguments of `\frac12` and `\sqrt3`.
fn add_braces(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let count = if rest.starts_with("\\frac") {
            2
        } else if rest.starts_with("\\sqrt") {
            1
        } else {
            out.push('\\');
            rest = &rest[1..];
            continue;
        };
        out.push_str(&rest[..5]);
        rest = &rest[5..];
        for _ in 0..count {
            rest = rest.trim_start();
            if let Some(c) = rest.chars().next().filter(|c| c.is_alphanumeric()) {
                out.push_str(&format!("{{{c}}}"));
                rest = &rest[c.len_utf8()..];
            } else if let Some(end) = closing_brace(rest) {
                // An argument may contain fractions.
                out.push_str(&format!("{{{}}}", add_braces(&rest[1..end - 1])));
                rest = &rest[end..];
            }
        }
    }
    out + rest
}

/// Returns the index after the brace that closes the brace at the start of `text`.
fn closing_brace(text: &str) -> Option<usize> {
    text.strip_prefix('{')?;
    let mut depth = 0usize;
    for (i, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}
