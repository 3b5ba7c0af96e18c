//! The header of a GGUF file: its metadata, and the location of each tensor. Every count and length is
//! compared with the size of the file before memory is allocated.

use super::tensor_type::TensorType;
use crate::bad_input;
use crate::bounded_file::{self, TOKENIZER_BYTES_MAX};
use anyhow::Result;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Maximum size of a header, in bytes. The header of GPT-OSS has about 13 MB.
const HEADER_BYTES_MAX: u64 = TOKENIZER_BYTES_MAX;
/// Maximum number of tensors of one file.
const TENSORS_MAX: u64 = 200_000;
/// Maximum number of entries of the metadata. Models have about 50.
const ENTRIES_MAX: u64 = 10_000;
/// Maximum length of the name of a tensor or of an entry, in bytes. GGML's tensors have up to 63.
const NAME_BYTES_MAX: usize = 1000;
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Minimum size of the entry of a tensor, in bytes: length of the name, number of dimensions, type, offset.
const TENSOR_BYTES_MIN: u64 = 8 + 4 + 4 + 8;
/// Minimum size of an entry of the metadata, in bytes: length of the key, type, value.
const ENTRY_BYTES_MIN: u64 = 8 + 4 + 1;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum MetadataValue {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    /// A list of 32-bit integers.
    Integers(Vec<i32>),
    /// A list of another type. Its values are skipped.
    OtherList,
}

/// The location of a tensor in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTensor {
    /// The shape, with the outermost dimension first.
    pub shape: Vec<usize>,
    pub dtype: &'static TensorType,
    /// The offset of the tensor's first byte in the file.
    start: u64,
}

impl GgufTensor {
    /// Returns its size in bytes.
    fn bytes(&self) -> u64 {
        self.dtype.bytes_of(self.shape.iter().product()) as u64
    }
}

/// An open GGUF file with its header.
pub struct GgufFile {
    path: PathBuf,
    file: File,
    pub metadata: HashMap<String, MetadataValue>,
    pub tensors: BTreeMap<String, GgufTensor>,
}

impl GgufFile {
    /// Opens a file and reads its header. The file must have all bytes of every tensor.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is damaged, is truncated, is not a GGUF file, or has a tensor
    /// of an unsupported type.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let unreadable = |e: std::io::Error| bad_input!("{shown}: cannot be read: {e}");
        let file = bounded_file::open(path, u64::MAX).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        let header = Header::read(&file, length).map_err(|what| bad_input!("{shown}: {what}"))?;
        let Header { metadata, tensors } = header;
        Ok(Self { path: path.to_owned(), file, metadata, tensors })
    }

    /// Fills `to` with the bytes of a tensor from `start` on. Several threads may call this method in
    /// parallel.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file was changed after it was opened, or cannot be read.
    pub fn read_at(&self, tensor: &GgufTensor, start: usize, to: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(to, tensor.start + start as u64).map_err(|e| {
            bad_input!(
                "{}: cannot be read: {e}; the file was changed after it was opened, or the disk is failing: fetch the file again",
                self.path.display()
            )
        })
    }
}

struct Header {
    metadata: HashMap<String, MetadataValue>,
    tensors: BTreeMap<String, GgufTensor>,
}

impl Header {
    fn read(file: &File, length: u64) -> Result<Self, String> {
        let limit = length.min(HEADER_BYTES_MAX);
        let mut from = Bytes { file: BufReader::new(file), left: limit, is_cut: length <= HEADER_BYTES_MAX };
        if from.array()? != *b"GGUF" {
            return Err("not a GGUF file; model.path must name a GGUF file or a folder".into());
        }
        match from.u32()? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=9) => {
                return Err("a big-endian GGUF file; convert it to little-endian".into());
            }
            version => {
                return Err(format!(
                    "GGUF version {version} is not supported; convert the file to version 3"
                ));
            }
        }
        let (tensor_count, entries) = (from.u64()?, from.u64()?);
        for (what, count, max, bytes) in [
            ("tensors", tensor_count, TENSORS_MAX, TENSOR_BYTES_MIN),
            ("entries of metadata", entries, ENTRIES_MAX, ENTRY_BYTES_MIN),
        ] {
            if count > max || count * bytes > from.left {
                return Err(format!(
                    "the header announces {count} {what}, but the file has space for {}; fetch the file again",
                    max.min(from.left / bytes)
                ));
            }
        }
        let mut metadata = HashMap::new();
        for _ in 0..entries {
            let key = from.name()?;
            let value = from.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("{key:?} occurs twice in the metadata; fetch the file again"));
            }
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = from.name()?;
            let tensor = from.tensor(&name)?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(format!("it has the tensor {name:?} twice; fetch the file again"));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(MetadataValue::Integer(n)) if (1..=i128::from(ALIGNMENT_MAX)).contains(n) => *n as u64,
            Some(other) => return Err(format!("general.alignment is {other:?}; fetch the file again")),
        };
        let data = (limit - from.left).next_multiple_of(alignment);
        let mut placed: Vec<(&String, &mut GgufTensor)> = tensors.iter_mut().collect();
        placed.sort_by_key(|(_, tensor)| (tensor.start, tensor.bytes()));
        let (mut free, mut before) = (0, "the start of the data");
        for (name, tensor) in placed {
            let (start, bytes) = (tensor.start, tensor.bytes());
            let end = data.checked_add(start).and_then(|start| start.checked_add(bytes));
            if end.is_none_or(|end| end > length) {
                return Err(format!(
                    "truncated: `{name}` has {bytes} bytes at offset {start}, but the file ends before the last of them; fetch the file again",
                ));
            }
            // llama.cpp too takes only tensors without overlaps and gaps.
            if start != free {
                return Err(format!(
                    "`{name}` begins at offset {start}, but {before} leads to offset {free} (general.alignment is {alignment}): tensors \
                     overlap, or leave a gap; fetch the file again"
                ));
            }
            (free, before) = ((start + bytes).next_multiple_of(alignment), name);
            tensor.start += data;
        }
        Ok(Self { metadata, tensors })
    }
}

