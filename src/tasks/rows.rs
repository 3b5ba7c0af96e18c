//! Reads rows from a user's files, and gives their order in training.

use super::columns::COLUMNS_KEY;
use crate::bad_input;
use crate::random::{Purpose, stream};
use crate::table_file;
use anyhow::{Result, ensure};
use rand::seq::SliceRandom;
use serde_json::Value;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Mutex;

/// Maximum number of broken rows that an error lists.
const BROKEN_ROWS_SHOWN: usize = 10;

/// Parses the first `rows_max` rows of `path` with `parse`. The path may name several files by `*` and `?`;
/// [`table_file`] says which kinds of files are read.
///
/// `example` is an example row for messages. `parse` returns a row's mistake in a few words.
///
/// # Errors
/// [`crate::error::BadInput`] when a file cannot be read or has no row, and when rows are broken. The
/// message lists the broken rows by number.
pub fn read<T>(
    path: &Path,
    rows_max: Option<usize>,
    example: &str,
    parse: impl Fn(&Value) -> Result<T, String>,
) -> Result<Vec<T>> {
    let shown = path.display();
    let unreadable = |path: &Path, e: io::Error| {
        let path = path.display();
        bad_input!(
            "{path}: cannot read the rows: {e}; name an existing file of rows; a row looks like {example}"
        )
    };
    let (mut rows, mut broken, mut more, mut no_json) = (Vec::new(), Vec::new(), 0, 0);
    let mut left = rows_max.unwrap_or(usize::MAX);
    let mut columns = String::new();
    let files = table_file::files(path).map_err(|e| unreadable(path, e))?;
    for file in &files {
        if left == 0 {
            break;
        }
        let of_file = match files.len() {
            1 => String::new(),
            _ => format!(" of {}", file.file_name().unwrap_or_default().display()),
        };
        let unreadable = |e| unreadable(file, e);
        for row in table_file::open(file).map_err(unreadable)? {
            let row = row.map_err(unreadable)?;
            if left == 0 {
                break;
            }
            left -= 1;
            no_json += usize::from(row.value.is_err());
            if let (true, Ok(Value::Object(values))) = (columns.is_empty(), &row.value) {
                columns = values.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            }
            match row.value.and_then(|value| parse(&value)) {
                Ok(row) => rows.push(row),
                Err(reason) if broken.len() < BROKEN_ROWS_SHOWN => {
                    broken.push((format!("row {}{of_file}", row.number), reason));
                }
                Err(_) => more += 1,
            }
        }
    }
    if rows.is_empty() && no_json > 1 && no_json == broken.len() + more {
        let (row, reason) = &broken[0];
        return Err(bad_input!(
            "{shown}: this is no file of JSON lines, a JSON array, CSV or Parquet: {row}: {reason}; a row looks like \
             {example}"
        ));
    }
    if let Some((row, reason)) = broken.first() {
        // A mistake of the recipe, or another name of a column, breaks every row in the same way.
        let is_columns = reason.starts_with(COLUMNS_KEY);
        let is_same = broken.iter().all(|(_, other)| other == reason);
        let is_whole_file = rows.is_empty() && is_same && broken.len() > 1;
        let has_other_names = is_whole_file && reason.ends_with("is missing") && !columns.is_empty();
        let remedy = match (is_columns, has_other_names) {
            (true, _) => "Correct the recipe".to_owned(),
            (_, true) => format!("The rows have {columns}; name the columns to read in {COLUMNS_KEY}"),
            _ => "Correct or delete these lines".to_owned(),
        };
        let list = if is_same && (is_columns || has_other_names) {
            more += broken.len() - 1;
            format!("{row}: {reason}")
        } else {
            let list: Vec<String> = broken.iter().map(|(row, reason)| format!("{row}: {reason}")).collect();
            list.join("; ")
        };
        let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
        return Err(bad_input!("{shown}: {list}{tail}. {remedy}; a row looks like {example}"));
    }
    ensure!(!rows.is_empty(), bad_input!("{shown}: no rows; give at least one line like {example}"));
    Ok(rows)
}

