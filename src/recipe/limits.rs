//! The range of a number in a recipe.

use std::ops::Bound;

/// An interval of allowed numbers: `from(0).to(1)`, `above(0)`, `from(0).below(1)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub low: Bound<f64>,
    pub high: Bound<f64>,
}

/// Numbers of at least `low`.
pub const fn from(low: f64) -> Limits {
    Limits { low: Bound::Included(low), high: Bound::Unbounded }
}

/// Numbers greater than `low`.
pub const fn above(low: f64) -> Limits {
    Limits { low: Bound::Excluded(low), high: Bound::Unbounded }
}

impl Limits {
    /// ... and of at most `high`.
    pub const fn to(self, high: f64) -> Limits {
        Limits { high: Bound::Included(high), ..self }
    }

    /// ... and less than `high`.
    pub const fn below(self, high: f64) -> Limits {
        Limits { high: Bound::Excluded(high), ..self }
    }
}
