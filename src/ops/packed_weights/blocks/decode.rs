//! Decoding of some columns of a panel of blocks.

#[cfg(target_arch = "x86_64")]
use super::vectors;
use super::{BlockType, GROUP, GROUPS, PAIRS, SIDE};
use crate::ops::tiles::has_bf16_dot;
use multiversion::multiversion;

/// The rows of k of a panel to decode, and the columns.
#[derive(Clone, Copy)]
pub(in super::super) struct BlockColumns<'a> {
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
    pub fn check(&self) {
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

    /// Calls `on_part` for all parts, with the block, the first value of the part in its block, and its place
    /// from `self.k` on.
    #[inline(always)]
    pub fn for_each_part(&self, mut on_part: impl FnMut(&[u8], usize, usize)) {
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
            unsafe { vectors::decode_f32(self, to.as_mut_ptr(), width) };
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
            unsafe { vectors::decode_bf16(self, to.as_mut_ptr(), width) };
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
