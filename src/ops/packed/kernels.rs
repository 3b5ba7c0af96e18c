//! The inner loops over packed weights, once for each width of vector.
//!
//! Every element of a product is one chain of fused multiply-adds over a chunk of k, as the `gemm` crate makes it, and a
//! weight is decoded to the very f32 that the decoded matrix would hold. So both give the same bits.

use super::{COLUMNS, PackedForm};
use crate::ops::mxfp4::{BLOCK, MAGNITUDES, scale};
use crate::ops::product::K_CHUNK;
use std::ops::Range;

/// Vectors of columns that one pass over a panel computes together.
const VECTORS: usize = 4;

/// One panel of a packed matrix, and what of it is asked for.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub form: PackedForm,
    /// `[in]` rows of [`COLUMNS`], as the form holds them.
    pub bytes: &'a [u8],
    /// Columns that exist.
    pub columns: usize,
}

/// Where a panel's part of a product goes: columns of an output whose other columns are other threads'.
#[derive(Clone, Copy)]
pub(super) struct Stripes {
    first: *mut f32,
    len: usize,
    stride: usize,
}

// SAFETY: threads write through copies of it, but no two the same columns; `PackedMatrix::products` sees to that.
unsafe impl Send for Stripes {}
// SAFETY: as above.
unsafe impl Sync for Stripes {}

impl Stripes {
    /// Over `out`, rows of `stride` values, which is lent to it until the product is done.
    pub fn new(out: &mut [f32], stride: usize) -> Self {
        Self { first: out.as_mut_ptr(), len: out.len(), stride }
    }

    /// The place of (`row`, `column`), from which `columns` values may be written.
    fn place(&self, row: usize, column: usize, columns: usize) -> *mut f32 {
        let start = row * self.stride + column;
        assert!(column + columns <= self.stride && start + columns <= self.len, "packed product: output");
        // SAFETY: just checked.
        unsafe { self.first.add(start) }
    }

    /// The rows from `row` on.
    pub fn starting_at(&self, row: usize) -> Self {
        let start = row * self.stride;
        assert!(start <= self.len, "packed product: output");
        // SAFETY: just checked.
        Self { first: unsafe { self.first.add(start) }, len: self.len - start, stride: self.stride }
    }

    /// Copies the first row's columns from `column` on.
    pub fn read(&self, column: usize, to: &mut [f32]) {
        let place = self.place(0, column, to.len());
        for (i, value) in to.iter_mut().enumerate() {
            // SAFETY: `place` was checked for all of them, and nobody else touches these columns.
            *value = unsafe { *place.add(i) };
        }
    }

    /// Adds `sums` to a row's columns, or writes them.
    pub fn put(&self, row: usize, column: usize, sums: &[f32], add: bool) {
        let place = self.place(row, column, sums.len());
        for (i, &sum) in sums.iter().enumerate() {
            // SAFETY: `place` was checked for all of them, and nobody else touches these columns.
            unsafe {
                let out = place.add(i);
                *out = if add { *out + sum } else { sum };
            }
        }
    }

