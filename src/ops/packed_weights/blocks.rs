//! Panels of the block types of GGUF files (`ggml-common.h`).
//!
//! A block holds 32 or 256 neighbouring values of k as integers `q`. A value is `s · q + b` in f32, where `s`
//! is a scale and `b` an offset. Blocks of 256 consist of parts, and each part has a scale of its own. The
//! product `s · q` is exact for every type, so the fused multiply-add gives the value that the format defines.
//!
//! A panel holds its blocks in ascending order of k. A block of a panel has, for all columns, the scales `d`
//! (f16), the minima (f16), and the scales and minima of the parts (8 bits). Then, for each group of
//! [`GROUP`] columns, it has the integers, four pairs of k after four pairs, in the order in which a vector
//! decodes them. Lane i of the first half of a pair is k `i % 2` of column `i / 2`, and the second half has
//! the other 8 columns. With at most 5 bits, four pairs have 16 words, one for each lane: byte p of a word
//! holds pair p, the first half in its low nibble. Then come two masks of fifth bits for each pair. With 8
//! bits the bytes of a pair follow each other. Q6_K takes 8 bits here instead of 6.5, as a vector decodes
//! bytes much faster.

use super::PANEL_COLUMNS;
use crate::ops::tiles::panels::{ChunkWords, FewSums, PanelWords};
use crate::ops::tiles::vectors::SimdWords;
use crate::ops::tiles::{CacheLine, KRange, VECTORS, has_bf16_dot, words_of};
use half::f16;
use multiversion::multiversion;

/// Number of columns that a vector decodes at a time.
pub(super) const GROUP: usize = 16;
/// Number of groups of a panel.
const GROUPS: usize = PANEL_COLUMNS / GROUP;
/// Number of pairs of k whose integers are stored together.
const PAIRS: usize = 4;
/// Number of groups that vectors decode side by side, so that the chains of sums of a product overlap.
const SIDE: usize = 2;

/// A type of quantised blocks in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// The sizes of a block type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockLayout {
    /// Number of values of a block.
    pub values: usize,
    /// Number of bytes of a block in a file.
    pub stored_bytes: usize,
    /// Number of values with one scale.
    pub part: usize,
    /// Number of bits of an integer in a panel: 4, 5, or 8.
    pub bits: usize,
    /// Whether a block has a minimum, which is subtracted (K types) or added.
    pub has_min: bool,
    /// The value that is added to an unsigned integer of 4 or 5 bits.
    pub shift: i8,
}

impl BlockType {
    /// All types.
    #[cfg(test)]
    pub const ALL: [Self; 8] =
        [Self::Q4_0, Self::Q4_1, Self::Q5_0, Self::Q5_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

    pub(super) const fn layout(self) -> BlockLayout {
        let (values, stored_bytes, part, bits, has_min, shift) = match self {
            Self::Q4_0 => (32, 18, 32, 4, false, -8),
            Self::Q4_1 => (32, 20, 32, 4, true, 0),
            Self::Q5_0 => (32, 22, 32, 5, false, -16),
            Self::Q5_1 => (32, 24, 32, 5, true, 0),
            Self::Q8_0 => (32, 34, 32, 8, false, 0),
            Self::Q4K => (256, 144, 32, 4, true, 0),
            Self::Q5K => (256, 176, 32, 5, true, 0),
            Self::Q6K => (256, 210, 16, 8, false, 0),
        };
        BlockLayout { values, stored_bytes, part, bits, has_min, shift }
    }

    /// Returns the number of values of a block.
    pub const fn values(self) -> usize {
        self.layout().values
    }

    /// Returns whether all values of stored blocks are finite.
    pub fn is_finite(self, stored: &[u8]) -> bool {
        let layout = self.layout();
        let halves: &[usize] = match self {
            Self::Q6K => &[208],
            _ if layout.has_min => &[0, 2],
            _ => &[0],
        };
        let is_finite = |block: &[u8], at: usize| block[at + 1] & 0x7c != 0x7c;
        let mut blocks = stored.chunks_exact(layout.stored_bytes);
        blocks.all(|block| halves.iter().all(|at| is_finite(block, *at)))
    }

    /// Returns the number of bytes of `values` values in a file.
    pub const fn stored_bytes(self, values: usize) -> usize {
        values / self.layout().values * self.layout().stored_bytes
    }
}

/// The integers and scales of one stored block.
struct Unpacked {
    q: [i8; 256],
    d: [u8; 2],
    min: [u8; 2],
    part_scales: [u8; 16],
    part_mins: [u8; 8],
}

impl BlockLayout {
    /// Returns whether parts have scales.
    pub const fn has_parts(&self) -> bool {
        self.values > self.part
    }

