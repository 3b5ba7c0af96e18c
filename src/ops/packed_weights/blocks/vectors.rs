//! Decoding of blocks, and products of few rows, by AVX-512.
//!
//! Unsafe blocks in this module have only intrinsics and calls of functions with the same requirements: the
//! processor has the instructions, and the panel and the output have all values. Arrays are written out,
//! because a closure of the standard library's functions is compiled without the instructions.

#![allow(clippy::undocumented_unsafe_blocks)]

use super::decode::BlockColumns;
use super::{BlockLayout, GROUP, PAIRS, PANEL_COLUMNS, SIDE};
use crate::ops::prefetch::prefetch_second;
use std::arch::x86_64::*;

/// Minimum number of bytes from what is decoded to what is prefetched.
const PREFETCH_DISTANCE: usize = 8192;
const CACHE_LINE: usize = 64;

/// The scales and offsets of a part, in the order of the integers of a pair: for columns 0 to 7, twice
/// each, and for columns 8 to 15.
#[inline(always)]
unsafe fn scales(
    layout: &BlockLayout,
    block: *const u8,
    k: usize,
    first: usize,
    distance: usize,
) -> [[__m512; 2]; 2] {
    unsafe {
        let halves = |at: usize| {
            let from = block.add(at + 2 * first);
            prefetch_second(from.wrapping_add(distance));
            _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
        };
        let d = halves(0);
        let min = if layout.has_min { halves(layout.mins_at()) } else { _mm512_set1_ps(-0.0) };
        let (s, b) = if layout.has_parts() {
            let at = k / layout.part * PANEL_COLUMNS + first;
            prefetch_second(block.wrapping_add(layout.part_scales_at() + at + distance));
            let bytes = _mm_loadu_si128(block.add(layout.part_scales_at() + at).cast());
            if layout.has_min {
                let mins = _mm_loadu_si128(block.add(layout.part_mins_at() + at).cast());
                let min = _mm512_mul_ps(min, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(mins)));
                let sign = _mm512_set1_epi32(i32::MIN);
                (
                    _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))),
                    _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(min), sign)),
                )
            } else {
                (_mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))), min)
            }
        } else {
            (d, min)
        };
        let low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        [
            [_mm512_permutexvar_ps(low, s), _mm512_permutexvar_ps(high, s)],
            [_mm512_permutexvar_ps(low, b), _mm512_permutexvar_ps(high, b)],
        ]
    }
}

/// Decodes the values of pair `P` of [`PAIRS`] pairs. `words` are their nibbles.
#[inline(always)]
unsafe fn decode_pair<const BITS: usize, const P: usize>(
    from: *const u8,
    words: __m512i,
    table: __m512,
    [s, b]: &[[__m512; 2]; 2],
) -> [__m512; 2] {
    unsafe {
        let (mut first, mut second);
        if BITS == 8 {
            let at = from.add(2 * GROUP * P);
            first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())));
            second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.add(GROUP).cast())));
        } else {
            let [low, high] = match P {
                0 => [words, _mm512_srli_epi32::<4>(words)],
                1 => [_mm512_srli_epi32::<8>(words), _mm512_srli_epi32::<12>(words)],
                2 => [_mm512_srli_epi32::<16>(words), _mm512_srli_epi32::<20>(words)],
                _ => [_mm512_srli_epi32::<24>(words), _mm512_srli_epi32::<28>(words)],
            };
            // A permutation reads the low four bits of each index.
            first = _mm512_permutexvar_ps(low, table);
            second = _mm512_permutexvar_ps(high, table);
            if BITS == 5 {
                let masks = from.add(PAIRS * GROUP).cast::<u32>().add(P).read_unaligned();
                let sixteen = _mm512_set1_ps(16.0);
                first = _mm512_mask_add_ps(first, masks as u16, first, sixteen);
                second = _mm512_mask_add_ps(second, (masks >> 16) as u16, second, sixteen);
            }
        }
        [_mm512_fmadd_ps(s[0], first, b[0]), _mm512_fmadd_ps(s[1], second, b[1])]
    }
}

