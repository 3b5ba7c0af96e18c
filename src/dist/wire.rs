//! Values as bytes, between ranks of one binary on one kind of machine.

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A record as bytes; floats keep their bits.
///
/// # Errors
/// When it cannot be written.
pub fn pack(record: &impl Serialize) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(record).context("packing for other ranks")
}

/// The record that [`pack`] wrote.
///
/// # Errors
/// When the bytes are not such a record.
pub fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).context("unpacking from another rank")
}

// Values travel as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// Values, little-endian.
pub fn f32_bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Values from little-endian bytes.
pub fn f32_values(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))
}
