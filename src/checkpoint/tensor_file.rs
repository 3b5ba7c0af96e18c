//! Reads and writes safetensors files, one tensor at a time, so memory never holds a whole file. Files are
//! not memory-mapped, because a mapped file that shrinks kills the process.

use crate::bad_input;
use crate::bounded_file;
use crate::integrity::DigestWriter;
use crate::model::names::StoredTensor;
use anyhow::{Context, Result};
use blake3::Hash;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserializer;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Maximum size of a header that safetensors readers accept, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Maximum number of tensors of one file. All files of the largest models together have about 100,000.
const TENSORS_MAX: usize = 200_000;
/// Number of values that are converted per chunk.
const CHUNK_VALUES: usize = 1 << 16;

/// Checks that a header has at most [`TENSORS_MAX`] tensors, and no name twice. If a name occurs twice,
/// readers differ in which entry they use.
struct HeaderValidator;

impl<'de> Visitor<'de> for HeaderValidator {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut header: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some((name, IgnoredAny)) = header.next_entry::<String, IgnoredAny>()? {
            if names.len() == TENSORS_MAX {
                return Err(A::Error::custom(format!("it names more than {TENSORS_MAX} tensors")));
            }
            if let Some(name) = names.replace(name) {
                return Err(A::Error::custom(format!("it names {name:?} twice")));
            }
        }
        Ok(())
    }
}

/// An open safetensors file with its parsed header.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    pub metadata: Metadata,
    /// Offset of the data in the file, in bytes.
    data_start: u64,
}

impl TensorFile {
    /// Opens the file and reads its header. The header must describe every byte of the file.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is damaged, is truncated or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let unreadable = |e: std::io::Error| bad_input!("{shown}: cannot be read: {e}");
        let mut file = bounded_file::open(path, u64::MAX).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        let truncated = |wanted: u64| {
            bad_input!(
                "{shown}: truncated: the header announces {wanted} bytes, but the file has {length}; fetch the file again"
            )
        };
        if length < 8 {
            return Err(truncated(8));
        }
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).map_err(unreadable)?;
        let header_length = u64::from_le_bytes(prefix);
        if header_length > HEADER_BYTES_MAX {
            return Err(bad_input!(
                "{shown}: the header has {header_length} bytes, more than {HEADER_BYTES_MAX}: not a safetensors file"
            ));
        }
        let data_start = 8 + header_length;
        if data_start > length {
            return Err(truncated(data_start));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let metadata = serde_json::Deserializer::from_slice(&header)
            .deserialize_map(HeaderValidator)
            .and_then(|()| serde_json::from_slice(&header))
            // Its struct is flattened: see serde_json in Cargo.toml.
            .and_then(serde_json::from_value::<Metadata>)
            .map_err(|e| bad_input!("{shown}: the header is damaged: {e}; fetch the file again"))?;
        let wanted = data_start.saturating_add(metadata.data_len() as u64);
        if wanted > length {
            return Err(truncated(wanted));
        }
        if wanted < length {
            return Err(bad_input!(
                "{shown}: {} bytes follow the last tensor; fetch the file again",
                length - wanted
            ));
        }
        Ok(Self { path: path.into(), file, metadata, data_start })
    }

    /// Returns the bytes of one tensor.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file became shorter after it was opened, or cannot be read.
    pub fn read(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        self.read_at(info, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `to` with the bytes of one tensor from `start` on. Several threads may call this method in
    /// parallel.
    ///
    /// # Errors
    /// Errors of [`Self::read`].
    pub fn read_at(&self, info: &TensorInfo, start: usize, to: &mut [u8]) -> Result<()> {
        let offset = self.data_start + (info.data_offsets.0 + start) as u64;
        self.file.read_exact_at(to, offset).map_err(|e| {
            bad_input!(
                "{}: cannot be read: {e}; the file was changed after it was opened, or the disk is failing: fetch the file again",
                self.path.display()
            )
        })
    }
}

/// Metadata of files with weights. Readers of the Hugging Face Hub refuse files that do not name a framework.
pub const FRAMEWORK: (&str, &str) = ("format", "pt");

/// Writes and syncs a new file with `tensors` in the given order. Returns the digest of the file. `write` is
/// called once per tensor with its index, and writes its bytes. `metadata` is the key and value in the
/// header. There is one entry, because several are written in a random order, and files of equal runs would
/// differ.
///
/// # Errors
/// When the file exists or cannot be written, or `write` fails.
pub fn write_tensors(
    path: &Path,
    tensors: Vec<StoredTensor>,
    metadata: (&str, &str),
    mut write: impl FnMut(usize, &mut dyn Write) -> Result<()>,
) -> Result<Hash> {
    let context = || format!("{}: cannot be written", path.display());
    let mut out = BufWriter::new(DigestWriter::new(File::create_new(path).with_context(context)?));
    let count = tensors.len();
    out.write_all(&header(tensors, metadata)?).with_context(context)?;
    (0..count).try_for_each(|index| write(index, &mut out))?;
    let file = out.into_inner().map_err(std::io::IntoInnerError::into_error).with_context(context)?;
    file.inner.sync_all().with_context(context)?;
    Ok(file.digest())
}

/// Returns the header of a file with `tensors` in the given order and with `metadata`, padded to a multiple
/// of 8 bytes.
fn header(tensors: Vec<StoredTensor>, (key, value): (&str, &str)) -> Result<Vec<u8>> {
    let mut offset = 0;
    let infos = tensors.into_iter().map(|stored| {
        let start = offset;
        offset += stored.bytes() as usize;
        (stored.name, TensorInfo { dtype: stored.dtype, shape: stored.shape, data_offsets: (start, offset) })
    });
    let entries = HashMap::from([(key.to_owned(), value.to_owned())]);
    let metadata = Metadata::new(Some(entries), infos.collect())?;
    let mut json = serde_json::to_vec(&metadata)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// Writes `values` as f32, in chunks.
///
/// # Errors
/// When writing fails.
pub fn write_f32(out: &mut dyn Write, values: &[f32]) -> Result<()> {
    write_chunks(out, values, |v| v.to_le_bytes())
}

/// Writes `values`, rounded to bf16, in chunks.
///
/// # Errors
/// When writing fails.
pub fn write_bf16(out: &mut dyn Write, values: &[f32]) -> Result<()> {
    write_chunks(out, values, |v| half::bf16::from_f32(v).to_le_bytes())
}

fn write_chunks<const N: usize>(
    out: &mut dyn Write,
    values: &[f32],
    bytes: impl Fn(f32) -> [u8; N],
) -> Result<()> {
    for piece in values.chunks(CHUNK_VALUES) {
        out.write_all(&piece.iter().flat_map(|&v| bytes(v)).collect::<Vec<u8>>())?;
    }
    Ok(())
}
