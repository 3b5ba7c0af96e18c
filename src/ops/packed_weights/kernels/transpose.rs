//! Transposes stored bf16 rows into a panel.

use super::PANEL_COLUMNS;
use std::ops::Range;

/// Side of the square blocks that vector instructions transpose.
const SIDE: usize = 8;

/// Writes the bf16 matrix `rows [columns][in]`, which has rows of `width` bytes, to the first columns of
/// `panel [in][PANEL_COLUMNS]`.
pub fn transpose(panel: &mut [u8], rows: &[u8], width: usize) {
    let (columns, inputs) = (rows.len() / width, width / 2);
    let (mut whole_columns, mut whole_inputs) = (0, 0);
    if cfg!(target_arch = "x86_64") {
        (whole_columns, whole_inputs) = (columns / SIDE * SIDE, inputs / SIDE * SIDE);
        // Each line of the panel is completed before the next one is begun.
        for first_input in (0..whole_inputs).step_by(SIDE) {
            for first_column in (0..whole_columns).step_by(SIDE) {
                transpose_block(panel, rows, width, first_column, first_input);
            }
        }
    }
    transpose_elements(panel, rows, width, 0..whole_columns, whole_inputs..inputs);
    transpose_elements(panel, rows, width, whole_columns..columns, 0..inputs);
}

/// Transposes one element at a time.
fn transpose_elements(
    panel: &mut [u8],
    rows: &[u8],
    width: usize,
    columns: Range<usize>,
    inputs: Range<usize>,
) {
    // The part of the panel that these elements fill stays in the first-level cache.
    const ELEMENTS: usize = 64;
    for first in inputs.clone().step_by(ELEMENTS) {
        for column in columns.clone() {
            for input in first..(first + ELEMENTS).min(inputs.end) {
                let element = &rows[column * width + 2 * input..][..2];
                panel[2 * (input * PANEL_COLUMNS + column)..][..2].copy_from_slice(element);
            }
        }
    }
}

/// Transposes [`SIDE`] values of each of [`SIDE`] rows.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_block(panel: &mut [u8], rows: &[u8], width: usize, first_column: usize, first_input: usize) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi16, _mm_unpacklo_epi16};
    const BYTES: usize = 2 * SIDE;
    let mut block: [_; SIDE] = std::array::from_fn(|row| {
        let from = &rows[(first_column + row) * width + 2 * first_input..][..BYTES];
        // SAFETY: the slice has the 16 bytes. Every x86-64 processor has SSE2.
        unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
    });
    // Each round interleaves the first half of the vectors with the second half.
    for _ in 0..SIDE.ilog2() {
        block = std::array::from_fn(|i| {
            let (a, b) = (block[i / 2], block[i / 2 + SIDE / 2]);
            // SAFETY: every x86-64 processor has SSE2.
            unsafe { if i % 2 == 0 { _mm_unpacklo_epi16(a, b) } else { _mm_unpackhi_epi16(a, b) } }
        });
    }
    for (i, vector) in block.into_iter().enumerate() {
        let to = &mut panel[2 * ((first_input + i) * PANEL_COLUMNS + first_column)..][..BYTES];
        // SAFETY: the slice has the 16 bytes. Every x86-64 processor has SSE2.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), vector) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn transpose_block(_: &mut [u8], _: &[u8], _: usize, _: usize, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_what_is_left_beside_them_are_transposed() {
        for (columns, inputs) in [(64, 16), (64, 19), (13, 7), (7, 24), (1, 1), (29, 131)] {
            let width = 2 * inputs;
            let rows: Vec<u8> = (0..columns * inputs).flat_map(|i| (i as u16 + 1).to_le_bytes()).collect();
            let mut panel = vec![0; width * PANEL_COLUMNS];
            transpose(&mut panel, &rows, width);
            for (i, bytes) in panel.as_chunks().0.iter().enumerate() {
                let (input, column) = (i / PANEL_COLUMNS, i % PANEL_COLUMNS);
                let wanted = if column < columns { (column * inputs + input) as u16 + 1 } else { 0 };
                assert_eq!(u16::from_le_bytes(*bytes), wanted, "{columns} x {inputs}: ({input}, {column})");
            }
        }
    }
}