    const fn parts(&self) -> usize {
        self.values / self.part
    }

    /// Returns the place of the minima in a block of a panel.
    const fn mins_at(&self) -> usize {
        2 * PANEL_COLUMNS
    }

    /// Returns the place of the scales of the parts, `[parts][PANEL_COLUMNS]`.
    const fn part_scales_at(&self) -> usize {
        2 * PANEL_COLUMNS * (1 + self.has_min as usize)
    }

    /// Returns the place of the minima of the parts, `[parts][PANEL_COLUMNS]`.
    const fn part_mins_at(&self) -> usize {
        self.part_scales_at() + if self.has_parts() { self.parts() * PANEL_COLUMNS } else { 0 }
    }

    /// Returns the place of the integers, `[GROUPS][values / 2 / PAIRS][pairs_bytes]`.
    const fn integers_at(&self) -> usize {
        let mins = if self.has_parts() && self.has_min { self.parts() * PANEL_COLUMNS } else { 0 };
        self.part_mins_at() + mins
    }

    /// Returns the number of bytes of [`PAIRS`] pairs of k of a group.
    const fn pairs_bytes(&self) -> usize {
        PAIRS
            * match self.bits {
                4 => GROUP,
                5 => GROUP + 4,
                _ => 2 * GROUP,
            }
    }

    /// Returns the place of the integers of a group in a block, from the pair with value `k` on.
    const fn pairs_at(&self, group: usize, k: usize) -> usize {
        self.integers_at() + (group * (self.values / 2) + k / 2) / PAIRS * self.pairs_bytes()
    }

    /// Returns the number of bytes of a block of a panel.
    pub const fn panel_block_bytes(&self) -> usize {
        self.pairs_at(GROUPS, 0)
    }

    /// Reads the scale and the offset of `column` for the part with value `k` of a block.
    fn scale_and_offset(&self, block: &[u8], k: usize, column: usize) -> (f32, f32) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let d = half(2 * column);
        let min = if self.has_min { half(self.mins_at() + 2 * column) } else { -0.0 };
        if !self.has_parts() {
            return (d, min);
        }
        let at = k / self.part * PANEL_COLUMNS + column;
        let scale = block[self.part_scales_at() + at];
        match self.has_min {
            true => (d * f32::from(scale), -(min * f32::from(block[self.part_mins_at() + at]))),
            false => (d * f32::from(scale as i8), -0.0),
        }
    }

    /// Decodes the value `k` of `column` in a block of a panel.
    pub fn value(&self, block: &[u8], k: usize, column: usize) -> f32 {
        let (s, b) = self.scale_and_offset(block, k, column);
        let pairs = &block[self.pairs_at(column / GROUP, k)..][..self.pairs_bytes()];
        let at = column % GROUP * 2 + k % 2;
        s * f32::from(self.integer(pairs, k / 2 % PAIRS, at)) + b
    }

    /// Returns integer `at` of pair `pair`: k `at % 2` of column `at / 2`.
    #[inline(always)]
    fn integer(&self, pairs: &[u8], pair: usize, at: usize) -> i8 {
        if self.bits == 8 {
            return pairs[pair * 2 * GROUP + at] as i8;
        }
        let (lane, is_high) = (at % GROUP, at >= GROUP);
        let byte = pairs[lane * PAIRS + pair];
        let nibble = if is_high { byte >> 4 } else { byte & 15 };
        let masks = PAIRS * GROUP + 4 * pair + 2 * usize::from(is_high);
        let fifth = if self.bits == 5 { pairs[masks + lane / 8] >> (lane % 8) & 1 } else { 0 };
        (nibble | fifth << 4) as i8 + self.shift
    }
}

