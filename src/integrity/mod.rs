//! Integrity of files: digests (BLAKE3) of a folder's files, and the checksum of a run's recipe.
//!
//! They detect accidents, such as a flipped bit, a truncated file or half an edit. They do not detect an
//! attacker, who can write new digests.

mod checksum;
mod manifest;

pub use checksum::{ChecksumStatus, add_checksum, remove_checksum};
pub use manifest::{DigestWriter, MANIFEST_FILE, Manifest};

use crate::bounded_file;
use blake3::{Hash, Hasher};
use std::io::{self, Read};
use std::path::Path;

/// Returns the digest of the file `path`, or of its first `bytes` bytes. A shorter file gives the digest of
/// all its bytes.
///
/// # Errors
/// When the file cannot be read.
pub fn file_digest(path: &Path, bytes: Option<u64>) -> io::Result<Hash> {
    let file = bounded_file::open(path, u64::MAX)?.take(bytes.unwrap_or(u64::MAX));
    Ok(Hasher::new().update_reader(file)?.finalize())
}
