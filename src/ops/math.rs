//! Elementwise functions and row sums. The bits of a result do not depend on the vector width, the position
//! in the row or the machine.

use multiversion::multiversion;

/// Number of lanes of a row sum. Element `i` is added to lane `i % LANES`. Then the lanes are added pairwise,
/// as a tree.
pub const LANES: usize = 16;

/// Returns `e^x` with an error of about one unit in the last place. The result is exactly 0 below −87, and
/// finite up to 88.
///
/// Uses only additions and multiplications (Cody–Waite reduction and a polynomial of degree 6). So a
/// vectorised loop and its scalar remainder give the same bits, unlike a mix of `exp` of the C library and a
/// vectorised `exp`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23. Adding this number rounds to the nearest integer.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let p = 1.987_569_1e-4_f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 5.0e-1);
    let p = p.mul_add(r * r, r) + 1.0;
    // n is read as an integer from the bits of the rounded sum, because a checked conversion would not
    // vectorise.
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let scale = f32::from_bits(exponent.wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { p * scale }
}

/// Returns `1 / (1 + e^{−x})`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the sum of the lanes, added pairwise. This is the last step of every row sum.
#[inline(always)]
pub fn add_lanes(lanes: [f32; LANES]) -> f32 {
    reduce_lanes(lanes, |a, b| a + b)
}

/// Reduces sixteen lanes to one value by applying `f` to the two halves repeatedly. The widths are constants,
/// so that the compiler keeps the arrays in vectors.
#[inline(always)]
fn reduce_lanes(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| f(lanes[i], lanes[i + 8]));
    let four: [f32; 4] = std::array::from_fn(|i| f(eight[i], eight[i + 4]));
    let two: [f32; 2] = std::array::from_fn(|i| f(four[i], four[i + 2]));
    f(two[0], two[1])
}

/// Returns Σ_i f(values of `rows` at i), added in lane order. All rows must have the same length. Values are
/// processed in whole chunks, so that the compiler keeps lanes in vectors.
#[inline(always)]
pub fn sum_lanes<const N: usize>(rows: [&[f32]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rests): ([&[[f32; LANES]]; N], [&[f32]; N]) =
        (rows.map(|row| row.as_chunks().0), rows.map(|row| row.as_chunks::<LANES>().1));
    for i in 0..chunks[0].len() {
        let chunk = chunks.map(|chunks| &chunks[i]);
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += f(chunk.map(|chunk| chunk[l]));
        }
    }
    for (l, lane) in lanes.iter_mut().enumerate().take(rests[0].len()) {
        *lane += f(rests.map(|rest| rest[l]));
    }
    add_lanes(lanes)
}

/// Returns Σ a_i b_i in lane order.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum_lanes([a, b], |[a, b]| a * b)
}

/// Computes `out = a + b`, elementwise.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(a).zip(b).for_each(|((out, a), b)| *out = a + b);
}

/// Returns the largest value of a row; −∞ for an empty row.
#[inline(always)]
pub fn max_lanes(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        raise(&mut lanes, chunk);
    }
    raise(&mut lanes, rest);
    reduce_lanes(lanes, larger)
}

/// Multiplies `row` by `factor` in place and returns the maximum. A single pass does both, because a row of
/// logits does not fit in the cache.
#[inline(always)]
pub fn scale_and_max(row: &mut [f32], factor: f32) -> f32 {
    if factor == 1.0 {
        return max_lanes(row);
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        chunk.iter_mut().for_each(|x| *x *= factor);
        raise(&mut lanes, chunk);
    }
    let rest = chunks.into_remainder();
    rest.iter_mut().for_each(|x| *x *= factor);
    raise(&mut lanes, rest);
    reduce_lanes(lanes, larger)
}

/// Sets each lane to the maximum of the lane and the value in `chunk`. `chunk` has at most [`LANES`] values.
#[inline(always)]
fn raise(lanes: &mut [f32; LANES], chunk: &[f32]) {
    for (lane, &x) in lanes.iter_mut().zip(chunk) {
        *lane = larger(*lane, x);
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0f64;
        for i in -870_000..880_000 {
            let x = i as f32 / 10_000.0;
            let exact = (x as f64).exp();
            let error = ((exp(x) as f64) - exact).abs() / exact;
            worst = worst.max(error);
        }
        assert!(worst < 2.0 * f32::EPSILON as f64, "worst relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e9), 0.0);
    }

    #[test]
    fn a_sum_ignores_how_the_row_is_reached() {
        let row: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.4).collect();
        let mut lanes = [0f32; LANES];
        row.iter().enumerate().for_each(|(i, x)| lanes[i % LANES] += std::hint::black_box(*x));
        assert_eq!(sum_lanes([&row], |[x]| x).to_bits(), add_lanes(lanes).to_bits());
        let squares: Vec<f32> = row.iter().map(|x| std::hint::black_box(*x) * x).collect();
        assert_eq!(dot(&row, &row).to_bits(), sum_lanes([&squares], |[x]| x).to_bits());
    }

    #[test]
    fn a_row_scaled_on_the_way_to_its_largest_value_is_the_row_scaled_before() {
        for len in [0, 1, 15, 16, 17, 1003] {
            let row: Vec<f32> = (0..len).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.4).collect();
            for factor in [1.0, 0.7, -2.0] {
                let scaled: Vec<f32> = row.iter().map(|x| x * factor).collect();
                let mut walked = row.clone();
                let highest = scale_and_max(&mut walked, factor);
                assert_eq!(
                    (highest, walked),
                    (scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max), scaled)
                );
            }
        }
    }
}
