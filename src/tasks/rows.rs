//! Reading of rows from a user's JSON-lines file, and their order in training.

use crate::bad_input;
use crate::bounded_file::{self, DATA_BYTES_MAX};
use crate::random::{Purpose, stream};
use anyhow::Result;
use flate2::read::MultiGzDecoder;
use rand::seq::SliceRandom;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::Mutex;

/// Maximum number of broken rows that one error lists.
const BROKEN_ROWS_SHOWN: usize = 10;

/// Parses the first `rows_max` rows of `path` with `parse`. The file has JSON lines, gzipped if it ends in
/// `.gz`; blank lines are skipped.
///
/// `form` is an example row for the user; `parse` describes a row's mistake in a few words.
///
/// # Errors
/// [`crate::error::BadInput`] when the file cannot be read or holds no row, and one that lists the
/// broken rows by line number.
pub fn read<T>(
    path: &Path,
    rows_max: Option<usize>,
    form: &str,
    parse: impl Fn(&Value) -> Result<T, String>,
) -> Result<Vec<T>> {
    let place = path.display();
    let unreadable = |e: io::Error| {
        bad_input!("{place}: cannot read the rows: {e}; name an existing JSON-lines file, one {form} a line")
    };
    let (mut rows, mut broken, mut more) = (Vec::new(), Vec::new(), 0);
    let mut left = rows_max.unwrap_or(usize::MAX);
    for (line, i) in bounded_file::lines(open(path).map_err(unreadable)?).zip(0..) {
        let line = line.map_err(unreadable)?;
        if line.trim_ascii().is_empty() {
            continue;
        }
        if left == 0 {
            break;
        }
        left -= 1;
        let row = serde_json::from_slice(&line).map_err(|e| format!("not JSON: {e}"));
        match row.and_then(|row| parse(&row)) {
            Ok(row) => rows.push(row),
            Err(reason) if broken.len() < BROKEN_ROWS_SHOWN => {
                broken.push(format!("row {}: {reason}", i + 1));
            }
            Err(_) => more += 1,
        }
    }
    if !broken.is_empty() {
        let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
        let list = broken.join("; ");
        return Err(bad_input!("{place}: {list}{tail}. Correct or delete these lines; a row is {form}"));
    }
    if rows.is_empty() {
        return Err(bad_input!("{place}: no rows; give at least one line of the form {form}"));
    }
    Ok(rows)
}

/// Opens the file and decompresses it.
fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let file = BufReader::new(bounded_file::open(path, DATA_BYTES_MAX)?);
    Ok(if path.extension().is_some_and(|e| e == "gz") {
        Box::new(BufReader::new(MultiGzDecoder::new(file)))
    } else {
        Box::new(file)
    })
}

/// Refuses validation prompts that are also in the training file, ignoring white space. Validation prompts
/// come with their row number, from 1; a row may have several.
///
/// # Errors
/// [`crate::error::BadInput`] that names the first pair.
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
                 what validation measures makes its figures worthless: remove the row from one of the files"
            ))
        }
    }
}

/// Returns the text under `key`, which must not be missing or blank.
pub fn text<'a>(row: &'a Value, key: &str) -> Result<&'a str, String> {
    match row.get(key) {
        Some(Value::String(text)) if !text.trim().is_empty() => Ok(text),
        Some(Value::String(_)) => Err(format!("`{key}` is empty")),
        Some(_) => Err(format!("`{key}` is not a string")),
        None => Err(format!("`{key}` is missing")),
    }
}

/// An endless order over `len` rows: every epoch is a new permutation.
///
/// A pure function of (seed, index); the last permutation is cached.
#[derive(Debug)]
pub struct Order {
    len: usize,
    purpose: Purpose,
    last: Mutex<Option<(u64, u64, Vec<u32>)>>,
}

impl Order {
    /// Returns an order over `len` rows from the random streams of `purpose`.
    pub fn new(len: usize, purpose: Purpose) -> Self {
        Self { len, purpose, last: Mutex::new(None) }
    }

    /// Returns the row, below `len`, at position `index`; 0 when there are no rows.
    pub fn row(&self, seed: u64, index: u64) -> usize {
        if self.len == 0 {
            return 0;
        }
        let (epoch, place) = (index / self.len as u64, (index % self.len as u64) as usize);
        // A poisoned lock holds a whole permutation or none: both are usable.
        let mut last = self.last.lock().unwrap_or_else(|e| e.into_inner());
        match &*last {
            Some((s, e, rows)) if (*s, *e) == (seed, epoch) => rows[place] as usize,
            _ => {
                let mut rows: Vec<u32> = (0..self.len as u32).collect();
                rows.shuffle(&mut stream(seed, self.purpose, &[epoch]));
                let row = rows[place] as usize;
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
        let order = Order::new(50, Purpose::Shuffle);
        let epoch = |k: u64| (50 * k..50 * (k + 1)).map(|i| order.row(3, i)).collect::<Vec<_>>();
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        for rows in [&first, &second] {
            let mut sorted = rows.clone();
            sorted.sort();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        }
        assert_eq!(Order::new(50, Purpose::Shuffle).row(3, 60), second[10]);
        assert_eq!(epoch(0), first);
    }
}
