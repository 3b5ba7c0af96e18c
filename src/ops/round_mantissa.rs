//! Rounding of mantissas, for an ablation. Each value is rounded to `b` stored mantissa bits, ties to even.
//!
//! bf16 has 7 stored mantissa bits, FP8 E4M3 has 3. The exponent keeps the range of f32. Not differentiable.

use super::graph::apply_without_gradient;
use super::operation::{HostArgument, Operation};
use candle_core::{CpuStorage, Result, Shape, Tensor};

/// Rounds every value of `x` to `bits` mantissa bits.
///
/// # Errors
/// When `x` is not f32.
pub fn round_mantissa(x: &Tensor, bits: u32) -> Result<Tensor> {
    apply_without_gradient(&x.contiguous()?, RoundMantissa { bits })
}

struct RoundMantissa {
    bits: u32,
}

impl Operation<1> for RoundMantissa {
    const NAME: &'static str = "round_mantissa";

    fn cpu(&self, [x]: [HostArgument; 1]) -> Result<(CpuStorage, Shape)> {
        let rounded = x.values()?.iter().map(|&v| round_value(v, self.bits)).collect();
        Ok((CpuStorage::F32(rounded), x.shape().clone()))
    }
}

/// Rounds one value to `bits` mantissa bits.
pub fn round_value(value: f32, bits: u32) -> f32 {
    let dropped = 23 - bits.min(23);
    if dropped == 0 || !value.is_finite() {
        return value;
    }
    let raw = value.to_bits();
    let half = (1u32 << (dropped - 1)) - 1 + ((raw >> dropped) & 1);
    f32::from_bits(raw.saturating_add(half) & !((1 << dropped) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, stream};
    use rand::RngCore;

    #[test]
    fn seven_bits_are_bf16_and_ties_go_to_even() {
        let mut rng = stream(1, Purpose::Initialisation, &[]);
        for _ in 0..10_000 {
            let value = f32::from_bits(rng.next_u32());
            if value.is_finite() && value.abs() < 1e38 {
                assert_eq!(round_value(value, 7), half::bf16::from_f32(value).to_f32(), "{value}");
            }
        }
        assert_eq!(round_value(1.0625, 3), 1.0);
        assert_eq!(round_value(1.1875, 3), 1.25);
        assert_eq!(round_value(0.3, 23), 0.3);
    }
}
