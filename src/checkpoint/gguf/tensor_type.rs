//! The types of values in a GGUF tensor.

use crate::bad_input;
use crate::ops::mxfp4;
use crate::ops::packed_weights::BlockType;
use anyhow::{Result, bail};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};

/// A type of values. Two types are equal if their ids are equal.
#[derive(Debug)]
pub struct TensorType {
    /// The number of the type in a GGUF file.
    pub id: u32,
    pub name: &'static str,
    /// Number of values per block.
    pub block: usize,
    /// Number of bytes per block.
    pub bytes: usize,
    /// The corresponding type of blocks that stay packed in memory, if any.
    pub packed: Option<BlockType>,
    /// The corresponding type in candle, which encodes the values. `None` for MXFP4, which candle does not
    /// have.
    dtype: Option<GgmlDType>,
}

impl PartialEq for TensorType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl TensorType {
    const fn plain(id: u32, name: &'static str, bytes: usize, dtype: GgmlDType) -> Self {
        Self { id, name, block: 1, bytes, packed: None, dtype: Some(dtype) }
    }

    /// Returns the type of blocks that stay packed in memory.
    const fn blocks(id: u32, kind: BlockType, dtype: GgmlDType) -> Self {
        let (block, bytes) = (kind.values(), kind.stored_bytes(kind.values()));
        Self { id, name: kind.name(), block, bytes, packed: Some(kind), dtype: Some(dtype) }
    }

    pub const F32: Self = Self::plain(0, "F32", 4, GgmlDType::F32);
    pub const F16: Self = Self::plain(1, "F16", 2, GgmlDType::F16);
    pub const Q8_0: Self = Self::blocks(8, BlockType::Q8_0, GgmlDType::Q8_0);
    pub const BF16: Self = Self::plain(30, "BF16", 2, GgmlDType::BF16);
    pub const MXFP4: Self =
        Self { id: 39, name: "MXFP4", block: mxfp4::BLOCK, bytes: MXFP4_BYTES, packed: None, dtype: None };

    /// All types that can be read.
    pub const ALL: &'static [Self] = &[
        Self::F32,
        Self::F16,
        Self::blocks(2, BlockType::Q4_0, GgmlDType::Q4_0),
        Self::blocks(3, BlockType::Q4_1, GgmlDType::Q4_1),
        Self::blocks(6, BlockType::Q5_0, GgmlDType::Q5_0),
        Self::blocks(7, BlockType::Q5_1, GgmlDType::Q5_1),
        Self::Q8_0,
        Self::blocks(12, BlockType::Q4K, GgmlDType::Q4K),
        Self::blocks(13, BlockType::Q5K, GgmlDType::Q5K),
        Self::blocks(14, BlockType::Q6K, GgmlDType::Q6K),
        Self::BF16,
        Self::MXFP4,
    ];
}

impl TensorType {
    /// Finds a type by its number in the file.
    pub fn by_id(id: u32) -> Option<&'static Self> {
        Self::ALL.iter().find(|found| found.id == id)
    }

    /// Returns the number of bytes of `count` values. `count` must be a multiple of the block size.
    pub fn bytes_of(&self, count: usize) -> usize {
        count / self.block * self.bytes
    }

    /// Decodes whole blocks. `values` must have one entry for each value of these blocks.
    pub fn decode(&self, bytes: &[u8], values: &mut [f32]) {
        match (self.packed, self.dtype) {
            (Some(kind), _) => kind.decode(bytes, values),
            (None, Some(GgmlDType::F32)) => decode_each(bytes, values, f32::from_le_bytes),
            (None, Some(GgmlDType::F16)) => decode_each(bytes, values, |b| f16::from_le_bytes(b).to_f32()),
            (None, Some(_)) => decode_each(bytes, values, |b| bf16::from_le_bytes(b).to_f32()),
            (None, None) => {
                for (block, values) in bytes.as_chunks().0.iter().zip(values.as_chunks_mut().0) {
                    let (nibbles, scale) = from_gguf_block(block);
                    *values = mxfp4::decode_block(&nibbles, scale);
                }
            }
        }
    }

    /// Encodes whole blocks of finite values, rounded to nearest.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a value is too large for the type. Another error when a value is NaN
    /// or infinite.
    pub(super) fn encode(&self, values: Vec<f32>) -> Result<Vec<u8>> {
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            bail!("it holds {value}: the model diverged, nothing is written");
        }
        let Some(dtype) = self.dtype else {
            return Ok(values.as_chunks().0.iter().flat_map(to_gguf_block).collect());
        };
        if dtype == GgmlDType::F16
            && let Some(value) = values.iter().find(|value| f16::from_f32(**value).is_infinite())
        {
            return Err(bad_input!("{value} is too large for F16; write bf16"));
        }
        let count = values.len();
        let quantized = QTensor::quantize(&Tensor::from_vec(values, count, &Device::Cpu)?, dtype)?;
        Ok(quantized.data()?.into_owned())
    }
}

/// Decodes values of `N` bytes.
fn decode_each<const N: usize>(bytes: &[u8], values: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = decode(*bytes);
    }
}

/// Number of bytes of an MXFP4 block in GGUF: 1 for the scale, and 16 for the nibbles.
pub(super) const MXFP4_BYTES: usize = 1 + mxfp4::BLOCK / 2;

/// Converts an MXFP4 block from GGUF's order of values to the order of the released GPT-OSS weights. Returns
/// the nibbles and the scale. In GGUF, the low nibbles hold the first 16 values, and the high nibbles hold
/// the other 16.
pub(super) fn from_gguf_block(block: &[u8; MXFP4_BYTES]) -> ([u8; 16], u8) {
    let [scale, bytes @ ..] = block;
    let nibble = |value: usize| if value < 16 { bytes[value] & 15 } else { bytes[value - 16] >> 4 };
    (std::array::from_fn(|pair| nibble(2 * pair) | nibble(2 * pair + 1) << 4), *scale)
}

/// Encodes values as an MXFP4 block in GGUF's order of values.
fn to_gguf_block(values: &[f32; mxfp4::BLOCK]) -> [u8; MXFP4_BYTES] {
    let (bytes, scale) = mxfp4::encode_block(values);
    let nibble = |value: usize| bytes[value / 2] >> (value % 2 * 4) & 15;
    std::array::from_fn(|at| if at == 0 { scale } else { nibble(at - 1) | nibble(at + 15) << 4 })
}
