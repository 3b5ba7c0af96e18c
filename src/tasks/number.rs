//! Numbers in running text: decimals, and fractions such as `1/2`, `2 1/2`, `½` and `\frac{1}{2}`.

use super::answer::latex_of;
use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, Zero};

/// A number in canonical form (`-1234.5`, or `1/3` without finite decimals): equal values have equal text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Number(String);

/// Maximum number of digits of a fraction's parts, and of its decimals. It bounds the cost.
const FRACTION_DIGITS_MAX: usize = 400;

impl Number {
    /// Parses `text` as one decimal. Surrounding white space, a currency sign and a full stop are ignored.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_end_matches('.').trim_start_matches('$').trim_end();
        let (negative, rest) = sign("", text);
        let (size, rest) = decimal(rest)?;
        rest.is_empty().then(|| Self::with_sign(negative, size))
    }

    /// Returns the last number in `text`, such as 1234 in `that makes $1,234.00 in all.`
    pub fn last_in(text: &str) -> Option<Self> {
        numbers(text).last()
    }

    /// Returns whether `text` begins with a number.
    pub fn starts(text: &str) -> bool {
        scan(text, 0).is_some()
    }

    fn with_sign(negative: bool, size: String) -> Self {
        Self(if negative && size != "0" { format!("-{size}") } else { size })
    }
}

impl From<&BigRational> for Number {
    fn from(value: &BigRational) -> Self {
        let ten = BigInt::from(10);
        let is_enough = |&count: &usize| (ten.pow(count as u32) % value.denom()).is_zero();
        let Some(count) = (0..=FRACTION_DIGITS_MAX).find(is_enough) else { return Self(value.to_string()) };
        let digits = (value.abs() * ten.pow(count as u32)).to_integer().to_string();
        let digits = format!("{digits:0>width$}", width = count + 1);
        let (whole, decimals) = digits.split_at(digits.len() - count);
        let size = if count == 0 { digits } else { format!("{whole}.{decimals}") };
        Self::with_sign(value.is_negative(), size)
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Iterates over all numbers in `text`, in their order.
pub(super) fn numbers(text: &str) -> impl Iterator<Item = Number> + '_ {
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

/// The characters that may write a minus.
pub const MINUS_SIGNS: [char; 6] = ['-', '\u{2212}', '\u{2010}', '\u{2011}', '\u{2013}', '\u{ff0d}'];

/// Separators of thousands: commas, those of LaTeX, and spaces that do not break.
const SEPARATORS: [&str; 6] = ["{,}", ",\\!", ",", "\\,", "\u{a0}", "\u{202f}"];

/// Returns whether a minus is at the start of `rest`, and the text after the sign and a currency sign. A
/// minus after a digit, a letter or a parenthesis is a subtraction.
fn sign<'a>(before: &str, rest: &'a str) -> (bool, &'a str) {
    let operand = before.ends_with(|c: char| c.is_alphanumeric() || c == ')');
    let (negative, rest) = match rest.strip_prefix(MINUS_SIGNS) {
        Some(unsigned) => (!operand, unsigned),
        None => (false, rest.strip_prefix('+').unwrap_or(rest)),
    };
    (negative, rest.strip_prefix('$').unwrap_or(rest))
}

/// Returns the number that starts at byte `start`, and the index of its end. A number has a sign, a currency
/// sign, and a decimal or a fraction or both.
fn scan(text: &str, start: usize) -> Option<(Number, usize)> {
    let (negative, rest) = sign(&text[..start], &text[start..]);
    let (size, rest) = match (fraction(rest), decimal(rest)) {
        (Some((value, rest)), _) => (Number::from(&value).0, rest),
        (None, decimal) => {
            let (whole, rest) = decimal?;
            match fraction(rest.trim_start_matches(' ')).zip(rational(&whole)) {
                Some(((part, rest), value)) if value.is_integer() => (Number::from(&(value + part)).0, rest),
                _ => (whole, rest),
            }
        }
    };
    Some((Number::with_sign(negative, size), text.len() - rest.len()))
}

/// Returns the value of the fraction at the start of `text`, and the text after it.
fn fraction(text: &str) -> Option<(BigRational, &str)> {
    let first = text.chars().next()?;
    if !first.is_ascii() && first.is_numeric() {
        return Some((fraction(latex_of(first)?)?.0, &text[first.len_utf8()..]));
    }
    let latex = ["\\frac{", "\\dfrac{", "\\tfrac{"].iter().find_map(|command| text.strip_prefix(command));
    let (bar, end) = if latex.is_some() { ("}{", "}") } else { ("/", "") };
    let (above, rest) = decimal(latex.unwrap_or(text))?;
    let (below, rest) = decimal(rest.strip_prefix(bar)?)?;
    let below = rational(&below).filter(|below| !below.is_zero())?;
    Some((rational(&above)? / below, rest.strip_prefix(end)?))
}

/// Returns the value of a canonical decimal.
fn rational(decimal: &str) -> Option<BigRational> {
    let (whole, after) = decimal.split_once('.').unwrap_or((decimal, ""));
    let digits = format!("{whole}{after}");
    let numerator = if digits.len() <= FRACTION_DIGITS_MAX { digits.parse().ok()? } else { return None };
    Some(BigRational::new(numerator, BigInt::from(10).pow(after.len() as u32)))
}

/// Returns the decimal without a sign at the start of `text`, in canonical form, and the text after it. It
/// has digits, also in groups, and decimals.
fn decimal(text: &str) -> Option<(String, &str)> {
    let first = digits_of(text);
    let (mut whole, mut rest) = (first.to_owned(), &text[first.len()..]);
    let (mut groups, mut after) = (String::new(), rest);
    while (1..=3).contains(&first.len())
        && let Some(group) = SEPARATORS.iter().find_map(|separator| after.strip_prefix(separator))
        && let digits = digits_of(group)
        && matches!(digits.len(), 2 | 3)
    {
        groups.push_str(digits);
        after = &group[digits.len()..];
        // Two digits are a group only if a group of three follows: `1,23,456` in India.
        if digits.len() == 3 {
            whole.push_str(&std::mem::take(&mut groups));
            rest = after;
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
    Some((canonical, rest))
}

/// Returns the decimal digits at the start of `text`.
pub fn digits_of(text: &str) -> &str {
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
