//! Collects a metric over the parts of a step and reduces it to one value.

use super::Metrics;
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Reduction {
    /// Σ weight·value and Σ weight.
    Mean {
        total: f64,
        weight: f64,
    },
    /// The sums over all values of 1, the value and its square.
    Deviation([f64; 3]),
    Sum(f64),
    Max(f64),
    Min(f64),
}

impl Reduction {
    /// Merges `other` into this value. Returns false if the two have different reductions.
    fn merge(&mut self, other: Reduction) -> bool {
        match (&mut *self, other) {
            (Reduction::Mean { total, weight }, Reduction::Mean { total: t, weight: w }) => {
                *total += t;
                *weight += w;
            }
            (Reduction::Deviation(a), Reduction::Deviation(b)) => {
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            }
            (Reduction::Sum(a), Reduction::Sum(b)) => *a += b,
            (Reduction::Max(a), Reduction::Max(b)) => *a = if b > *a || b.is_nan() { b } else { *a },
            (Reduction::Min(a), Reduction::Min(b)) => *a = if b < *a || b.is_nan() { b } else { *a },
            _ => return false,
        }
        true
    }

    fn value(self) -> f64 {
        match self {
            Reduction::Mean { total, weight } => total / weight,
            Reduction::Deviation([count, total, squares]) => {
                let squares = squares - total * total / count;
                // Rounding may make it negative. NaN is kept.
                let squares = if squares < 0.0 { 0.0 } else { squares };
                squares.sqrt() / (count - 1.0).max(1.0).sqrt()
            }
            Reduction::Sum(x) | Reduction::Max(x) | Reduction::Min(x) => x,
        }
    }
}

/// Collects metrics. Each name has one reduction; [`Accumulator::finish`] fails if a name has two. NaN is
/// kept by every reduction, including maximum and minimum. The mean over zero weight is NaN.
#[derive(Debug, Clone, Default)]
pub struct Accumulator {
    reductions: BTreeMap<String, Reduction>,
    /// Names with two reductions. They are reported only by [`Self::finish`], so that collecting cannot fail.
    conflicting: BTreeSet<String>,
}

impl Accumulator {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `value` to the metric `name`, which is the mean Σ weight·value / Σ weight. `weight` is the number
    /// of tokens or sequences that `value` was computed from.
    pub fn mean(&mut self, name: &str, value: f64, weight: f64) {
        self.merge_value(name, Reduction::Mean { total: value * weight, weight });
    }

    /// Adds `value` to the metric `name`, which is the sample standard deviation; 0 of one value.
    pub fn deviation(&mut self, name: &str, value: f64) {
        self.merge_value(name, Reduction::Deviation([1.0, value, value * value]));
    }

    pub fn sum(&mut self, name: &str, value: f64) {
        self.merge_value(name, Reduction::Sum(value));
    }

    pub fn max(&mut self, name: &str, value: f64) {
        self.merge_value(name, Reduction::Max(value));
    }

    pub fn min(&mut self, name: &str, value: f64) {
        self.merge_value(name, Reduction::Min(value));
    }

    /// Returns the reduced values.
    ///
    /// # Errors
    /// When a name has two reductions, because the value is then undefined.
    pub fn finish(self) -> Result<Metrics> {
        let names: Vec<&str> = self.conflicting.iter().map(String::as_str).collect();
        ensure!(names.is_empty(), "metrics with two reductions: {}", names.join(", "));
        Ok(self.reductions.into_iter().map(|(name, reduction)| (name, reduction.value())).collect())
    }

    fn merge_value(&mut self, name: &str, reduction: Reduction) {
        let is_merged = match self.reductions.get_mut(name) {
            Some(existing) => existing.merge(reduction),
            None => self.reductions.insert(name.to_owned(), reduction).is_none(),
        };
        if !is_merged {
            self.conflicting.insert(name.to_owned());
        }
    }
}
