//! Decimal numbers in running text.

/// A decimal number in canonical form (`-1234.5`): equal values have equal text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Number(String);

impl Number {
    /// Parses `text` as one number. Surrounding white space, a currency sign and a full stop are ignored.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_end_matches('.').trim_start_matches('$').trim_end();
        let (number, end) = scan(text, 0)?;
        (end == text.len()).then_some(number)
    }

    /// Returns the last number in `text`, such as 1234 in `that makes $1,234.00 in all.`
    pub fn last_in(text: &str) -> Option<Self> {
        numbers(text).last()
    }

    /// Returns the first number in `text`.
    pub fn first_in(text: &str) -> Option<Self> {
        numbers(text).next()
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Iterates over all numbers in `text`, in their order.
fn numbers(text: &str) -> impl Iterator<Item = Number> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < text.len() {
            if text.is_char_boundary(at)
                && let Some((number, end)) = scan(text, at)
            {
                at = end;
                return Some(number);
            }
            at += 1;
        }
        None
    })
}

/// Separators of thousands: commas, those of LaTeX, and spaces that do not break.
const SEPARATORS: [&str; 6] = ["{,}", ",\\!", ",", "\\,", "\u{a0}", "\u{202f}"];

/// Returns the number that starts at byte `start`, and the index of its end. A number has a sign, a currency
/// sign, digits with thousands commas, and decimals. A minus after a digit, a letter or a parenthesis is a
/// subtraction.
fn scan(text: &str, start: usize) -> Option<(Number, usize)> {
    let (before, mut rest) = (&text[..start], &text[start..]);
    let mut negative = false;
    if let Some(unsigned) = rest.strip_prefix(['-', '\u{2212}', '\u{2011}', '\u{2013}']) {
        let operand = before.ends_with(|c: char| c.is_alphanumeric() || c == ')');
        (negative, rest) = (!operand, unsigned);
    }
    rest = rest.strip_prefix('$').unwrap_or(rest);
    let mut whole = String::new();
    loop {
        let digits = digits_of(rest);
        whole.push_str(digits);
        rest = &rest[digits.len()..];
        // A separator belongs to the number if one to three digits precede it and exactly three follow it.
        match SEPARATORS.iter().find_map(|separator| rest.strip_prefix(separator)) {
            Some(group) if !whole.is_empty() && digits.len() <= 3 && digits_of(group).len() == 3 => {
                rest = group
            }
            _ => break,
        }
    }
    let decimals = rest.strip_prefix('.').map(digits_of).filter(|d| !d.is_empty()).unwrap_or("");
    if whole.is_empty() && decimals.is_empty() {
        return None;
    }
    if !decimals.is_empty() {
        rest = &rest[1 + decimals.len()..];
    }
    let (whole, decimals) = (whole.trim_start_matches('0'), decimals.trim_end_matches('0'));
    let mut canonical = String::from(if whole.is_empty() { "0" } else { whole });
    if !decimals.is_empty() {
        canonical = format!("{canonical}.{decimals}");
    }
    if negative && canonical != "0" {
        canonical.insert(0, '-');
    }
    Some((Number(canonical), text.len() - rest.len()))
}

fn digits_of(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(text: &str) -> Option<String> {
        Number::last_in(text).map(|n| n.to_string())
    }

    #[test]
    fn the_last_number_is_found_as_written_by_people() {
        for (text, want) in [
            ("She has 3 apples, then 1,234 in all.", "1234"),
            ("$1,000.50", "1000.5"),
            ("-$5", "-5"),
            ("The change is -7.0 degrees", "-7"),
            ("10-3", "3"),
            ("x = 10 - 3", "3"),
            ("= -3", "-3"),
            ("1, 2, 3", "3"),
            ("12,34", "34"),
            ("1,234,567", "1234567"),
            ("1234,567", "567"),
            ("0012", "12"),
            (".50 dollars", "0.5"),
            ("-0.00", "0"),
            ("14{,}916", "14916"),
            ("14\\,916", "14916"),
            ("14,\\!916", "14916"),
            ("14\u{202f}916", "14916"),
            ("14\u{a0}916", "14916"),
            ("\u{2011}5", "-5"),
            ("5\u{2013}7", "7"),
            ("\u{2212}4", "-4"),
            ("18.", "18"),
            ("25% of it", "25"),
            ("3.14.15", "0.15"),
        ] {
            assert_eq!(last(text).as_deref(), Some(want), "{text}");
        }
        for text in ["", "none", ".", "-", "$", ",", "é"] {
            assert_eq!(last(text), None, "{text}");
        }
    }

    #[test]
    fn parse_wants_nothing_but_the_number() {
        let parse = |text| Number::parse(text).map(|n| n.to_string());
        assert_eq!(parse(" $1,200. ").as_deref(), Some("1200"));
        assert_eq!(parse("-3").as_deref(), Some("-3"));
        assert_eq!(parse("3 apples"), None);
        assert_eq!(parse("1,2"), None);
    }
}
