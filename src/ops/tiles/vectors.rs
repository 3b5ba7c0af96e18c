//! The vector operations of tiles and skinny products, and their x86 implementations.

use super::{KRange, TileOperands, TileOutput, UnpackedOperand};

/// A vector of f32 values, or of 32-bit words with bf16 values.
///
/// # Safety
/// The processor must have the vector instructions. Pointers must be valid for [`Self::LANES`] words.
pub trait SimdVector: Copy {
    /// Number of words per vector.
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(word: u32) -> Self;
    unsafe fn load(from: *const u32) -> Self;
    unsafe fn store(self, to: *mut u32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Returns `self · factor + sum` with one rounding.
    unsafe fn fma(self, factor: Self, sum: Self) -> Self;
}

/// Products of tiles with one vector width and precision.
///
/// # Safety
/// As for [`SimdVector`].
pub trait SimdWords {
    type Vector: SimdVector;
    /// Number of words per vector.
    const LANES: usize = Self::Vector::LANES;
    /// Number of rows per tile. The sums of a tile and the columns of one step fit into registers.
    const ROWS: usize;
    /// Number of values of k per word.
    const PER_WORD: usize;
    /// Returns `sum` plus the products of the words of `x` and `w`.
    #[inline(always)]
    unsafe fn add_product(sum: Self::Vector, x: Self::Vector, w: Self::Vector) -> Self::Vector {
        // SAFETY: guaranteed by the caller.
        unsafe { x.fma(w, sum) }
    }
    /// Writes the first `columns` sums to `to`. If `add` is true, adds them to the values there.
    unsafe fn store_columns(to: *mut f32, sums: Self::Vector, columns: usize, add: bool);
    /// Loads one vector from at most `left` values that are contiguous in memory.
    unsafe fn load_contiguous(from: *const f32, left: usize) -> Self::Vector;
    /// Loads the next word of each of the first `lines` lines. A line is a row of A or a column of B. `from`
    /// is the next value of the first line; the next values of the other lines follow it contiguously. Within
    /// a line, values are `stride` apart, and `left` of them remain, including the next one. If a bf16 pair
    /// has no second value, 0 takes its place.
    unsafe fn load_strided(from: *const f32, stride: usize, left: usize, lines: usize) -> Self::Vector;
    /// Transposes the first [`Self::LANES`] vectors: swaps word `i` of vector `j` with word `j` of vector
    /// `i`.
    unsafe fn transpose(block: &mut [Self::Vector; 16]);
    /// Calls [`super::tile`], compiled for these vectors, for `rows` rows.
    unsafe fn tile(rows: usize, panels: TileOperands, to: TileOutput, columns: usize, add: bool);
    /// Calls [`super::pack_panel`], compiled for these vectors.
    unsafe fn pack(
        operand: UnpackedOperand,
        line: usize,
        lines: usize,
        chunk: KRange,
        to: *mut u32,
        width: usize,
    );
}

// Unsafe blocks in this module have only intrinsics. The trait requires that callers check the processor
// features of these intrinsics.
#[allow(clippy::undocumented_unsafe_blocks)]
#[cfg(target_arch = "x86_64")]
pub mod x86 {
    use super::super::{pack_panel, tile};
    use super::{KRange, SimdVector, SimdWords, TileOperands, TileOutput, UnpackedOperand};
    use std::arch::x86_64::*;

    /// Implements the two functions of the trait that are compiled for the features of a processor.
    macro_rules! compile_for_features {
        ($features:literal, $($rows:literal)+) => {
            #[inline]
            unsafe fn tile(rows: usize, panels: TileOperands, to: TileOutput, columns: usize, add: bool) {
                #[target_feature(enable = $features)]
                unsafe fn compiled<W: SimdWords, const R: usize>(panels: TileOperands, to: TileOutput, columns: usize, add: bool) {
                    unsafe { tile::<W, R>(panels, to, columns, add) }
                }
                unsafe {
                    match rows {
                        $($rows => compiled::<Self, $rows>(panels, to, columns, add),)+
                        _ => {}
                    }
                }
            }

            #[inline]
            unsafe fn pack(operand: UnpackedOperand, line: usize, lines: usize, chunk: KRange, to: *mut u32, width: usize) {
                #[target_feature(enable = $features)]
                unsafe fn compiled<W: SimdWords>(operand: UnpackedOperand, line: usize, lines: usize, chunk: KRange, to: *mut u32, width: usize) {
                    unsafe { pack_panel::<W>(operand, line, lines, chunk, to, width) }
                }
                unsafe { compiled::<Self>(operand, line, lines, chunk, to, width) }
            }
        };
    }