    /// The library's product of `x [m, k]` with the decoded `w [k, width]`, into columns from `column` on.
    pub fn library_product(
        &self,
        column: usize,
        (x, x_stride): (&[f32], usize),
        (w, w_stride): (&[f32], usize),
        (m, k, width): (usize, usize, usize),
        add: bool,
    ) {
        assert!(
            width <= w_stride && w.len() >= k * w_stride && x.len() >= (m - 1) * x_stride + k,
            "packed product: operands"
        );
        let first = self.place(0, column, width);
        self.place(m - 1, column, width);
        // SAFETY: all places were checked, and nobody else touches these columns.
        unsafe {
            gemm::gemm(
                m,
                width,
                k,
                first,
                1,
                self.stride as isize,
                add,
                x.as_ptr(),
                1,
                x_stride as isize,
                w.as_ptr(),
                1,
                w_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Vectors of one kind.
///
/// # Safety
/// Every function needs a processor that has the vectors; pointers must be good for [`Self::LANES`] elements.
trait Lanes {
    type Vector: Copy;
    const LANES: usize;
    /// Rows whose sums fit into registers.
    const ROWS: usize;
    unsafe fn zero() -> Self::Vector;
    unsafe fn splat(x: f32) -> Self::Vector;
    unsafe fn store(to: *mut f32, x: Self::Vector);
    /// `a · b + c`, rounded once.
    unsafe fn fused(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    unsafe fn times(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn bf16(from: *const u8) -> Self::Vector;
    /// Scale bytes, none of them 255.
    unsafe fn scales(from: *const u8) -> Self::Vector;
    /// What the low and the high nibbles of bytes stand for.
    unsafe fn nibbles(from: *const u8) -> [Self::Vector; 2];
}

// Each block is intrinsics alone; what they need is what the trait asks of its callers.
#[allow(clippy::undocumented_unsafe_blocks)]
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, MAGNITUDES};
    use std::arch::x86_64::*;

    /// The sixteen values of a nibble.
    const NIBBLES: [f32; 16] = {
        let mut values = [0f32; 16];
        let mut i = 0;
        while i < 16 {
            values[i] = if i < 8 { MAGNITUDES[i] } else { -MAGNITUDES[i - 8] };
            i += 1;
        }
        values
    };
    /// 2^-127, a scale byte of 0.
    const SMALLEST: i32 = 1 << 22;

    pub(super) struct Avx512;

    // SAFETY: the callers' duty, as the trait says.
    impl Lanes for Avx512 {
        type Vector = __m512;
        const LANES: usize = 16;
        const ROWS: usize = 6;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m512 {
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, x: __m512) {
            unsafe { _mm512_storeu_ps(to, x) }
        }

        #[inline(always)]
        unsafe fn fused(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn times(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }

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
                // The look-up reads the low four bits of each index and no others.
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
                let high = _mm512_srli_epi32::<4>(bytes);
                [_mm512_permutexvar_ps(bytes, table), _mm512_permutexvar_ps(high, table)]
            }
        }
    }

    pub(super) struct Avx2;

    // SAFETY: the callers' duty, as the trait says.
    impl Lanes for Avx2 {
        type Vector = __m256;
        const LANES: usize = 8;
        const ROWS: usize = 2;

        #[inline(always)]
        unsafe fn zero() -> __m256 {
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m256 {
            unsafe { _mm256_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, x: __m256) {
            unsafe { _mm256_storeu_ps(to, x) }
        }

        #[inline(always)]
        unsafe fn fused(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn times(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }

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
                // The look-up reads three bits of each index: the magnitude; the fourth is the sign.
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

/// Calls `each(k, weights)` for every k of `rows` in order, with the weights of the columns from `column` on.
///
/// # Safety
/// As [`Lanes`]; `rows` and the columns must lie in the panel, and blocks of MXFP4 must not be cut.
#[inline(always)]
unsafe fn walk<L: Lanes>(
    panel: Panel,
    rows: Range<usize>,
    column: usize,
    mut each: impl FnMut(usize, [L::Vector; VECTORS]),
) {
    let base = panel.bytes.as_ptr();
    match panel.form {
        PackedForm::Bf16 => {
            for k in rows {
                // SAFETY: row k of the panel, COLUMNS halves long, lies in it.
                unsafe {
                    let row = base.add((k * COLUMNS + column) * 2);
                    let mut weights = [L::zero(); VECTORS];
                    for (v, w) in weights.iter_mut().enumerate() {
                        *w = L::bf16(row.add(v * L::LANES * 2));
                    }
                    each(k, weights);
                }
            }
        }
        PackedForm::Mxfp4 => {
            for block in rows.start / BLOCK..rows.end / BLOCK {
                // SAFETY: the block, COLUMNS scales and BLOCK / 2 rows of COLUMNS bytes, lies in the panel.
                unsafe {
                    let start = base.add(block * PackedForm::MXFP4_BLOCK_BYTES + column);
                    let mut scales = [L::zero(); VECTORS];
                    for (v, s) in scales.iter_mut().enumerate() {
                        *s = L::scales(start.add(v * L::LANES));
                    }
                    for pair in 0..BLOCK / 2 {
                        let row = start.add((1 + pair) * COLUMNS);
                        let (mut low, mut high) = (scales, scales);
                        for v in 0..VECTORS {
                            let [l, h] = L::nibbles(row.add(v * L::LANES));
                            low[v] = L::times(l, scales[v]);
                            high[v] = L::times(h, scales[v]);
                        }
                        each(block * BLOCK + 2 * pair, low);
                        each(block * BLOCK + 2 * pair + 1, high);
                    }
                }
            }
        }
    }
}

/// `R` rows of `x` from `row` on times the panel's k of `rows`.
///
/// # Safety
/// As [`walk`]; the rows of `x`, `stride` apart, must be there.
#[inline(always)]
unsafe fn some_rows<L: Lanes, const R: usize>(
    panel: Panel,
    rows: Range<usize>,
    (x, stride): (&[f32], usize),
    row: usize,
    (out, first): (Stripes, usize),
    add: bool,
) {
    for column in (0..panel.columns).step_by(VECTORS * L::LANES) {
        // SAFETY: the callers' duty.
        unsafe {
            let mut sums = [[L::zero(); VECTORS]; R];
            let x = x.as_ptr().add(row * stride);
            walk::<L>(
                panel,
                rows.clone(),
                column,
                #[inline(always)]
                |k, weights| {
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let x = L::splat(*x.add(r * stride + k));
                        for v in 0..VECTORS {
                            sums[v] = L::fused(x, weights[v], sums[v]);
                        }
                    }
                },
            );
            let mut values = [0f32; COLUMNS];
            let columns = (panel.columns - column).min(VECTORS * L::LANES);
            for (r, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    L::store(values.as_mut_ptr().add(v * L::LANES), sum);
                }
                out.put(row + r, first + column, &values[..columns], add);
            }
        }
    }
}

/// All rows of `x` times a panel, a chunk of k after the other.
///
/// # Safety
/// As [`some_rows`].
#[inline(always)]
unsafe fn all_rows<L: Lanes>(panel: Panel, (x, k): (&[f32], usize), out: (Stripes, usize), accumulate: bool) {
    let m = x.len() / k;
    for start in (0..k).step_by(K_CHUNK) {
        let rows = start..(start + K_CHUNK).min(k);
        let add = accumulate || start > 0;
        let mut row = 0;
        // SAFETY: the callers' duty.
        unsafe {
            while row < m {
                let (rows, x) = (rows.clone(), (x, k));
                match (m - row).min(L::ROWS) {
                    1 => some_rows::<L, 1>(panel, rows, x, row, out, add),
                    2 => some_rows::<L, 2>(panel, rows, x, row, out, add),
                    3 => some_rows::<L, 3>(panel, rows, x, row, out, add),
                    4 => some_rows::<L, 4>(panel, rows, x, row, out, add),
                    5 => some_rows::<L, 5>(panel, rows, x, row, out, add),
                    _ => some_rows::<L, 6>(panel, rows, x, row, out, add),
                }
                row += (m - row).min(L::ROWS);
            }
        }
    }
}

/// The panel's weights of the k of `rows`, `[rows][width]`, from `to` on.
///
/// # Safety
/// As [`walk`]; `to` must have room for [`COLUMNS`] values in every row.
#[inline(always)]
unsafe fn decode<L: Lanes>(panel: Panel, rows: Range<usize>, to: *mut f32, width: usize) {
    let first = rows.start;
    for column in (0..COLUMNS).step_by(VECTORS * L::LANES) {
        // SAFETY: the callers' duty.
        unsafe {
            walk::<L>(
                panel,
                rows.clone(),
                column,
                #[inline(always)]
                |k, weights| {
                    let row = to.add((k - first) * width + column);
                    for (v, weights) in weights.into_iter().enumerate() {
                        L::store(row.add(v * L::LANES), weights);
                    }
                },
            );
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn all_rows_avx512(panel: Panel, x: (&[f32], usize), out: (Stripes, usize), accumulate: bool) {
    // SAFETY: the callers' duty.
    unsafe { all_rows::<x86::Avx512>(panel, x, out, accumulate) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn all_rows_avx2(panel: Panel, x: (&[f32], usize), out: (Stripes, usize), accumulate: bool) {
    // SAFETY: the callers' duty.
    unsafe { all_rows::<x86::Avx2>(panel, x, out, accumulate) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn decode_avx512(panel: Panel, rows: Range<usize>, to: *mut f32, width: usize) {
    // SAFETY: the callers' duty.
    unsafe { decode::<x86::Avx512>(panel, rows, to, width) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn decode_avx2(panel: Panel, rows: Range<usize>, to: *mut f32, width: usize) {
    // SAFETY: the callers' duty.
    unsafe { decode::<x86::Avx2>(panel, rows, to, width) }
}

/// Which vectors this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vectors {
    Avx512,
    Avx2,
    /// None that is known here: weights are decoded one by one, and the library multiplies.
    Plain,
}

impl Vectors {
    /// The widest that there are.
    pub fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Vectors::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Vectors::Avx2;
            }
        }
        Vectors::Plain
    }

    /// Rows of `x [m, in]` times `panel`, into columns from `first` on. False, and nothing done, without vectors.
    pub fn few_rows(self, panel: Panel, x: (&[f32], usize), out: (Stripes, usize), accumulate: bool) -> bool {
        panel.check(0..x.1);
        assert!(x.1 > 0 && x.0.len().is_multiple_of(x.1), "packed product: rows");
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has them, the panel is whole, and `x` holds whole rows.
            Vectors::Avx512 => unsafe { all_rows_avx512(panel, x, out, accumulate) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Vectors::Avx2 => unsafe { all_rows_avx2(panel, x, out, accumulate) },
            _ => return false,
        }
        true
    }

    /// Decodes the k of `rows` into columns from `column` on of `tile`, rows of `width` values.
    ///
    /// A last panel's columns that do not exist are written as 0: the row must have room for them.
    pub fn decode(self, panel: Panel, rows: Range<usize>, tile: &mut [f32], column: usize, width: usize) {
        panel.check(rows.clone());
        let last = rows.len().saturating_sub(1) * width + column + COLUMNS;
        assert!(column + COLUMNS <= width && last <= tile.len(), "packed product: tile");
        let to = tile[column..].as_mut_ptr();
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has them, the panel is whole, and the tile has room.
            Vectors::Avx512 => unsafe { decode_avx512(panel, rows, to, width) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Vectors::Avx2 => unsafe { decode_avx2(panel, rows, to, width) },
            _ => {
                for (at, k) in rows.enumerate() {
                    let row = &mut tile[at * width + column..][..COLUMNS];
                    row.iter_mut().enumerate().for_each(|(c, value)| *value = panel.value(k, c));
                }
            }
        }
    }
}

impl Panel<'_> {
    /// Panics where `rows` are not in the panel, or cut one of its blocks.
    fn check(&self, rows: Range<usize>) {
        let whole = self.form != PackedForm::Mxfp4
            || (rows.start.is_multiple_of(BLOCK) && rows.end.is_multiple_of(BLOCK));
        assert!(whole && self.columns <= COLUMNS, "packed product: rows {rows:?} cut a block");
        assert!(self.form.panel_bytes(rows.end) <= self.bytes.len(), "packed product: rows {rows:?}");
    }

    /// One weight.
    pub fn value(&self, k: usize, column: usize) -> f32 {
        match self.form {
            PackedForm::Bf16 => {
                let at = (k * COLUMNS + column) * 2;
                half::bf16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32()
            }
            PackedForm::Mxfp4 => {
                let block = &self.bytes[k / BLOCK * PackedForm::MXFP4_BLOCK_BYTES..];
                let byte = block[(1 + k % BLOCK / 2) * COLUMNS + column];
                let nibble = if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
                let magnitude = MAGNITUDES[usize::from(nibble & 7)];
                let value = if nibble & 8 == 0 { magnitude } else { -magnitude };
                value * scale(block[column])
            }
        }
    }
}
