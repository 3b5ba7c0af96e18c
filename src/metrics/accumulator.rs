//! Collects a metric over the parts of a step and reduces it to one value.

use super::Metrics;
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Cell {
    /// Σ weight·value and Σ weight.
    Mean {
        total: f64,
        weight: f64,
    },
    Sum(f64),
    Max(f64),
    Min(f64),
}

impl Cell {
    /// Merges `other` into this value. Returns false if the two have different reductions.
    fn merge(&mut self, other: Cell) -> bool {
        match (&mut *self, other) {
            (Cell::Mean { total, weight }, Cell::Mean { total: t, weight: w }) => {
                *total += t;
                *weight += w;
            }
            (Cell::Sum(a), Cell::Sum(b)) => *a += b,
            (Cell::Max(a), Cell::Max(b)) => *a = if b > *a || b.is_nan() { b } else { *a },
            (Cell::Min(a), Cell::Min(b)) => *a = if b < *a || b.is_nan() { b } else { *a },
            _ => return false,
        }
        true
    }

    fn value(self) -> f64 {
        match self {
            Cell::Mean { total, weight } => total / weight,
            Cell::Sum(x) | Cell::Max(x) | Cell::Min(x) => x,
        }
    }
}

/// Collects metrics. Each name has one reduction; [`Accumulator::finish`] fails if a name has two. NaN is
/// kept by every reduction, including maximum and minimum. The mean over zero weight is NaN.
#[derive(Debug, Clone, Default)]
pub struct Accumulator {
    cells: BTreeMap<String, Cell>,
    /// Names with two reductions. They are reported only by [`Self::finish`], so that collecting cannot fail.
    conflicting: BTreeSet<String>,
}

impl Accumulator {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds to the mean Σ weight·value / Σ weight. `weight` is the number of tokens or sequences that `value`
    /// was computed from.
    pub fn mean(&mut self, name: &str, value: f64, weight: f64) {
        self.merge_value(name, Cell::Mean { total: value * weight, weight });
    }

    pub fn sum(&mut self, name: &str, value: f64) {
        self.merge_value(name, Cell::Sum(value));
    }

    pub fn max(&mut self, name: &str, value: f64) {
        self.merge_value(name, Cell::Max(value));
    }

    pub fn min(&mut self, name: &str, value: f64) {
        self.merge_value(name, Cell::Min(value));
    }

    /// Returns the reduced values.
    ///
    /// # Errors
    /// When a name has two reductions, because the value is then undefined.
    pub fn finish(self) -> Result<Metrics> {
        let names: Vec<&str> = self.conflicting.iter().map(String::as_str).collect();
        ensure!(names.is_empty(), "metrics with two reductions: {}", names.join(", "));
        Ok(self.cells.into_iter().map(|(name, cell)| (name, cell.value())).collect())
    }

    fn merge_value(&mut self, name: &str, cell: Cell) {
        let joined = match self.cells.get_mut(name) {
            Some(held) => held.merge(cell),
            None => self.cells.insert(name.to_owned(), cell).is_none(),
        };
        if !joined {
            self.conflicting.insert(name.to_owned());
        }
    }
}
