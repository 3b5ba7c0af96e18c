//! AdamW with block-wise 8-bit moments (Dettmers, Lewis, Shleifer, Zettlemoyer 2022, "8-bit Optimizers via
//! Block-wise Quantization").
//!
//! Each value has one code. Each block of 256 values has one scale, the largest magnitude of the block.
//!
//! A code is the index of the nearest of 256 values in [−1, 1], or in [0, 1] for a moment that is never
//! negative. The values are spaced like floating-point numbers, over seven powers of ten. For d from 0 to 6
//! they are `10^−d` times the midpoints of `n · 2^(6−d)` equal parts of [0.1, 1]. 0 and 1 are also values.
//! The signed map has n = 1. It has every value with both signs, but no −1. The unsigned map has n = 2.
//!
//! In each block, the value with the largest magnitude is exact if it is positive. If it is negative, its
//! error is 0.7%, because the signed map has no −1. Values of at least a tenth of the largest magnitude have
//! an error of at most 0.7% (signed) or 0.35% (unsigned) of this magnitude. Smaller values have fewer
//! significant digits.

use super::cpu::{change, edit, edit_codes, host_values, should_parallelize};
use super::cuda;
use super::optimizer::{AdamW, CHUNK_VALUES, check_same_shape};
use candle_core::{Result, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;

/// Number of consecutive values of a tensor that share a scale.
pub const BLOCK: usize = 256;
/// Minimum number of values of a tensor with 8-bit moments. The moments of smaller tensors, such as norms,
/// biases and sinks, stay in f32.
pub const VALUES_MIN: usize = 4096;

/// The 256 values of a code map, in ascending order.
struct CodeMap {
    values: [f32; 256],
    /// `bounds[i]` is the midpoint between values i and i + 1. The last bound is infinite.
    bounds: [f32; 256],
}

/// Code map of the first moment.
static SIGNED: CodeMap = CodeMap::new(true);
/// Code map of the second moment.
static UNSIGNED: CodeMap = CodeMap::new(false);

impl CodeMap {
    const fn new(signed: bool) -> Self {
        // 10^−d.
        const POWERS: [f64; 7] = [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6];
        let zero = if signed { 127 } else { 0 };
        let mut values = [0f32; 256];
        let (mut code, mut d) = (zero, POWERS.len());
        while d > 0 {
            d -= 1;
            let parts = (if signed { 1 } else { 2 }) << (6 - d);
            let mut part = 0;
            while part < parts {
                let middle = 0.1 + 0.9 * (part as f64 + 0.5) / parts as f64;
                code += 1;
                values[code] = (POWERS[d] * middle) as f32;
                if signed {
                    values[2 * zero - code] = -values[code];
                }
                part += 1;
            }
        }
        values[255] = 1.0;
        let mut bounds = [f32::INFINITY; 256];
        let mut i = 0;
        while i < 255 {
            bounds[i] = ((values[i] as f64 + values[i + 1] as f64) / 2.0) as f32;
            i += 1;
        }
        Self { values, bounds }
    }

    #[inline(always)]
    fn decode(&self, values: &mut [f32], codes: &[u8], scale: f32) {
        let pairs = values.iter_mut().zip(codes);
        pairs.for_each(|(value, &code)| *value = self.values[usize::from(code)] * scale);
    }

    /// Writes the codes of a block and returns its scale. A block of zeros has scale 0, and its codes have no
    /// meaning.
    ///
    /// The unsigned map never encodes a nonzero value as 0. If a second moment became 0, the update would
    /// divide the first moment by ε only, and would be far too large. With the smallest nonzero value, the
    /// update is too small until the largest value of the block decreases.
    #[inline(always)]
    fn encode(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let scale = values.iter().fold(0f32, |max, value| max.max(value.abs()));
        for (code, &value) in codes.iter_mut().zip(values) {
            let nearest = self.nearest(value / scale);
            *code = nearest + u8::from(nearest == 0 && value > 0.0);
        }
        scale
    }

    /// Returns the code of `x`: the number of bounds that do not exceed `x`. Uses binary search.
    #[inline(always)]
    fn nearest(&self, x: f32) -> u8 {
        let mut code = 0u8;
        for step in [128, 64, 32, 16, 8, 4, 2, 1] {
            code += if x >= self.bounds[usize::from(code + (step - 1))] { step } else { 0 };
        }
        code
    }
}

/// One moment of a tensor of n values: n codes, and one scale per [`BLOCK`] values.
#[derive(Clone, Copy)]
pub struct Moment<'a> {
    pub codes: &'a Tensor,
    pub scales: &'a Tensor,
}

