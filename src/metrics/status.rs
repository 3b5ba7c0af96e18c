//! The current stage as a file in the run's folder. `report --follow` reads the file.

use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const NAME: &str = ".under_way";
/// Minimum time between two writes.
const WRITE_INTERVAL_MIN: Duration = Duration::from_secs(2);
/// Maximum age of the file of a running process. An older file was left by a killed process.
const AGE_MAX: Duration = Duration::from_secs(20);

/// The status file. It is removed when this value is dropped.
pub(super) struct StatusFile {
    path: PathBuf,
    written: Option<Instant>,
}

impl StatusFile {
    pub fn new(folder: &Path) -> Self {
        Self { path: folder.join(NAME), written: None }
    }

    /// Replaces the file's text with `line`, if a write is due at `now`. An I/O error does not end the run.
    pub fn update(&mut self, line: &str, now: Instant) {
        if self.written.is_some_and(|at| now.saturating_duration_since(at) < WRITE_INTERVAL_MIN) {
            return;
        }
        self.written = Some(now);
        let temporary = self.path.with_extension("partial");
        let write = || {
            let _ = fs::remove_file(&temporary);
            OpenOptions::new().write(true).create_new(true).open(&temporary)?.write_all(line.as_bytes())?;
            fs::rename(&temporary, &self.path)
        };
        let _: std::io::Result<()> = write();
    }
}

impl Drop for StatusFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns the current stage of the run in `folder`; `None` if no process runs there.
pub fn current_stage(folder: &Path) -> Option<String> {
    let path = folder.join(NAME);
    let age = fs::metadata(&path).ok()?.modified().ok()?.elapsed().unwrap_or_default();
    (age < AGE_MAX).then(|| bounded_file::read_text(&path, SMALL_FILE_BYTES_MAX).ok()).flatten()
}
