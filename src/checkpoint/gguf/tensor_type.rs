//! The types of values in a GGUF tensor.

use super::decode::{self, Decode};
use crate::bad_input;
use crate::ops::mxfp4;
use crate::ops::packed_weights::BlockType;
use anyhow::{Result, bail};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::f16;

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
    decode: Decode,
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

macro_rules! types {
    ($($name:ident = $id:literal $shown:literal $block:literal values in $bytes:literal $decode:ident $packed:expr, $dtype:expr;)*) => {
        impl TensorType {
            $(pub const $name: Self =
                Self { id: $id, name: $shown, block: $block, bytes: $bytes, decode: decode::$decode, packed: $packed, dtype: $dtype };)*
            /// All types that can be read.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }
    };
}

types! {
    F32 = 0 "F32" 1 values in 4 f32_values None, Some(GgmlDType::F32);
    F16 = 1 "F16" 1 values in 2 f16_values None, Some(GgmlDType::F16);
    Q4_0 = 2 "Q4_0" 32 values in 18 q4_0 Some(BlockType::Q4_0), Some(GgmlDType::Q4_0);
    Q4_1 = 3 "Q4_1" 32 values in 20 q4_1 Some(BlockType::Q4_1), Some(GgmlDType::Q4_1);
    Q5_0 = 6 "Q5_0" 32 values in 22 q5_0 Some(BlockType::Q5_0), Some(GgmlDType::Q5_0);
    Q5_1 = 7 "Q5_1" 32 values in 24 q5_1 Some(BlockType::Q5_1), Some(GgmlDType::Q5_1);
    Q8_0 = 8 "Q8_0" 32 values in 34 q8_0 Some(BlockType::Q8_0), Some(GgmlDType::Q8_0);
    Q4_K = 12 "Q4_K" 256 values in 144 q4_k Some(BlockType::Q4K), Some(GgmlDType::Q4K);
    Q5_K = 13 "Q5_K" 256 values in 176 q5_k Some(BlockType::Q5K), Some(GgmlDType::Q5K);
    Q6_K = 14 "Q6_K" 256 values in 210 q6_k Some(BlockType::Q6K), Some(GgmlDType::Q6K);
    BF16 = 30 "BF16" 1 values in 2 bf16_values None, Some(GgmlDType::BF16);
    MXFP4 = 39 "MXFP4" 32 values in 17 mxfp4 None, None;
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
        (self.decode)(bytes, values);
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
            let blocks = values.as_chunks().0.iter();
            return Ok(blocks.flat_map(to_gguf_block).collect());
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