/// Updates weights by AdamW, as [`super::optimizer::adamw`] does, with 8-bit moments. The moments are decoded
/// and updated. The update of the weights uses the exact new moments, which are then encoded. Codes have the
/// shape of the weights, and scales have the shape `[⌈n / 256⌉]`. Blocks follow the order of the values, so
/// the result has the same bits on any number of threads.
///
/// # Errors
/// When shapes differ.
pub fn adamw_8bit(
    weights: &Tensor,
    [first, second]: [Moment; 2],
    gradient: &Tensor,
    step: &AdamW,
) -> Result<()> {
    check_same_shape(weights, &[first.codes, second.codes, gradient])?;
    let blocks = weights.elem_count().div_ceil(BLOCK);
    if [first, second].iter().any(|moment| moment.scales.dims() != [blocks]) {
        bail!("adamw_8bit: {blocks} blocks, scales {:?} and {:?}", first.scales.dims(), second.scales.dims());
    }
    if weights.device().is_cuda() {
        let maps = [SIGNED.values, SIGNED.bounds, UNSIGNED.values, UNSIGNED.bounds];
        return cuda::adamw_8bit(weights, [first, second], gradient, step, &maps);
    }
    let gradient = host_values(gradient)?;
    let chunk_scales = CHUNK_VALUES / BLOCK;
    edit_moment(first, |m, m_scales| {
        edit_moment(second, |v, v_scales| {
            change(weights, |w| {
                if should_parallelize(w.len()) {
                    let weights = w.par_chunks_mut(CHUNK_VALUES).zip(gradient.par_chunks(CHUNK_VALUES));
                    let first = m.par_chunks_mut(CHUNK_VALUES).zip(m_scales.par_chunks_mut(chunk_scales));
                    let second = v.par_chunks_mut(CHUNK_VALUES).zip(v_scales.par_chunks_mut(chunk_scales));
                    weights.zip(first.zip(second)).for_each(|((w, g), (m, v))| update(w, g, m, v, step));
                } else {
                    update(w, &gradient, (m, m_scales), (v, v_scales), step);
                }
            })
        })
    })
}

/// Returns the values of the first or the second moment. There is one scale per [`BLOCK`] codes.
pub fn decode_moment(is_first: bool, codes: &[u8], scales: &[f32]) -> Vec<f32> {
    let map = if is_first { &SIGNED } else { &UNSIGNED };
    let mut values = vec![0.0; codes.len()];
    let blocks = values.chunks_mut(BLOCK).zip(codes.chunks(BLOCK));
    blocks.zip(scales).for_each(|((values, codes), &scale)| map.decode(values, codes, scale));
    values
}

fn edit_moment<R>(moment: Moment, f: impl FnOnce(&mut [u8], &mut [f32]) -> Result<R>) -> Result<R> {
    edit_codes(moment.codes, |codes| edit(moment.scales, |scales| f(codes, scales)))
}