/// Calls `put(pair of k from the start, group, values)` for all pairs of [`SIDE`] groups from `first` on.
#[inline(always)]
unsafe fn for_each_pair<const BITS: usize>(
    columns: &BlockColumns,
    first: usize,
    mut put: impl FnMut(usize, usize, [__m512; 2]),
) {
    let layout = columns.kind.layout();
    let table: [f32; 16] = std::array::from_fn(|q| q as f32 + f32::from(layout.shift));
    let pairs_bytes = layout.pairs_bytes();
    // The same place of a later block, as a product reads some groups of each block.
    let distance = PREFETCH_DISTANCE.next_multiple_of(layout.panel_block_bytes());
    unsafe {
        let table = _mm512_loadu_ps(table.as_ptr());
        columns.for_each_part(
            #[inline(always)]
            |block, k, at| {
                let block = block.as_ptr();
                let group = columns.groups.0 + first;
                let scales = [
                    scales(&layout, block, k, group * GROUP, distance),
                    scales(&layout, block, k, (group + 1) * GROUP, distance),
                ];
                let mut from =
                    [block.add(layout.pairs_at(group, k)), block.add(layout.pairs_at(group + 1, k))];
                for step in (0..layout.part / 2).step_by(PAIRS) {
                    for line in (0..pairs_bytes).step_by(CACHE_LINE) {
                        prefetch_second(from[0].wrapping_add(distance + line));
                        prefetch_second(from[1].wrapping_add(distance + line));
                    }
                    let words = [_mm512_loadu_si512(from[0].cast()), _mm512_loadu_si512(from[1].cast())];
                    macro_rules! put_pair {
                        ($($pair:literal)+) => {
                            $(for side in 0..SIDE {
                                let (from, words) = (from[side], words[side]);
                                let values = decode_pair::<BITS, $pair>(from, words, table, &scales[side]);
                                put(at / 2 + step + $pair, first + side, values);
                            })+
                        };
                    }
                    put_pair!(0 1 2 3);
                    from = [from[0].add(pairs_bytes), from[1].add(pairs_bytes)];
                }
            },
        );
    }
}

/// Calls `$function` for the number of bits of the columns' integers.
macro_rules! by_bits {
    ($columns:expr, $function:ident $(, $rows:ident)? ($($argument:expr),*)) => {
        match $columns.kind.layout().bits {
            4 => $function::<4 $(, $rows)?>($columns, $($argument),*),
            5 => $function::<5 $(, $rows)?>($columns, $($argument),*),
            _ => $function::<8 $(, $rows)?>($columns, $($argument),*),
        }
    };
}

#[target_feature(enable = "avx512f")]
pub unsafe fn decode_f32(columns: &BlockColumns, to: *mut f32, width: usize) {
    #[inline(always)]
    unsafe fn all<const BITS: usize>(columns: &BlockColumns, to: *mut f32, width: usize) {
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            for first in (0..columns.groups.1).step_by(SIDE) {
                for_each_pair::<BITS>(
                    columns,
                    first,
                    #[inline(always)]
                    |pair, group, [low, high]| {
                        let to = to.add(2 * pair * width + group * GROUP);
                        _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, even, high));
                        _mm512_storeu_ps(to.add(width), _mm512_permutex2var_ps(low, odd, high));
                    },
                );
            }
        }
    }
    unsafe { by_bits!(columns, all(to, width)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn decode_bf16(columns: &BlockColumns, to: *mut u32, width: usize) {
    #[inline(always)]
    unsafe fn all<const BITS: usize>(columns: &BlockColumns, to: *mut u32, width: usize) {
        unsafe {
            for first in (0..columns.groups.1).step_by(SIDE) {
                for_each_pair::<BITS>(
                    columns,
                    first,
                    #[inline(always)]
                    |pair, group, [low, high]| {
                        let words: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                        _mm512_storeu_si512(to.add(pair * width + group * GROUP).cast(), words);
                    },
                );
            }
        }
    }
    unsafe { by_bits!(columns, all(to, width)) }
}

/// Computes the products of `R` rows of words `x [pairs][R]` by [`SIDE`] groups of columns, in the order of
/// sums of a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn multiply_bf16<const R: usize>(
    columns: &BlockColumns,
    x: *const u32,
    sums: &mut [[f32; SIDE * GROUP]],
) {
    #[inline(always)]
    unsafe fn all<const BITS: usize, const R: usize>(
        columns: &BlockColumns,
        x: *const u32,
        to: &mut [[f32; SIDE * GROUP]],
    ) {
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); SIDE]; R];
            for_each_pair::<BITS>(
                columns,
                0,
                #[inline(always)]
                |pair, group, [low, high]| {
                    let w = _mm512_cvtne2ps_pbh(high, low);
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let x = _mm512_set1_epi32(*x.add(pair * R + row) as i32);
                        sums[group] =
                            _mm512_dpbf16_ps(sums[group], std::mem::transmute::<__m512i, __m512bh>(x), w);
                    }
                },
            );
            for (sums, to) in sums.into_iter().zip(to) {
                for (group, sum) in sums.into_iter().enumerate() {
                    _mm512_storeu_ps(to.as_mut_ptr().add(group * GROUP), sum);
                }
            }
        }
    }
    unsafe { by_bits!(columns, all, R(x, sums)) }
}
