//! Data for tests: the outside data, read in place from `RLOSS_DATA` (default `data/`) and never copied,
//! and a small set of our own that is always there: `scripts/make_small_vectors.py` and
//! `scripts/make_small_data.py` make it.

use crate::cli::in_repository;
use crate::skips;
use std::path::{Path, PathBuf};

/// A folder of test data.
pub struct Folder {
    pub path: PathBuf,
    /// Whether it is our own small one.
    pub own: bool,
}

/// The folders of `kind`: our own, if there is one, and the outside one, where it is there.
pub fn folders(kind: &str) -> Vec<Folder> {
    let own = own(kind).map(|path| Folder { path, own: true });
    let instead = if own.is_some() { ON_OUR_OWN } else { SKIPPED };
    own.into_iter().chain(outside(kind, instead).map(|path| Folder { path, own: false })).collect()
}

/// The outside folder of `kind`, for what only it can show; `None` where it is not there.
pub fn folder(kind: &str) -> Option<PathBuf> {
    outside(kind, SKIPPED)
}

fn own(kind: &str) -> Option<PathBuf> {
    let own = in_repository("tests/fixtures/vectors").join(kind);
    Some(own).filter(|own| own.is_dir())
}

const SKIPPED: &str = "skipped";
const ON_OUR_OWN: &str = "ran on our own small data alone";

/// Panics when `RLOSS_DATA` is set but the folder is missing, or when the folder is there but empty: a
/// wrong setting must not look like a pass. When it is unset and there is no `data/`, what becomes of the
/// test is noted.
fn outside(kind: &str, instead: &str) -> Option<PathBuf> {
    let (root, set) = match std::env::var_os("RLOSS_DATA") {
        Some(root) => (PathBuf::from(root), true),
        None => (in_repository("data"), false),
    };
    let folder = root.join(kind);
    if !folder.is_dir() {
        assert!(!set, "RLOSS_DATA is set, but {} is not a folder", folder.display());
        note(instead, kind);
        return None;
    }
    let empty = std::fs::read_dir(&folder).expect("read_dir").next().is_none();
    assert!(!empty, "{} is empty", folder.display());
    Some(folder)
}

/// Notes the running test.
fn note(instead: &str, kind: &str) {
    let reason = "no outside data (scripts/fetch_data.sh fetches it, or set RLOSS_DATA)";
    skips::note(reason, &format!("{instead}, no {kind}"));
}

/// Every row of every `*.jsonl` in the folders of `kind`, as (file stem, row), in file-name order.
pub fn jsonl_rows(kind: &str) -> Vec<(String, serde_json::Value)> {
    folders(kind).iter().flat_map(|folder| rows_of(&folder.path)).collect()
}

/// The rows of one folder.
pub fn rows_of(folder: &Path) -> Vec<(String, serde_json::Value)> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("read_dir")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no *.jsonl in {}", folder.display());
    let mut rows = Vec::new();
    for file in files {
        let stem = file.file_stem().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file).expect("read");
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let row = serde_json::from_str(line)
                .unwrap_or_else(|e| panic!("{}: line {}: {e}", file.display(), i + 1));
            rows.push((stem.clone(), row));
        }
    }
    rows
}
