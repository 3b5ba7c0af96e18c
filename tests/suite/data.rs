//! Data for tests: the outside data, read in place from `RLOSS_DATA` (default `data/`) and never copied, and a small set of
//! our own that is always there.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The folder `kind` of the test data, or `None`, said on stderr, when `RLOSS_DATA` is unset and there is no `data/`.
///
/// Panics when `RLOSS_DATA` is set but the folder is missing, or when the folder is there but empty:
/// a wrong setting must not look like a pass.
pub fn folder(kind: &str) -> Option<PathBuf> {
    outside(kind, "skipped")
}

/// The same; what is said to become of the test without it is `instead`.
fn outside(kind: &str, instead: &str) -> Option<PathBuf> {
    let (root, set) = match std::env::var_os("RLOSS_DATA") {
        Some(root) => (PathBuf::from(root), true),
        None => (Path::new(env!("CARGO_MANIFEST_DIR")).join("data"), false),
    };
    let folder = root.join(kind);
    if !folder.is_dir() {
        assert!(!set, "RLOSS_DATA is set, but {} is not a folder", folder.display());
        say(instead, kind, &root);
        return None;
    }
    let empty = std::fs::read_dir(&folder).expect("read_dir").next().is_none();
    assert!(!empty, "{} is empty", folder.display());
    Some(folder)
}

/// Names the running test and what becomes of it, past the harness, which keeps the words of a test that passes to itself. One
/// line a test and kind; the harness runs each test in a thread of its name.
fn say(instead: &str, kind: &str, root: &Path) {
    static SAID: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test").to_owned();
    if SAID.lock().expect("no panic inside").insert((test.clone(), kind.to_owned())) {
        let line = format!(
            "{instead}: {test}: no {kind} in {} (scripts/fetch_data.sh fetches it, or set RLOSS_DATA)\n",
            root.display()
        );
        std::io::stderr().write_all(line.as_bytes()).expect("stderr");
    }
}

/// Every row of every `*.jsonl` in `kind`, as (file stem, row), in file-name order: our own small set, which
/// `scripts/make_small_vectors.py` makes, and the outside data where it is there. `None` when there is neither.
pub fn jsonl_rows(kind: &str) -> Option<Vec<(String, serde_json::Value)>> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vectors").join(kind);
    let own = Some(own).filter(|own| own.is_dir());
    let instead = if own.is_some() { "our own few vectors alone" } else { "skipped" };
    let folders: Vec<PathBuf> = own.into_iter().chain(outside(kind, instead)).collect();
    let rows: Vec<_> = folders.iter().flat_map(|folder| rows_of(folder)).collect();
    (!rows.is_empty()).then_some(rows)
}

fn rows_of(folder: &Path) -> Vec<(String, serde_json::Value)> {
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