impl BlockType {
    /// Reads the integers and the scales of a stored block. The integers of a type of at most 5 bits are
    /// unsigned.
    #[inline(always)]
    fn unpack(self, block: &[u8], to: &mut Unpacked) {
        let pair = |at: usize| [block[at], block[at + 1]];
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => {
                to.d = pair(0);
                let layout = self.layout();
                if layout.has_min {
                    to.min = pair(2);
                }
                let start = if layout.has_min { 4 } else { 2 };
                let (fifth, nibbles) = match layout.bits {
                    5 => {
                        let bits = block[start..].first_chunk().map_or(0, |bits| u32::from_le_bytes(*bits));
                        (bits, &block[start + 4..start + 20])
                    }
                    _ => (0, &block[start..start + 16]),
                };
                for (i, &byte) in nibbles.iter().enumerate() {
                    to.q[i] = (byte & 15 | ((fifth >> i & 1) << 4) as u8) as i8;
                    to.q[i + 16] = (byte >> 4 | ((fifth >> (i + 16) & 1) << 4) as u8) as i8;
                }
            }
            Self::Q8_0 => {
                to.d = pair(0);
                to.q.iter_mut().zip(&block[2..34]).for_each(|(q, byte)| *q = *byte as i8);
            }
            Self::Q4K | Self::Q5K => {
                (to.d, to.min) = (pair(0), pair(2));
                let packed = &block[4..16];
                for part in 0..8 {
                    (to.part_scales[part], to.part_mins[part]) = match part {
                        0..4 => (packed[part] & 63, packed[part + 4] & 63),
                        _ => (
                            packed[part + 4] & 15 | packed[part - 4] >> 6 << 4,
                            packed[part + 4] >> 4 | packed[part] >> 6 << 4,
                        ),
                    };
                }
                let nibbles = if self == Self::Q5K { &block[48..176] } else { &block[16..144] };
                for (part, q) in to.q.chunks_exact_mut(32).enumerate() {
                    let low = &nibbles[part / 2 * 32..][..32];
                    for (i, q) in q.iter_mut().enumerate() {
                        let fifth = if self == Self::Q5K { (block[16 + i] >> part & 1) << 4 } else { 0 };
                        *q = (low[i] >> (part % 2 * 4) & 15 | fifth) as i8;
                    }
                }
            }
            Self::Q6K => {
                to.d = pair(208);
                to.part_scales.copy_from_slice(&block[192..208]);
                for (part, q) in to.q.chunks_exact_mut(32).enumerate() {
                    let (half, group) = (part / 4, part % 4);
                    let low = &block[half * 64 + group % 2 * 32..][..32];
                    let high = &block[128 + half * 32..][..32];
                    for (i, q) in q.iter_mut().enumerate() {
                        let bits = low[i] >> (group / 2 * 4) & 15 | (high[i] >> (group * 2) & 3) << 4;
                        *q = bits as i8 - 32;
                    }
                }
            }
        }
    }
}

/// Copies the stored blocks `[columns][in / values][stored_bytes]` into a panel. Missing columns become 0.
pub(super) fn arrange(kind: BlockType, panel: &mut [u8], stored: &[u8]) {
    let layout = kind.layout();
    let blocks = panel.len() / layout.panel_block_bytes();
    let width = blocks * layout.stored_bytes;
    let columns = stored.len() / width.max(1);
    let empty = Unpacked { q: [0; 256], d: [0; 2], min: [0; 2], part_scales: [0; 16], part_mins: [0; 8] };
    let mut group: [Unpacked; GROUP] = std::array::from_fn(|_| Unpacked { ..empty });
    for (index, panel) in panel.chunks_exact_mut(layout.panel_block_bytes()).enumerate() {
        let (scales, integers) = panel.split_at_mut(layout.integers_at());
        for (first, integers) in
            integers.chunks_exact_mut(layout.values / 2 / PAIRS * layout.pairs_bytes()).enumerate()
        {
            for (at, column) in group.iter_mut().enumerate() {
                let place = first * GROUP + at;
                match place < columns {
                    true => {
                        let start = place * width + index * layout.stored_bytes;
                        kind.unpack(&stored[start..start + layout.stored_bytes], column);
                    }
                    false => *column = Unpacked { ..empty },
                }
                scales[2 * place..2 * place + 2].copy_from_slice(&column.d);
                if layout.has_min {
                    scales[layout.mins_at() + 2 * place..][..2].copy_from_slice(&column.min);
                }
                for part in (0..layout.parts()).filter(|_| layout.has_parts()) {
                    scales[layout.part_scales_at() + part * PANEL_COLUMNS + place] = column.part_scales[part];
                    if layout.has_min {
                        scales[layout.part_mins_at() + part * PANEL_COLUMNS + place] = column.part_mins[part];
                    }
                }
            }
            arrange_integers(&layout, integers, &group);
        }
    }
}

