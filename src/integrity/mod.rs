//! Integrity of files: BLAKE3 digests of a folder's files, and the checksum of a run's recipe.
//!
//! Digests detect accidents, such as a flipped bit, a truncated file or a partial edit. They do not detect an
//! attacker, because an attacker can write new digests.

mod checksum;
mod manifest;

pub use checksum::{ChecksumStatus, add_checksum, remove_checksum};
pub use manifest::{DigestWriter, MANIFEST_FILE, Manifest};

use crate::bounded_file;
use blake3::{Hash, Hasher};
use std::io::{self, Read};
use std::path::Path;

/// Returns the digest of the file `path`, or of its first `bytes` bytes. For a shorter file, returns the
/// digest of the whole file.
///
/// # Errors
/// When the file cannot be read.
pub fn file_digest(path: &Path, bytes: Option<u64>) -> io::Result<Hash> {
    let file = bounded_file::open(path, u64::MAX)?.take(bytes.unwrap_or(u64::MAX));
    Ok(Hasher::new().update_reader(file)?.finalize())
}
