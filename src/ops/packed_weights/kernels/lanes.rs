//! The vector operations of the loops over packed weights, and their x86 implementations.

use crate::ops::tiles::vectors::SimdVector;

/// Loads of packed weights as vectors of f32.
///
/// # Safety
/// As for [`SimdVector`]. Pointers must be valid for [`SimdVector::LANES`] weights.
pub trait SimdLanes: SimdVector {
    /// Number of rows whose sums fit into registers.
    const ROWS: usize;
    unsafe fn bf16(from: *const u8) -> Self;
    /// Loads scale bytes, none of which may be 255.
    unsafe fn scales(from: *const u8) -> Self;
    /// Loads bytes, and returns the decoded values of their low nibbles and of their high nibbles.
    unsafe fn nibbles(from: *const u8) -> [Self; 2];
}

// Unsafe blocks in this module have only intrinsics. The trait requires that callers check the processor
// features of these intrinsics.
#[allow(clippy::undocumented_unsafe_blocks)]
#[cfg(target_arch = "x86_64")]
pub mod x86 {
    use super::SimdLanes;
    use crate::ops::mxfp4::MAGNITUDES;
    use std::arch::x86_64::*;

    /// The sixteen values that a nibble can encode.
    const NIBBLES: [f32; 16] = {
        let mut values = [0f32; 16];
        let mut i = 0;
        while i < 16 {
            values[i] = if i < 8 { MAGNITUDES[i] } else { -MAGNITUDES[i - 8] };
            i += 1;
        }
        values
    };
    /// The bits of 2^-127, the value of scale byte 0.
    const SMALLEST: i32 = 1 << 22;

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdLanes for __m512 {
        const ROWS: usize = 6;

        #[inline(always)]
        unsafe fn bf16(from: *const u8) -> __m512 {
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
            }
        }

        #[inline(always)]
        unsafe fn scales(from: *const u8) -> __m512 {
            unsafe {
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
                let zero = _mm512_testn_epi32_mask(bytes, bytes);
                let bits = _mm512_slli_epi32::<23>(bytes);
                _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, zero, _mm512_set1_epi32(SMALLEST)))
            }
        }

        #[inline(always)]
        unsafe fn nibbles(from: *const u8) -> [__m512; 2] {
            unsafe {
                let table = _mm512_loadu_ps(NIBBLES.as_ptr());
                // The table lookup uses only the low four bits of each index.
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
                let high = _mm512_srli_epi32::<4>(bytes);
                [_mm512_permutexvar_ps(bytes, table), _mm512_permutexvar_ps(high, table)]
            }
        }
    }

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdLanes for __m256 {
        const ROWS: usize = 2;

        #[inline(always)]
        unsafe fn bf16(from: *const u8) -> __m256 {
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            }
        }

        #[inline(always)]
        unsafe fn scales(from: *const u8) -> __m256 {
            unsafe {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
                let zero = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
                let smallest = _mm256_and_si256(zero, _mm256_set1_epi32(SMALLEST));
                _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32::<23>(bytes), smallest))
            }
        }

        #[inline(always)]
        unsafe fn nibbles(from: *const u8) -> [__m256; 2] {
            unsafe {
                let table = _mm256_loadu_ps(NIBBLES.as_ptr());
                let sign = _mm256_set1_epi32(i32::MIN);
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
                // The table lookup uses three bits of each index, which give the magnitude. The fourth bit is
                // the sign.
                let value = |index: __m256i, signed: __m256i| {
                    let magnitude = _mm256_permutevar8x32_ps(table, index);
                    _mm256_xor_ps(magnitude, _mm256_castsi256_ps(_mm256_and_si256(signed, sign)))
                };
                let low = value(bytes, _mm256_slli_epi32::<28>(bytes));
                let high = value(_mm256_srli_epi32::<4>(bytes), _mm256_slli_epi32::<24>(bytes));
                [low, high]
            }
        }
    }
}
