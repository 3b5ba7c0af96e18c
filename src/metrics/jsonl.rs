//! `metrics.jsonl`: one [`Row`] per line. The file of a killed run can be truncated to its last checkpoint.

use super::Row;
use crate::bad_input;
use crate::bounded_file::{self, ROWS_BYTES_MAX};
use anyhow::{Context, Result, ensure};
use blake3::{Hash, Hasher};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Writes `metrics.jsonl`. A checkpoint stores the length that [`MetricsFile::sync`] returns. A resumed run
/// opens the file with that length.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    hasher: Hasher,
}

impl MetricsFile {
    /// Creates the file of a new run. An existing file is never overwritten.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file exists.
    pub fn create(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => bad_input!(
                "{}: the run's metrics already exist; name another folder with --out, or continue with --resume",
                path.display()
            ),
            _ => anyhow::Error::new(e).context(format!("{}: cannot be created", path.display())),
        })?;
        // A checkpoint relies on these rows, so the file's entry in the folder must also survive a crash.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.with_context(|| format!("{}: cannot be synced", folder.display()))?;
        Ok(Self { file, path: path.to_owned(), bytes: 0, hasher: Hasher::new() })
    }

    /// Opens the file of a resumed run and truncates it to the length `bytes` of the checkpoint. This removes
    /// later rows and an incomplete last line.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is shorter than `bytes`, or no line ends there.
    pub fn resume(path: &Path, bytes: u64) -> Result<Self> {
        let path_text = path.display();
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(bytes == 0)
            .truncate(false)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path);
        let mut file = opened.with_context(|| format!("{path_text}: cannot be opened to resume the run"))?;
        let length = file.metadata().with_context(|| format!("{path_text}: cannot be read"))?.len();
        if length < bytes {
            return Err(bad_input!(
                "{path_text}: has {length} bytes, but {bytes} when the checkpoint was written; the file was changed later: restore it, or resume from an older checkpoint"
            ));
        }
        if bytes > 0 {
            let mut last = [0u8];
            file.seek(SeekFrom::Start(bytes - 1))
                .and_then(|_| file.read_exact(&mut last))
                .with_context(|| format!("{path_text}: cannot be read"))?;
            if last != [b'\n'] {
                return Err(bad_input!(
                    "{path_text}: no line ends at byte {bytes}, where the checkpoint was written; the file was changed later: restore it, or resume from an older checkpoint"
                ));
            }
        }
        let mut hasher = Hasher::new();
        let cut = file.set_len(bytes).and_then(|()| file.rewind());
        cut.and_then(|()| hasher.update_reader(&file).map(drop))
            .with_context(|| format!("{path_text}: cannot be truncated"))?;
        Ok(Self { file, path: path.to_owned(), bytes, hasher })
    }

    /// Appends a row in a single write. Readers then see whole lines, and a kill damages at most the last
    /// line.
    pub fn write(&mut self, row: &Row) -> Result<()> {
        self.check_path()?;
        let line = row.to_json() + "\n";
        let written = self.file.write_all(line.as_bytes());
        written.with_context(|| format!("{}: cannot be written", self.path.display()))?;
        self.bytes += line.len() as u64;
        self.hasher.update(line.as_bytes());
        Ok(())
    }

    /// Checks that the file is still at its path. If the run's folder was moved or removed, further writes
    /// would be lost.
    ///
    /// # Errors
    /// When the file is not at its path.
    pub fn check_path(&self) -> Result<()> {
        let open_file = self.file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        let file_at_path = std::fs::metadata(&self.path).map(|metadata| (metadata.dev(), metadata.ino()));
        let same = matches!((&open_file, &file_at_path), (Ok(open_file), Ok(file_at_path)) if open_file == file_at_path);
        ensure!(
            same,
            "{}: the run's folder was moved, replaced or removed during the run; put it back and continue with \
                           --resume from its last checkpoint",
            self.path.display()
        );
        Ok(())
    }

    /// Returns the digest of all bytes in the file.
    pub fn digest(&self) -> Hash {
        self.hasher.finalize()
    }

    /// Writes the file to disk and returns its length, for the checkpoint.
    pub fn sync(&mut self) -> Result<u64> {
        self.check_path()?;
        self.file.sync_data().with_context(|| format!("{}: cannot be synced", self.path.display()))?;
        Ok(self.bytes)
    }
}

/// Reads all rows of the file. A last line without a line feed is incomplete and is skipped.
///
/// # Errors
/// [`crate::error::BadInput`] that names file and line, when the file cannot be read or a line is not a row.
pub fn read_rows(path: &Path) -> Result<Vec<Row>> {
    let text = bounded_file::read(path, ROWS_BYTES_MAX)
        .map_err(|e| bad_input!("{}: cannot be read ({e})", path.display()))?;
    let mut rows = Vec::new();
    for (i, line) in text.split_inclusive(|&b| b == b'\n').enumerate() {
        let row = std::str::from_utf8(line).map_err(|e| e.to_string()).and_then(Row::from_json);
        match row {
            Ok(row) => rows.push(row),
            Err(_) if !line.ends_with(b"\n") => break,
            Err(why) => {
                let (path_text, number) = (path.display(), i + 1);
                return Err(bad_input!(
                    "{path_text}: line {number}: {why}; remove the line, or restore the file"
                ));
            }
        }
    }
    Ok(rows)
}