/// Writes the integers of a group of columns.
fn arrange_integers(layout: &BlockLayout, to: &mut [u8], group: &[Unpacked; GROUP]) {
    for (index, to) in to.chunks_exact_mut(layout.pairs_bytes()).enumerate() {
        for pair in 0..PAIRS {
            let of = |column: usize| {
                let (q, k) = (&group[column].q, 2 * (index * PAIRS + pair));
                u16::from_le_bytes([q[k] as u8, q[k + 1] as u8])
            };
            if layout.bits == 8 {
                let to = &mut to[pair * 2 * GROUP..][..2 * GROUP];
                for (column, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
                    *to = of(column).to_le_bytes();
                }
                continue;
            }
            let mut masks = [0u16; 2];
            for column in 0..GROUP / 2 {
                let (low, high) = (of(column), of(column + GROUP / 2));
                let [first, second] = (low & 0x0f0f | (high & 0x0f0f) << 4).to_le_bytes();
                to[2 * column * PAIRS + pair] = first;
                to[(2 * column + 1) * PAIRS + pair] = second;
                for (mask, q) in masks.iter_mut().zip([low, high]) {
                    *mask |= (q >> 4 & 1 | (q >> 12 & 1) << 1) << (2 * column);
                }
            }
            if layout.bits == 5 {
                let to = &mut to[PAIRS * GROUP + 4 * pair..][..4];
                to[..2].copy_from_slice(&masks[0].to_le_bytes());
                to[2..].copy_from_slice(&masks[1].to_le_bytes());
            }
        }
    }
}

/// The rows of k of a panel to decode, and the columns.
#[derive(Clone, Copy)]
pub(super) struct BlockColumns<'a> {
    pub kind: BlockType,
    /// The whole panel.
    pub panel: &'a [u8],
    /// The first value of k. It begins a part.
    pub k: usize,
    /// Number of values of k, whole parts.
    pub count: usize,
    /// Index of the first group, and number of groups.
    pub groups: (usize, usize),
}

impl BlockColumns<'_> {
    /// Panics if the panel does not have these values.
    fn check(&self) {
        let layout = self.kind.layout();
        let end = self.k + self.count;
        assert!(
            self.k.is_multiple_of(layout.part)
                && self.count.is_multiple_of(layout.part)
                && end.div_ceil(layout.values) * layout.panel_block_bytes() <= self.panel.len()
                && self.groups.0 + self.groups.1 <= GROUPS,
            "packed product: k {} to {end} of a panel of blocks",
            self.k
        );
    }

    /// Calls `on_part(block, first value of the part in its block, its place from `self.k` on)` for all parts.
    #[inline(always)]
    fn for_each_part(&self, mut on_part: impl FnMut(&[u8], usize, usize)) {
        let layout = self.kind.layout();
        let size = layout.panel_block_bytes();
        for at in (0..self.count).step_by(layout.part) {
            let k = self.k + at;
            let block = &self.panel[k / layout.values * size..][..size];
            on_part(block, k % layout.values, at);
        }
    }

    /// Decodes to `to`, whose rows of one k are `width` values apart. Row 0 is `self.k`, and column 0 the
    /// first column of the first group.
    pub fn decode(&self, to: &mut [f32], width: usize) {
        self.check();
        assert!(
            self.count == 0
                || width >= self.groups.1 * GROUP
                    && to.len() >= (self.count - 1) * width + self.groups.1 * GROUP,
            "packed product: tile"
        );
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && self.groups.1.is_multiple_of(SIDE) {
            // SAFETY: the processor has the instructions; all places were checked.
            unsafe { x86::decode_f32(self, to.as_mut_ptr(), width) };
            return;
        }
        plain_decode(self, to, width);
    }

    /// Decodes to words of two neighbouring k in bf16, rounded to nearest. `to` is `[count / 2][width]`.
    ///
    /// # Panics
    /// When the processor has no bf16 dot products.
    pub fn decode_to_bf16_pairs(&self, to: &mut [u32], width: usize) {
        self.check();
        assert!(
            self.count == 0
                || width >= self.groups.1 * GROUP
                    && self.groups.1.is_multiple_of(SIDE)
                    && to.len() >= (self.count / 2 - 1) * width + self.groups.1 * GROUP,
            "packed product: words"
        );
        #[cfg(target_arch = "x86_64")]
        if has_bf16_dot() {
            // SAFETY: the processor has the instructions; all places were checked.
            unsafe { x86::decode_bf16(self, to.as_mut_ptr(), width) };
            return;
        }
        unreachable!("no bf16 dot products");
    }
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn plain_decode(columns: &BlockColumns, to: &mut [f32], width: usize) {
    let layout = columns.kind.layout();
    columns.for_each_part(|block, k, at| {
        for group in 0..columns.groups.1 {
            let index = columns.groups.0 + group;
            let scales: [(f32, f32); GROUP] =
                std::array::from_fn(|column| layout.scale_and_offset(block, k, index * GROUP + column));
            for pair in 0..layout.part / 2 {
                let integers = &block[layout.pairs_at(index, k + 2 * pair)..][..layout.pairs_bytes()];
                for second in 0..2 {
                    let row = &mut to[(at + 2 * pair + second) * width + group * GROUP..][..GROUP];
                    for (column, (to, (s, b))) in row.iter_mut().zip(scales).enumerate() {
                        *to = s * f32::from(layout.integer(integers, pair % PAIRS, 2 * column + second)) + b;
                    }
                }
            }
        }
    });
}

