//! Times of other implementations of attention, measured by `scripts/attention_peers.py` in the same run.

use crate::bad_input;
use anyhow::Result;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The script's output.
#[derive(Debug, Deserialize)]
pub(super) struct AttentionTimings {
    /// The library and its version.
    pub library: String,
    /// The device that was measured.
    pub device: String,
    rows: Vec<Row>,
}

#[derive(Debug, Deserialize)]
struct Row {
    /// The implementation's name, a column of the table.
    implementation: String,
    heads: usize,
    kv_heads: usize,
    window: Option<usize>,
    length: usize,
    backward: bool,
    /// `None` if it did not run.
    milliseconds: Option<f32>,
    /// The reason why it did not run.
    error: Option<String>,
}

/// A measured case of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TimingCase {
    pub heads: usize,
    pub kv_heads: usize,
    pub window: Option<usize>,
    pub length: usize,
    pub backward: bool,
}

impl AttentionTimings {
    /// Returns the implementations' names, in order of appearance.
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

    /// Returns the implementations that did not run every case, each with its last error.
    pub fn failures(&self) -> BTreeMap<&str, &str> {
        self.rows
            .iter()
            .filter_map(|row| Some((row.implementation.as_str(), row.error.as_deref()?)))
            .collect()
    }
}

/// Reads the script's file.
pub(super) fn read(path: &Path) -> Result<AttentionTimings> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| bad_input!("{}: {e}; scripts/attention_peers.py writes it", path.display()))?;
    serde_json::from_str(&text)
        .map_err(|e| bad_input!("{}: {e}; write it anew with scripts/attention_peers.py", path.display()))
}
