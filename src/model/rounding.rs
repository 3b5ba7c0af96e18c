//! Ablations that round the weights for sampling.

use super::ablations::Ablations;
use super::layers_on_demand::WeightChange;
use super::names::ParameterSpec;
use super::storage::StoredFormat;
use crate::bad_input;
use crate::ops::packed_weights::{PackedFormat, PackedMatrix};
use crate::ops::product::Precision;
use crate::ops::weight::Weight;
use crate::ops::{mxfp4, round_mantissa, round_mantissa::round_value};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Number of stored mantissa bits of bf16.
const BF16_BITS: u32 = 7;
/// Number of mantissa bits that represent every value of MXFP4, including values below the normal range of
/// f32.
const MXFP4_BITS: u32 = 2;

/// The rounding of weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightRounding {
    /// Whether expert matrices are rounded to MXFP4, before the rounding to `bits`.
    pub mxfp4: bool,
    /// Number of stored mantissa bits to which every tensor is rounded; `None` means no rounding.
    pub bits: Option<u32>,
}

impl WeightRounding {
    /// Returns the rounding of the rollout's weights under `ablations`.
    pub fn from_ablations(ablations: &Ablations) -> Self {
        Self { mxfp4: ablations.rollout_mxfp4, bits: ablations.rollout_mantissa_limit() }
    }

    /// Returns a rounding that changes each tensor that `self` or `other` changes.
    pub fn union(self, other: Self) -> Self {
        Self { mxfp4: self.mxfp4 || other.mxfp4, bits: self.bits.into_iter().chain(other.bits).min() }
    }

    /// Returns the memory, in bytes, that [`Self::apply`] allocates for a tensor stored in `format`. It is 0
    /// if the result shares the tensor.
    pub fn copy_bytes(self, spec: &ParameterSpec, format: StoredFormat) -> u64 {
        let packed = spec.packed_format(format);
        let becomes_mxfp4 = self.mxfp4 && spec.is_expert_matrix() && packed != Some(PackedFormat::Mxfp4);
        let loses_bits =
            self.bits.is_some_and(|bits| packed.is_none_or(|packed| bits < mantissa_bits(packed)));
        // A tensor of MXFP4 or of blocks that is rounded to fewer bits is decoded to f32.
        let is_decoded = packed.is_some_and(|packed| !is_bf16(packed));
        let format = if loses_bits && is_decoded { StoredFormat::F32 } else { format };
        if becomes_mxfp4 || loses_bits { spec.resident_bytes(format) } else { 0 }
    }

    /// Returns the rounding as a [`WeightChange`].
    pub fn weight_change(self) -> WeightChange {
        Arc::new(move |spec, weight| self.apply(spec, weight))
    }

    /// Returns the rounded tensor. If rounding does not change the tensor, the result shares it.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when `mxfp4` is set and the number of inputs of an expert matrix is not a
    /// multiple of the MXFP4 block size.
    pub fn apply(&self, spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
        let becomes_mxfp4 = self.mxfp4 && spec.is_expert_matrix();
        if !becomes_mxfp4 && self.bits.is_none() {
            return Ok(weight);
        }
        let weight = as_in_checkpoint(spec, weight)?;
        let weight = if becomes_mxfp4 { to_mxfp4(spec, weight)? } else { weight };
        let Some(bits) = self.bits else { return Ok(weight) };
        Ok(match weight {
            Weight::Dense(dense) => Weight::dense(&round_mantissa(dense.values(), bits)?),
            Weight::Packed(matrix) if bits >= mantissa_bits(matrix.format()) => Weight::Packed(matrix),
            Weight::Packed(matrix) if is_bf16(matrix.format()) => {
                Weight::Packed(Arc::new(matrix.map_values(|value| round_value(value, bits))?))
            }
            packed => Weight::dense(&round_mantissa(&packed.decode(&spec.working_shape())?, bits)?),
        })
    }
}

/// Returns the values of a checkpoint. In training, a matrix with products in bf16 has exact values; to round
/// these could give another result.
fn as_in_checkpoint(spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
    match &weight {
        Weight::Dense(dense)
            if dense.precision() == Precision::Bf16Dot
                && dense.values().device().is_cpu()
                && spec.is_rounded_in_use() =>
        {
            Ok(Weight::dense(&round_mantissa(dense.values(), BF16_BITS)?))
        }
        Weight::Packed(matrix) if matrix.precision() == Precision::Bf16Dot && spec.is_rounded_in_use() => {
            Ok(Weight::dense(&round_mantissa(&weight.decode(&spec.working_shape())?, BF16_BITS)?))
        }
        _ => Ok(weight),
    }
}