// Unsafe blocks in this module have only intrinsics and calls of functions with the same requirements: the
// processor has the instructions, and the panel and the output have all values.
#[allow(clippy::undocumented_unsafe_blocks)]
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BlockColumns, BlockLayout, GROUP, PAIRS, PANEL_COLUMNS, SIDE};
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
                            sums[group] = _mm512_dpbf16_ps(sums[group], std::mem::transmute(x), w);
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
}

/// The matrix of one expert as the panels of a product.
pub(super) struct BlockPanels<'a> {
    pub kind: BlockType,
    /// All panels.
    pub bytes: &'a [u8],
    pub panel_bytes: usize,
}

impl BlockPanels<'_> {
    /// Returns the columns of a panel of a product for `chunk`.
    fn columns<W: SimdWords>(&self, panel: usize, chunk: KRange) -> BlockColumns<'_> {
        let (width, first) = (VECTORS * W::LANES, panel * VECTORS * W::LANES);
        BlockColumns {
            kind: self.kind,
            panel: &self.bytes[first / PANEL_COLUMNS * self.panel_bytes..][..self.panel_bytes],
            k: chunk.start,
            count: chunk.values,
            groups: (first % PANEL_COLUMNS / GROUP, width / GROUP),
        }
    }
}

impl PanelWords for BlockPanels<'_> {
    fn words<W: SimdWords>(&self, panel: usize, chunk: KRange, scratch: &mut [CacheLine]) -> ChunkWords {
        let (columns, width) = (self.columns::<W>(panel, chunk), VECTORS * W::LANES);
        let words = words_of(scratch);
        match W::PER_WORD {
            2 => columns.decode_to_bf16_pairs(words, width),
            _ => columns.decode(as_f32(words), width),
        }
        // Decoding itself prefetches.
        ChunkWords { words: words.as_ptr(), next: std::ptr::null(), next_lines: 0 }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn multiply_few<W: SimdWords>(
        &self,
        panel: usize,
        chunk: KRange,
        x: *const u32,
        rows: usize,
        sums: &mut FewSums,
    ) -> usize {
        if W::PER_WORD != 2 {
            return 0;
        }
        let columns = self.columns::<W>(panel, chunk);
        columns.check();
        // SAFETY: guaranteed by the caller; words of two values mean bf16 dot products.
        unsafe {
            match rows {
                1 => x86::multiply_bf16::<1>(&columns, x, &mut sums[..1]),
                _ => x86::multiply_bf16::<2>(&columns, x, &mut sums[..2]),
            }
        }
        rows
    }
}

fn as_f32(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: both types have 32 bits, and every bit pattern is valid.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}
