//! The stage under way as a file of the run's folder, which `report --follow` reads.

use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const NAME: &str = ".under_way";
/// Time between two writes.
const WRITES_APART: Duration = Duration::from_secs(2);
/// Age from which the file was left by a killed process.
const AGE_MAX: Duration = Duration::from_secs(20);

/// The file; dropping it removes it.
pub(super) struct StatusFile {
    path: PathBuf,
    written: Option<Instant>,
}

impl StatusFile {
    pub fn new(folder: &Path) -> Self {
        Self { path: folder.join(NAME), written: None }
    }

    /// Replaces the file's text by `line`, if that is due at `now`. A disk that refuses does not end the run.
    pub fn renew(&mut self, line: &str, now: Instant) {
        if self.written.is_some_and(|at| now.saturating_duration_since(at) < WRITES_APART) {
            return;
        }
        self.written = Some(now);
        let aside = self.path.with_extension("partial");
        let write = || {
            let _ = fs::remove_file(&aside);
            OpenOptions::new().write(true).create_new(true).open(&aside)?.write_all(line.as_bytes())?;
            fs::rename(&aside, &self.path)
        };
        let _: std::io::Result<()> = write();
    }
}

impl Drop for StatusFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns the stage under way of the run in `folder`; `None` if no process works there.
pub fn stage_under_way(folder: &Path) -> Option<String> {
    let path = folder.join(NAME);
    let age = fs::metadata(&path).ok()?.modified().ok()?.elapsed().unwrap_or_default();
    (age < AGE_MAX).then(|| bounded_file::read_text(&path, SMALL_FILE_BYTES_MAX).ok()).flatten()
}
