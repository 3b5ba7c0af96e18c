//! Panels of the block types of GGUF files (`ggml-common.h`).
//!
//! A block holds 32 or 256 neighbouring values of k as integers `q`. A value is `s · q + b` in f32, where `s`
//! is a scale and `b` an offset. Blocks of 256 consist of parts, and each part has a scale of its own. The
//! product `s · q` is exact for every type, so the fused multiply-add gives the value that the format
//! defines.
//!
//! A panel holds its blocks in ascending order of k. A block of a panel has, for all columns, the scales `d`
//! (f16), the minima (f16), and the scales and minima of the parts (8 bits). Then, for each group of
//! [`GROUP`] columns, it has the integers, four pairs of k after four pairs, in the order in which a vector
//! decodes them. Lane i of the first half of a pair is k `i % 2` of column `i / 2`, and the second half has
//! the other 8 columns. With at most 5 bits, four pairs have 16 words, one for each lane: byte p of a word
//! holds pair p, the first half in its low nibble. Then come two masks of fifth bits for each pair. With 8
//! bits the bytes of a pair follow each other. Q6_K takes 8 bits here instead of 6.5, as a vector decodes
//! bytes much faster.

pub(super) mod decode;
mod product;
#[cfg(target_arch = "x86_64")]
mod vectors;

use super::PANEL_COLUMNS;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

    /// Returns the name of the type in GGUF.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
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

impl Unpacked {
    const EMPTY: Self = Self { q: [0; 256], d: [0; 2], min: [0; 2], part_scales: [0; 16], part_mins: [0; 8] };
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
        let at = k / self.part * PANEL_COLUMNS + column;
        let of_part = |place: usize, has: bool| if has { block[place + at] } else { 0 };
        let scale = of_part(self.part_scales_at(), self.has_parts());
        self.part_scale(d, min, scale, of_part(self.part_mins_at(), self.has_parts() && self.has_min))
    }

    /// Returns the scale and the offset of a part from those of its block.
    #[inline(always)]
    fn part_scale(&self, d: f32, min: f32, scale: u8, part_min: u8) -> (f32, f32) {
        match (self.has_parts(), self.has_min) {
            (false, _) => (d, min),
            (true, true) => (d * f32::from(scale), -(min * f32::from(part_min))),
            (true, false) => (d * f32::from(scale as i8), -0.0),
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
    /// Decodes whole stored blocks, to the bits of the Python package `gguf`. `values` has one entry for each
    /// of their values.
    pub fn decode(self, stored: &[u8], values: &mut [f32]) {
        decode_stored(self, stored, values);
    }

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

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn decode_stored(kind: BlockType, stored: &[u8], values: &mut [f32]) {
    let layout = kind.layout();
    let half = |bytes: [u8; 2]| f16::from_le_bytes(bytes).to_f32();
    let mut block = Unpacked::EMPTY;
    for (stored, values) in
        stored.chunks_exact(layout.stored_bytes).zip(values.chunks_exact_mut(layout.values))
    {
        kind.unpack(stored, &mut block);
        let (d, min) = (half(block.d), if layout.has_min { half(block.min) } else { -0.0 });
        let parts = values.chunks_exact_mut(layout.part).zip(block.q.chunks_exact(layout.part));
        for (part, (values, q)) in parts.enumerate() {
            let part_min = block.part_mins.get(part).copied().unwrap_or(0);
            let (s, b) = layout.part_scale(d, min, block.part_scales[part], part_min);
            values.iter_mut().zip(q).for_each(|(value, q)| *value = s * f32::from(q + layout.shift) + b);
        }
    }
}

/// Copies the stored blocks `[columns][in / values][stored_bytes]` into a panel. Missing columns become 0.
pub(super) fn arrange(kind: BlockType, panel: &mut [u8], stored: &[u8]) {
    let layout = kind.layout();
    let blocks = panel.len() / layout.panel_block_bytes();
    let width = blocks * layout.stored_bytes;
    let columns = stored.len() / width.max(1);
    let mut group = [const { Unpacked::EMPTY }; GROUP];
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
                    false => *column = Unpacked::EMPTY,
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
