//! Every row of the reference vectors (values and gradients of verl and TRL) through the public functions.

use super::*;
use crate::data;
use serde_json::Value;
use std::collections::BTreeMap;

/// One row of the vectors.
pub struct Row {
    pub name: String,
    /// The function that made the row.
    pub function: String,
    pub inputs: Value,
    pub params: Value,
    expected: Value,
    noise: Value,
}

/// What a function of ours gave for one expected key.
pub enum Actual {
    Values(Vec<f64>),
    /// Values that mean something only where the mask is true.
    Masked(Vec<f64>, Vec<bool>),
    Metrics(BTreeMap<String, f64>),
}

pub type Outcome = anyhow::Result<Vec<(&'static str, Actual)>>;

impl Row {
    fn new(row: &Value) -> Self {
        let text = |key: &str| row[key].as_str().unwrap_or_else(|| panic!("no {key} in {row}")).to_owned();
        Self {
            name: text("name"),
            function: text("fn"),
            inputs: row["inputs"].clone(),
            params: row["params"].clone(),
            expected: row["expected"].clone(),
            noise: row["noise_f32_vs_f64"].clone(),
        }
    }

    pub fn family(&self) -> &str {
        self.name.split('/').next().expect("a name")
    }
}

/// A padded `[row][token]` batch as packed sequences, every row as wide as the padding.
pub struct Batch {
    pub cu_seqlens: Vec<usize>,
    pub mask: Vec<bool>,
    pub width: usize,
}

impl Batch {
    pub fn new(row: &Row, mask_key: &str) -> Self {
        let shape = &row.inputs[mask_key];
        let mask: Vec<bool> = numbers(shape).iter().map(|&m| m != 0.0).collect();
        let rows = shape.as_array().expect("rows").len();
        let width = mask.len() / rows;
        Self { cu_seqlens: (0..=rows).map(|r| r * width).collect(), mask, width }
    }

    pub fn sequences(&self) -> rloss::policy::Sequences<'_> {
        rloss::policy::Sequences::new(&self.cu_seqlens, &self.mask).expect("sequences")
    }
}

/// A number, an array of numbers or an array of arrays, flat. Non-finite numbers are strings.
pub fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        Value::Bool(b) => vec![f64::from(*b)],
        Value::Number(n) => vec![n.as_f64().expect("f64")],
        Value::String(s) if s == "NaN" => vec![f64::NAN],
        Value::String(s) if s == "Infinity" => vec![f64::INFINITY],
        Value::String(s) if s == "-Infinity" => vec![f64::NEG_INFINITY],
        other => panic!("not numbers: {other}"),
    }
}

pub fn floats(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(|v| v as f32).collect()
}

/// Rows of the vectorised variants that contradict their plain twins: a group of one keeps its reward here.
const NOT_FOLLOWED: [&str; 1] = ["rloo_vectorized/equal_rewards_group_and_group_of_one/"];

#[derive(Default)]
struct Tally {
    rows: usize,
    refused: usize,
    values: usize,
    /// Why a value was not compared, and how many.
    skipped: BTreeMap<&'static str, usize>,
    worst: f64,
    failures: Vec<String>,
}

impl Tally {
    fn row(&mut self, row: &Row) {
        self.rows += 1;
        let outcome = families::compute(row);
        if row.expected.get("error").is_some() {
            self.error_row(row, outcome);
            return;
        }
        let actual: BTreeMap<&str, Actual> = match outcome {
            Ok(actual) => actual.into_iter().collect(),
            Err(error) => return self.failures.push(format!("{}: refused: {error:#}", row.name)),
        };
        for (key, expected) in row.expected.as_object().expect("expected") {
            match actual.get(key.as_str()) {
                None => self.failures.push(format!("{}: expected key {key} is not computed", row.name)),
                Some(Actual::Metrics(metrics)) => self.metrics(row, key, metrics, expected),
                Some(Actual::Values(values)) => self.values(row, key, values, None, expected),
                Some(Actual::Masked(values, mask)) => self.values(row, key, values, Some(mask), expected),
            }
        }
    }