/// The codes and the scales of one moment.
type CodesAndScales<'a> = (&'a mut [u8], &'a mut [f32]);

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn update(
    weights: &mut [f32],
    gradient: &[f32],
    first: CodesAndScales,
    second: CodesAndScales,
    step: &AdamW,
) {
    let (mut m, mut v) = ([0f32; BLOCK], [0f32; BLOCK]);
    let blocks = weights.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
    let first = first.0.chunks_mut(BLOCK).zip(first.1);
    let second = second.0.chunks_mut(BLOCK).zip(second.1);
    for ((w, g), ((m_codes, m_scale), (v_codes, v_scale))) in blocks.zip(first.zip(second)) {
        let (m, v) = (&mut m[..w.len()], &mut v[..w.len()]);
        SIGNED.decode(m, m_codes, *m_scale);
        UNSIGNED.decode(v, v_codes, *v_scale);
        step.apply(w, m, v, g);
        *m_scale = SIGNED.encode(m, m_codes);
        *v_scale = UNSIGNED.encode(v, v_codes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode_values(map: &CodeMap, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0; values.len()];
        let scale = map.encode(values, &mut codes);
        let mut decoded = vec![0.0; values.len()];
        map.decode(&mut decoded, &codes, scale);
        (codes, decoded)
    }

    #[test]
    fn maps_have_the_papers_values() {
        for (map, parts) in [(&SIGNED, 64), (&UNSIGNED, 128)] {
            assert!(map.values.is_sorted_by(|a, b| a < b), "256 values");
            assert!(map.values.contains(&0.0) && map.values[255] == 1.0);
            let upper = map.values.iter().filter(|&&value| value > 0.1 && value < 1.0).count();
            assert_eq!(upper, parts, "parts of [0.1, 1]");
            assert_eq!(map.values[254], (1.0 - 0.45 / parts as f64) as f32);
        }
        assert_eq!(
            (SIGNED.values[0], SIGNED.values[127], SIGNED.values[128]),
            (-SIGNED.values[254], 0.0, 5.5e-7)
        );
        assert_eq!((UNSIGNED.values[0], UNSIGNED.values[1], UNSIGNED.values[2]), (0.0, 3.25e-7, 7.75e-7));
    }

    #[test]
    fn a_code_is_that_of_the_nearest_value() {
        for (map, low) in [(&SIGNED, -1.0), (&UNSIGNED, 0.0)] {
            for i in 0..=20_000u32 {
                let x = low + (1.0 - low) * i as f32 / 20_000.0;
                let distance = |value: &f32| (f64::from(*value) - f64::from(x)).abs();
                let nearest = map.values.iter().map(distance).fold(f64::INFINITY, f64::min);
                let found = distance(&map.values[usize::from(map.nearest(x))]);
                // A bound is rounded to f32.
                assert!(
                    found <= nearest + 1e-7,
                    "{x}: {found} from the code's value, {nearest} from the nearest"
                );
            }
            map.values
                .iter()
                .enumerate()
                .for_each(|(code, &x)| assert_eq!(usize::from(map.nearest(x)), code));
        }
    }

    #[test]
    fn what_is_encoded_again_stays_and_zeros_are_zeros() {
        let values: Vec<f32> = (0..256).map(|i| ((i * 7919) % 1000) as f32 * 3e-5 - 0.01).collect();
        let squares: Vec<f32> = values.iter().map(|x| x * x).collect();
        for (map, values) in [(&SIGNED, values), (&UNSIGNED, squares)] {
            let (codes, decoded) = encode_values(map, &values);
            assert_eq!(encode_values(map, &decoded), (codes, decoded.clone()));
            assert!(values.iter().zip(&decoded).all(|(x, y)| x * y >= 0.0), "no sign turns");
            assert!(encode_values(map, &[0.0; 5]).1.iter().all(|&x| x == 0.0));
            assert!(encode_values(map, &[0.0, 2.5, 0.0]).1 == [0.0, 2.5, 0.0]);
        }
    }

    #[test]
    fn a_second_moment_is_never_lost() {
        for small in [1e-9, 1e-20, 1e-38, 1e-45] {
            let (codes, decoded) = encode_values(&UNSIGNED, &[1.0, small, 0.0]);
            assert_eq!(codes, [255, 1, 0], "{small}");
            assert_eq!(decoded, [1.0, 3.25e-7, 0.0]);
        }
    }
}
