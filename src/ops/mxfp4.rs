//! MXFP4: blocks of 32 four-bit values that share a power-of-two scale (OCP Microscaling Formats 1.0).
//!
//! A block has 16 bytes. Each byte holds two values, the first in the **low** nibble. A nibble is a sign bit
//! followed by an index into [`MAGNITUDES`]. Scale byte e means 2^(e − 127), except that 255 means NaN.

use rayon::prelude::*;

/// Values per block.
pub const BLOCK: usize = 32;
/// The magnitudes, indexed by the low three bits of a nibble (E2M1).
pub const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
const SCALE_BIAS: i32 = 127;
const SCALE_EXPONENT_MAX: i32 = 254 - SCALE_BIAS;

/// Returns the value of a scale byte. It is exact in f32, where 2^-127 is subnormal.
pub fn scale(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        e => f32::from_bits(u32::from(e) << 23),
    }
}

fn decode_nibble(nibble: u8) -> f32 {
    let magnitude = MAGNITUDES[usize::from(nibble & 7)];
    if nibble & 8 == 0 { magnitude } else { -magnitude }
}

/// Decodes the 32 values of a block. The values are exact, except that values of 2^128 and above become
/// infinite.
pub fn decode_block(bytes: &[u8; BLOCK / 2], scale_byte: u8) -> [f32; BLOCK] {
    let scale = scale(scale_byte);
    let mut values = [0.0; BLOCK];
    for (pair, byte) in values.chunks_exact_mut(2).zip(bytes) {
        pair[0] = decode_nibble(byte & 15) * scale;
        pair[1] = decode_nibble(byte >> 4) * scale;
    }
    values
}

/// Encodes 32 finite values as the nearest block. Returns the bytes and the scale byte.
///
/// The scale is the smallest power of two at which no scaled value exceeds 6, the largest magnitude. Values
/// are rounded to the nearest magnitude, ties to the even index. Values of a decoded MXFP4 block keep their
/// bits.
pub fn encode_block(values: &[f32; BLOCK]) -> ([u8; BLOCK / 2], u8) {
    let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let scale_byte = (scale_exponent(largest) + SCALE_BIAS) as u8;
    // In f64 the quotient by a power of two is exact.
    let scale = f64::from(scale(scale_byte));
    let nibble = |value: f32| {
        let index = nearest_index(f64::from(value.abs()) / scale);
        if value.is_sign_negative() { index | 8 } else { index }
    };
    let mut bytes = [0; BLOCK / 2];
    for (byte, pair) in bytes.iter_mut().zip(values.chunks_exact(2)) {
        *byte = nibble(pair[0]) | nibble(pair[1]) << 4;
    }
    (bytes, scale_byte)
}

/// Returns the smallest exponent s in the range of the format with `largest` <= 6 · 2^s.
fn scale_exponent(largest: f32) -> i32 {
    // No f32 value is subnormal in f64, so largest = m · 2^exponent with 1 <= m < 2. 6 is 1.5 · 2^2.
    let bits = f64::from(largest).to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa_exceeds_1_5 = bits & ((1 << 52) - 1) > 1 << 51;
    (exponent - 2 + i32::from(mantissa_exceeds_1_5)).clamp(-SCALE_BIAS, SCALE_EXPONENT_MAX)
}

/// Returns the index of the magnitude nearest to `value`, ties to the even index.
fn nearest_index(value: f64) -> u8 {
    // Midpoints between neighbouring magnitudes, and whether the midpoint itself belongs to the lower index,
    // which is then even.
    const MIDPOINTS: [(f64, bool); 7] =
        [(0.25, true), (0.75, false), (1.25, true), (1.75, false), (2.5, true), (3.5, false), (5.0, true)];
    MIDPOINTS.iter().filter(|&&(mid, closed)| value > mid || (value == mid && !closed)).count() as u8
}

