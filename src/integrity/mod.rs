//! Whether files still hold what was written: digests (BLAKE3) of a folder's files, and of a run's recipe.
//!
//! They find accidents, such as a flipped bit, a cut file or half an edit; who means harm can write new digests.

mod manifest;
mod seal;

pub use manifest::{Digesting, MANIFEST_FILE, Manifest};
pub use seal::{Seal, sealed, unsealed};

use crate::bounded_file;
use blake3::{Hash, Hasher};
use std::io::{self, Read};
use std::path::Path;

/// The digest of the file `path`, or of its first `bytes`; one that is shorter gives that of what it has.
///
/// # Errors
/// When the file cannot be read.
pub fn digest_of(path: &Path, bytes: Option<u64>) -> io::Result<Hash> {
    let file = bounded_file::open(path, u64::MAX)?.take(bytes.unwrap_or(u64::MAX));
    Ok(Hasher::new().update_reader(file)?.finalize())
}
