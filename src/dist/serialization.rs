//! Serialises values that ranks exchange. All ranks run the same binary on the same kind of machine.

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{Read, Write};

/// Serialises and compresses a record. Floats keep their bits.
///
/// # Errors
/// When the record cannot be serialised.
pub fn serialize(record: &impl Serialize) -> Result<Vec<u8>> {
    let bytes = rmp_serde::to_vec_named(record).context("serialising for other ranks")?;
    let mut encoder = DeflateEncoder::new(vec![], Compression::fast());
    encoder.write_all(&bytes).and_then(|()| encoder.finish()).context("compressing for other ranks")
}

/// Deserialises a record that [`serialize`] returned.
///
/// # Errors
/// When the bytes are not such a record.
pub fn deserialize<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let mut record = vec![];
    DeflateDecoder::new(bytes).read_to_end(&mut record).context("decompressing from another rank")?;
    rmp_serde::from_slice(&record).context("deserialising from another rank")
}

// Values are sent in memory order, which must be little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// Returns the little-endian bytes of `values`.
pub fn f32_bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Reads values from little-endian bytes.
pub fn f32_values(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))
}
