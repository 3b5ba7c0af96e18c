//! Times of other implementations of attention. `scripts/attention_peers.py` measures them in the same run.

use anyhow::Result;
use rloss::bad_input;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The output of the script.
#[derive(Debug, Deserialize)]
pub struct AttentionTimings {
    /// The library and its version.
    pub library: String,
    /// The device that was measured.
    pub device: String,
    rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Row {
    /// The implementation's name, which is the heading of its column.
    implementation: String,
    heads: usize,
    kv_heads: usize,
    window: Option<usize>,
    length: usize,
    backward: bool,
    /// The time. `None` if the implementation did not run.
    milliseconds: Option<f32>,
    /// The reason why the implementation did not run.
    error: Option<String>,
}

/// A measured case of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimingCase {
    pub heads: usize,
    pub kv_heads: usize,
    pub window: Option<usize>,
    pub length: usize,
    pub backward: bool,
}

impl AttentionTimings {
    /// Returns the names of the implementations, in the order in which they appear.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = vec![];
        for row in &self.rows {
            if !names.contains(&row.implementation.as_str()) {
                names.push(&row.implementation);
            }
        }
        names
    }

    /// Returns the time of the implementation `name`, if it ran.
    pub fn milliseconds(&self, name: &str, case: TimingCase) -> Option<f32> {
        let TimingCase { heads, kv_heads, window, length, backward } = case;
        let row = self.rows.iter().find(|row| {
            (row.implementation.as_str(), row.heads, row.kv_heads) == (name, heads, kv_heads)
                && (row.window, row.length, row.backward) == (window, length, backward)
        })?;
        row.milliseconds
    }

    /// Returns the implementations that failed on some case, each with its last error.
    pub fn failures(&self) -> BTreeMap<&str, &str> {
        self.rows
            .iter()
            .filter_map(|row| Some((row.implementation.as_str(), row.error.as_deref()?)))
            .collect()
    }
}

/// Reads the output file of the script.
pub fn read(path: &Path) -> Result<AttentionTimings> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| bad_input!("{}: {e}; create it with scripts/attention_peers.py", path.display()))?;
    serde_json::from_str(&text)
        .map_err(|e| bad_input!("{}: {e}; create it again with scripts/attention_peers.py", path.display()))
}
