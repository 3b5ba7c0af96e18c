//! Lookup of rows of a packed embedding table, and of columns of a packed LM head that is tied to the
//! embedding.

use super::{PackedFormat, PackedMatrix};
use candle_core::{Device, Result, Tensor, bail};

/// Returns the values of little-endian bf16 bytes.
pub(super) fn bf16_values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<2>().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32())
}

/// Returns little-endian bf16 bytes with `map` applied to each value.
pub(super) fn map_bf16(bytes: &[u8], map: impl Fn(f32) -> f32) -> Vec<u8> {
    bf16_values(bytes).flat_map(|value| half::bf16::from_f32(map(value)).to_le_bytes()).collect()
}

/// Returns rows `ids` of `table [V, H]`, `[T, H]`. Not differentiable.
///
/// # Errors
/// When an id is not below `V`, or `table` is not an embedding table on the host.
pub fn packed_rows(table: &PackedMatrix, ids: &[u32]) -> Result<Tensor> {
    let [_, rows, width] = table.shape();
    let is_blocks = matches!(table.format(), PackedFormat::BlockRows(_));
    if table.format() != PackedFormat::Bf16Rows && !is_blocks {
        bail!("embedding: packed matrix {:?} supports products only, no row lookup", table.shape());
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
        bail!("embedding: token {id} in a vocabulary of {rows}");
    }
    let bytes = table.bytes()?;
    let mut out = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        if is_blocks {
            out.extend(table.column(id as usize)?);
            continue;
        }
        let start = id as usize * 2 * width;
        out.extend(bf16_values(&bytes[start..start + 2 * width]));
    }
    Tensor::from_vec(out, (ids.len(), width), &Device::Cpu)
}

/// Returns columns `ids` of `matrix [H, V]` as rows, `[T, H]`. Not differentiable.
///
/// # Errors
/// When an id is not below `V`, or the matrix is on a device.
pub fn packed_columns(matrix: &PackedMatrix, ids: &[u32]) -> Result<Tensor> {
    let [_, width, columns] = matrix.shape();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= columns) {
        bail!("tied_embedding: token {id} in a vocabulary of {columns}");
    }
    let mut out = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        out.extend(matrix.column(id as usize)?);
    }
    Tensor::from_vec(out, (ids.len(), width), &Device::Cpu)
}