    /// Returns the mask of the first `count` of sixteen lanes.
    #[inline(always)]
    fn lane_mask(count: usize) -> __mmask16 {
        if count >= 16 { !0 } else { (1 << count) - 1 }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> __m512 {
        unsafe {
            if count >= 16 { _mm512_loadu_ps(from) } else { _mm512_maskz_loadu_ps(lane_mask(count), from) }
        }
    }

    #[inline(always)]
    unsafe fn store_columns(to: *mut f32, sums: __m512, columns: usize, add: bool) {
        unsafe {
            if columns >= 16 {
                _mm512_storeu_ps(to, if add { _mm512_add_ps(_mm512_loadu_ps(to), sums) } else { sums });
            } else {
                let sums = if add { _mm512_add_ps(load_first(to, columns), sums) } else { sums };
                _mm512_mask_storeu_ps(to, lane_mask(columns), sums);
            }
        }
    }

    /// Transposes a matrix of 4 × 4 blocks with 4 × 4 words: first each block, then the matrix of blocks.
    #[inline(always)]
    unsafe fn transpose(rows: &mut [__m512; 16]) {
        unsafe {
            let mut pairs = *rows;
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            let pd = |x: __m512| _mm512_castps_pd(x);
            let mut fours = *rows;
            for i in 0..4 {
                let of = &pairs[4 * i..4 * i + 4];
                fours[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(of[0]), pd(of[2])));
                fours[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(of[0]), pd(of[2])));
                fours[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(of[1]), pd(of[3])));
                fours[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(of[1]), pd(of[3])));
            }
            for i in 0..4 {
                let (a, b, c, d) = (fours[i], fours[4 + i], fours[8 + i], fours[12 + i]);
                let (low, high) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (low_2, high_2) =
                    (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
                rows[i] = _mm512_shuffle_f32x4::<0x88>(low, low_2);
                rows[8 + i] = _mm512_shuffle_f32x4::<0xdd>(low, low_2);
                rows[4 + i] = _mm512_shuffle_f32x4::<0x88>(high, high_2);
                rows[12 + i] = _mm512_shuffle_f32x4::<0xdd>(high, high_2);
            }
        }
    }

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdVector for __m512 {
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn splat(word: u32) -> Self {
            unsafe { _mm512_castsi512_ps(_mm512_set1_epi32(word as i32)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const u32) -> Self {
            unsafe { _mm512_loadu_ps(from.cast()) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u32) {
            unsafe { _mm512_storeu_ps(to.cast(), self) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { _mm512_add_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            unsafe { _mm512_mul_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, sum: Self) -> Self {
            unsafe { _mm512_fmadd_ps(self, factor, sum) }
        }
    }

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdVector for __m256 {
        const LANES: usize = 8;

        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn splat(word: u32) -> Self {
            unsafe { _mm256_castsi256_ps(_mm256_set1_epi32(word as i32)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const u32) -> Self {
            unsafe { _mm256_loadu_ps(from.cast()) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u32) {
            unsafe { _mm256_storeu_ps(to.cast(), self) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { _mm256_add_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            unsafe { _mm256_mul_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn fma(self, factor: Self, sum: Self) -> Self {
            unsafe { _mm256_fmadd_ps(self, factor, sum) }
        }
    }

    /// Sixteen f32 lanes (AVX-512).
    pub struct F32x16;

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdWords for F32x16 {
        type Vector = __m512;
        const ROWS: usize = 12;
        const PER_WORD: usize = 1;

        #[inline(always)]
        unsafe fn store_columns(to: *mut f32, sums: __m512, columns: usize, add: bool) {
            unsafe { store_columns(to, sums, columns, add) }
        }

        #[inline(always)]
        unsafe fn load_contiguous(from: *const f32, left: usize) -> __m512 {
            unsafe { load_first(from, left) }
        }

        #[inline(always)]
        unsafe fn load_strided(from: *const f32, _: usize, _: usize, lines: usize) -> __m512 {
            unsafe { load_first(from, lines) }
        }

        #[inline(always)]
        unsafe fn transpose(block: &mut [__m512; 16]) {
            unsafe { transpose(block) }
        }

        compile_for_features!("avx512f", 1 2 3 4 5 6 7 8 9 10 11 12);
    }

    /// Returns the mask of the first `count` of eight lanes.
    #[inline(always)]
    unsafe fn lane_mask_of_8(count: usize) -> __m256i {
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(8) as i32), lanes)
        }
    }

    /// Eight f32 lanes (AVX2).
    pub struct F32x8;

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdWords for F32x8 {
        type Vector = __m256;
        const ROWS: usize = 6;
        const PER_WORD: usize = 1;

        #[inline(always)]
        unsafe fn store_columns(to: *mut f32, sums: __m256, columns: usize, add: bool) {
            unsafe {
                let sums = if add { _mm256_add_ps(Self::load_contiguous(to, columns), sums) } else { sums };
                if columns >= Self::LANES {
                    _mm256_storeu_ps(to, sums);
                } else {
                    _mm256_maskstore_ps(to, lane_mask_of_8(columns), sums);
                }
            }
        }

        #[inline(always)]
        unsafe fn load_contiguous(from: *const f32, left: usize) -> __m256 {
            unsafe {
                if left >= Self::LANES {
                    _mm256_loadu_ps(from)
                } else {
                    _mm256_maskload_ps(from, lane_mask_of_8(left))
                }
            }
        }

        #[inline(always)]
        unsafe fn load_strided(from: *const f32, _: usize, _: usize, lines: usize) -> __m256 {
            unsafe { Self::load_contiguous(from, lines) }
        }

        #[inline(always)]
        unsafe fn transpose(block: &mut [__m256; 16]) {
            unsafe {
                let mut pairs = *block;
                for i in 0..4 {
                    pairs[2 * i] = _mm256_unpacklo_ps(block[2 * i], block[2 * i + 1]);
                    pairs[2 * i + 1] = _mm256_unpackhi_ps(block[2 * i], block[2 * i + 1]);
                }
                let mut fours = *block;
                for i in 0..2 {
                    let of = &pairs[4 * i..4 * i + 4];
                    fours[4 * i] = _mm256_shuffle_ps::<0x44>(of[0], of[2]);
                    fours[4 * i + 1] = _mm256_shuffle_ps::<0xee>(of[0], of[2]);
                    fours[4 * i + 2] = _mm256_shuffle_ps::<0x44>(of[1], of[3]);
                    fours[4 * i + 3] = _mm256_shuffle_ps::<0xee>(of[1], of[3]);
                }
                for i in 0..4 {
                    block[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
                    block[4 + i] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
                }
            }
        }

        compile_for_features!("avx2,fma", 1 2 3 4 5 6);
    }

    /// 32 bf16 values per vector, with two neighbouring k in each 32-bit word. Dot-product instructions of
    /// AVX-512 BF16 multiply the values and add in f32.
    pub struct Bf16x32;

    // SAFETY: guaranteed by the caller, as the trait requires.
    impl SimdWords for Bf16x32 {
        type Vector = __m512;
        const ROWS: usize = 12;
        const PER_WORD: usize = 2;

        #[inline(always)]
        unsafe fn add_product(sum: __m512, x: __m512, w: __m512) -> __m512 {
            unsafe { _mm512_dpbf16_ps(sum, halves(x), halves(w)) }
        }

        #[inline(always)]
        unsafe fn store_columns(to: *mut f32, sums: __m512, columns: usize, add: bool) {
            unsafe { store_columns(to, sums, columns, add) }
        }

        #[inline(always)]
        unsafe fn load_contiguous(from: *const f32, left: usize) -> __m512 {
            unsafe {
                let (low, high) =
                    (load_first(from, left), load_first(from.wrapping_add(16), left.saturating_sub(16)));
                words(_mm512_cvtne2ps_pbh(high, low))
            }
        }

        #[inline(always)]
        unsafe fn load_strided(from: *const f32, stride: usize, left: usize, lines: usize) -> __m512 {
            unsafe {
                let low = load_first(from, lines);
                let high = load_first(from.wrapping_add(stride), if left > 1 { lines } else { 0 });
                // The low halves are in the first vector, and each is paired with its high half in the second
                // vector.
                let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let pairs = _mm512_or_si512(
                    lanes,
                    _mm512_slli_epi32::<16>(_mm512_add_epi32(lanes, _mm512_set1_epi32(16))),
                );
                let halves = _mm512_castps_si512(words(_mm512_cvtne2ps_pbh(high, low)));
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(pairs, halves))
            }
        }

        #[inline(always)]
        unsafe fn transpose(block: &mut [__m512; 16]) {
            unsafe { transpose(block) }
        }

        compile_for_features!("avx512f,avx512bw,avx512bf16", 1 2 3 4 5 6 7 8 9 10 11 12);
    }

    #[inline(always)]
    fn halves(words: __m512) -> __m512bh {
        // SAFETY: both types are 512 bits.
        unsafe { std::mem::transmute(words) }
    }

    #[inline(always)]
    fn words(halves: __m512bh) -> __m512 {
        // SAFETY: both types are 512 bits.
        unsafe { std::mem::transmute(halves) }
    }
}
