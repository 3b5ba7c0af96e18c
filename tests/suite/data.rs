//! Data for tests: the outside data, read in place from `RLOSS_DATA` (default `data/`) and never copied, and a small set of
//! our own that is always there: `scripts/make_small_vectors.py` and `scripts/make_small_data.py` make it.
//!
//! When the run is over, what had no outside data is listed, after the harness's own summary.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once};

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
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vectors").join(kind);
    Some(own).filter(|own| own.is_dir())
}

const SKIPPED: &str = "skipped";
const ON_OUR_OWN: &str = "ran on our own small data alone";

/// Panics when `RLOSS_DATA` is set but the folder is missing, or when the folder is there but empty: a wrong setting must not
/// look like a pass. When it is unset and there is no `data/`, what becomes of the test is noted.
fn outside(kind: &str, instead: &'static str) -> Option<PathBuf> {
    let (root, set) = match std::env::var_os("RLOSS_DATA") {
        Some(root) => (PathBuf::from(root), true),
        None => (Path::new(env!("CARGO_MANIFEST_DIR")).join("data"), false),
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

/// What became of which test for want of which outside data.
static NOTED: Mutex<BTreeSet<(&str, String, String)>> = Mutex::new(BTreeSet::new());

/// Notes the running test, by the name that the harness gives its thread. The list is printed when the process ends: the
/// harness keeps the words of a test that passes to itself.
fn note(instead: &'static str, kind: &str) {
    static AT_EXIT: Once = Once::new();
    // SAFETY: `list_noted` may be called at any time, and neither unwinds nor ends the process.
    AT_EXIT.call_once(|| assert_eq!(unsafe { libc::atexit(list_noted) }, 0));
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    NOTED.lock().expect("no panic inside").insert((instead, test, kind.to_owned()));
}

extern "C" fn list_noted() {
    let Ok(noted) = NOTED.lock() else { return };
    let mut text = "\nNo outside data (scripts/fetch_data.sh fetches it, or set RLOSS_DATA):\n".to_owned();
    for instead in [ON_OUR_OWN, SKIPPED] {
        let tests = noted.iter().filter(|(what, ..)| *what == instead);
        let lines: String = tests.map(|(_, test, kind)| format!("    {test}: no {kind}\n")).collect();
        if !lines.is_empty() {
            text += &format!("  {instead}:\n{lines}");
        }
    }
    let _ = std::io::stderr().write_all(text.as_bytes());
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