/// Returns the number of mantissa bits that represent every value of `format`.
fn mantissa_bits(format: PackedFormat) -> u32 {
    match format {
        PackedFormat::Bf16 | PackedFormat::Bf16Rows => BF16_BITS,
        PackedFormat::Mxfp4 => MXFP4_BITS,
        PackedFormat::Blocks(_) | PackedFormat::BlockRows(_) => f32::MANTISSA_DIGITS,
    }
}

fn is_bf16(format: PackedFormat) -> bool {
    matches!(format, PackedFormat::Bf16 | PackedFormat::Bf16Rows)
}

/// Rounds an expert matrix to MXFP4.
fn to_mxfp4(spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
    if let Weight::Packed(matrix) = &weight
        && matrix.format() == PackedFormat::Mxfp4
    {
        return Ok(weight);
    }
    let values = weight.decode(&spec.working_shape())?;
    let shape: [usize; 3] = values.dims3()?.into();
    let [_, input, _] = shape;
    if !input.is_multiple_of(mxfp4::BLOCK) {
        return Err(bad_input!(
            "arms.rollout_mxfp4: {} has {input} inputs, which is not a multiple of the MXFP4 block size {}; switch this ablation off",
            spec.name,
            mxfp4::BLOCK
        ));
    }
    let (blocks, scales) = mxfp4::encode(&values.flatten_all()?.to_vec1::<f32>()?, shape);
    if matches!(weight, Weight::Dense(_)) {
        let decoded = mxfp4::decode(&blocks, &scales, shape);
        return Ok(Weight::dense(&Tensor::from_vec(decoded, shape.to_vec(), values.device())?));
    }
    Ok(Weight::Packed(Arc::new(PackedMatrix::from_mxfp4(&blocks, &scales, shape))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::{Config, LayerType, Rope};
    use crate::model::families::Family;
    use crate::model::names::parameter_specs;
    use candle_core::Device;

    /// In training with products in bf16, matrices have exact values. An ablation once rounded these, and a
    /// check of the run's checkpoint rounded others.
    #[test]
    fn roundings_start_from_the_values_of_a_checkpoint() {
        let rounding = |mxfp4, bits| WeightRounding { mxfp4, bits };
        // Above a tie of 3 bits by less than bf16 resolves: rounded at once 1.125, of the checkpoint's 1.0.
        let exact = 1.0625f32 + 1e-5;
        assert_eq!((round_value(exact, 3), round_value(round_value(exact, 7), 3)), (1.125, 1.0));
        let config = Config {
            family: Family::default(),
            vocab_size: 8,
            hidden_size: 32,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            head_dim: 32,
            intermediate_size: 32,
            num_local_experts: 2,
            num_experts_per_tok: 1,
            sliding_window: 4,
            layer_types: LayerType::alternate(1),
            rope: Rope { theta: 1e4, yarn: None },
            rms_norm_eps: 1e-5,
            swiglu_limit: 7.0,
            tie_word_embeddings: false,
            max_position_embeddings: 64,
            bos_token_id: None,
            eos_token_ids: vec![],
            pad_token_id: None,
        };
        for spec in parameter_specs(&config) {
            let filled = |value: f32, precision| {
                let values = Tensor::full(value, spec.working_shape(), &Device::Cpu).unwrap();
                Weight::dense(&values).with_precision(precision)
            };
            let rounded = |rounding: WeightRounding, weight: Weight| {
                let values = rounding.apply(&spec, weight).unwrap().decode(&spec.working_shape()).unwrap();
                values.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            let start = if spec.is_rounded_in_use() { round_value(exact, 7) } else { exact };
            for bits in [1, 3, 7, 10] {
                let of_training = rounded(rounding(false, Some(bits)), filled(exact, Precision::Bf16Dot));
                let of_checkpoint = rounded(rounding(false, Some(bits)), filled(start, Precision::F32));
                assert_eq!(of_training, of_checkpoint, "{} {bits}", spec.name);
            }
            if spec.is_expert_matrix() {
                // In a block of such values MXFP4 has 1.0 and 1.5. The checkpoint's 1.25 is a tie.
                let exact = 1.25f32 + 1e-5;
                assert_eq!(round_value(exact, 7), 1.25);
                let of_training = rounded(rounding(true, None), filled(exact, Precision::Bf16Dot));
                assert!(of_training.iter().all(|&value| value == 1.0), "{}", spec.name);
                let of_exact = rounded(rounding(true, None), filled(exact, Precision::F32));
                assert!(of_exact.iter().all(|&value| value == 1.5), "{}", spec.name);
            }
        }
    }
}
