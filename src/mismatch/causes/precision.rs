//! Causes in precision: weights in a shorter format, and shorter mantissas everywhere.

use super::{Cause, Change, F32_RUN, RELOADED_WEIGHTS};
use crate::model::config::Config;
use crate::model::names::ParameterSpec;
use crate::model::rounding::WeightRounding;
use crate::ops::mxfp4::{BLOCK, MAGNITUDES};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

pub(super) const BF16_WEIGHTS: &str = "bf16 weights";
pub(super) const REDUCED_MANTISSA: &str = "short mantissas";

pub(super) fn causes(config: &Config) -> Vec<Cause> {
    let weight_rounding = |name, detail, rounding: WeightRounding| {
        let change = Change::Weights(Arc::new(move |_| Ok(rounding.weight_change())));
        Cause::new(name, detail, RELOADED_WEIGHTS, change)
    };
    let bf16 = WeightRounding { mxfp4: false, bits: Some(7) };
    let mut causes = vec![weight_rounding(BF16_WEIGHTS, "every tensor is rounded", bf16)];
    let is_divisible =
        [config.hidden_size, config.intermediate_size].iter().all(|size| size.is_multiple_of(BLOCK));
    if config.family.has_experts && is_divisible {
        let name = "MXFP4 weights";
        let detail = "expert matrices in blocks of 32; values above 6 times the block's scale are clamped";
        causes.push(Cause::in_tensors(
            name,
            detail,
            RELOADED_WEIGHTS,
            ParameterSpec::is_expert_matrix,
            round_to_mxfp4_saturating,
        ));
        let mxfp4 = WeightRounding { mxfp4: true, bits: None };
        causes.push(weight_rounding(name, "expert matrices in blocks of 32", mxfp4));
    }
    causes.extend([3, 5, 7].map(|bits| {
        let detail = format!("weights and activations of {bits} bits");
        Cause::in_forward(REDUCED_MANTISSA, detail, F32_RUN, move |variant| variant.set_rounding(bits, bits))
    }));
    causes
}

/// Rounds to MXFP4 in blocks of 32 inputs. The scale of a block is a power of two, chosen so that the largest
/// magnitude divided by the scale is in 4..8. Each magnitude is rounded to the nearest of the format's eight
/// values; ties go to the even index. Values above 6 become 6.
fn round_to_mxfp4_saturating(tensor: &Tensor) -> Result<Tensor> {
    let [_, inputs, outputs]: [usize; 3] = tensor.dims3()?.into();
    let mut values = tensor.flatten_all()?.to_vec1::<f32>()?;
    for matrix in values.chunks_exact_mut(inputs * outputs) {
        for block in matrix.chunks_exact_mut(BLOCK * outputs) {
            for output in 0..outputs {
                let indices = (0..BLOCK).map(|i| i * outputs + output);
                let largest = indices.clone().fold(0f32, |m, index| m.max(block[index].abs()));
                let exponent = ((largest.to_bits() >> 23) as i32 - 127 - 2).clamp(-127, 127);
                let scale = f32::powi(2.0, exponent);
                indices.for_each(|index| block[index] = nearest_magnitude(block[index] / scale) * scale);
            }
        }
    }
    Ok(Tensor::from_vec(values, tensor.shape(), tensor.device())?)
}

fn nearest_magnitude(x: f32) -> f32 {
    let mut best = 0;
    for (index, magnitude) in MAGNITUDES.iter().enumerate() {
        let (new, old) = ((x.abs() - magnitude).abs(), (x.abs() - MAGNITUDES[best]).abs());
        if new < old || new == old && index % 2 == 0 {
            best = index;
        }
    }
    MAGNITUDES[best].copysign(x)
}