    /// A row that the reference refuses: refused here too with a message of ours, except where zeros are
    /// right.
    fn error_row(&mut self, row: &Row, outcome: Outcome) {
        if !row.name.ends_with("_zero_division_error") {
            match outcome {
                Ok(_) => self.failures.push(format!("{}: not refused", row.name)),
                Err(error) if error.to_string().len() < 20 => {
                    self.failures.push(format!("{}: the message says little: {error}", row.name));
                }
                Err(_) => self.refused += 1,
            }
            return;
        }
        let actual = match outcome {
            Ok(actual) => actual,
            Err(error) => return self.failures.push(format!("{}: refused: {error:#}", row.name)),
        };
        for (key, actual) in actual {
            let zero = match &actual {
                Actual::Values(values) | Actual::Masked(values, _) => values.iter().all(|&v| v == 0.0),
                Actual::Metrics(metrics) => {
                    assert!(metrics.values().all(|v| v.is_finite()), "{}: {metrics:?}", row.name);
                    ["rollout_is_mean", "rollout_is_eff_sample_size"].iter().all(|m| metrics[*m] == 0.0)
                }
            };
            self.values += 1;
            if !zero {
                self.failures.push(format!("{}: {key} is not 0", row.name));
            }
        }
    }

    fn metrics(&mut self, row: &Row, key: &str, actual: &BTreeMap<String, f64>, expected: &Value) {
        let expected = expected.as_object().expect("metrics");
        for name in actual.keys().filter(|name| !expected.contains_key(*name)) {
            self.failures.push(format!("{}: metric {name} is not expected", row.name));
        }
        for (name, value) in expected {
            match actual.get(name) {
                None => self.failures.push(format!("{}: metric {name} is not computed", row.name)),
                Some(&a) => self.compare(row, name, a, numbers(value)[0], &row.noise[key][name]),
            }
        }
    }

    fn values(&mut self, row: &Row, key: &str, actual: &[f64], mask: Option<&[bool]>, expected: &Value) {
        let expected = numbers(expected);
        if actual.len() != expected.len() {
            self.failures.push(format!("{}: {key}: {} values", row.name, actual.len()));
            return;
        }
        for (i, (&a, &b)) in actual.iter().zip(&expected).enumerate() {
            if mask.is_some_and(|mask| !mask[i]) {
                *self.skipped.entry("left-over at a masked token").or_default() += 1;
            } else if row.name.contains("rounding_artifact") {
                *self.skipped.entry("rounding artifact, 0 here").or_default() += 1;
                if a != 0.0 {
                    self.failures.push(format!("{}: {key}[{i}] is {a}, not exactly 0", row.name));
                }
            } else if NOT_FOLLOWED.iter().any(|prefix| row.name.starts_with(prefix))
                && families::group_size_of_value(row, i) == 1
            {
                *self.skipped.entry("not followed: group of one").or_default() += 1;
            } else {
                self.compare(row, &format!("{key}[{i}]"), a, b, &row.noise[key]);
            }
        }
    }

    fn compare(&mut self, row: &Row, what: &str, a: f64, b: f64, noise: &Value) {
        self.values += 1;
        if a.is_nan() || b.is_nan() {
            if !(a.is_nan() && b.is_nan()) {
                self.failures.push(format!("{}: {what}: {a} for {b}", row.name));
            }
            return;
        }
        if b.is_infinite() || noise.as_str() == Some("differs") {
            // The reference overflowed in f32: ours must do so too once rounded to f32.
            if f64::from(a as f32) != b {
                self.failures.push(format!("{}: {what}: {a} for {b}", row.name));
            }
            return;
        }
        let allowed = 1e-6 + 5e-6 * b.abs() + 10.0 * noise.as_f64().unwrap_or(0.0);
        self.worst = self.worst.max((a - b).abs() / allowed);
        if (a - b).abs() > allowed || a.is_infinite() {
            self.failures.push(format!("{}: {what}: {a} for {b}, allowed {allowed:e}", row.name));
        }
    }
}

#[test]
fn policy_vectors_pass_through_the_public_functions() {
    let rows = data::jsonl_rows("policy-vectors");
    let mut by_file: BTreeMap<String, Tally> = BTreeMap::new();
    // REINFORCE++ has no discount here.
    let is_discounted = |row: &Row| row.family() == "reinforce_plus_plus" && row.params["gamma"] != 1.0;
    for (file, row) in &rows {
        if is_discounted(&Row::new(row)) {
            continue;
        }
        by_file.entry(file.clone()).or_default().row(&Row::new(row));
    }
    let mut failures = Vec::new();
    for (file, tally) in by_file {
        println!(
            "{file}: {} rows ({} refused), {} values compared, skipped {:?}, worst {:.2} of the allowed difference",
            tally.rows, tally.refused, tally.values, tally.skipped, tally.worst
        );
        failures.extend(tally.failures);
    }
    println!("not followed, a group of one keeps its reward: {NOT_FOLLOWED:?}");
    let shown: Vec<_> = failures.iter().take(40).collect();
    assert!(failures.is_empty(), "{} failures, the first:\n{shown:#?}", failures.len());
}
