//! Formats the result as a table, and as the text of `mismatch.json`.

use super::bitwise_equality::EqualityCheck;
use super::compare::COLUMNS;
use crate::metrics::{TextTable, format_number};
use serde_json::{Map, Value, json};

/// One line of the result: an equality check, an ablation, or a range of positions.
#[derive(Debug, Clone, PartialEq)]
pub struct ResultLine {
    pub name: String,
    /// Values by metric name. `None` if there is no value, for example if no layer differs.
    pub metrics: Vec<(String, Option<f64>)>,
    /// The likely cause as text.
    pub cause: Option<String>,
}

impl ResultLine {
    /// Creates the line of one equality check.
    pub fn from_check(check: &EqualityCheck) -> Self {
        let metrics = [
            ("mismatch/tokens", check.tokens as f64),
            ("mismatch/logprob_abs_diff_max", check.logprob_abs_diff_max),
            ("mismatch/bit_equal_fraction", check.bit_equal_fraction()),
        ];
        Self {
            name: check.name.to_owned(),
            metrics: metrics.map(|(name, value)| (name.to_owned(), Some(value))).to_vec(),
            cause: None,
        }
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(key, _)| key == name).and_then(|(_, value)| *value)
    }
}

/// Formats the equality checks as a table.
pub fn equality_table(lines: &[ResultLine]) -> String {
    let mut table = TextTable::new(["check", "tokens", "logprob_abs_diff_max", "bit_equal_fraction"]);
    for line in lines {
        let keys = ["mismatch/tokens", "mismatch/logprob_abs_diff_max", "mismatch/bit_equal_fraction"];
        table.add_row(std::iter::once(line.name.clone()).chain(keys.map(|key| value_text(line.value(key)))));
    }
    table.to_string()
}

/// Formats the mismatches as a table of at most `columns` characters per line. The causes follow below the
/// table.
pub fn mismatch_table(title: &str, lines: &[ResultLine], columns: usize) -> String {
    let has_values = |(key, _): &&(_, _)| lines.iter().any(|l| l.metrics.iter().any(|(k, _)| k == key));
    let columns_with_values: Vec<_> = COLUMNS.iter().filter(has_values).collect();
    let header = std::iter::once(title).chain(columns_with_values.iter().map(|(_, short)| *short));
    let mut table = TextTable::new(header);
    for line in lines {
        let values = columns_with_values.iter().map(|(key, _)| value_text(line.value(key)));
        table.add_row(std::iter::once(line.name.clone()).chain(values));
    }
    let mut text = table.format_within(columns);
    let causes = lines.iter().filter_map(|line| Some((&line.name, line.cause.as_ref()?)));
    for (name, cause) in causes {
        let cause =
            cause.strip_prefix("none: ").map_or(cause.clone(), |reason| format!("no difference; {reason}"));
        text.push_str(&format!("{name}: {cause}\n"));
    }
    text
}

fn value_text(value: Option<f64>) -> String {
    value.map_or("–".to_owned(), |value| match value {
        // A value just below 1 must not be printed as 1.
        value if value < 1.0 && format_number(value) == "1" => format!("{value}"),
        value => format_number(value),
    })
}

/// Returns `mismatch.json`: `{"rows": [{"name", metric: value, …, "cause"}], "verdict", "diagnosis"?,
/// "bad_rows"?}`. A value that is not a number becomes null.
pub fn to_json(lines: &[ResultLine], verdict: &str, diagnosis: Option<Value>, bad_rows: &[String]) -> String {
    let row = |line: &ResultLine| {
        let mut row = Map::new();
        row.insert("name".into(), json!(line.name));
        line.metrics.iter().for_each(|(key, value)| {
            row.insert(key.clone(), json!(value));
        });
        if let Some(cause) = &line.cause {
            row.insert("cause".into(), json!(cause));
        }
        Value::Object(row)
    };
    let rows: Vec<Value> = lines.iter().map(row).collect();
    let mut whole = json!({"rows": rows, "verdict": verdict});
    if let (Some(diagnosis), Some(object)) = (diagnosis, whole.as_object_mut()) {
        object.insert("diagnosis".into(), diagnosis);
        object.insert("bad_rows".into(), json!(bad_rows));
    }
    format!("{whole:#}\n")
}
