//! Angular frequencies of RoPE, either plain or with YaRN (Peng et al. 2023).

use super::config::Rope;
use super::settings::Yarn;
use crate::ops::rope::RopeTable;

/// Returns the RoPE table of `positions` positions for heads with `head_dim` dimensions.
pub fn table(rope: &Rope, head_dim: usize, positions: usize) -> RopeTable {
    RopeTable::new(&frequencies(rope, head_dim), positions, attention_factor(rope))
}

/// Returns the factor that multiplies cosine and sine.
pub fn attention_factor(rope: &Rope) -> f64 {
    let factor = rope.yarn.as_ref().map_or(1.0, |yarn| yarn.factor);
    if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
}

/// Returns the radians per position of each pair of dimensions, `[D / 2]`.
pub fn frequencies(rope: &Rope, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let period = |i: usize| rope.theta.powf(2.0 * i as f64 / head_dim as f64);
    let Some(yarn) = &rope.yarn else {
        return (0..half).map(|i| (1.0 / period(i)) as f32).collect();
    };
    let (low, high) = ramp_bounds(yarn, rope.theta, head_dim);
    (0..half)
        .map(|i| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let (extrapolated, interpolated) = (1.0 / period(i), 1.0 / (yarn.factor * period(i)));
            (interpolated * ramp + extrapolated * (1.0 - ramp)) as f32
        })
        .collect()
}

/// Returns the bounds of the range of dimensions in which frequencies change from unscaled to scaled. Within
/// the original context, the frequency at the lower bound makes `beta_fast` turns. The frequency at the upper
/// bound makes `beta_slow` turns.
fn ramp_bounds(yarn: &Yarn, theta: f64, head_dim: usize) -> (f64, f64) {
    let original = yarn.original_max_position_embeddings as f64;
    let dimension =
        |turns: f64| head_dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (dimension(yarn.beta_fast), dimension(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    (low, high)
}
