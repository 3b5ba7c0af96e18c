//! Serialises values that ranks exchange. All ranks run the same binary on the same kind of machine.

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Serialises a record. Floats keep their bits.
///
/// # Errors
/// When the record cannot be serialised.
pub fn serialize(record: &impl Serialize) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(record).context("serialising for other ranks")
}

/// Deserialises a record that [`serialize`] returned.
///
/// # Errors
/// When the bytes are not such a record.
pub fn deserialize<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).context("deserialising from another rank")
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
