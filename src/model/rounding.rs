//! Arms that round weights: what sampling then computes with.

use super::arms::Arms;
use super::config::Form;
use super::layers_on_demand::WeightChange;
use super::names::ParameterSpec;
use crate::bad_input;
use crate::ops::packed::{PackedForm, PackedMatrix};
use crate::ops::weight::Weight;
use crate::ops::{mxfp4, round_mantissa, round_mantissa::round_value};
use anyhow::Result;
use candle_core::Tensor;
use std::sync::Arc;

/// Stored mantissa bits of bf16.
const BF16_BITS: u32 = 7;
/// Mantissa bits that hold every value of MXFP4, those below f32's normal range included.
const MXFP4_BITS: u32 = 2;

/// How weights are rounded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightRounding {
    /// Experts' matrices to MXFP4, first.
    pub mxfp4: bool,
    /// Everything to so many mantissa bits.
    pub bits: Option<u32>,
}

impl WeightRounding {
    /// Of the policy that samples under `arms`.
    pub fn of(arms: &Arms) -> Self {
        Self { mxfp4: arms.rollout_mxfp4, bits: arms.rollout_bits() }
    }

    /// One that leaves no tensor alone which either of the two changes.
    pub fn coarser(self, other: Self) -> Self {
        let bits = self.bits.into_iter().chain(other.bits).min();
        Self { mxfp4: self.mxfp4 || other.mxfp4, bits }
    }

    /// Bytes of the tensor that [`Self::apply`] makes of one stored in `form`; 0 where it is shared.
    pub fn copied_bytes(self, spec: &ParameterSpec, form: Form) -> u64 {
        let packed = spec.packed_form(form);
        let coarsened = self.mxfp4 && spec.is_expert_matrix() && packed != Some(PackedForm::Mxfp4);
        let shortened =
            self.bits.is_some_and(|bits| packed.is_none_or(|packed| bits < mantissa_bits(packed)));
        // MXFP4 that is shortened further is decoded.
        let form = if shortened && packed == Some(PackedForm::Mxfp4) { Form::F32 } else { form };
        if coarsened || shortened { spec.resident_bytes(form) } else { 0 }
    }

    /// Itself as a change.
    pub fn change(self) -> WeightChange {
        Arc::new(move |spec, weight| self.apply(spec, weight))
    }

    /// The tensor after rounding; one that rounding leaves alone is shared.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when `rollout_mxfp4` meets expert matrices that do not divide into its blocks.
    pub fn apply(&self, spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
        let weight = if self.mxfp4 && spec.is_expert_matrix() { to_mxfp4(spec, weight)? } else { weight };
        let Some(bits) = self.bits else { return Ok(weight) };
        Ok(match weight {
            Weight::Dense(dense) => Weight::dense(&round_mantissa(dense.values(), bits)?),
            Weight::Packed(matrix) if keeps(&matrix, bits) => Weight::Packed(matrix),
            Weight::Packed(matrix) if matrix.form() != PackedForm::Mxfp4 => {
                Weight::Packed(Arc::new(matrix.mapped(|value| round_value(value, bits))?))
            }
            packed => Weight::dense(&round_mantissa(&packed.decoded(&spec.working_shape())?, bits)?),
        })
    }
}

/// Whether every value of the matrix has so few bits already.
fn keeps(matrix: &PackedMatrix, bits: u32) -> bool {
    bits >= mantissa_bits(matrix.form())
}

/// Mantissa bits that hold every value of `form`.
fn mantissa_bits(form: PackedForm) -> u32 {
    match form {
        PackedForm::Bf16 | PackedForm::Bf16Rows => BF16_BITS,
        PackedForm::Mxfp4 => MXFP4_BITS,
    }
}

/// An expert matrix as MXFP4 holds it.
fn to_mxfp4(spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
    if let Weight::Packed(matrix) = &weight
        && matrix.form() == PackedForm::Mxfp4
    {
        return Ok(weight);
    }
    let values = weight.decoded(&spec.working_shape())?;
    let shape: [usize; 3] = values.dims3()?.into();
    let [_, input, _] = shape;
    if !input.is_multiple_of(mxfp4::BLOCK) {
        return Err(bad_input!(
            "arms.rollout_mxfp4: {} has {input} inputs, which MXFP4's blocks of {} do not divide; leave the arm off",
            spec.name,
            mxfp4::BLOCK
        ));
    }
    let (blocks, scales) = mxfp4::encode(&values.flatten_all()?.to_vec1::<f32>()?, shape);
    if matches!(weight, Weight::Dense(_)) {
        let decoded = mxfp4::decode(&blocks, &scales, shape);
        return Ok(Weight::dense(&Tensor::from_vec(decoded, shape.to_vec(), values.device())?));
    }
    Ok(Weight::Packed(Arc::new(PackedMatrix::of_mxfp4(&blocks, &scales, shape))))
}
