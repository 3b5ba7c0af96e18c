//! Reads whole files up to a size limit, which depends on the kind of file. The limit bounds the time and the
//! memory of reading any input. Devices, pipes and folders are errors.

use std::fs::{self, File};
use std::io::{self, BufRead, ErrorKind, Read};
use std::path::Path;

/// Maximum bytes of a TOML file: a recipe or its base.
pub const TOML_BYTES_MAX: u64 = 1 << 20;
/// Maximum bytes of a small file of a model or a run: `config.json`, `trainer.json`, `manifest.b3`.
pub const SMALL_FILE_BYTES_MAX: u64 = 4 << 20;
/// Maximum bytes of `tokenizer.json`, a chat template or an index of shards. The tokenizer of GPT-OSS has 28
/// MB.
pub const TOKENIZER_BYTES_MAX: u64 = 64 << 20;
/// Maximum bytes of one line of a data file: a conversation, a trajectory.
pub const LINE_BYTES_MAX: u64 = 16 << 20;
/// Maximum bytes of a data file after decompression.
pub const DATA_BYTES_MAX: u64 = 4 << 30;
/// Maximum bytes of a checkpoint's samples of later steps. Their digest is checked before they are read.
pub const SAMPLED_AHEAD_BYTES_MAX: u64 = 1 << 40;
/// Maximum bytes of a run's metrics or trajectories.
pub const ROWS_BYTES_MAX: u64 = 1 << 30;

/// Opens a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// When the file cannot be opened, is larger than `bytes_max`, or is a folder, a pipe or a device. In these
/// cases nothing is read.
pub fn open(path: &Path, bytes_max: u64) -> io::Result<File> {
    // This check comes before opening, because opening a pipe waits for its writer.
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::other("a pipe or a device; give a regular file"));
    }
    if metadata.len() > bytes_max { Err(too_large(bytes_max)) } else { File::open(path) }
}

/// Reads the bytes of a file.
///
/// # Errors
/// Errors of [`open`], and when the file cannot be read.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    // The length is checked again: the file may have grown, and some files under /proc report no length.
    open(path, bytes_max)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { Err(too_large(bytes_max)) } else { Ok(bytes) }
}

/// Reads the text of a file.
///
/// # Errors
/// Errors of [`read`], and when the bytes are not UTF-8. The error then names the line.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?).map_err(|e| {
        let before = e.as_bytes().get(..e.utf8_error().valid_up_to()).unwrap_or_default();
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        io::Error::new(ErrorKind::InvalidData, format!("line {line} is not UTF-8 text"))
    })
}

/// Returns the lines of `from` without their line feeds. A line has at most [`LINE_BYTES_MAX`] bytes, all
/// lines together at most [`DATA_BYTES_MAX`]. After an error the iterator ends.
pub fn lines(mut from: impl BufRead) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    let (mut bytes_left, mut number, mut has_ended) = (DATA_BYTES_MAX, 0u64, false);
    std::iter::from_fn(move || {
        if has_ended {
            return None;
        }
        number += 1;
        let mut line = vec![];
        let found = match from.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line) {
            Ok(0) => return None,
            Ok(length) if length as u64 > LINE_BYTES_MAX => {
                Err(io::Error::other(format!("line {number} is longer than {} MiB", LINE_BYTES_MAX >> 20)))
            }
            Ok(length) if length as u64 > bytes_left => Err(too_large(DATA_BYTES_MAX)),
            Ok(length) => {
                bytes_left -= length as u64;
                line.pop_if(|last| *last == b'\n');
                Ok(line)
            }
            Err(e) => Err(e),
        };
        has_ended = found.is_err();
        Some(found)
    })
}

fn too_large(bytes_max: u64) -> io::Error {
    let limit = if bytes_max < 1 << 30 {
        format!("{} MiB", bytes_max >> 20)
    } else {
        format!("{} GiB", bytes_max >> 30)
    };
    io::Error::new(ErrorKind::FileTooLarge, format!("larger than {limit}, the limit for this kind of file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        fs::write(&file, "a\nb").unwrap();
        assert_eq!(read(&file, 3).unwrap().len(), 3);
        assert_eq!(read(&file, 2).unwrap_err().kind(), ErrorKind::FileTooLarge);
        fs::write(&file, b"a\nb\xff").unwrap();
        assert!(read_text(&file, 9).unwrap_err().to_string().contains("line 2"));
        assert_eq!(read(folder.path(), 9).unwrap_err().kind(), ErrorKind::IsADirectory);
        for device in ["/dev/zero", "/dev/tty"] {
            assert!(read(Path::new(device), 9).is_err(), "{device}");
        }
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(read(&pipe, 9).unwrap_err().to_string().contains("a pipe"));
    }

    #[test]
    fn a_line_without_end_ends_the_reading() {
        let whole: Vec<_> = lines(&b"a\n\nb"[..]).map(Result::unwrap).collect();
        assert_eq!(whole, [&b"a"[..], b"", b"b"]);
        let endless = io::BufReader::new(io::repeat(b'x'));
        let found: Vec<_> = lines(endless).collect();
        assert_eq!(found.len(), 1);
        assert!(found[0].as_ref().unwrap_err().to_string().contains("line 1 is longer"));
    }
}
