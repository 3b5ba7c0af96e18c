//! One row of metrics: the measurements of a step, of an evaluation, or of a step of the SFT warm-up.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};
use std::collections::BTreeMap;
use strum::{IntoStaticStr, VariantArray};

/// The part of a run to which a row belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Phase {
    /// `cold_start` in files.
    #[serde(rename = "cold_start")]
    #[strum(serialize = "cold_start")]
    SftWarmUp,
    Rl,
    Eval,
}

impl Phase {
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Returns the name of the phase in files.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Metric names and values, sorted by name. So the text of a row does not depend on the order of measurement.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets metric `name`, and replaces an earlier value.
    pub fn set(&mut self, name: impl Into<String>, value: f64) {
        self.0.insert(name.into(), value);
    }

    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// Adds every metric of `other`. A value of `other` replaces a value of the same name.
    pub fn extend(&mut self, other: Metrics) {
        self.0.extend(other.0);
    }

    /// Returns the metrics, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, &value)| (name.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl<N: Into<String>> FromIterator<(N, f64)> for Metrics {
    fn from_iter<I: IntoIterator<Item = (N, f64)>>(pairs: I) -> Self {
        Metrics(pairs.into_iter().map(|(name, value)| (name.into(), value)).collect())
    }
}

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub step: u64,
    pub phase: Phase,
    pub metrics: Metrics,
}

impl Row {
    /// Returns the row as one line of JSON without the line feed. Every finite value is read back with the
    /// same bits. Whole numbers have no `.0`. Values without a JSON number are strings (`"NaN"`,
    /// `"-Infinity"`).
    pub fn to_json(&self) -> String {
        let mut object = Map::with_capacity(self.metrics.len() + 2);
        object.insert("step".into(), self.step.into());
        object.insert("phase".into(), self.phase.name().into());
        for (name, value) in self.metrics.iter() {
            object.insert(name.to_owned(), to_value(value));
        }
        Value::Object(object).to_string()
    }

    /// Reads a line that [`Row::to_json`] wrote.
    ///
    /// # Errors
    /// The message says what is wrong with the line. The caller adds file and line number.
    pub fn from_json(line: &str) -> Result<Row, String> {
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|e| format!("not a JSON object ({e})"))?;
        let step = object.get("step").and_then(Value::as_u64);
        let step = step.ok_or("`step` is missing or not a whole number")?;
        let phase = object.get("phase").ok_or("`phase` is missing")?;
        let phase = Phase::deserialize(phase)
            .map_err(|_| "`phase` is not one of \"cold_start\", \"rl\", \"eval\"".to_owned())?;
        let mut metrics = Metrics::new();
        for (name, value) in object.iter().filter(|(name, _)| *name != "step" && *name != "phase") {
            let number = from_value(value).ok_or_else(|| format!("`{name}` is not a number: {value}"))?;
            metrics.set(name.as_str(), number);
        }
        Ok(Row { step, phase, metrics })
    }
}

/// 2^53: an `f64` represents every whole number up to this value.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

fn to_value(value: f64) -> Value {
    let negative_zero = value == 0.0 && value.is_sign_negative();
    if value.fract() == 0.0 && value.abs() <= WHOLE_MAX && !negative_zero {
        return Value::from(value as i64);
    }
    let non_finite = || match value {
        v if v.is_nan() => "NaN",
        v if v > 0.0 => "Infinity",
        _ => "-Infinity",
    };
    Number::from_f64(value).map_or_else(|| non_finite().into(), Value::Number)
}

fn from_value(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => match text.as_str() {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}