/// Checks that no validation prompt is in the training file too. White space is ignored. Each validation
/// prompt has its row number, from 1. A row may have several prompts.
///
/// # Errors
/// [`crate::error::BadInput`] with the first prompt that is in both files.
pub fn refuse_overlap<'a>(
    (train, prompts): (&Path, impl Iterator<Item = &'a str>),
    (validation, held_out): (&Path, impl Iterator<Item = (usize, &'a str)>),
) -> Result<()> {
    let plain = |text: &str| text.split_whitespace().collect::<String>();
    let mut known = HashMap::new();
    for (row, prompt) in held_out {
        known.entry(plain(prompt)).or_insert(row);
    }
    let mut shared = prompts.zip(1..).filter_map(|(text, row)| Some((row, *known.get(&plain(text))?, text)));
    match shared.next() {
        None => Ok(()),
        Some((row, held_out_row, text)) => {
            let start: String = text.chars().take(80).collect();
            let (train, validation) = (train.display(), validation.display());
            Err(bad_input!(
                "{train}: row {row} has the prompt of {validation}: row {held_out_row} (\"{start}\"); training on \
                 validation prompts makes the validation metrics meaningless; remove the row from one of the files"
            ))
        }
    }
}

/// Returns the string under `key`. It must be present and not blank.
pub fn text<'a>(row: &'a Value, key: &str) -> Result<&'a str, String> {
    match row.get(key) {
        Some(Value::String(text)) if !text.trim().is_empty() => Ok(text),
        Some(Value::String(_)) => Err(format!("`{key}` is empty")),
        Some(_) => Err(format!("`{key}` is not a string")),
        None => Err(format!("`{key}` is missing")),
    }
}

/// An endless order of `len` rows. Every epoch is a new permutation.
///
/// The order is a pure function of (seed, index). The last permutation is cached.
#[derive(Debug)]
pub struct EpochOrder {
    /// The rows that are drawn.
    rows: Vec<u32>,
    purpose: Purpose,
    last: Mutex<Option<(u64, u64, Vec<u32>)>>,
}

impl EpochOrder {
    /// Returns an order of `len` rows that uses the random streams of `purpose`.
    pub fn new(len: usize, purpose: Purpose) -> Self {
        Self { rows: (0..len as u32).collect(), purpose, last: Mutex::new(None) }
    }

    /// Leaves out the rows for which `is_kept` returns false, but not if they are all. Returns how many were
    /// left out.
    pub fn leave_out(&mut self, is_kept: impl Fn(usize) -> bool) -> usize {
        let kept: Vec<u32> = self.rows.iter().copied().filter(|&row| is_kept(row as usize)).collect();
        if kept.is_empty() {
            return 0;
        }
        let before = std::mem::replace(&mut self.rows, kept).len();
        before - self.rows.len()
    }

    /// Returns the number of rows that an epoch has.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns the row at position `index`. Returns 0 if there are no rows.
    pub fn row(&self, seed: u64, index: u64) -> usize {
        let len = self.rows.len() as u64;
        if len == 0 {
            return 0;
        }
        let (epoch, position) = (index / len, (index % len) as usize);
        // A poisoned lock holds a whole permutation or none. Both are usable.
        let mut last = self.last.lock().unwrap_or_else(|e| e.into_inner());
        match &*last {
            Some((s, e, rows)) if (*s, *e) == (seed, epoch) => rows[position] as usize,
            _ => {
                let mut rows = self.rows.clone();
                rows.shuffle(&mut stream(seed, self.purpose, &[epoch]));
                let row = rows[position] as usize;
                *last = Some((seed, epoch, rows));
                row
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_visits_every_row_once_an_epoch_and_does_not_depend_on_calls_before() {
        let order = EpochOrder::new(50, Purpose::Shuffle);
        let epoch = |k: u64| (50 * k..50 * (k + 1)).map(|i| order.row(3, i)).collect::<Vec<_>>();
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        for rows in [&first, &second] {
            let mut sorted = rows.clone();
            sorted.sort();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        }
        assert_eq!(EpochOrder::new(50, Purpose::Shuffle).row(3, 60), second[10]);
        assert_eq!(epoch(0), first);
    }
}
