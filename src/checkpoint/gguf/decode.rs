//! Decodes the blocks of a GGUF tensor to f32, bit for bit as the Python package `gguf` does. The formats are
//! those of ggml (`ggml-common.h`). A block has one or two f16 scales. A block of a K format consists of
//! parts, and each part has its own scale too. An MXFP4 block has an 8-bit exponent as its scale.
//!
//! In the formulas below, `q` is the stored integer, `d` is the scale of a block, and `m` is its minimum.
//!
//! candle has decoders for these formats too, but copies the values three times and uses no vectors. With
//! candle's decoders, loading took 2.4 times as long.

use super::tensor_type::from_gguf_block;
use crate::ops::mxfp4;
use half::{bf16, f16};
use multiversion::multiversion;

/// A function that decodes whole blocks of one type, from bytes to values.
pub(super) type Decode = fn(&[u8], &mut [f32]);

/// Reads the f16 at byte `at` of a block.
fn scale(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Decodes F32.
pub(super) fn f32_values(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

/// Decodes F16.
pub(super) fn f16_values(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f16::from_le_bytes(*bytes).to_f32();
    }
}

/// Decodes BF16.
pub(super) fn bf16_values(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// Decodes Q8_0: `d · q`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q8_0(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<34>().0.iter().zip(values.as_chunks_mut::<32>().0) {
        let d = scale(block, 0);
        for (value, q) in values.iter_mut().zip(&block[2..]) {
            *value = d * f32::from(*q as i8);
        }
    }
}

/// Decodes Q4_0: `d · (q - 8)`. The low nibbles hold the first 16 values of a block.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q4_0(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<18>().0.iter().zip(values.as_chunks_mut::<32>().0) {
        let d = scale(block, 0);
        for (i, q) in block[2..].iter().enumerate() {
            values[i] = d * (f32::from(q & 15) - 8.0);
            values[i + 16] = d * (f32::from(q >> 4) - 8.0);
        }
    }
}

/// Decodes Q4_1: `d · q + m`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q4_1(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<20>().0.iter().zip(values.as_chunks_mut::<32>().0) {
        let (d, m) = (scale(block, 0), scale(block, 2));
        for (i, q) in block[4..].iter().enumerate() {
            values[i] = d * f32::from(q & 15) + m;
            values[i + 16] = d * f32::from(q >> 4) + m;
        }
    }
}

/// Returns the fifth bit of each of the 32 values of a block, shifted to its place in `q`: 16 or 0.
#[inline]
fn fifth_bits(bits: [u8; 4]) -> [u8; 32] {
    let bits = u32::from_le_bytes(bits);
    std::array::from_fn(|i| ((bits >> i & 1) << 4) as u8)
}

/// Decodes Q5_0: `d · (q - 16)`. A block stores the fifth bits before the nibbles.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q5_0(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<22>().0.iter().zip(values.as_chunks_mut::<32>().0) {
        let d = scale(block, 0);
        let fifth = fifth_bits([block[2], block[3], block[4], block[5]]);
        for (i, q) in block[6..].iter().enumerate() {
            values[i] = d * (f32::from(q & 15 | fifth[i]) - 16.0);
            values[i + 16] = d * (f32::from(q >> 4 | fifth[i + 16]) - 16.0);
        }
    }
}

/// Decodes Q5_1: `d · q + m`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q5_1(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<24>().0.iter().zip(values.as_chunks_mut::<32>().0) {
        let (d, m) = (scale(block, 0), scale(block, 2));
        let fifth = fifth_bits([block[4], block[5], block[6], block[7]]);
        for (i, q) in block[8..].iter().enumerate() {
            values[i] = d * f32::from(q & 15 | fifth[i]) + m;
            values[i + 16] = d * f32::from(q >> 4 | fifth[i + 16]) + m;
        }
    }
}

/// Returns the scale and the minimum of part `part` (from 0) of a Q4_K or Q5_K block. `packed` holds the
/// scales and minima of all 8 parts in 12 bytes, 6 bits each.
#[inline]
fn part_scales(packed: &[u8], part: usize) -> (f32, f32) {
    let (scale, min) = match part {
        0..4 => (packed[part] & 63, packed[part + 4] & 63),
        _ => (
            packed[part + 4] & 15 | packed[part - 4] >> 6 << 4,
            packed[part + 4] >> 4 | packed[part] >> 6 << 4,
        ),
    };
    (f32::from(scale), f32::from(min))
}

/// Decodes Q4_K: `(d · scale) · q - d_min · min`. Each part of 32 values has its own `scale` and `min`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q4_k(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<144>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let (d, d_min) = (scale(block, 0), scale(block, 2));
        let (packed, nibbles) = block[4..].split_at(12);
        for (part, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = part_scales(packed, part);
            let (scale, min, shift) = (d * scale, d_min * min, part % 2 * 4);
            for (value, q) in values.iter_mut().zip(&nibbles[part / 2 * 32..][..32]) {
                *value = scale * f32::from(q >> shift & 15) - min;
            }
        }
    }
}

/// Decodes Q5_K by the formula of Q4_K. The fifth bits of all values are stored in 32 bytes: bit `p` of byte
/// `i` belongs to value `i` of part `p`.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q5_k(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<176>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let (d, d_min) = (scale(block, 0), scale(block, 2));
        let (packed, rest) = block[4..].split_at(12);
        let (fifth, nibbles) = rest.split_at(32);
        for (part, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = part_scales(packed, part);
            let (scale, min, shift) = (d * scale, d_min * min, part % 2 * 4);
            let low = &nibbles[part / 2 * 32..][..32];
            for ((value, q), fifth) in values.iter_mut().zip(low).zip(fifth) {
                *value = scale * f32::from(q >> shift & 15 | (fifth >> part & 1) << 4) - min;
            }
        }
    }
}

/// Decodes Q6_K: `(d · scale) · (q - 32)`. Each part of 16 values has its own `scale`. Each half of a block
/// stores the low 4 bits of its values in 64 bytes, and the high 2 bits in 32 bytes.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn q6_k(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks::<210>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = scale(block, 208);
        let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
        for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            // Four groups of 32 values share the 32 bytes with the high bits.
            for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let low = &low[half * 64 + group % 2 * 32..][..32];
                let high = &high[half * 32..][..32];
                let scale: [f32; 2] =
                    std::array::from_fn(|at| d * f32::from(scales[half * 8 + group * 2 + at] as i8));
                for (i, value) in values.iter_mut().enumerate() {
                    let q = low[i] >> (group / 2 * 4) & 15 | (high[i] >> (group * 2) & 3) << 4;
                    *value = scale[i / 16] * (f32::from(q) - 32.0);
                }
            }
        }
    }
}

/// Decodes MXFP4.
pub(super) fn mxfp4(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.as_chunks().0.iter().zip(values.as_chunks_mut().0) {
        let (nibbles, scale) = from_gguf_block(block);
        *values = mxfp4::decode_block(&nibbles, scale);
    }
}