/// Decodes the rows of expert matrices from blocks and scales.
///
/// `blocks` is [E, out, in/32, 16] and `scales` is [E, out, in/32], both row-major. The result is [E, in,
/// out], row-major.
pub fn decode(blocks: &[u8], scales: &[u8], [experts, input, output]: [usize; 3]) -> Vec<f32> {
    let mut values = vec![0.0; experts * input * output];
    let blocks_a_row = input / BLOCK;
    let (blocks, _) = blocks.as_chunks::<{ BLOCK / 2 }>();
    values
        .par_chunks_exact_mut(input * output)
        .zip(blocks.par_chunks_exact(output * blocks_a_row))
        .zip(scales.par_chunks_exact(output * blocks_a_row))
        .for_each(|((values, blocks), scales)| {
            for (index, (bytes, &scale_byte)) in blocks.iter().zip(scales).enumerate() {
                let (column, block) = (index / blocks_a_row, index % blocks_a_row);
                for (i, value) in decode_block(bytes, scale_byte).into_iter().enumerate() {
                    values[(block * BLOCK + i) * output + column] = value;
                }
            }
        });
    values
}

/// Encodes expert matrices [E, in, out]. Returns blocks and scales in the layout that [`decode`] reads,
/// rounded as in [`encode_block`].
pub fn encode(values: &[f32], [experts, input, output]: [usize; 3]) -> (Vec<u8>, Vec<u8>) {
    let blocks_a_row = input / BLOCK;
    let count = experts * output * blocks_a_row;
    let (mut blocks, mut scales) = (vec![[0; BLOCK / 2]; count], vec![0; count]);
    values
        .par_chunks_exact(input * output)
        .zip(blocks.par_chunks_exact_mut(output * blocks_a_row))
        .zip(scales.par_chunks_exact_mut(output * blocks_a_row))
        .for_each(|((values, blocks), scales)| {
            for (index, (bytes, scale_byte)) in blocks.iter_mut().zip(scales).enumerate() {
                let (column, block) = (index / blocks_a_row, index % blocks_a_row);
                (*bytes, *scale_byte) =
                    encode_block(&std::array::from_fn(|i| values[(block * BLOCK + i) * output + column]));
            }
        });
    (blocks.into_flattened(), scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_nibbles_and_every_scale_survives_a_round_trip_to_the_bit() {
        for scale_byte in 0..=252u8 {
            for high in 0..16u8 {
                let bytes: [u8; 16] = std::array::from_fn(|low| high << 4 | low as u8);
                let values = decode_block(&bytes, scale_byte);
                let (bytes, new_scale) = encode_block(&values);
                let again = decode_block(&bytes, new_scale);
                assert_eq!(values.map(f32::to_bits), again.map(f32::to_bits), "scale {scale_byte}");
            }
        }
    }

    #[test]
    fn a_block_of_small_nibbles_keeps_its_values_under_another_scale() {
        for largest in 0..8u8 {
            for scale_byte in [0, 1, 2, 3, 100, 254] {
                let bytes: [u8; 16] = std::array::from_fn(|i| (i as u8).min(largest) % 8);
                let values = decode_block(&bytes, scale_byte);
                if values.iter().all(|v| v.is_finite()) {
                    let (bytes, new_scale) = encode_block(&values);
                    assert_eq!(
                        values,
                        decode_block(&bytes, new_scale),
                        "largest {largest}, scale {scale_byte}"
                    );
                }
            }
        }
    }

    #[test]
    fn ties_round_to_the_even_index_and_the_scale_lets_nothing_saturate() {
        for (value, index) in
            [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.01, 7), (0.26, 1)]
        {
            assert_eq!(nearest_index(value), index, "{value}");
        }
        let mut values = [0.0; BLOCK];
        values[3] = 7.5;
        let (bytes, scale_byte) = encode_block(&values);
        assert_eq!(decode_block(&bytes, scale_byte)[3], 8.0);
    }

    #[test]
    fn the_nan_scale_decodes_to_nothing_finite() {
        assert!(decode_block(&[0x70; 16], 255).iter().all(|v| !v.is_finite()));
    }
}
