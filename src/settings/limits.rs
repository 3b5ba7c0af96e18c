//! The range of a number in a recipe.

use std::fmt;
use std::ops::Bound;

/// The allowed range of a number, written as `from(0.0).to(1.0)`, `above(0.0)` or `from(0.0).below(1.0)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limits {
    low: Bound<f64>,
    high: Bound<f64>,
}

/// Allows numbers of at least `low`.
pub(crate) const fn from(low: f64) -> Limits {
    Limits { low: Bound::Included(low), high: Bound::Unbounded }
}

/// Allows numbers greater than `low`.
pub(crate) const fn above(low: f64) -> Limits {
    Limits { low: Bound::Excluded(low), high: Bound::Unbounded }
}

impl Limits {
    /// Adds the inclusive upper bound `high`.
    pub const fn to(self, high: f64) -> Limits {
        Limits { high: Bound::Included(high), ..self }
    }

    /// Adds the exclusive upper bound `high`.
    pub const fn below(self, high: f64) -> Limits {
        Limits { high: Bound::Excluded(high), ..self }
    }

    /// Returns the range as keywords of JSON Schema.
    pub fn to_schema(self) -> serde_json::Map<String, serde_json::Value> {
        let bound = |inclusive: &str, exclusive: &str, bound: Bound<f64>| match bound {
            Bound::Included(number) => Some((inclusive.to_owned(), number.into())),
            Bound::Excluded(number) => Some((exclusive.to_owned(), number.into())),
            Bound::Unbounded => None,
        };
        let low = bound("minimum", "exclusiveMinimum", self.low);
        low.into_iter().chain(bound("maximum", "exclusiveMaximum", self.high)).collect()
    }

    /// Returns whether `number` is allowed. NaN is never allowed.
    pub fn contains(&self, number: f64) -> bool {
        use std::ops::RangeBounds;
        (self.low, self.high).contains(&number)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.low.map(format_number), self.high.map(format_number)) {
            (Bound::Included(low), Bound::Included(high)) => write!(f, "{low} to {high}"),
            (Bound::Included(low), Bound::Unbounded) => write!(f, "{low} or more"),
            (Bound::Included(low), Bound::Excluded(high)) => write!(f, "{low} or more and below {high}"),
            (Bound::Excluded(low), Bound::Included(high)) => write!(f, "above {low} and at most {high}"),
            (Bound::Excluded(low), Bound::Excluded(high)) => write!(f, "above {low} and below {high}"),
            (Bound::Excluded(low), Bound::Unbounded) => write!(f, "above {low}"),
            (Bound::Unbounded, _) => write!(f, "any"),
        }
    }
}

/// Formats whole numbers without a decimal point, and small numbers with an exponent.
fn format_number(number: f64) -> String {
    if number.fract() == 0.0 { number.to_string() } else { format!("{number:?}") }
}
