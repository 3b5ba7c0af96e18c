//! A table of rows in bf16, the embedding of a model that does not learn it; and columns of a packed head that is the embedding
//! too.

use super::{PackedMatrix, bf16_is_finite};
use candle_core::{Device, Result, Tensor, bail};

/// `[V, H]` in bf16, as stored.
pub struct PackedTable {
    width: usize,
    bytes: Vec<u8>,
}

impl PackedTable {
    /// Rows of `width` little-endian bf16 values.
    pub fn new(bytes: Vec<u8>, width: usize) -> Self {
        assert!(width > 0 && bytes.len().is_multiple_of(2 * width), "packed table: rows of {width}");
        Self { width, bytes }
    }

    /// As it lies in memory.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// `[V, H]`.
    pub fn shape(&self) -> (usize, usize) {
        (self.bytes.len() / (2 * self.width), self.width)
    }

    /// Its size in memory.
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The place of the first value that is NaN or infinite.
    pub fn first_not_finite(&self) -> Option<usize> {
        self.bytes.as_chunks::<2>().0.iter().position(|bytes| !bf16_is_finite(*bytes))
    }

    /// The values of row `index`.
    pub fn row(&self, index: usize) -> impl Iterator<Item = f32> {
        let row = &self.bytes[index * 2 * self.width..(index + 1) * 2 * self.width];
        row.as_chunks::<2>().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32())
    }

    /// The same with each value replaced by `map` of it, which must be a bf16 again.
    pub fn mapped(&self, map: impl Fn(f32) -> f32) -> Self {
        Self { width: self.width, bytes: map_bf16(&self.bytes, map) }
    }

    /// All values.
    pub fn decoded(&self) -> Vec<f32> {
        self.bytes.as_chunks::<2>().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect()
    }
}

/// Little-endian bf16 values after `map`.
pub(super) fn map_bf16(bytes: &[u8], map: impl Fn(f32) -> f32) -> Vec<u8> {
    let of =
        |value: &[u8; 2]| half::bf16::from_f32(map(half::bf16::from_le_bytes(*value).to_f32())).to_le_bytes();
    bytes.as_chunks::<2>().0.iter().flat_map(of).collect()
}

/// Rows `ids` of `table`, `[T, H]`. No gradient flows.
///
/// # Errors
/// When an id is not below `V`.
pub fn packed_rows(table: &PackedTable, ids: &[u32]) -> Result<Tensor> {
    let (rows, width) = table.shape();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
        bail!("embedding: token {id} in a vocabulary of {rows}");
    }
    let mut out = Vec::with_capacity(ids.len() * width);
    ids.iter().for_each(|&id| out.extend(table.row(id as usize)));
    Tensor::from_vec(out, (ids.len(), width), &Device::Cpu)
}

/// Columns `ids` of `matrix [H, V]`, as rows: `[T, H]`. No gradient flows.
///
/// # Errors
/// When an id is not below `V`, or the matrix lies on a device.
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
