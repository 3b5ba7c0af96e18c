//! Reads rows from a user's JSON-lines file, and gives their order in training.

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

/// Maximum number of broken rows that an error lists.
const BROKEN_ROWS_SHOWN: usize = 10;

/// Parses the first `rows_max` rows of `path` with `parse`. The file has JSON lines, and is gzipped if its
/// name ends in `.gz`. Blank lines are skipped.
///
/// `example` is an example row for messages. `parse` returns a row's mistake in a few words.
///
/// # Errors
/// [`crate::error::BadInput`] when the file cannot be read or has no row, and when rows are broken. The
/// message lists the broken rows by line number.
pub fn read<T>(
    path: &Path,
    rows_max: Option<usize>,
    example: &str,
    parse: impl Fn(&Value) -> Result<T, String>,
) -> Result<Vec<T>> {
    let path_text = path.display();
    let unreadable = |e: io::Error| {
        bad_input!(
            "{path_text}: cannot read the rows: {e}; name an existing JSON-lines file; each line looks like {example}"
        )
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
        // A byte order mark is no part of the text (RFC 8259, section 8.1).
        let text = line.strip_prefix("\u{feff}".as_bytes()).filter(|_| i == 0).unwrap_or(&line);
        let row = serde_json::from_slice(text).map_err(|e| not_json(text, &e));
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
        return Err(bad_input!(
            "{path_text}: {list}{tail}. Correct or delete these lines; a row looks like {example}"
        ));
    }
    if rows.is_empty() {
        return Err(bad_input!("{path_text}: no rows; give at least one line like {example}"));
    }
    Ok(rows)
}

/// Returns why `text` is not JSON, and the remedy for what other programs write.
fn not_json(text: &[u8], error: &serde_json::Error) -> String {
    let contains = |word: &str| text.windows(word.len()).any(|bytes| bytes == word.as_bytes());
    let remedy = if text.contains(&0) || text.starts_with(b"\xff\xfe") || text.starts_with(b"\xfe\xff") {
        "; the file seems to be UTF-16: save it as UTF-8"
    } else if error.to_string().contains("surrogate") {
        "; an escape such as \\ud83d is half a character: write both halves, or the character itself"
    } else if ["NaN", "Infinity"].into_iter().any(contains) {
        "; JSON has no NaN and no Infinity: write null"
    } else {
        ""
    };
    format!("not JSON: {error}{remedy}")
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
