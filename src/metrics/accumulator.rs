//! Gathers a metric over the pieces of a step and reduces it to one value.

use super::Metrics;
use std::collections::BTreeMap;

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
    fn join(&mut self, other: Cell) {
        match (&mut *self, other) {
            (Cell::Mean { total, weight }, Cell::Mean { total: t, weight: w }) => {
                *total += t;
                *weight += w;
            }
            (Cell::Sum(a), Cell::Sum(b)) => *a += b,
            (Cell::Max(a), Cell::Max(b)) => *a = if b > *a || b.is_nan() { b } else { *a },
            (Cell::Min(a), Cell::Min(b)) => *a = if b < *a || b.is_nan() { b } else { *a },
            (kept, offered) => debug_assert!(false, "one metric, two reductions: {kept:?}, {offered:?}"),
        }
    }

    fn value(self) -> f64 {
        match self {
            Cell::Mean { total, weight } => total / weight,
            Cell::Sum(x) | Cell::Max(x) | Cell::Min(x) => x,
        }
    }
}

/// Metrics in the making. A name keeps the reduction it was first used with. A NaN is never hidden:
/// it stays in every reduction, maximum and minimum included. The mean over no weight is NaN.
///
/// ```
/// let mut step = rloss::metrics::Accumulator::new();
/// step.mean("actor/entropy", 2.0, 3.0); // 3 tokens
/// step.mean("actor/entropy", 6.0, 1.0); // 1 token
/// step.max("response_length/max", 72.0);
/// let metrics = step.finish();
/// assert_eq!(metrics.get("actor/entropy"), Some(3.0));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Accumulator(BTreeMap<String, Cell>);

impl Accumulator {
    pub fn new() -> Self {
        Self::default()
    }

    /// Σ weight·value / Σ weight: `weight` is the number of tokens or sequences that `value` is the mean of.
    pub fn mean(&mut self, name: &str, value: f64, weight: f64) {
        self.offer(name, Cell::Mean { total: value * weight, weight });
    }

    pub fn sum(&mut self, name: &str, value: f64) {
        self.offer(name, Cell::Sum(value));
    }

    pub fn max(&mut self, name: &str, value: f64) {
        self.offer(name, Cell::Max(value));
    }

    pub fn min(&mut self, name: &str, value: f64) {
        self.offer(name, Cell::Min(value));
    }

    /// Adds what another worker or micro-batch gathered. Sums of floats depend on the order of the calls.
    pub fn merge(&mut self, other: Accumulator) {
        for (name, cell) in other.0 {
            self.offer(&name, cell);
        }
    }

    pub fn finish(self) -> Metrics {
        self.0.into_iter().map(|(name, cell)| (name, cell.value())).collect()
    }

    fn offer(&mut self, name: &str, cell: Cell) {
        match self.0.get_mut(name) {
            Some(held) => held.join(cell),
            None => drop(self.0.insert(name.to_owned(), cell)),
        }
    }
}