/// The bytes of a header.
struct Bytes<'a> {
    file: BufReader<&'a File>,
    left: u64,
    /// Whether `left` counts the bytes up to the end of the file. Otherwise `left` counts the bytes up to
    /// [`HEADER_BYTES_MAX`]. When `left` is too small, the file is truncated in the first case; in the second
    /// case, the header is too long.
    is_cut: bool,
}

impl Bytes<'_> {
    fn take(&mut self, count: u64) -> Result<(), String> {
        self.left = self.left.checked_sub(count).ok_or_else(|| match self.is_cut {
            true => "truncated within its header; fetch the file again".to_owned(),
            false => format!("its header is longer than {} MiB: damaged", HEADER_BYTES_MAX >> 20),
        })?;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads the name of a tensor or of an entry.
    fn name(&mut self) -> Result<String, String> {
        let name = self.text()?;
        match name.len() <= NAME_BYTES_MAX {
            true => Ok(name),
            false => Err(format!("a name of its header has {} bytes; fetch the file again", name.len())),
        }
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        self.take(length)?;
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
        String::from_utf8(bytes)
            .map_err(|_| "a string of its header is not UTF-8; fetch the file again".into())
    }

    fn value(&mut self, key: &str) -> Result<MetadataValue, String> {
        Ok(match self.u32()? {
            0 => MetadataValue::Integer(i128::from(u8::from_le_bytes(self.array()?))),
            1 => MetadataValue::Integer(i128::from(i8::from_le_bytes(self.array()?))),
            2 => MetadataValue::Integer(i128::from(u16::from_le_bytes(self.array()?))),
            3 => MetadataValue::Integer(i128::from(i16::from_le_bytes(self.array()?))),
            4 => MetadataValue::Integer(i128::from(self.u32()?)),
            5 => MetadataValue::Integer(i128::from(i32::from_le_bytes(self.array()?))),
            // The shortest decimal of the f32 is the value that the writer intended: 1e-6 instead of
            // 9.99999997e-7.
            6 => MetadataValue::Float(
                f32::from_le_bytes(self.array()?).to_string().parse().unwrap_or(f64::NAN),
            ),
            7 => MetadataValue::Bool(self.array::<1>()? != [0]),
            8 => MetadataValue::Text(self.text()?),
            9 => self.list(key)?,
            10 => MetadataValue::Integer(i128::from(self.u64()?)),
            11 => MetadataValue::Integer(i128::from(i64::from_le_bytes(self.array()?))),
            12 => MetadataValue::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("{key:?} has the unknown type {other}; fetch the file again")),
        })
    }

    fn list(&mut self, key: &str) -> Result<MetadataValue, String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(format!("{key:?} is a list of lists, which no model has; fetch the file again")),
            other => return Err(format!("{key:?} has the unknown type {other}; fetch the file again")),
        };
        if count.checked_mul(bytes).is_none_or(|bytes| bytes > self.left) {
            return Err(format!(
                "truncated: {key:?} has {count} values, but the header ends before the last of them; fetch the file again"
            ));
        }
        Ok(match kind {
            8 => MetadataValue::Texts((0..count).map(|_| self.text()).collect::<Result<_, _>>()?),
            4 | 5 => {
                let one = |_| self.array().map(i32::from_le_bytes);
                MetadataValue::Integers((0..count).map(one).collect::<Result<_, _>>()?)
            }
            _ => {
                self.take(count * bytes)?;
                let skipped = self.file.seek_relative((count * bytes) as i64);
                skipped.map_err(|e| format!("cannot be read: {e}"))?;
                MetadataValue::OtherList
            }
        })
    }

    fn tensor(&mut self, name: &str) -> Result<GgufTensor, String> {
        let dimensions = self.u32()?;
        if dimensions > DIMENSIONS_MAX {
            return Err(format!("`{name}` has {dimensions} dimensions; fetch the file again"));
        }
        let mut shape = vec![];
        for _ in 0..dimensions {
            shape.push(self.u64()?);
        }
        let (id, start) = (self.u32()?, self.u64()?);
        let count = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
        let row = shape.first().copied().unwrap_or(1);
        let shape: Vec<usize> = shape.into_iter().rev().map(|n| n as usize).collect();
        let Some(dtype) = TensorType::by_id(id) else {
            let known: Vec<&str> = TensorType::ALL.iter().map(|known| known.name).collect();
            return Err(format!(
                "`{name}` has the unsupported type {id}; convert the file to one of {}",
                known.join(", ")
            ));
        };
        match count {
            // Fewer than 2^56 values have fewer than 2^63 bytes.
            Some(count) if count < 1 << 56 && row.is_multiple_of(dtype.block as u64) => {
                Ok(GgufTensor { shape, dtype, start })
            }
            _ => Err(format!(
                "`{name}` of type {} has the shape {shape:?}, but rows must be multiples of {} values; fetch the file again",
                dtype.name, dtype.block
            )),
        }
    }
}
